"""The driver process: the shell around the pure core.

`driver.ElasticDriver` feeds events to `job.job.Job` and carries out what it decides. Nothing
here decides which workers train; the core reads no clock, socket or file.
"""
