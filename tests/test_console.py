"""The console against real pipes, files, sockets and terminals, with readers good and bad."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from elastic_driver.console import HIGH_WATER, Console

Body = Callable[[Console, list[bool], list[str]], Awaitable[None]]


def with_console(fd: int, body: Body, stall: float = 0.2) -> None:
    async def run() -> None:
        flows: list[bool] = []
        troubles: list[str] = []
        console = Console(fd, "stdout", on_trouble=troubles.append, stall=stall)
        console.attach(flows.append)
        try:
            await asyncio.wait_for(body(console, flows, troubles), 10)
        finally:
            console.close()

    asyncio.run(run())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def read_lines(fd: int, wanted: bytes) -> bytes:
    os.set_blocking(fd, False)
    got = b""
    while wanted not in got:
        try:
            got += os.read(fd, 65536)
        except BlockingIOError:
            await asyncio.sleep(0.005)
    return got


def test_lines_reach_a_pipe_whole_and_the_pipes_mode_is_left_alone() -> None:
    read, write = os.pipe()
    lines = b"".join(b"line %d\n" % n for n in range(5000))

    async def body(console: Console, flows: list[bool], troubles: list[str]) -> None:
        console.write(lines)
        assert os.get_blocking(write)
        assert await read_lines(read, b"line 4999\n") == lines
        assert troubles == []

    with_console(write, body)
    os.close(read)
    os.close(write)


def test_two_writers_to_a_full_pipe_never_mix_their_lines() -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)

    async def body(first: Console, _flows: list[bool], _troubles: list[str]) -> None:
        second = Console(write, "stdout", on_trouble=print)
        for n in range(500):
            first.write(b"a" * 90 + b" %d\n" % n)
            second.write(b"b" * 90 + b" %d\n" % n)
        both = asyncio.gather(first.drain(10), second.drain(10))
        got = b""
        os.set_blocking(read, False)
        while not both.done() or len(got) < 2 * 500 * 92:
            await asyncio.sleep(0)
            try:
                got += os.read(read, 65536)
            except BlockingIOError:
                if both.done():
                    break
        second.close()
        lines = got.splitlines()
        assert len(lines) == 1000
        assert all(line[:90] in (b"a" * 90, b"b" * 90) for line in lines)

    with_console(write, body)
    os.close(read)
    os.close(write)


def test_a_reader_that_stands_still_pauses_writers_then_output_is_dropped_and_told_once() -> None:
    read, write = os.pipe()

    async def body(console: Console, flows: list[bool], troubles: list[str]) -> None:
        line = b"x" * 999 + b"\n"
        while not flows:
            console.write(line)
        assert flows == [False]
        await until(lambda: troubles)
        assert flows == [False, True]
        assert "nothing has read our stdout" in troubles[0]
        for _ in range(10_000):  # goes nowhere, and is not kept either
            console.write(line)
        console.write(b"while away\n")

        async def come_back() -> None:
            os.set_blocking(read, False)
            seen = b""
            while b"again\n" not in seen:
                console.write(b"again\n")
                try:
                    seen += os.read(read, 65536)
                except BlockingIOError:
                    await asyncio.sleep(0.005)
            assert b"while away" not in seen
            assert len(seen) < 2 * HIGH_WATER

        await come_back()
        assert len(troubles) == 1

    with_console(write, body)
    os.close(read)
    os.close(write)


def test_a_reader_that_is_gone_is_told_and_writing_goes_on_harmlessly() -> None:
    read, write = os.pipe()

    async def body(console: Console, flows: list[bool], troubles: list[str]) -> None:
        os.close(read)
        console.write(b"one\n")
        console.write(b"two\n")
        await console.drain(1)
        assert len(troubles) == 1
        assert "Broken pipe" in troubles[0]
        assert False not in flows

    with_console(write, body)
    os.close(write)


def test_a_reader_gone_before_we_began_is_no_error_either() -> None:
    read, write = os.pipe()
    os.close(read)

    async def body(console: Console, _flows: list[bool], troubles: list[str]) -> None:
        console.write(b"one\n")
        assert "Broken pipe" in troubles[0]

    with_console(write, body)
    os.close(write)


def test_files_sockets_and_terminals_take_lines_too(tmp_path: Path) -> None:
    file = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    ours, theirs = socket.socketpair()
    controller, terminal = pty.openpty()
    for fd, look in (
        (file, lambda: os.pread(file, 100, 0)),
        (ours.fileno(), lambda: theirs.recv(100)),
        (terminal, lambda: os.read(controller, 100).replace(b"\r", b"")),
    ):

        async def body(console: Console, _flows: list[bool], troubles: list[str]) -> None:
            console.write(b"hello\n")
            await console.drain(2)
            assert troubles == []

        with_console(fd, body)
        assert look() == b"hello\n"
    for fd in (file, controller, terminal):
        os.close(fd)
    ours.close()
    theirs.close()


def test_a_full_disk_is_told() -> None:
    full = os.open("/dev/full", os.O_WRONLY)

    async def body(console: Console, _flows: list[bool], troubles: list[str]) -> None:
        console.write(b"x\n")
        assert "No space left" in troubles[0]

    with_console(full, body)
    os.close(full)


def test_a_stream_that_is_not_open_swallows_everything() -> None:
    async def body(console: Console, _flows: list[bool], troubles: list[str]) -> None:
        console.write(b"x\n")
        await console.drain(1)
        assert troubles == []

    with_console(987, body)


def test_a_broken_pipe_hands_its_lines_elsewhere_and_holds_nobody_up() -> None:
    read, write = os.pipe()
    taken: list[bytes] = []

    async def body(console: Console, flows: list[bool], troubles: list[str]) -> None:
        console.elsewhere = taken.append
        console.write(b"one\n")
        assert await read_lines(read, b"one\n") == b"one\n"
        os.close(read)
        console.write(b"two\n")
        console.write(b"three\n")
        assert taken == [b"two\n", b"three\n"]
        assert (flows, troubles) == ([], [])

    with_console(write, body)
    os.close(write)


def test_lines_that_nothing_has_read_go_elsewhere_with_those_that_follow() -> None:
    read, write = os.pipe()
    taken: list[bytes] = []

    async def body(console: Console, flows: list[bool], troubles: list[str]) -> None:
        console.elsewhere = taken.append
        first = b"a" * 2 * HIGH_WATER + b"\n"
        for lines in (b"zero\n", first):
            console.write(lines)
        assert flows == [False]
        console.divert()
        console.write(b"more\n")
        assert flows == [False, True]
        in_pipe = len(await read_lines(read, b"a")) - len(b"zero\n")
        assert b"".join(taken).endswith(b"a\nmore\n")
        assert sum(map(len, taken)) == len(first) - in_pipe + len(b"more\n")
        console.take_back()
        console.write(b"last\n")
        assert await read_lines(read, b"last\n") == b"last\n"
        assert troubles == []

    with_console(write, body)
    os.close(read)
    os.close(write)
