"""Warm workers: `starter` requests them, `parent/` runs inside the job's command and forks them.

`command` and `plan` decide what is kept warm. `docs/warm-workers.md` describes everything.
"""
