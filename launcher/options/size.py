"""Options that say how many workers there are to be."""

from __future__ import annotations

from launcher.options import kinds
from launcher.options.option import SIZE, Option

NUM_PROC: Option[int | None] = Option(
    "num-proc",
    kinds.whole(least=1),
    None,
    SIZE,
    "Workers to start with. Once training, the job goes on with what is left.",
    aliases=("-np", "-n"),
    shown="every slot of fixed hosts, else --min-np",
)
MIN_NP: Option[int | None] = Option(
    "min-np",
    kinds.whole(least=1),
    None,
    SIZE,
    "Never train with fewer workers. Also enough to start with once --start-timeout is over.",
    aliases=("--min-num-proc",),
    shown="1, and the start waits for -np",
)
MAX_NP: Option[int | None] = Option(
    "max-np",
    kinds.whole(least=1),
    None,
    SIZE,
    "Never train with more workers.",
    aliases=("--max-num-proc",),
    shown="-np for fixed hosts, no limit with a discovery script",
)
NNODES: Option[tuple[int, int] | None] = Option(
    "nnodes",
    kinds.node_range(),
    None,
    SIZE,
    "The same in hosts (as torchrun has it): MIN to MAX hosts of --nproc-per-node workers each.",
)
NPROC_PER_NODE: Option[int | str | None] = Option(
    "nproc-per-node",
    kinds.node_workers(),
    None,
    SIZE,
    "Workers on each host: a number, or this machine's GPUs (gpu), cores (cpu), or GPUs if it has "
    "any and cores otherwise (auto).",
    shown="1",
)
NODE_UNIT: Option[int] = Option(
    "node-unit",
    kinds.whole(least=1),
    1,
    SIZE,
    "Train on a multiple of N hosts. Workers of surplus hosts wait until they make up a unit, or "
    "take the place of one that fails; with fewer than N hosts the job waits.",
)

VIRTUAL_WORKERS: Option[int | None] = Option(
    "virtual-workers",
    kinds.whole(least=1),
    None,
    SIZE,
    "For elastic.FixedBatch: the workers the script is written for; however many there are, a step "
    "trains what N would.",
    shown="--max-np",
)
REPLACE_SLOW: Option[bool] = Option(
    "replace-slow",
    kinds.flag(),
    False,
    SIZE,
    "Replace a worker that computes slowly for long by one on another host, where --max-np leaves "
    "a slot free; no step is lost.",
)
BALANCE: Option[bool] = Option(
    "balance",
    kinds.flag(),
    False,
    SIZE,
    "For elastic.FixedBatch: slow workers are given less of each step; the result stays the same.",
)
