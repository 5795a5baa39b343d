"""For jobs whose very end is not what a test looks at: without taking torch apart.

That costs each worker a second of a processor, and the tests have hundreds of them. Everything
else about the end (exit handlers, threads, the status) is as ever.
"""

import atexit
import gc


def prepare() -> None:
    """The interpreter will find nothing to collect when it ends; call it once, at any time."""
    atexit.unregister(gc.unfreeze)  # of the warm parent
    atexit.register(gc.freeze)
