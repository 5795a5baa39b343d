"""The last checkpoint of workers that have to leave while no driver lives.

With a driver, it names the step and the workers that write it (`job.preemption`). Without
one they agree through the folder of the checkpoints, which all of them see: each notes the step
that it holds. As soon as all members of the last world have done so, or after a wait, one of them
writes the request, and only the first one counts. Then those that hold the newest step write it
together. A worker that was killed is not waited for long. Times are seconds.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from elastic_driver import contract
from elastic_driver.errors import ElasticError
from elastic_driver.words.orders import SaveRequest
from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.checkpoints.folder import DamagedError
from elastic_driver.worker.checkpoints.keeper import Checkpoints, describe
from elastic_driver.worker.state_sync.sharing import LiveState
from rendezvous.own_files import shown_folder

ROLL_CALL_S = 8.0  # the longest wait for the other members of the last world
ROLL_CALL_SHARE = 0.4  # of the time that is left; the rest is for writing
POLL_S = 0.05
REQUEST = "request.json"
NOTHING = -1  # the step of a worker whose state is of no use


class Arrival(Struct, frozen=True):
    """A worker that leaves, and the step whose state it holds."""

    worker: str
    step: int


def save_together(
    checkpoints: Checkpoints, state: LiveState, me: Arrival, world: Sequence[str], seconds: float
) -> str:
    """Write the newest step with the others that leave; return a clause that says what is on disk.

    Args:
        checkpoints: of the state.
        state: as it is after `me.step` steps.
        me: this worker.
        world: the members of the last world, by rank.
        seconds: the time that is left.
    """
    until = time.monotonic() + seconds
    patience = min(ROLL_CALL_S, seconds * ROLL_CALL_SHARE)
    try:
        request = _agree(checkpoints.root, me, world, patience, until)
        if me.worker not in request.members:
            return f"others write the state of step {request.step}, if they can"
        rank = request.members.index(me.worker)
        folder = checkpoints.take_last(state, request, rank)
        if rank > 0:
            checkpoints.drain()
            return f"its share of step {request.step} is in {folder}"
        problem = _outcome(checkpoints, folder, until)
    except (ElasticError, OSError) as error:
        problem = describe(error)
    if problem:
        return f"the state of step {me.step} is not on disk: {problem}"
    folders.remove_roll_calls(checkpoints.root)
    return f"the state of step {request.step} is in {folder}"


def _agree(
    root: Path, me: Arrival, world: Sequence[str], patience: float, until: float
) -> SaveRequest:
    """Sign in, wait for the others, and return the request that all of them follow."""
    run = os.environ.get(contract.RUN_ID, "")
    digest = hashlib.sha256("\n".join([run, *world]).encode()).hexdigest()[:8]
    folder = root / folders.roll_call_name(digest)
    root.mkdir(parents=True, exist_ok=True)
    shown_folder(folder)
    folders.write_document(folder / f"{me.worker}.arrival", me)
    published = time.monotonic() + patience
    while (now := time.monotonic()) < until:
        with suppress(FileNotFoundError, DamagedError):  # damaged: half written so far
            return folders.read_document(folder / REQUEST, SaveRequest)
        arrived = _arrivals(folder)
        if now >= published or {one.worker for one in arrived}.issuperset(world):
            _publish(folder, _request(arrived, world, until - now))
        time.sleep(POLL_S)
    raise ElasticError("the workers did not agree in time")


def _arrivals(folder: Path) -> list[Arrival]:
    found = []
    for path in folder.glob("*.arrival"):
        with suppress(DamagedError, FileNotFoundError):
            found.append(folders.read_document(path, Arrival))
    return found


def _request(arrived: Sequence[Arrival], world: Sequence[str], seconds: float) -> SaveRequest:
    """Return the request: those that hold the newest step write it, by rank."""
    newest = max(one.step for one in arrived)
    order = {worker: rank for rank, worker in enumerate(world)}
    holders = [one.worker for one in arrived if one.step == newest > NOTHING]
    members = sorted(holders, key=lambda worker: (order.get(worker, len(order)), worker))
    return SaveRequest(0, newest, tuple(members), seconds, "no driver lives")


def _publish(folder: Path, request: SaveRequest) -> None:
    """Write the request, unless there is one already."""
    body = msgspec.json.encode(request)
    with suppress(FileExistsError):
        descriptor = os.open(folder / REQUEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def _outcome(checkpoints: Checkpoints, folder: Path, until: float) -> str:
    """Wait for the end of the writing; return "" or why the checkpoint is not complete."""
    while (problem := checkpoints.outcome(folder)) is None and time.monotonic() < until:
        time.sleep(POLL_S)
    return "it was not written in time; raise --grace-period" if problem is None else problem
