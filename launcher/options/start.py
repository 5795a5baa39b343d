"""Options that say how agents and workers are started."""

from __future__ import annotations

from launcher.options import kinds
from launcher.options.option import START, Option

BACKEND: Option[str] = Option(
    "backend",
    kinds.text("auto|local|ssh|slurm|mpi|NAME"),
    "auto",
    START,
    "How agents get onto hosts: auto takes local for names of this machine and ssh for all others, "
    "and slurm inside an allocation when no hosts are named. Other packages may bring more "
    "(docs/starters.md).",
)
SSH_PORT: Option[int | None] = Option(
    "ssh-port",
    kinds.whole("PORT", least=1),
    None,
    START,
    "The port that sshd listens on, on every host (ssh and mpi).",
    aliases=("-p",),
    shown="as in ssh's configuration",
)
SSH_IDENTITY_FILE: Option[str | None] = Option(
    "ssh-identity-file",
    kinds.text("FILE"),
    None,
    START,
    "The private key for ssh (ssh and mpi).",
    aliases=("-i",),
    shown="as in ssh's configuration",
)
NETWORK_INTERFACES: Option[tuple[str, ...] | None] = Option(
    "network-interfaces",
    kinds.names("eth0,eth1"),
    None,
    START,
    "Interfaces the workers talk over (sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME), and that "
    "the rendezvous listens on. By default the one that leads to the other hosts.",
    aliases=("--network-interface", "--nics"),
)
ENV: Option[tuple[tuple[str, str | None], ...]] = Option(
    "env",
    kinds.variables(),
    (),
    START,
    "A variable for the workers; NAME alone passes on what it is here. May be given several times. "
    "Workers on other hosts get some without asking (docs/hosts.md).",
    aliases=("-x",),
)

PRELOAD: Option[tuple[str, ...]] = Option(
    "preload",
    kinds.names("MODULES"),
    ("torch",),
    START,
    "Modules that a warm process has imported before a worker is forked from it, with commas "
    "between them (docs/warm-workers.md).",
)
WARM: Option[int | None] = Option(
    "warm",
    kinds.whole_or("auto"),
    None,
    START,
    "Processes kept warm on each host for workers to come; 0 starts every worker afresh.",
    shown="auto: one, if the command is Python and imports more than the standard library; none "
    "with --tf-config",
)
