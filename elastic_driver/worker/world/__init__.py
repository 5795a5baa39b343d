"""The worlds of a job, as one worker meets them: joined, left, and broken where they hang.

`session` begins and ends the membership of the process, `membership` takes it from one round to the
next, `groups` builds the torch process group of a round from a gloo half and, with `devices` and
`nccl`, one for CUDA tensors.
"""
