"""Horovod's API on our workers: `import elastic_driver.horovod.torch as hvd`.

The path after `elastic_driver.` is Horovod's own, so one substitution converts a script. Names and
meanings are those of Horovod 0.28.1; `docs/horovod.md` lists where they differ. Nothing here is
imported before a script asks for it.
"""
