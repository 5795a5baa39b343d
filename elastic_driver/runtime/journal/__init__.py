"""The journal of a run: every event of its machines on disk, and the way back (docs/journal.md)."""
