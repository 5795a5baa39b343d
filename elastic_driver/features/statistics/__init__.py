"""How fast the job trains, what its workers and hosts use, and what is kept of that."""
