"""What `--tf-config` and `--tf-roles` come to in a launch plan. Pure; `launch` calls it."""

from __future__ import annotations

from elastic_driver.core.tf_config import CHIEF, PS, WORKERS_ONLY
from elastic_driver.errors import UsageError
from elastic_driver.settings import Settings, TfRoles
from launcher import options as o
from launcher.commandline.values import Values

TF_PORTS = 128  # that each agent looks for: more than a host has slots for TensorFlow


def tf_roles(values: Values) -> TfRoles | None:
    """The roles of the workers in TF_CONFIG; None where they get none."""
    asked = values[o.TF_ROLES]
    if asked is None:
        return WORKERS_ONLY if values[o.TF_CONFIG] else None
    return asked


def check_tf_roles(settings: Settings) -> None:
    """Raise UsageError where the job may go on with fewer workers than its roles take."""
    if settings.tf_roles is None:
        return
    fixed = {role: count for role, count in settings.tf_roles if count}
    trains_alone = CHIEF in fixed and PS not in fixed
    need = sum(fixed.values()) + (not trains_alone)
    if settings.min_np < need:
        named = ", ".join(f"{count} {role}" for role, count in fixed.items())
        more = "" if trains_alone else " and a worker"
        raise UsageError(
            f"--tf-roles: {named}{more} are {need} processes, but the job may go on with "
            f"{settings.min_np}; say --min-np {need}"
        )


def warm_processes(values: Values) -> int | None:
    """`--warm`, as JobSpec has it: TensorFlow starts threads when imported, so none unless asked.

    A process with threads cannot be forked safely, and importing torch is of no use to it.
    """
    warm = values[o.WARM]
    return 0 if warm is None and tf_roles(values) is not None else warm
