"""The agent's command line, which backends write (`launcher.backends.base`).

An agent may be started before its host is known (`SPARE_FLAG`). It has imported everything and its
warm parent is ready, so a host that appears in discovery begins at once. Its arguments come later:
the driver's process writes them to the agent's stdin as one line, a JSON list.
"""

import argparse
import json
import os
from collections.abc import Sequence
from typing import NoReturn

from msgspec import Struct

from elastic_driver.errors import ExitCode


class AgentConfig(Struct, frozen=True, kw_only=True):
    """The agent's command line."""

    endpoint: str  # http://host:port of the driver
    host: str  # this host's name, as discovery has it
    incarnation: int  # counts the agents of this host
    token_file: str  # path of this host's token, or of the driver's
    address: str | None = None  # at which other hosts reach this one; None: that towards the driver
    lifeline: bool = False  # our stdin is a pipe that closes when the driver dies
    kept: bool = False  # the pipe is that of a process on this host, without which we end
    orphan_files: list[str] = []  # files of the driver, to be removed if it dies
    resumable: bool = False  # then they are, but only after the wait for the next driver
    driver_file: str | None = None  # for the address of a driver that takes over; our parent's


class _AgentParser(argparse.ArgumentParser):
    """Leaves with the project's exit status for a wrong command."""

    def error(self, message: str) -> NoReturn:
        self.exit(int(ExitCode.USAGE), f"{self.prog}: {message}\n")


def parse(argv: Sequence[str]) -> AgentConfig:
    """Read the agent's command line (see `AgentConfig`); exit with 64 where it is wrong."""
    parser = _AgentParser(prog="python -m launcher.agent", description="Run the agent of a host.")
    for name in ("--endpoint", "--host", "--token-file"):
        parser.add_argument(name, required=True)
    parser.add_argument("--incarnation", required=True, type=int)
    parser.add_argument("--address")
    parser.add_argument("--lifeline", action="store_true")
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--orphan-file", action="append", default=[], dest="orphan_files")
    parser.add_argument("--resumable", action="store_true")
    parser.add_argument("--driver-file")
    return AgentConfig(**vars(parser.parse_args(argv)))


# ---- arguments that come later ------------------------------------------------------------


SPARE_FLAG = "--when-told"  # in place of all other arguments


def send_arguments(lifeline: int, arguments: Sequence[str]) -> None:
    """Write the arguments to the agent's stdin (`lifeline`); raises OSError if it has ended."""
    os.write(lifeline, json.dumps(list(arguments)).encode("ascii") + b"\n")


def receive_arguments(stdin: int) -> list[str]:
    """Wait for the arguments; empty if the driver's process has ended or needs no spare."""
    with open(stdin, "rb", closefd=False) as pipe:
        line = pipe.readline()
    return [str(word) for word in json.loads(line)] if line.endswith(b"\n") else []
