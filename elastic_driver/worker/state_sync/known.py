"""Which classes and functions other workers find by their names.

A worker that joins has loaded what the script loads before its training function is called, and
has not run that function. So what is imported or defined in there has no name that it knows.
"""

import sys
from typing import Any

MAIN = "__main__"


class _Script:
    """What the script had loaded and defined when its training functions began.

    A worker that joins is there when the function is called: it has not loaded what comes inside.
    Names of modules, and `__main__:NAME` for what the script itself has defined.
    """

    trains = False
    loaded: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()

    @classmethod
    def knew(cls, module: Any, name: str) -> bool:
        own = f"{MAIN}:{name.partition('.')[0]}" if module == MAIN else module
        return own not in cls.late and (not cls.trains or own in cls.loaded)


def _loaded_now() -> frozenset[str]:
    own = vars(sys.modules[MAIN]) if MAIN in sys.modules else {}
    return frozenset(sys.modules) | {f"{MAIN}:{name}" for name in list(own)}


def training_begins() -> None:
    """Note what a worker that joins has loaded when it is given the state."""
    _Script.trains, _Script.loaded = True, _loaded_now() - _Script.late


def training_ends() -> None:
    """Note what the training function has loaded, which a worker that skips it has not."""
    if _Script.trains:
        _Script.late |= _loaded_now() - _Script.loaded
        _Script.trains = False


def is_known(value: Any) -> bool:
    """Return whether a class or function is found by its name on other workers, too."""
    module, name = value.__module__, value.__qualname__
    return looked_up(module, name) is value and _Script.knew(module, name)


def looked_up(module: Any, name: str) -> Any:
    """Return what a name means in a module that is loaded; None where there is nothing."""
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def no_name(module: Any, name: str) -> tuple[str, str]:
    """Return why a class or function is not known to other workers, and what to do."""
    if looked_up(module, name) is not None and not _Script.knew(module, name):
        if module == MAIN:
            return (
                f"{name} was defined in the script after training had begun",
                "define it at the top of the script, so that a worker that joins knows it, too",
            )
        return (
            f"{name} is of the module {module}, which was imported after training had begun",
            "import it at the top of the script, so that a worker that joins knows it, too",
        )
    problem = f"{name} has no name that other workers know"
    return problem, "define it at the top of a module, and keep its name"
