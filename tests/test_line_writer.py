"""The writer of lines: callers go on, whatever the terminal or the disk does."""

from __future__ import annotations

import errno
import threading
import time

from elastic_driver.line_writer import LineWriter
from tests.runtime.waiting import until

LONG_S = 30.0


class Disk:
    """Takes what is written, unless it hangs."""

    def __init__(self) -> None:
        self.works = threading.Event()
        self.works.set()
        self.hangs = threading.Event()  # a write has begun that does not end
        self.written = b""

    def write(self, data: bytes) -> None:
        if not self.works.is_set():
            self.hangs.set()
        assert self.works.wait(LONG_S)
        self.written += data


def test_lines_are_written_when_the_caller_goes_on() -> None:
    disk = Disk()
    writer = LineWriter(disk.write, patience=LONG_S)
    for number in range(3):
        assert writer.put(b"%d\n" % number)
        writer.settle()
        assert disk.written.endswith(b"%d\n" % number)
    assert writer.close(LONG_S)
    assert disk.written == b"0\n1\n2\n"
    assert not writer.put(b"too late\n")


def test_a_hung_disk_costs_a_moment_once_and_what_is_lost_is_told() -> None:
    disk = Disk()
    disk.works.clear()
    writer = LineWriter(disk.write, limit=10, on_lost=lambda n: b"%d lost\n" % n)
    assert writer.put(b"123\n")
    assert disk.hangs.wait(LONG_S)
    writer.settle()  # waits in vain
    began = time.monotonic()
    taken = [writer.put(b"456\n") for _ in range(100)]
    for _ in range(1000):
        writer.settle()
    assert time.monotonic() - began < LONG_S / 10  # with a wait in each it would be minutes
    assert taken == [True] + [False] * 99
    disk.works.set()
    assert writer.flush(LONG_S)
    assert writer.put(b"7\n")
    assert writer.close(LONG_S)
    assert disk.written == b"123\n456\n99 lost\n7\n"


def test_a_writer_that_hangs_for_good_does_not_hold_up_the_end() -> None:
    disk = Disk()
    disk.works.clear()
    writer = LineWriter(disk.write)
    writer.put(b"1\n")
    assert not writer.close(0.01)
    disk.works.set()
    assert writer.close(LONG_S)


def test_a_broken_disk_is_told_once_and_later_lines_are_dropped() -> None:
    errors: list[int | None] = []

    def full(_data: bytes) -> None:
        raise OSError(errno.ENOSPC, "full")

    writer = LineWriter(full, patience=LONG_S, on_broken=lambda error: errors.append(error.errno))
    writer.put(b"1\n")
    assert writer.flush(LONG_S)
    assert not writer.put(b"2\n")
    assert writer.close(LONG_S)
    assert errors == [errno.ENOSPC]


def test_what_a_full_disk_refuses_waits_until_it_has_room_again() -> None:
    told: list[int | None] = []
    disk, full = Disk(), threading.Event()
    full.set()

    def write(data: bytes) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, "full")
        disk.write(data)

    writer = LineWriter(
        write,
        limit=10,
        patience=LONG_S,
        retry=0.01,
        on_broken=lambda error: told.append(error.errno),
        on_lost=lambda n: b"%d lost\n" % n,
    )
    for episode in (1, 2):
        assert writer.put(b"123\n")
        until(lambda: len(told) == episode, "the user is told")  # noqa: B023 - called at once
        began = time.monotonic()
        assert writer.put(b"456\n")
        assert not writer.put(b"789\n")
        writer.settle()
        assert time.monotonic() - began < LONG_S / 2, "nobody waits for a disk that is full"
        full.clear()
        assert writer.flush(LONG_S)
        assert writer.put(b"7\n")
        assert writer.flush(LONG_S)
        full.set()
    assert disk.written == b"123\n456\n1 lost\n7\n" * 2
    assert told == [errno.ENOSPC] * 2
    assert writer.put(b"lost at the end\n")
    assert writer.close(LONG_S)


def test_an_error_that_nobody_expects_is_told_like_one_of_the_disk() -> None:
    told: list[str] = []

    def fail(_data: bytes) -> None:
        raise RuntimeError("a fault")

    writer = LineWriter(fail, patience=LONG_S, on_broken=lambda error: told.append(str(error)))
    assert writer.put(b"1\n")
    assert writer.close(LONG_S)
    assert told == ["RuntimeError: a fault"]
