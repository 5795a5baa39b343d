"""Writes one checkpoint in the background, on a daemon thread of its own.

Every rank writes its share and reports it. Rank 0 then waits for all reports and completes the
checkpoint. Ranks learn of each other through the shared folder only: no collective, no message. A
failure is logged in one line, once until writing works again, and never reaches the training
thread. Times are seconds.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

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
    disk: threading.Lock = field(default_factory=threading.Lock)  # held to write or to delete


class CheckpointShare(Struct, frozen=True):
    """One rank's part of one checkpoint: its staged tensors, and on rank 0 all else as well."""

    folder: Path
    version: int
    staging: tensors.Staging
    pack: Callable[[], Envelope] | None  # in the background: it takes longer than copying
    consequence: str  # of a failure, for the log; "": the caller logs the failure


class CheckpointWriter(threading.Thread):
    """Writes one share; on rank 0 it then completes the checkpoint.

    Args:
        root: the folder of all checkpoints.
        share: its staging must not be touched until `written` is set.
        before: earlier writers that still wait for reports. They give up when this one completes
            its checkpoint, because ranks write in the order of steps.
    """

    def __init__(
        self, root: CheckpointRoot, share: CheckpointShare, before: Sequence["CheckpointWriter"]
    ) -> None:
        super().__init__(name="elastic-checkpoints", daemon=True)
        self.share = share
        self.written = threading.Event()  # this rank's share is on disk, or has failed
        self.superseded = threading.Event()  # a later checkpoint is complete
        self.problem: str | None = None  # on rank 0 after a failure: the reason
        self._root, self._before = root, before

    def run(self) -> None:
        """Write the share and, on rank 0, complete the checkpoint."""
        try:
            with self._root.disk:
                self._write()
                self.written.set()
                done = self._complete()
            deadline, pause = time.monotonic() + PATIENCE_S, FIRST_POLL_S
            while not done:
                self.superseded.wait(pause)
                pause = min(pause * GROWTH, LONGEST_POLL_S)
                with self._root.disk:
                    done = self._complete()
                if not done and time.monotonic() >= deadline:
                    raise DamagedError(
                        f"not every rank has written its part within {PATIENCE_S:g} s"
                    )
        except Exception as error:  # a checkpoint that fails must not end the training
            self._fail(describe(error))
        finally:
            self.written.set()
            self._before = ()

    def _write(self) -> None:
        folder, staging = self.share.folder, self.share.staging
        # Rank 0 alone creates the folder of all, so that a rank that does not see it fails.
        if staging.rank == 0:
            self._root.path.mkdir(parents=True, exist_ok=True)
        elif not self._root.path.is_dir():
            raise DamagedError(
                f"rank {staging.rank} does not see the folder; give a checkpoint_dir that is "
                "the same on every host"
            )
        folder.mkdir(exist_ok=True)
        report = tensors.write_share(folder, staging)
        if self.share.pack is not None:
            packed = msgspec.msgpack.encode(self.share.pack())
            report.files[folders.VALUES] = folders.write_file(folder / folders.VALUES, packed)
        folders.write_document(folder / f"part-{staging.rank}.json", report)

    def _complete(self) -> bool:
        """On rank 0, complete the checkpoint if all ranks have reported; return whether to stop.

        Raises an error where a rank cannot write its part.
        """
        root, share = self._root, self.share
        if share.staging.rank > 0:
            root.in_trouble = False
            return True
        if self.superseded.is_set():
            return True
        reports = self._reports()
        if reports is None:
            return False
        manifest = Manifest(
            version=share.version,
            world_size=share.staging.size,
            tensors=share.staging.kinds,
            chunks=tuple(chunk for report in reports for chunk in report.chunks),
            files={name: mark for report in reports for name, mark in report.files.items()},
            torch=str(torch.__version__),
        )
        manifest.files[tensors.INDEX] = tensors.write_index(share.folder, manifest)
        folders.complete(share.folder, manifest)
        for writer in self._before:
            writer.superseded.set()
        if root.in_trouble:
            say(f"checkpoints are written again, to {root.path}: step {share.version}")
        root.in_trouble = False
        folders.retire(root.path, root.keep)
        return True

    def _reports(self) -> list[Report] | None:
        """Return the reports of all ranks, None while one is missing."""
        folder, ranks = self.share.folder, range(self.share.staging.size)
        names = set(os.listdir(folder))
        for rank in ranks:
            if f"part-{rank}.failed" in names:
                reason = (folder / f"part-{rank}.failed").read_text()
                raise DamagedError(f"rank {rank}: {reason}")
        paths = [folder / f"part-{rank}.json" for rank in ranks]
        if any(path.name not in names for path in paths):
            return None
        reports = [folders.read_document(path, Report) for path in paths]
        for rank, report in enumerate(reports):
            if report.layout != self.share.staging.digest:
                raise DamagedError(
                    f"rank {rank} has other tensors than rank 0; give the state the same on each"
                )
        return reports

    def _fail(self, reason: str) -> None:
        """Free the space; rank 0 logs the reason, others leave it in the folder for rank 0."""
        folder, rank = self.share.folder, self.share.staging.rank
        if rank == 0:
            self.problem = reason
            folders.remove(folder)
            if self.share.consequence:
                self._complain(reason)
            return
        with suppress(OSError):
            (folder / tensors.file_name(rank)).unlink(missing_ok=True)
        try:
            (folder / f"part-{rank}.failed").write_text(reason)
        except OSError:
            self._complain(reason)

    def _complain(self, reason: str) -> None:
        share, root = self.share, self._root
        if not root.in_trouble:
            consequence = f"; {share.consequence}" if share.consequence else ""
            say(
                f"the checkpoint of step {share.version} in {root.path} is not written: "
                f"{reason}{consequence}"
            )
        root.in_trouble = True


def describe(error: BaseException) -> str:
    """Return one line about a failure: the disk's own message where torch has wrapped one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return first_line(error)
