"""Starts what a plan holds: looks for what is wrong, finds a way to the hosts, runs the job."""
