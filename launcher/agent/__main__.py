"""`python -m launcher.agent`: the agent's process. Backends start it; people do not."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from elastic_driver.errors import ExitCode
from launcher.agent.agent import Agent, AgentConfig
from launcher.agent.spare import WHEN_TOLD, hear
from launcher.agent.warm.fork_client import inherit
from rendezvous.auth import read_token_file
from rendezvous.errors import TokenError


class _Parser(argparse.ArgumentParser):
    """Leaves with the project's exit status for a wrong command."""

    def error(self, message: str) -> NoReturn:
        self.exit(int(ExitCode.USAGE), f"{self.prog}: {message}\n")


def parse(argv: Sequence[str]) -> AgentConfig:
    """The agent's configuration from its command line; exits with 64 where it is wrong."""
    parser = _Parser(prog="python -m launcher.agent", description=__doc__)
    parser.add_argument("--endpoint", required=True, help="http://HOST:PORT of the driver")
    parser.add_argument("--host", required=True, help="this host's name, as discovery has it")
    parser.add_argument("--incarnation", required=True, type=int, help="counts starts on a host")
    parser.add_argument("--token-file", required=True, help="path of the job's token")
    parser.add_argument("--address", help="where other hosts reach this one")
    parser.add_argument(
        "--lifeline", action="store_true", help="stdin is a pipe that closes when the driver dies"
    )
    parser.add_argument(
        "--orphan-file",
        action="append",
        default=[],
        metavar="PATH",
        help="remove this file of the driver's when the driver dies (may be repeated)",
    )
    values = parser.parse_args(argv)
    return AgentConfig(
        endpoint=values.endpoint,
        host=values.host,
        incarnation=values.incarnation,
        token_file=values.token_file,
        address=values.address,
        lifeline=values.lifeline,
        orphan_files=tuple(values.orphan_file),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == [WHEN_TOLD]:
        told = hear(0)
        if told is None:
            return 0
        words = told
    config = parse(words)
    inherited = inherit(os.environ)
    try:
        token = read_token_file(config.token_file)
    except TokenError as error:
        print(f"elasticrun: agent on {config.host}: {error}", file=sys.stderr)
        return int(error.exit_code)
    return asyncio.run(Agent(config, token, inherited).run())


if __name__ == "__main__":
    sys.exit(main())
