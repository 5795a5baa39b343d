"""Spellings of horovodrun 0.28.1 beside our options: opposites, what is ignored, variables, YAML.

The options of horovodrun that have an effect are in the table (`launcher.options.table`). Names and
meanings are those of its parser and of its configuration file.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from elastic_driver.options import FLAG, Heading, ValueKind, number, text, whole
from launcher.options import table
from launcher.options.table import LaunchOptions, Option

# A switch → the one whose opposite it is.
OPPOSITES = {
    "--stall-check": "--no-stall-check",
    "--no-timeline-mark-cycles": "--timeline-mark-cycles",
    "--log-without-timestamp": "--log-with-timestamp",
    "--log-hide-timestamp": "--log-with-timestamp",
}

_OPPOSITES = {**table.OPPOSITES, **OPPOSITES}

# Another spelling → the option and its value.
_MEANS = {"--mpi": ("--backend", "mpi"), "--use-mpi": ("--backend", "mpi")}

# Taken so that commands written for horovodrun run as they are; nothing here needs them.
_WITHOUT_EFFECT: dict[str, ValueKind[Any]] = {
    "--gloo": FLAG,
    "--use-gloo": FLAG,
    "--disable-cache": FLAG,
    "--cycle-time-ms": number("MS"),
    "--cache-capacity": whole(),
    "--hierarchical-allreduce": FLAG,
    "--no-hierarchical-allreduce": FLAG,
    "--hierarchical-allgather": FLAG,
    "--no-hierarchical-allgather": FLAG,
    "--torus-allreduce": FLAG,
    "--no-torus-allreduce": FLAG,
    "--autotune": FLAG,
    "--no-autotune": FLAG,
    "--autotune-log-file": text("FILE"),
    "--autotune-warmup-samples": whole(),
    "--autotune-steps-per-sample": whole(),
    "--autotune-bayes-opt-max-samples": whole(),
    "--autotune-gaussian-process-noise": number("0-1", most=1.0),
    "--mpi-threads-disable": FLAG,
    "--no-mpi-threads-disable": FLAG,
    "--tcp": FLAG,
    "--binding-args": text("WORDS"),
    "--num-nccl-streams": whole(),
    "--thread-affinity": whole(),
}
IGNORED = tuple(
    Option(name[2:].replace("-", "_"), None, Heading.HOROVOD, kind, "Ignored.", (), "", name[2:])
    for name, kind in _WITHOUT_EFFECT.items()
)

# A section of horovodrun's configuration file → what its keys lack to be names of options.
SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall-check": "stall-check-",
    "library-options": "",
    "logging": "log-",
}
_CONTROLLERS = {"gloo": "--gloo", "mpi": "--mpi"}

# A variable → the option that it sets; flags and variables of ours win over it.
VARIABLES = {
    "HOROVOD_TIMELINE": "--timeline-filename",
    "HOROVOD_TIMELINE_MARK_CYCLES": "--timeline-mark-cycles",
    "HOROVOD_STALL_CHECK_DISABLE": "--no-stall-check",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "--stall-check-warning-time-seconds",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "--stall-check-shutdown-time-seconds",
    "HOROVOD_FUSION_THRESHOLD": "--fusion-threshold-mb",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "--gloo-timeout-seconds",
    "HOROVOD_LOG_LEVEL": "--log-level",
    "HOROVOD_LOG_HIDE_TIME": "--log-hide-timestamp",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "--dynamic-process-sets",
    "HOROVOD_START_TIMEOUT": "--start-timeout",
    "HOROVOD_ELASTIC_TIMEOUT": "--elastic-timeout",
}
_IN_BYTES = "HOROVOD_FUSION_THRESHOLD"
_MB = 2**20


class Spelled(NamedTuple):
    """The spelling of an option of the table, and the value that came with it."""

    spelling: str
    value: str | None  # None: it stands in the next word, or none is needed


def translated(spelling: str, value: str | None) -> Spelled:
    """Return the option that another spelling means, such as one of horovodrun."""
    if spelling in _OPPOSITES:
        return Spelled(_OPPOSITES[spelling], _opposite(value or "true"))
    if spelling in _MEANS and (value is None or _is_on(value)):
        return Spelled(*_MEANS[spelling])
    return Spelled(spelling, value)


def from_variable(name: str, value: str) -> Spelled:
    """Return the option that one of `VARIABLES` sets."""
    if name == _IN_BYTES and value.isascii() and value.isdigit():
        value = repr(int(value) / _MB)
    return translated(VARIABLES[name], value)


def from_section(section: str, key: str, value: str) -> Spelled | None:
    """Return the option of one entry of horovodrun's YAML; None where it changes nothing."""
    if (section, key) == ("autotune", "enabled"):
        return Spelled("--autotune", value) if _is_on(value) else None
    if (section, key) == ("stall-check", "enabled"):
        return translated("--stall-check", value)
    return translated(f"--{SECTIONS[section]}{key}", value)


def from_controller(name: str) -> Spelled:
    """Return the option that `controller:` means; raises ValueError for an unknown one."""
    spelling = _CONTROLLERS.get(name.lower())
    if spelling is None:
        raise ValueError(f"is one of {', '.join(_CONTROLLERS)}, got {name!r}")
    return translated(spelling, None)


def remark(ignored: tuple[str, ...]) -> str:
    """Return one line that names all options that were given in vain; empty if none was."""
    are = "is" if len(ignored) == 1 else "are"
    why = "nothing here needs it" if len(ignored) == 1 else "nothing here needs them"
    named = ", ".join(ignored)
    return f"{named} {are} ignored: {why} (docs/from-horovod.md)" if ignored else ""


def worker_variables(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which workers learn the options of `VARIABLES` that were set.

    A worker on another host gets all of them; one that shares this environment has those of
    `environ` anyway, and those that an option sets differently win.
    """
    found: dict[str, object] = {
        "HOROVOD_TIMELINE": options.timeline_filename,
        "HOROVOD_TIMELINE_MARK_CYCLES": _digit(options.timeline_mark_cycles),
        "HOROVOD_STALL_CHECK_DISABLE": _digit(options.no_stall_check),
        "HOROVOD_STALL_CHECK_TIME_SECONDS": _short(options.stall_check_warning_time_seconds),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": _short(options.stall_check_shutdown_time_seconds),
        "HOROVOD_FUSION_THRESHOLD": _bytes(options.fusion_threshold_mb),
        "HOROVOD_GLOO_TIMEOUT_SECONDS": _short(options.gloo_timeout_seconds),
        "HOROVOD_LOG_LEVEL": options.log_level,
        "HOROVOD_LOG_HIDE_TIME": _digit(_not(options.log_with_timestamp)),
        "HOROVOD_DYNAMIC_PROCESS_SETS": _digit(options.dynamic_process_sets),
    }
    return {
        name: str(value)
        for name, value in found.items()
        if value is not None and environ.get(name) != str(value)
    }


def _opposite(value: str) -> str:
    """Return the opposite of a switch's value; a word that is none stays, and is refused later."""
    try:
        return "false" if FLAG.read(value) else "true"
    except ValueError:
        return value


def _is_on(value: str) -> bool:
    try:
        return FLAG.read(value)
    except ValueError:
        return True


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _digit(value: bool | None) -> str | None:
    return None if value is None else str(int(value))


def _short(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _bytes(megabytes: float | None) -> str | None:
    return None if megabytes is None else str(round(megabytes * _MB))
