"""Tests of the ledger of time."""
