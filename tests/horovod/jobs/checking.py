"""Runs the checks of a job file on every rank, one after the other."""

import json
import sys
import time
import traceback
from pathlib import Path

import pytest

import elastic_driver.horovod.torch as hvd


def run_checks(module: dict[str, object]) -> None:
    """Run each function of a module whose name begins with `check_`, in a world of its own.

    Writes `RANK.json` into the folder that is the first argument: by check "ok", or the traceback.
    Ranks are in step after each check, so one that fails does not disturb the next.
    """
    hvd.init(process_sets="dynamic")
    results = {}
    for name, check in list(module.items()):
        if not name.startswith("check_") or not callable(check):
            continue
        began = time.monotonic()
        try:
            check()
            results[name] = "ok"
        except (Exception, pytest.fail.Exception):
            results[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - began:.2f} s", flush=True)
        hvd.barrier()
    Path(sys.argv[1], f"{hvd.rank()}.json").write_text(json.dumps(results))
    hvd.shutdown()
