"""The page of a real job in a real browser: it logs in, sees a kill, and steers."""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import aiohttp
import pytest

from rendezvous.auth import read_token_file
from tests.support import axe
from tests.support.browser import Tab, needs_chromium, tab
from tests.support.job import JOBS, ROOT, RunningJob, elasticrun

pytestmark = [needs_chromium, axe.needs_axe, pytest.mark.timeout(300)]

SIZE = "document.querySelector('#tiles dd')?.textContent"
PROBLEM = "[...document.querySelectorAll('#problem:not([hidden])')].map(e => e.textContent)[0]"
FAILURES = "[...document.querySelectorAll('#tiles div')].at(7).textContent"


def ctl(*words: str, job: RunningJob, cwd: Path = ROOT) -> str:
    where = ("--run-id", job.run_id, "--state-dir", str(job.run_dir.parent))
    argv = [sys.executable, "-m", "launcher.ctl", *words, *where]
    ran = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_a_browser_watches_and_steers_a_job(tmp_path: Path) -> None:
    args = ("-H", "localhost:3", "-np", "3", "--min-np", "1", "--", str(JOBS / "train.py"))
    with elasticrun(*args, env={"STEPS": "1000000", "STEP_MS": "20"}) as job:
        asyncio.run(watch(job, tmp_path))
        report = tmp_path / "report.html"
        ctl("report", "--html", "-o", str(report), job=job)
        asyncio.run(read_report(report, tmp_path))


async def watch(job: RunningJob, folder: Path) -> None:
    job.until_size(3)
    address = ctl("open", job=job)
    async with tab(folder) as page:
        await log_in(page, address, read_token_file(job.run_dir / "token-operator"))
        await page.until(f"{SIZE} === '3'")
        await page.until("document.querySelectorAll('#members tr').length === 3")
        assert await page.evaluate("document.querySelector('.uplot canvas') !== null")
        await sees_a_kill(page, job)
        await steers(page, job)
        await is_accessible(page)
        await works_by_keyboard(page, job)
        await fits_a_phone(page)
        await shows_a_reader_no_buttons(page, job)
        await keeps_its_session_from_other_ports(page, address)
        await is_unknown_in_a_new_tab(page)
        refused = ("/login", "/v1/scale")  # as this test wants it
        assert [fault for fault in page.faults if not fault.endswith(refused)] == []
        await escapes(page)


async def log_in(page: Tab, address: str, token: str) -> None:
    """A code logs in once and leaves the address; a token in the form does the same."""
    url = address.partition("#")[0]
    await page.order("Page.navigate", url=address)
    await page.until(f"{SIZE}", "the job after a login by code")
    assert await page.evaluate("location.href") == url
    assert await page.evaluate("document.cookie") == "", "no script can read it"
    await page.evaluate("document.querySelector('#logout').click()")
    await page.until("document.querySelector('#login')?.hidden === false", "the form")
    assert not await page.evaluate("document.querySelector('#tiles').children.length")
    await submit(page, "login", "token", token[1:])
    assert "no token of this run" in await page.until(PROBLEM, "the refusal")
    assert await axe.faults(page) == []
    await submit(page, "login", "token", token)


async def submit(page: Tab, form: str, name: str, value: str) -> None:
    """Fill in a field of a form and send the form."""
    await page.evaluate(f"document.querySelector('#{name}').value = {json.dumps(value)}")
    await page.evaluate(f"document.querySelector('#{form}').requestSubmit()")


async def sees_a_kill(page: Tab, job: RunningJob) -> None:
    job.kill(max(job.until_size(3).values(), key=lambda record: record.rank).pid)
    await page.until(
        "/ lost| exited/.test(document.querySelector('#events').textContent)",
        "the loss among the events",
    )
    await page.until(f"{SIZE} === '3' && {FAILURES} === 'failures1'")
    rank = "[...document.querySelectorAll('#members tr')].map(r => r.textContent).join('|')"
    await page.until(f"({rank}).split('|').filter(r => r.includes('running')).length === 3")
    shares = await page.text("#goodput")
    assert "training" in shares


async def steers(page: Tab, job: RunningJob) -> None:
    await submit(page, "scale", "scale-to", "2")
    job.until_size(2)
    await page.until(f"{SIZE} === '2'")
    assert "2 workers are wanted" in await page.text("#told-text")
    assert await page.evaluate("!document.querySelector('#undo').hidden"), "it can be undone"
    await page.evaluate("document.querySelector('#scale').noValidate = true")
    await submit(page, "scale", "scale-to", "99")
    problem = await page.until(PROBLEM)
    assert re.search(r"99 workers are more than", problem)
    await page.evaluate("document.querySelector('#ask-stacks').click()")
    await page.until("document.querySelector('#stacks pre')?.textContent.length > 20", "the stacks")
    await page.evaluate("document.querySelector('#hosts button').click()")
    await page.until("document.querySelector('#confirm').open", "a question: it is the last host")
    await page.evaluate("document.querySelector('#confirm [value=no]').click()")
    await page.until("!document.querySelector('#confirm').open")


async def is_accessible(page: Tab) -> None:
    """In the light and in the dark, on a desk and on a small phone, axe-core finds no fault."""
    await page.evaluate("document.querySelector('#numbers').open = true")
    for colours in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": colours}]
        await page.order("Emulation.setEmulatedMedia", features=features)
        for width in (1280, 360):
            await show_on(page, width)
            assert await axe.faults(page) == [], f"{colours}, {width} pixels wide"
    await page.order("Emulation.setEmulatedMedia", features=[])
    await page.order("Emulation.clearDeviceMetricsOverride")


