"""Warm workers: `starter` asks, `parent/` answers from inside the job's own command.

`command` and `plan` decide what is kept warm; `fork_client` starts a warm parent or inherits one.
`docs/warm-workers.md` tells the whole story.
"""
