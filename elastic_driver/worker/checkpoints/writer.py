"""Writes checkpoints in the background, on a daemon thread that lives while there is work for it.

Every rank writes its share and reports it. Rank 0 also waits for all reports, while it goes on
writing its own shares, and then completes the checkpoint. Ranks learn of each other through the
shared folder only: no collective, no message. A failure is logged in one line, once until writing
works again, and never reaches the training thread. Times are seconds.
"""

import atexit
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct

from elastic_driver.worker.checkpoints import folder as folders
from elastic_driver.worker.checkpoints.folder import DamagedError, Manifest, Report
from elastic_driver.worker.checkpoints.staging import Staging
from elastic_driver.worker.state_sync.sharing import SplitState
from elastic_driver.worker.state_sync.values import first_line
from elastic_driver.worker.worker_log import say

PATIENCE_S = 600.0  # for the other ranks' reports: as long as a slow disk may take
FIRST_POLL_S = 0.02  # for other ranks' reports; each pause is GROWTH times longer, up to …
LONGEST_POLL_S = 1.0
GROWTH = 1.5
EXIT_S = 60.0  # a process that ends waits this long for its own share …
EXIT_OTHERS_S = 10.0  # … and this long for the others'


class CheckpointShare(Struct, frozen=True):
    """One rank's part of one checkpoint: its staged tensors, and on rank 0 all plain values."""

    folder: Path
    version: int
    staging: Staging
    # With the states of the generators; packed in the background, which takes longer than copying.
    values: tuple[SplitState, dict[str, Any]] | None
    consequence: str  # of a failure, for the log; "": whoever asked for it logs the failure