async def works_by_keyboard(page: Tab, job: RunningJob) -> None:
    """The number is typed, Enter sends it, Tab reaches the button that undoes it."""
    await page.evaluate("document.querySelector('#scale-to').select()")
    await page.type("1")
    await page.press("Enter", 13)
    await page.until(
        "document.querySelector('#told-text').textContent.startsWith('1 worker is wanted')"
    )
    job.until_size(1)
    undo = "document.activeElement.id === 'undo'"
    await page.until(f"{undo} || document.activeElement.id === 'scale-to'")
    for _ in range(4):
        await page.press("Tab", 9)
    assert await page.evaluate(undo), await page.evaluate("document.activeElement.outerHTML")
    await page.press("Enter", 13)
    job.until_size(2)


async def shows_a_reader_no_buttons(page: Tab, job: RunningJob) -> None:
    await page.evaluate("document.querySelector('#logout').click()")
    await page.until("document.querySelector('#login')?.hidden === false", "the form")
    await submit(page, "login", "token", read_token_file(job.run_dir / "token-reader"))
    await page.until(f"{SIZE} === '2'")
    assert await page.evaluate("document.querySelector('#controls').hidden")
    assert not await page.evaluate("document.querySelector('#hosts button')")


async def is_unknown_in_a_new_tab(page: Tab) -> None:
    """What another tab stores is not here: it shows the login; a reload goes on."""
    await page.order("Page.reload")
    await page.until(f"{SIZE} === '2'", "the job after a reload")
    key = await page.evaluate("sessionStorage.getItem('elastic')")
    await page.evaluate("sessionStorage.clear()")
    await page.order("Page.reload")
    await page.until("document.querySelector('#login')?.hidden === false", "the form")
    await page.evaluate(f"sessionStorage.setItem('elastic', {json.dumps(key)})")
    await page.order("Page.reload")
    await page.until(f"{SIZE} === '2'", "the job with its key")


class OtherUser(http.server.BaseHTTPRequestHandler):
    """Another user's server on the same machine; it keeps the headers that browsers send."""

    seen: ClassVar[list[dict[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>free GPUs</title>")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


async def keeps_its_session_from_other_ports(page: Tab, address: str) -> None:
    """The server at another port of this name gets the cookie, which opens nothing there."""
    url, before = address.partition("/#")[0], len(page.faults)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherUser) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        await page.order("Page.navigate", url=f"http://127.0.0.1:{other.server_port}/")
        await page.until("document.title === 'free GPUs'")
        assert await page.evaluate("Object.keys(sessionStorage).length") == 0
        for options in ("{credentials: 'include'}", "{mode: 'no-cors', credentials: 'include'}"):
            script = f"fetch('{url}/v1/status', {options}).then(a => a.type + a.status, () => '-')"
            assert await page.evaluate(script) == "-", "its script learns nothing"
        other.shutdown()
    del page.faults[before:]  # the browser's own, about that script
    stolen = OtherUser.seen[0]
    assert stolen["cookie"].startswith("elastic_"), "the browser sends it to any port"
    assert not [value for name, value in stolen.items() if name.startswith("x-")]
    replayed = {"Cookie": stolen["cookie"], "X-Elastic": "page"}
    async with aiohttp.ClientSession(url, headers=replayed) as thief:
        for method, path in (
            *(("GET", "/v1/status"), ("GET", "/v1/live"), ("GET", "/v1/logs")),
            *(("POST", "/v1/scale"), ("POST", "/v1/stop"), ("POST", "/v1/login-codes")),
        ):
            async with thief.request(method, path, json={}) as answer:
                assert answer.status == 401, (method, path, await answer.text())
        async with thief.get("/login") as answer:
            assert (await answer.json())["role"] is None
    await page.order("Page.navigate", url=url)
    await page.until(f"{SIZE} === '2'", "the job, with the tab's own key")


async def escapes(page: Tab) -> None:
    """No HTML comes from the job's texts, and the policy runs and loads nothing of others."""
    assert not await page.evaluate("document.querySelector('main img, main script, main iframe')")
    loaded = "fetch('data:text/plain,x').then(() => 'loaded', () => 'refused')"
    assert await page.evaluate(loaded) == "refused"
    image = json.dumps('<img id="hostile" src="data:," onerror="window.seen = true">')
    await page.evaluate(
        f"""new Promise(done => {{
            document.querySelector('main').insertAdjacentHTML('beforeend', {image});
            document.querySelector('#hostile').addEventListener('error', done);
        }}).then(() => 1)"""
    )
    assert not await page.evaluate("window.seen"), "the policy runs no script in HTML"
    (fault,) = await axe.faults(page)
    assert fault.endswith("#hostile"), "an image without words is found"


async def show_on(page: Tab, width: int) -> None:
    """Give the screen a width in pixels; a narrow one is a phone's."""
    metrics = {"height": 800, "deviceScaleFactor": 2, "mobile": width < 500}
    await page.order("Emulation.setDeviceMetricsOverride", width=width, **metrics)


async def fits_a_phone(page: Tab) -> None:
    await show_on(page, 360)
    wide = "document.documentElement.scrollWidth <= innerWidth + 1"
    await page.until(wide, "no sideways scrolling on a phone")


async def read_report(report: Path, folder: Path) -> None:
    (folder / "again").mkdir()
    async with tab(folder / "again") as page:
        await page.order("Page.navigate", url=report.as_uri())
        await page.until("document.querySelectorAll('#events li').length > 3", "the events")
        assert "A report" in await page.text("#link")
        assert await page.evaluate("document.querySelector('#controls').hidden")
        assert "lost" in await page.text("#goodput")
        assert await axe.faults(page) == []
        assert page.faults == []
