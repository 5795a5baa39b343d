"""Writes one checkpoint in the background, on a daemon thread of its own.

Every rank writes its share and reports it. Rank 0 then waits for all reports and completes the
checkpoint. Ranks learn of each other through the shared folder only: no collective, no message. A
failure is logged in one line, once until writing works again, and never reaches the training
thread. Times are seconds.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread

import msgspec
import torch

from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.checkpoints import tensors
from elastic_driver.worker.checkpoints.folder import DamagedError, Manifest, Report
from elastic_driver.worker.state_sync.sharing import Envelope
from elastic_driver.worker.state_sync.values import first_line
from elastic_driver.worker.worker_log import say

PATIENCE_S = 600.0  # for the other ranks' reports: as long as a slow disk may take
FIRST_POLL_S = 0.02  # for other ranks' reports; each pause is GROWTH times longer, up to …
LONGEST_POLL_S = 1.0
GROWTH = 1.5


@dataclass(slots=True)
class CheckpointRoot:
    """The folder of all checkpoints of a state, and what the threads that write there share."""

    path: Path
    keep: int  # complete checkpoints that stay
    in_trouble: bool = False  # the last attempt failed, and that was logged
    disk: Lock = field(default_factory=Lock)  # held to write or to delete


@dataclass(eq=False, repr=False)
class CheckpointWriter(Thread):
    """Writes one rank's share of one checkpoint; on rank 0 it then completes the checkpoint.

    Args:
        root, folder: the folder of all checkpoints, and of this one.
        version: committed steps of the state.
        staging: the share; it must not be touched until `written` is set.
        pack: on rank 0, returns the rest of the state; called here because it takes long.
        is_last: the workers are about to leave, and the caller logs a failure.
        before: earlier writers that still wait for reports. They give up when this one completes
            its checkpoint, because ranks write in the order of steps.
    """

    root: CheckpointRoot
    folder: Path
    version: int
    staging: tensors.Staging
    pack: Callable[[], Envelope] | None
    is_last: bool
    before: list["CheckpointWriter"]
    written: Event = field(default_factory=Event)  # this rank's share is on disk, or has failed
    superseded: Event = field(default_factory=Event)  # a later checkpoint is complete
    problem: str = ""  # on rank 0 after a failure: the reason

    def __post_init__(self) -> None:
        super().__init__(name="elastic-checkpoints", daemon=True)

    def run(self) -> None:
        """Write the share and, on rank 0, complete the checkpoint."""
        try:
            with self.root.disk:
                self._write()
                self.written.set()
                done = self._complete()
            deadline, pause = time.monotonic() + PATIENCE_S, FIRST_POLL_S
            while not done:
                self.superseded.wait(pause)
                pause = min(pause * GROWTH, LONGEST_POLL_S)
                with self.root.disk:
                    done = self._complete()
                if not done and time.monotonic() >= deadline:
                    raise DamagedError(
                        f"not every rank has written its part within {PATIENCE_S:g} s"
                    )
        except Exception as error:  # a checkpoint that fails must not end the training
            self._fail(describe(error))
        finally:
            self.written.set()
            self.before = []

    def _write(self) -> None:
        folder, rank = self.folder, self.staging.rank
        # Rank 0 alone creates the folder of all, so that a rank that does not see it fails.
        if rank == 0:
            self.root.path.mkdir(parents=True, exist_ok=True)
        elif not self.root.path.is_dir():
            raise DamagedError(
                f"rank {rank} does not see the folder; give a checkpoint_dir that is the same on "
                "every host"
            )
        folder.mkdir(exist_ok=True)
        report = tensors.write_share(folder, self.staging)
        if self.pack is not None:
            values = msgspec.msgpack.encode(self.pack())
            report.files[folders.VALUES] = folders.write_file(folder / folders.VALUES, values)
        folders.write_document(folder / f"part-{rank}.json", report)

    def _complete(self) -> bool:
        """On rank 0, complete the checkpoint if all ranks have reported; return whether to stop.

        Raises an error where a rank cannot write its part.
        """
        root, staging = self.root, self.staging
        if staging.rank > 0:
            root.in_trouble = False
            return True
        if self.superseded.is_set():
            return True
        reports = self._reports()
        if reports is None:
            return False
        manifest = Manifest(
            version=self.version,
            world_size=staging.size,
            tensors=staging.kinds,
            chunks=tuple(chunk for report in reports for chunk in report.chunks),
            files={name: mark for report in reports for name, mark in report.files.items()},
            torch=str(torch.__version__),
        )
        manifest.files[tensors.INDEX] = tensors.write_index(self.folder, manifest)
        folders.complete(self.folder, manifest)
        for writer in self.before:
            writer.superseded.set()
        if root.in_trouble:
            say(f"checkpoints are written again, to {root.path}: step {self.version}")
        root.in_trouble = False
        folders.retire(root.path, root.keep)
        return True

    def _reports(self) -> list[Report] | None:
        """Return the reports of all ranks, None while one is missing."""
        names, reports = set(os.listdir(self.folder)), []
        ranks = range(self.staging.size)
        for rank in ranks:
            if f"part-{rank}.failed" in names:
                reason = (self.folder / f"part-{rank}.failed").read_text()
                raise DamagedError(f"rank {rank}: {reason}")
        if not names.issuperset(f"part-{rank}.json" for rank in ranks):
            return None
        for rank in ranks:
            reports.append(folders.read_document(self.folder / f"part-{rank}.json", Report))
            if reports[rank].layout != self.staging.digest:
                raise DamagedError(
                    f"rank {rank} has other tensors than rank 0; give the state the same on each"
                )
        return reports

    def _fail(self, reason: str) -> None:
        """Free the space; rank 0 logs the reason, others leave it in the folder for rank 0."""
        rank, logged = self.staging.rank, not self.is_last
        if rank == 0:
            self.problem = reason
            folders.remove(self.folder)
        else:
            with suppress(OSError):
                (self.folder / tensors.file_name(rank)).unlink(missing_ok=True)
            try:
                (self.folder / f"part-{rank}.failed").write_text(reason)
                logged = False
            except OSError:
                logged = True
        if logged and not self.root.in_trouble:
            say(
                f"the checkpoint of step {self.version} in {self.root.path} is not written: "
                f"{reason}; training goes on, and every later checkpoint is tried again"
            )
        self.root.in_trouble |= logged


def describe(error: BaseException) -> str:
    """Return one line about a failure: the disk's own message where torch has wrapped one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return first_line(error)
