"""A real browser: Chromium without a window, steered by its DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.processes import descendants, select

NAMES = ("chromium", "chromium-browser", "google-chrome")
WITHIN_S = 60.0
_NAVIGATED = "Inspected target navigated or closed"  # meanwhile: the page of before cannot answer
needs_chromium = pytest.mark.skipif(
    not any(map(shutil.which, NAMES)), reason="chromium is not installed"
)
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--no-first-run", "--remote-debugging-port=0"),
    *("--disable-component-update", "--disable-sync", "--password-store=basic"),
)


class NavigatedError(Exception):
    """The page was replaced by another one before it had answered."""


class Tab:
    """One page of the browser; `faults` are the errors that it has met."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[bool], browser: int) -> None:
        self._socket, self._browser, self._numbers = socket, browser, itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.faults: list[str] = []

    async def read(self) -> None:
        """Take in what the browser says, until it has gone."""
        async for message in self._socket:
            found = message.json()
            if "id" in found:
                self._waiting.pop(found["id"]).set_result(found)
            elif found["method"] == "Runtime.exceptionThrown":
                self.faults.append(str(found["params"]["exceptionDetails"]))
            elif found["method"] == "Log.entryAdded":
                entry = found["params"]["entry"]
                if entry["level"] == "error" and "net::ERR" not in entry["text"]:
                    self.faults.append(f"{entry['text']} {entry.get('url', '')}")

    async def order(self, method: str, **params: Any) -> dict[str, Any]:
        """Carry out a command of the protocol; return its result."""
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        found = await asyncio.wait_for(answer, WITHIN_S)
        if found.get("error", {}).get("message") == _NAVIGATED:
            raise NavigatedError(params)
        assert "error" not in found, found
        result: dict[str, Any] = found["result"]
        return result

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page; a promise is waited for."""
        found = await self.order(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in found, (script, found)
        return found["result"].get("value")

    async def until(self, script: str, what: str = "") -> Any:
        """Return the value of an expression as soon as it is true, in this page or in the next."""
        until = time.monotonic() + WITHIN_S
        while time.monotonic() < until:
            with contextlib.suppress(NavigatedError):
                if value := await self.evaluate(script):
                    return value
            await asyncio.sleep(0.05)
        shown = await self.evaluate("document.body?.innerText")
        raise AssertionError(f"{what or script}\n{shown}")

    async def press(self, key: str, code: int) -> None:
        """Press a key that has this virtual key code."""
        text = "\r" if key == "Enter" else ""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.order("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        await self.order("Input.dispatchKeyEvent", type="keyUp", **about)

    async def type(self, text: str) -> None:
        """Type into the field that has the focus."""
        await self.order("Input.insertText", text=text)

    def main_thread_s(self) -> float:
        """Return the processor seconds of the page's main thread so far, as the kernel has them."""
        spent = 0
        renderers = select(descendants(self._browser), lambda p: "--type=renderer" in p.cmdline())
        for renderer in renderers:
            with contextlib.suppress(OSError):  # it has ended since
                # Of the first thread; an unused renderer has next to nothing.
                times = Path(f"/proc/{renderer.pid}/task/{renderer.pid}/schedstat").read_text()
                spent += int(times.split()[0])
        return spent / 1e9

    async def text(self, selector: str) -> str:
        """Return the text of an element."""
        return str(await self.evaluate(f"document.querySelector('{selector}').textContent"))


@asynccontextmanager
async def tab(folder: Path) -> AsyncIterator[Tab]:
    """Start a browser with an empty profile in `folder`, and end it afterwards."""
    program = next(filter(None, map(shutil.which, NAMES)))
    log = folder / "chromium.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [program, *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdout=out,
            stderr=out,
            env={**os.environ, "HOME": str(folder)},
        )
    try:
        port = await _port(log, process)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                found = await answer.json(content_type=None)
            address = next(each for each in found if each["type"] == "page")
            url, most = address["webSocketDebuggerUrl"], 64 * 1024**2
            async with session.ws_connect(url, max_msg_size=most) as socket:
                subject = Tab(socket, process.pid)
                reading = asyncio.create_task(subject.read())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await subject.order(f"{domain}.enable")
                yield subject
                reading.cancel()
    finally:
        process.terminate()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _port(log: Path, process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + WITHIN_S
    while True:
        found = re.search(r"DevTools listening on ws://[^:]+:(\d+)/", log.read_text())
        if found:
            return found[1]
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        await asyncio.sleep(0.05)
