"""Where each worker's two streams go: the terminal, files, or both.

    <log_dir>/<worker>/stdout.log, stderr.log      named by the stable worker id
    <log_dir>/by-rank/<round>/<rank>               link to the folder of that round's rank

`--redirects`, `--tee` and `--local-ranks-filter` mean what they mean to torchrun: a redirected
stream goes to its file only, a teed one to file and terminal, any other to the terminal. The
files get a worker's bytes as they are, at once, and are appended to.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.core.documents import JobSpec

OUT, ERR = 1, 2  # bits of torchrun's Std


@dataclass(frozen=True)
class Routing:
    """For one worker: which streams (bits `OUT`, `ERR`) go to a file, which to the terminal."""

    to_file: int
    to_console: int


def parse_streams(text: str, local_rank: int) -> int:
    """What torchrun's `--redirects`/`--tee` value says for one local rank, as bits.

    Either one number for all ("3"), or local rank by local rank ("0:3,1:1"), where ranks that
    are not named get 0. Raises ValueError for anything else.
    """
    if ":" not in text:
        return _streams(text)
    by_rank: dict[int, int] = {}
    for pair in text.split(","):
        rank, _, streams = pair.partition(":")
        by_rank[int(rank)] = _streams(streams)
    return by_rank.get(local_rank, 0)


def route(spec: JobSpec, local_rank: int) -> Routing:
    """Where the streams of the worker with this `LOCAL_RANK` go.

    Without a log directory there are no files, and nothing is kept from the terminal but what
    the filter keeps.
    """
    redirected = parse_streams(spec.redirects, local_rank) if spec.log_dir else 0
    teed = parse_streams(spec.tee, local_rank) if spec.log_dir else 0
    shown = (OUT | ERR) & (~redirected | teed)
    if spec.local_ranks_filter is not None and local_rank not in spec.local_ranks_filter:
        shown = 0
    return Routing(to_file=redirected | teed, to_console=shown)


class LogFile:
    """One stream's file; a write that fails (disk full) ends the file, not the worker."""

    def __init__(self, path: Path) -> None:
        """Open for appending, with the folders above it; raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def write(self, data: bytes) -> str | None:
        """Append; returns a sentence about what went wrong, once, and None otherwise."""
        while data and self._fd >= 0:
            try:
                data = data[os.write(self._fd, data) :]
            except OSError as error:
                self.close()
                return (
                    f"cannot write {self.path} ({error.strerror}); what follows is missing "
                    "from this file; make room or choose another --log-dir"
                )
        return None

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def link_ranks(log_dir: Path, round_id: int, ranks: dict[str, int]) -> None:
    """Make `by-rank/<round>/<rank>` lead to each of these workers' folders; raises OSError."""
    folder = log_dir / "by-rank" / str(round_id)
    folder.mkdir(parents=True, exist_ok=True)
    for worker, rank in ranks.items():
        draft = folder / f".{rank}.{worker}"
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        draft.symlink_to(Path("..") / ".." / worker, target_is_directory=True)
        draft.replace(folder / str(rank))


def _streams(text: str) -> int:
    value = int(text)
    if not 0 <= value <= (OUT | ERR):
        raise ValueError(f"{text!r} is not 0 (none), 1 (stdout), 2 (stderr) or 3 (both)")
    return value
