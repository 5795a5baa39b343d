"""Tests of slow ranks, slow links and differing states."""
