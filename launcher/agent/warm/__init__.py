"""Warm workers: `starter` asks, `parent/` answers from inside the job's own command.

What is to be kept warm is decided in `command` and `plan`; how a warm parent comes to be is in
`birth`. `docs/warm-workers.md` tells the whole story.
"""
