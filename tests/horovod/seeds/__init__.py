"""Random programs of Horovod calls, one for each seed, on every rank of real jobs."""
