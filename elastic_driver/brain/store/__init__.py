"""The statistics of jobs in a database: SQLite in the run's folder, or PostgreSQL.

`writer` is the thread that a driver hands its measurements to. Only `database`
and `statements` load SQLAlchemy. docs/statistics.md tells users about it.
"""
