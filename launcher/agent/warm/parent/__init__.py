"""Modules that run inside the warm parent, in the user's own interpreter.

The directory is put on the warm parent's PYTHONPATH, so that `site` imports `sitecustomize` from
here before the interpreter turns to the job's command. Nothing here imports this project, nothing
of it is left in a worker, and the agent imports only what both ends of the conversation need
(`_elastic_warm_common`). The modules bear long names because they stand beside the user's own.
`launcher.agent.warm.starter` is the other end; `docs/warm-workers.md` tells the whole story.
"""
