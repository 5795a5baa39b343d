"""The driver process: the shell around the pure core.

`driver.ElasticDriver` feeds events to `core.job.Job` and carries out what it decides. Nothing
here decides who trains; nothing in the core reads a clock, a socket or a file.
"""
