"""Plan a job and start it: hosts, workers and settings; checks; the driver."""
