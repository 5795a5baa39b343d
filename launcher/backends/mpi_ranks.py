"""Find the hosts of all ranks over MPI, after mpirun has started several `elasticrun`.

At some sites a batch system or an outer mpirun decides where to run:
`mpirun -np 8 elasticrun --backend mpi -- train.py`. The ranks exchange the names of their hosts
(mpi4py). Rank 0 becomes the driver of a job with a slot for each rank; the other ranks exit.
`launcher.run_job` calls `meet_ranks` before it plans.
"""

import importlib
import socket
from collections import Counter
from collections.abc import Mapping

from elastic_driver.errors import UsageError
from elastic_driver.runtime.discovery import Hosts, check_host

# The number of ranks: the variables of Open MPI, and of MPICH and its relatives.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_AS_ROOT = "OMPI_ALLOW_RUN_AS_ROOT"
_SETTINGS = ("OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_")
_RANK = "OMPI_COMM_WORLD_RANK"


def started_ranks(environ: Mapping[str, str]) -> int:
    """Return the number of ranks that mpirun has started; 1 if mpirun did not start us."""
    said = next((environ[name] for name in _SIZES if name in environ), "1")
    return int(said) if said.isdecimal() and len(said) < 10 else 1


def settings_of_mpirun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of Open MPI that a user has made with variables.

    A rank of mpirun has others that mpirun has made for it; they cannot be told apart there.
    """
    known = _AS_ROOT if _RANK in environ else (_AS_ROOT, *_SETTINGS)
    return {name: value for name, value in environ.items() if name.startswith(known)}


def meet_ranks() -> Hosts | None:
    """Return the hosts of all ranks, a slot for each rank, in their order; None: not rank 0.

    Every rank has to call it; it finalizes MPI. Raises UsageError if mpi4py is missing or was built
    for another MPI than the mpirun that started us.
    """
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library
        raise UsageError(
            f"several ranks of mpirun find each other with mpi4py ({error}); install it with "
            "pip install 'elastic-driver[mpi]', or start elasticrun once, with -H or --hostfile"
        ) from None
    world = mpi.COMM_WORLD
    rank = world.Get_rank()
    size = world.Get_size()
    names = world.allgather(socket.gethostname())
    mpi.Finalize()
    if size == 1:
        raise UsageError(
            "mpi4py sees one rank where mpirun has started several: it was built for another MPI; "
            "try: pip install --no-binary=mpi4py mpi4py"
        )
    return count_ranks(names) if rank == 0 else None


def count_ranks(names: list[str]) -> Hosts:
    """Return a slot for each rank; raises UsageError for an invalid name."""
    for name in names:
        if problem := check_host(name):
            raise UsageError(f"mpirun has started us on a host with an invalid name: {problem}")
    return tuple(Counter(names).items())
