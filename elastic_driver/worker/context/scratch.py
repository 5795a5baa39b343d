"""Has Python's `multiprocessing` keep its sockets where the agent removes them.

It makes a folder of its own for them when it first needs one, and children use their parent's;
there is no official way to name one. A worker that is killed cannot remove it, so the agent's is
used.
"""

from __future__ import annotations

import multiprocessing


def use_scratch(folder: str) -> None:
    """From now on, unless there is such a folder already; harmless where Python has changed."""
    config = getattr(multiprocessing.current_process(), "_config", None)
    if isinstance(config, dict):
        config.setdefault("tempdir", folder)
