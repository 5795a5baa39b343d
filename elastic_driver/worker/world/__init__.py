"""A worker's part in the worlds of a job: it joins them, leaves them, and breaks those that hang.

`session` starts and ends the membership of the process, `membership` takes it from one round to the
next, `groups` chooses the backend and builds the torch process group of a round, `device` the half
of it for an accelerator (`nccl` knows NCCL's ways).
"""
