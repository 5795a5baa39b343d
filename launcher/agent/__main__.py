"""`python -m launcher.agent`: the agent's process. Backends start it; people do not."""

import asyncio
import os
import sys

from launcher.agent import processes
from launcher.agent.agent import Agent
from launcher.agent.command_line import SPARE_FLAG, parse, receive_arguments
from launcher.agent.processes import forbid_core_dumps
from launcher.agent.warm.starter import inherit
from rendezvous.auth import read_credentials
from rendezvous.errors import TokenError


def main() -> int:
    """Run the agent; return its exit status."""
    arguments = sys.argv[1:]
    if arguments == [SPARE_FLAG]:
        arguments = receive_arguments(0)
        if not arguments:
            return 0
    config = parse(arguments)
    forbid_core_dumps()
    inherited = inherit(os.environ)
    given = processes.inherit_stdin(os.environ)
    try:
        credentials = read_credentials(config.token_file)
    except TokenError as error:
        print(f"elasticrun: agent on {config.host}: {error}", file=sys.stderr)
        return int(error.exit_code)
    return asyncio.run(Agent(config, credentials, inherited, given).run())


if __name__ == "__main__":
    sys.exit(main())
