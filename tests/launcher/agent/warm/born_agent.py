"""Plays an agent that was forked from a warm parent, for tests that look at its workers.

    python -m tests.launcher.agent.warm.born_agent SPEC ANSWERS

Takes the job's specification as JSON. For each line on its stdin, variables as JSON, it runs the
job's command with these afresh and warm, and writes a line to the file ANSWERS.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from elastic_driver.words.orders import JobSpec, decode
from launcher.agent.environment import common_environment
from launcher.agent.processes import become_subreaper
from launcher.agent.warm.starter import WorkerStarter, inherit
from launcher.agent.warm.warm_plan import warm_plan_for
from tests.launcher.agent.warm.harness import Agent


def main() -> None:
    """Answer until stdin ends."""
    become_subreaper()
    inherited = inherit(os.environ)
    assert inherited is not None
    spec = decode(JobSpec, sys.argv[1].encode())
    fake = Agent(Path(spec.cwd))
    fake.env = common_environment(os.environ, spec)
    fake.starter = WorkerStarter(fake.said.append, inherited=inherited)
    fake.starter.launch(warm_plan_for(spec, os.environ))
    asyncio.run(fake.starter.ready())
    with open(sys.argv[2], "w") as answers:
        for line in sys.stdin:
            arguments, variables = spec.command[1:], json.loads(line)
            fresh = fake.run_fresh(*arguments, **variables)
            warm = fake.run(*arguments, **variables)
            of_birth = inherited.pid in fake.starter.own_pids()
            answer = [
                asdict(fresh),
                asdict(warm),
                [*fake.said, *([] if of_birth else ["not kept"])],
            ]
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    fake.starter.close()


if __name__ == "__main__":
    main()
