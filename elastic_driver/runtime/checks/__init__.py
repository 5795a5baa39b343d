"""What checks hosts and nodes: before a job trains, while it runs, and what all checks found."""
