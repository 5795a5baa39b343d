"""Options of jobs whose nodes start by themselves: who serves, who joins, and with what secret."""

from __future__ import annotations

from launcher.options import kinds
from launcher.options.option import JOIN, Option

SERVE: Option[bool] = Option(
    "serve",
    kinds.flag(),
    False,
    JOIN,
    "Run no workers here: hold the job, and train on the nodes that --join it.",
)
JOIN_AT: Option[tuple[str, int] | None] = Option(
    "join",
    kinds.endpoint(),
    None,
    JOIN,
    "Make this node a host of the job that is served at HOST:PORT, with --nproc-per-node workers. "
    "It may start before the server, and come back after leaving (Ctrl-C, SIGTERM).",
)
RDZV_ENDPOINT: Option[tuple[str, int]] = Option(
    "rdzv-endpoint",
    kinds.endpoint(),
    ("127.0.0.1", 0),
    JOIN,
    "Address and port the job's rendezvous listens on; 0.0.0.0 for all addresses. With --nnodes of "
    "more than 1 and no list of hosts, the same command is meant for every node: the one that is "
    "HOST serves, and all join.",
    shown="this machine only, or the address that remote hosts reach; any free port",
)
RDZV_BACKEND: Option[str | None] = Option(
    "rdzv-backend",
    kinds.choice("c10d", "static"),
    None,
    JOIN,
    "Taken for torchrun's sake: the job always brings its own rendezvous.",
)
NODE_RANK: Option[int | None] = Option(
    "node-rank",
    kinds.whole(),
    None,
    JOIN,
    "Node 0 serves, the others join it. Ranks are given in the order in which nodes come.",
    shown="NODE_RANK or RANK in the environment, where MASTER_ADDR counts",
)
MASTER_ADDR: Option[str | None] = Option(
    "master-addr",
    kinds.text("HOST"),
    None,
    JOIN,
    "Where node 0 serves, for nodes that are started with --node-rank.",
    shown="MASTER_ADDR in the environment, else 127.0.0.1",
)
MASTER_PORT: Option[int | None] = Option(
    "master-port",
    kinds.whole("PORT", least=1),
    None,
    JOIN,
    "The port there.",
    shown="MASTER_PORT in the environment, else 29500",
)
TOKEN_FILE: Option[str | None] = Option(
    "token-file",
    kinds.text("FILE"),
    None,
    JOIN,
    "A file that only you can read, with the secret that lets nodes join; the same text on the "
    "server and on every node.",
    shown="the run's own token in a shared --state-dir, else derived from --run-id",
)
