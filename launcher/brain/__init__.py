"""The `elasticbrain` command: a process that shares hosts among jobs (docs/brain.md)."""
