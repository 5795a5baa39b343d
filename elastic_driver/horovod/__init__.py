"""Horovod's API on our workers: `import elastic_driver.horovod.torch as hvd`.

The path after `elastic_driver.` is Horovod's own, so one substitution converts a script. Names and
meanings are those of Horovod 0.28.1; `docs/horovod.md` lists where they differ. Nothing here is
imported before a script asks for it.
"""

import sys
from typing import Any, NoReturn

from elastic_driver.horovod.absent import AbsentParts

__version__ = "0.28.1"  # of the API


if not any(isinstance(finder, AbsentParts) for finder in sys.meta_path):
    sys.meta_path.append(AbsentParts(sys.modules[__name__]))


def run(*_args: Any, **_kwargs: Any) -> NoReturn:
    """Raise `UsageError`: `elasticrun` starts the workers."""
    from elastic_driver.errors import UsageError  # noqa: PLC0415 - see above

    raise UsageError(
        "horovod.run() starts no workers here; start the script with "
        "`elasticrun -np N --horovod python SCRIPT`"
    )
