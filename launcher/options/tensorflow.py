"""Options for jobs of TensorFlow."""

from __future__ import annotations

from elastic_driver.settings import TfRoles
from launcher.options import kinds
from launcher.options.option import TENSORFLOW, Option

TF_CONFIG: Option[bool] = Option(
    "tf-config",
    kinds.flag(),
    False,
    TENSORFLOW,
    "Give each worker TF_CONFIG, for tf.distribute. When workers come or go, all are started "
    "again with a new one; BackupAndRestore goes on where they were.",
)
TF_ROLES: Option[TfRoles | None] = Option(
    "tf-roles",
    kinds.tf_roles(),
    None,
    TENSORFLOW,
    "Their roles, handed out in this order, the oldest first; worker=* are all the others. "
    "Implies --tf-config.",
    shown="worker=*",
)
