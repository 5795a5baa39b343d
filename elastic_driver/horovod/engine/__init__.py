"""Carries out the operations of `horovod.torch`: names decide, not the order of the calls.

`negotiation` is pure and decides which tensors are ready on all ranks, and in which order they
move. `running` holds the engine of this process; `common.basics` starts it in each world and stops
it when the world is left.
"""
