"""What people know from torchrun, horovodrun and mpirun, and what becomes of it here."""

from __future__ import annotations

# Without a counterpart: what to do instead.
FOREIGN: dict[str, str] = {
    "--rdzv-conf": "use --start-timeout, --elastic-timeout and --last-call",
    "--mpi": "use --backend mpi",
    "--blacklist": "use --host-failures and --blacklist-cooldown-range",
    "--wdir": "change folder first: cd DIR && elasticrun ...",
    "-wdir": "change folder first: cd DIR && elasticrun ...",
    "--log-level": "use -v or -q",
    "--fusion-threshold-mb": "DistributedDataParallel has bucket_cap_mb: elastic.wrap(model, ...)",
}

# Not needed: how many values each takes, and why. They are passed over, with a remark.
NEEDLESS: dict[str, tuple[int, str]] = {
    "--monitor-interval": (1, "a worker's end is noticed at once"),
    "--no-python": (0, "a COMMAND that does not end in .py is run as it is"),
    "--start-method": (1, "workers are separate programs"),
    "--role": (1, "all workers have the same role"),
    "--gloo": (0, "the script chooses, elastic.init(backend='gloo')"),
    "--use-gloo": (0, "the script chooses, elastic.init(backend='gloo')"),
    "--disable-cache": (0, "hosts are looked at each time"),
    "--tag-output": (0, "every line begins with its worker's rank"),
    "-tag-output": (0, "every line begins with its worker's rank"),
    "--oversubscribe": (0, "a host has as many slots as you say"),
    "--allow-run-as-root": (0, "nobody is refused"),
    "--bind-to": (1, "workers are not bound to cores; begin COMMAND with numactl or taskset"),
    "--map-by": (1, "hosts are filled one after the other"),
}

# torchrun reads each of these from PET_<NAME> too; a launcher above us may set them (Kubeflow's
# PyTorchJob does, for elastic jobs).
PET_OPTIONS = (
    *("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--standalone", "--max-restarts"),
    *("--log-dir", "--redirects", "--tee", "--local-ranks-filter"),
)
