"""Tests of the job machine."""
