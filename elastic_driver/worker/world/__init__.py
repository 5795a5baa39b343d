"""A worker's part in the worlds of a job: it joins them, leaves them, and breaks those that hang.

`session` starts and ends the membership of the process, `membership` takes it from one round to the
next and leaves a round when it is told to. `groups` chooses the backend and builds the torch
process group of a round; `device` is the half of it for an accelerator, and `nccl` knows NCCL's
ways. `gloo` has the connections and waits of a group, `wrapping` is `elastic.wrap`.
"""
