"""Modules that run inside the warm parent, in the user's own interpreter.

The directory is put on the warm parent's PYTHONPATH, so that `site` imports `sitecustomize` from
here before the interpreter runs the job's command. These modules import nothing else of this
project, and a worker does not keep them. The agent imports from `_elastic_warm_worker` how messages
are sent. The modules have long names because they stand beside the user's own modules.
`launcher.agent.warm.starter` is the other end; `docs/warm-workers.md` describes everything.
"""
