"""`python -m launcher.agent`: the agent's process. Backends start it; people do not."""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from elastic_driver.errors import ExitCode
from launcher.agent.agent import Agent, AgentConfig
from launcher.agent.processes import forbid_core_dumps
from launcher.agent.spare import SPARE_FLAG, receive_arguments
from launcher.agent.warm.starter import inherit
from rendezvous.auth import read_credentials
from rendezvous.errors import TokenError


class _AgentParser(argparse.ArgumentParser):
    """Leaves with the project's exit status for a wrong command."""

    def error(self, message: str) -> NoReturn:
        self.exit(int(ExitCode.USAGE), f"{self.prog}: {message}\n")


def parse(argv: Sequence[str]) -> AgentConfig:
    """Read the agent's command line (see `AgentConfig`); exit with 64 where it is wrong."""
    parser = _AgentParser(prog="python -m launcher.agent", description=__doc__)
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


def main() -> int:
    """Run the agent; return its exit status."""
    arguments = sys.argv[1:]
    if arguments == [SPARE_FLAG] and not (arguments := receive_arguments(0)):
        return 0
    config = parse(arguments)
    forbid_core_dumps()
    inherited = inherit(os.environ)
    try:
        credentials = read_credentials(config.token_file)
    except TokenError as error:
        print(f"elasticrun: agent on {config.host}: {error}", file=sys.stderr)
        return int(error.exit_code)
    return asyncio.run(Agent(config, credentials, inherited).run())


if __name__ == "__main__":
    sys.exit(main())