class Writer:
    """The background thread and its work.

    Args:
        root: the folder of all checkpoints.
        keep: how many complete ones to keep.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self._root, self._keep = root, keep
        self._changed = threading.Condition()
        self._share: CheckpointShare | None = None  # submitted, and not written yet
        self._awaited: dict[
            Path, tuple[CheckpointShare, float]
        ] = {}  # without all reports; and deadlines
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self._waited_for_at_exit = False
        self._in_trouble = False  # the last attempt failed, and that was logged
        self._given_up: tuple[Path, str] | None = None  # the newest that rank 0 gave up, and why

    # ---- called by the training thread ---------------------------------------------------

    def is_free(self, within: float) -> bool:
        """Return whether the last share is written, after waiting up to `within` seconds for it."""
        with self._changed:
            return self._changed.wait_for(lambda: self._share is None, within)

    def submit(self, share: CheckpointShare) -> None:
        """Have a share written; its staging must not be touched until the writer is free again."""
        with self._changed:
            self._share = share
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="elastic-checkpoints", daemon=True
                )
                self._thread.start()
        if not self._waited_for_at_exit:
            self._waited_for_at_exit = True
            atexit.register(self.drain)

    def outcome(self, folder: Path) -> str | None:
        """Return, on rank 0, "" for a complete checkpoint, why it failed, or None while pending."""
        with self._changed:
            if folder in self._awaited or (self._share and self._share.folder == folder):
                return None
            if self._given_up is not None and self._given_up[0] == folder:
                return self._given_up[1]
        return "" if folders.is_complete(folder) else "it was given up for another one"

    def drain(self, own: float = EXIT_S, others: float = EXIT_OTHERS_S) -> bool:
        """Wait for this rank's share, then for the others'; return whether all are written.

        Called when the process ends, so that the checkpoint of its last step is not lost.
        """
        if os.getpid() != self._owner:
            return True  # a forked child does not write
        if not self.is_free(own):
            return False
        with self._changed:
            return self._changed.wait_for(lambda: not self._awaited, others)

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        pause = FIRST_POLL_S
        while True:
            with self._changed:
                if self._share is None and not self._awaited:
                    self._thread = None
                    return
                self._changed.wait_for(
                    lambda: self._share is not None, pause if self._awaited else None
                )
                share = self._share
            pause = min(pause * GROWTH, LONGEST_POLL_S)
            if share is not None:
                self._write(share)
                pause = FIRST_POLL_S
            for awaited, deadline in list(self._awaited.values()):
                self._poll(awaited, deadline)

    def _write(self, share: CheckpointShare) -> None:
        from elastic_driver.worker.checkpoints.format import write_share  # noqa: PLC0415 - see there

        rank, written = share.staging.rank, False
        try:
            self._make_folder(share)
            report = write_share(share.folder, share.staging)
            if share.values is not None:
                contents, random = share.values
                with folders.replacing(share.folder / folders.VALUES) as fresh:
                    fresh.write_bytes(msgspec.msgpack.encode(contents.envelope(random)))
                report.files[folders.VALUES] = folders.mark_of(share.folder / folders.VALUES)
            folders.write_document(folders.report_path(share.folder, rank), report)
            written = True
        except Exception as error:  # a checkpoint that fails must not end the training
            self._failed(share, describe(error))
        with self._changed:
            if written and rank == 0:
                self._awaited[share.folder] = share, time.monotonic() + PATIENCE_S
            elif written:
                self._in_trouble = False
            self._share = None
            self._changed.notify_all()

    def _make_folder(self, share: CheckpointShare) -> None:
        """Create the checkpoint's folder; rank 0 alone creates the folder of all.

        So a rank that does not see the shared folder fails.
        """
        if share.staging.rank == 0:
            self._root.mkdir(parents=True, exist_ok=True)
        elif not self._root.is_dir():
            raise DamagedError(
                f"rank {share.staging.rank} does not see the folder; give a checkpoint_dir that is "
                "the same on every host"
            )
        share.folder.mkdir(exist_ok=True)

    def _failed(self, share: CheckpointShare, reason: str) -> None:
        """Free the space, and leave the reason in the folder for rank 0 to log."""
        if share.staging.rank == 0:
            self._give_up(share, reason)
            return
        with suppress(OSError):
            for path in share.folder.glob(f"__{share.staging.rank}_*"):  # as DCP names them
                path.unlink()
        try:
            folders.trouble_path(share.folder, share.staging.rank).write_text(reason)
        except OSError:
            self._complain(share, reason)

    def _give_up(self, share: CheckpointShare, reason: str) -> None:
        self._given_up = (share.folder, reason)
        folders.remove(share.folder)
        if share.consequence:
            self._complain(share, reason)

    def _complain(self, share: CheckpointShare, reason: str) -> None:
        if not self._in_trouble:
            say(
                f"the checkpoint of step {share.version} in {self._root} is not written: {reason}"
                f"{'; ' if share.consequence else ''}{share.consequence}"
            )
        self._in_trouble = True

    # ---- rank 0: completing checkpoints --------------------------------------------------

    def _poll(self, share: CheckpointShare, deadline: float) -> None:
        """Complete the checkpoint if all ranks have reported; give it up if one cannot."""
        try:
            done = self._finish_if_reported(share)
            if not done and time.monotonic() >= deadline:
                raise DamagedError(f"not every rank has written its part within {PATIENCE_S:g} s")
        except Exception as error:  # as above
            self._give_up(share, describe(error))
            done = True
        if done:
            with self._changed:
                # Ranks write in the order of steps: no older checkpoint will be completed now.
                while share.folder in self._awaited:
                    del self._awaited[next(iter(self._awaited))]
                self._changed.notify_all()

    def _finish_if_reported(self, share: CheckpointShare) -> bool:
        folder, size = share.folder, share.staging.size
        there = set(os.listdir(folder))
        for rank in range(size):
            trouble = folders.trouble_path(folder, rank)
            if trouble.name in there:
                raise DamagedError(f"rank {rank}: {trouble.read_text()}")
        paths = [folders.report_path(folder, rank) for rank in range(size)]
        if any(path.name not in there for path in paths):
            return False
        self._finish(share, [folders.read_document(path, Report) for path in paths])
        return True

    def _finish(self, share: CheckpointShare, reports: list[Report]) -> None:
        from elastic_driver.worker.checkpoints import format as dcp_format  # noqa: PLC0415 - see there

        for rank, report in enumerate(reports):
            if report.layout != share.staging.digest:
                raise DamagedError(
                    f"rank {rank} has other tensors than rank 0; give the state the same on each"
                )
        manifest = Manifest(
            version=share.version,
            world_size=share.staging.size,
            tensors=share.staging.kinds,
            chunks=tuple(chunk for report in reports for chunk in report.chunks),
            files={name: mark for report in reports for name, mark in report.files.items()},
            torch=str(torch.__version__),
        )
        manifest.files[dcp_format.INDEX] = dcp_format.write_index(share.folder, manifest)
        folders.complete(share.folder, manifest)
        if self._in_trouble:
            say(f"checkpoints are written again, to {self._root}: step {share.version}")
        self._in_trouble = False
        folders.retire(self._root, self._keep)


def describe(error: BaseException) -> str:
    """Return one line about a failure: the disk's own message where torch has wrapped one."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return first_line(error)
