"""Tests of the search of a job's size."""
