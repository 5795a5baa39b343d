"""Runs a script whose rank 1 is killed right after its N-th commit, once.

    lost_at_commit.py MARK N SCRIPT [ARGS…]

MARK is a path that does not exist: it is made before the kill, so that there is one only.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

import elastic_driver as elastic

mark, number, *sys.argv = sys.argv[1:]
commit = elastic.State.commit


def commit_and_die(state):
    commit(state)
    if state.version == int(number) and elastic.rank() == 1:
        try:
            Path(mark).touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


elastic.State.commit = commit_and_die
runpy.run_path(sys.argv[0], run_name="__main__")
