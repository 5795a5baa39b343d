"""The page of a job: what it costs the driver and the browser, with few and many workers.

The driver's routes serve a simulated job whose workers all make steps, and whose states change.
The figures of the driver are its processor time for each viewer, that for making the status
document left out, as `elasticctl status` has it too. Those of the browser are the first paint, and
the processor time of the page's main thread for each update, once a second. It needs Chromium.

    python -m benchmarks.page [--workers 3,1000] [--viewers 10] [--seconds 15]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import msgspec

from benchmarks.common import OURS, Figure, report
from elastic_driver.runtime.api import DriverRoutes, job_access
from elastic_driver.runtime.event_log import EventLog
from elastic_driver.words.progress import History
from rendezvous.auth import reader_token
from rendezvous.server import RendezvousServer
from tests.support.browser import tab
from tests.support.pictures import status_of_size

TOKEN = "a-token-of-the-benchmark"  # noqa: S105 - of a server on loopback that ends with it
SETTLE_S = 3.0
EVENT_EVERY_S = 0.5


class Simulated:
    """A driver whose workers make two steps a second, and change their states now and then."""

    size_bounds: tuple[int, int | None] = (1, None)

    def __init__(self, workers: int) -> None:
        self.document = status_of_size(workers)
        self._random, self._began = random.Random(1), time.time()
        self.making = 0.0  # processor seconds in which documents were made

    def ask_status(self, reply: Callable[[bytes], None]) -> None:
        """Answer with the next document."""
        began = time.thread_time()
        document, chance, age = self.document, self._random.random, time.time() - self._began
        measured = document["measured"]
        measured |= {"step": int(2 * age), "steps_per_s": 2 + chance() / 10}
        for worker in measured["workers"].values():
            worker |= {"step": int(2 * age), "steps_per_s": 2 + chance() / 10, "cpu": chance()}
        for host in document["hosts"]:
            usage = {"cpu": chance(), "memory_used": 10**10, "memory_total": 6 * 10**10}
            usage |= {"disk_used": 10**11, "disk_total": 10**12, "net_in": 1e6, "net_out": 2e6}
            measured.setdefault("hosts", {})[host["host"]] = usage
        document["goodput"]["seconds"]["training"] = age * len(document["members"])
        document["goodput"]["wall"] = age
        for member in document["members"]:
            if member["state"] != "running" and chance() < 0.5:
                member["state"] = "running"
        states = ("ready", "lost", "starting")
        self._random.choice(document["members"])["state"] = self._random.choice(states)
        body = msgspec.json.encode(document)
        self.making += time.thread_time() - began
        reply(body)

    def history(self, since: float) -> History:
        """Return as many points as the driver has after an hour, or those since then."""
        now = int(time.time())
        moments = [float(t) for t in range(now - 630, now) if t > since]
        count = len(moments)
        return History(
            t=moments,
            step=[int(t) for t in moments],
            steps_per_s=[2 + t % 7 / 50 for t in moments],
            samples_per_s=[100 + t % 9 for t in moments],
            world_size=[len(self.document["members"]) - int(t) % 3 for t in moments],
            step_time=[0.5] * count,
        )

    def post(self, _event: object) -> bool:
        """Refuse: nobody steers this job."""
        return False

    def deliver(self, _event: object, _acknowledge: Callable[[], None]) -> bool:
        """Refuse: nobody steers this job."""
        return False

    def request_stop(self, reason: str, exit_code: int) -> None:
        """Go on: this job ends with the benchmark."""


@contextlib.contextmanager
def serving(workers: int) -> Iterator[tuple[RendezvousServer, Simulated, EventLog]]:
    """Serve the page of such a job."""
    driver = Simulated(workers)
    log = EventLog(None, clock=time.time, on_broken=print)
    routes = DriverRoutes(driver, log)
    with RendezvousServer(token=TOKEN, access=job_access(), routes=routes.add_to) as server:
        yield server, driver, log
        log.close()


def busy(driver: Simulated, log: EventLog, seconds: float) -> float:
    """Return the share of a core that this process needs while events come."""
    began, before = time.monotonic(), time.process_time() - driver.making
    while time.monotonic() < began + seconds:
        time.sleep(EVENT_EVERY_S)
        log.append("worker_lost", worker="h0.0.1", host="h0", reason="a simulated loss")
    used = time.process_time() - driver.making - before
    return used / (time.monotonic() - began)


async def view(url: str, viewers: int) -> None:
    """Read the stream so many times, until killed."""
    bearer = {"Authorization": f"Bearer {reader_token(TOKEN)}"}
    forever = aiohttp.ClientTimeout(total=None)

    async def one(session: aiohttp.ClientSession) -> None:
        async with session.get(f"{url}/v1/live", headers=bearer) as answer:
            await answer.content.readany()
            print("reads", flush=True)
            async for _ in answer.content.iter_any():
                pass

    async with aiohttp.ClientSession(timeout=forever) as session:
        await asyncio.gather(*(one(session) for _ in range(viewers)))


def of_driver(workers: int, viewers: int, seconds: float) -> list[Figure]:
    """Measure the driver, with nobody, one viewer and many."""
    shares: dict[int, float] = {}
    with serving(workers) as (server, driver, log):
        for count in (0, 1, viewers):
            argv = [sys.executable, "-m", "benchmarks.page", "--view", server.url, str(count)]
            process = subprocess.Popen(argv, stdout=subprocess.PIPE) if count else None
            try:
                for _ in range(count):
                    assert process is not None
                    assert process.stdout is not None
                    process.stdout.readline()
                busy(driver, log, SETTLE_S)
                shares[count] = busy(driver, log, seconds)
            finally:
                if process is not None:
                    process.kill()
                    process.wait()
    where = f"{workers} workers"
    each = (shares[viewers] - shares[0]) / viewers
    one = shares[1] - shares[0]
    return [
        Figure(OURS, f"driver for one viewer, {where}", "% of a core", (100 * one,)),
        Figure(OURS, f"driver for each of {viewers}, {where}", "% of a core", (100 * each,)),
    ]


async def of_browser(workers: int, seconds: float) -> list[Figure]:
    """Measure a browser that shows such a job."""
    with tempfile.TemporaryDirectory() as folder, serving(workers) as (server, driver, log):
        async with tab(Path(folder)) as page:
            await page.order("Page.navigate", url=server.url)
            await page.until("document.querySelector('#login')?.hidden === false")
            await page.evaluate(f"document.querySelector('#token').value = '{reader_token(TOKEN)}'")
            await page.evaluate("document.querySelector('#login').requestSubmit()")
            await page.until("document.querySelector('#tiles dd')?.textContent > ''")
            await page.order("Page.navigate", url=server.url)
            await page.until("document.querySelector('#tiles dd')?.textContent > ''")
            paints = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            paint = float(await page.until(paints))
            await asyncio.sleep(SETTLE_S)
            await page.evaluate(_WATCH)
            before = page.main_thread_s()
            await asyncio.to_thread(busy, driver, log, seconds)
            used, updates = page.main_thread_s() - before, await page.evaluate("window.updates")
            longest = await page.evaluate("Math.max(0, ...window.long)")
    where = f"{workers} workers"
    return [
        Figure(OURS, f"first paint, {where}", "ms", (paint,)),
        Figure(OURS, f"main thread for each update, {where}", "ms", (1000 * used / updates,)),
        Figure(OURS, f"longest task over 50 ms, {where}", "ms", (float(longest),), "0: none"),
    ]


# Counts the updates that change the page (many elements at a time are one), and long tasks.
_WATCH = """
window.updates = 0; window.long = [];
new MutationObserver(() => window.updates++).observe(
    document.querySelector('#tiles'), {subtree: true, childList: true, characterData: true});
new PerformanceObserver(list => list.getEntries().forEach(e => window.long.push(e.duration)))
    .observe({type: 'longtask'});
0
"""


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="3,1000")
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--view", nargs=2, metavar=("URL", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.view:
        asyncio.run(view(options.view[0], int(options.view[1])))
        return
    figures: list[Figure] = []
    for workers in map(int, options.workers.split(",")):
        figures += of_driver(workers, options.viewers, options.seconds)
        figures += asyncio.run(of_browser(workers, options.seconds))
    report("page", figures)


if __name__ == "__main__":
    main()
