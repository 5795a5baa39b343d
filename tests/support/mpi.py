"""Open MPI on a cluster of network namespaces; needs Debian's openmpi-bin."""

from __future__ import annotations

import shutil

from tests.support import cluster

ENVIRON = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def why_not() -> str | None:
    """Why mpirun cannot start anything on a cluster's nodes; None where it can."""
    missing = [tool for tool in ("mpirun", "orted") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)} (openmpi-bin)" if missing else cluster.why_not()
