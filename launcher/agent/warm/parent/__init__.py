"""What runs inside the warm parent, in the user's own interpreter.

The directory is put on the warm parent's PYTHONPATH, so that `site` imports `sitecustomize` from
here before the interpreter turns to the job's command. Nothing here is imported by the agent,
nothing here imports this project, and nothing of it is left in a worker. The modules bear long
names because they stand beside the user's own. `launcher.agent.warm.starter` is the other end of
the conversation; `docs/warm-workers.md` tells the whole story.
"""
