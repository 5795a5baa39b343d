"""Policies beside the job: pure machines with tables of their own."""
