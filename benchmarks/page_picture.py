"""The picture of the page in the documentation, made of a real job.

Four workers on two hosts train; one is killed, then a third host comes. It needs Chromium.

    python -m benchmarks.page_picture docs/page.png
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import tempfile
from pathlib import Path

from rendezvous.auth import read_token_file
from tests.support.browser import Tab, tab
from tests.support.job import JOBS, Hosts, RunningJob, elasticrun

WIDTH, HEIGHT = 1150, 860
CALM_S = 20.0  # of training between two changes
SLOW_S = 300.0  # a busy machine may take so long for a change
SEVERAL = "document.querySelector('#tiles dd')?.textContent.startsWith('{}')"


async def take(job: RunningJob, hosts: Hosts, folder: Path) -> bytes:
    """Have the job change twice while a browser looks; return the picture as PNG."""
    members = await asyncio.to_thread(job.until_size, 4, SLOW_S)
    async with tab(folder) as page:
        await log_in(job, page)
        await page.until(SEVERAL.format(4), "four workers")
        await asyncio.sleep(CALM_S)
        job.kill(max(members.values(), key=lambda record: record.rank).pid)
        await asyncio.to_thread(job.until_size, 4, SLOW_S)
        await asyncio.sleep(CALM_S)
        hosts.set("localhost:2", "127.0.0.2:2", "127.0.0.3:2")
        await asyncio.to_thread(job.until_size, 6, SLOW_S)
        await page.until(SEVERAL.format(6), "six workers")
        await asyncio.sleep(CALM_S)
        shot = await page.order("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


async def log_in(job: RunningJob, page: Tab) -> None:
    """Open the page as an operator."""
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    await page.order("Emulation.setDeviceMetricsOverride", **size)
    endpoint = json.loads((job.run_dir / "endpoint.json").read_text())
    await page.order("Page.navigate", url=endpoint["url"])
    await page.until("document.querySelector('#login')?.hidden === false", "the form")
    token = json.dumps(read_token_file(job.run_dir / "token-operator"))
    await page.evaluate(f"document.querySelector('#token').value = {token}")
    await page.evaluate("document.querySelector('#login').requestSubmit()")


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hosts = Hosts(folder, "localhost:2", "127.0.0.2:2")
        script = ("--host-discovery-script", str(hosts.script), "--discovery-interval", "1")
        size = ("-np", "2", "--max-np", "6", "--", str(JOBS / "train.py"))
        with elasticrun(*script, *size, env={"STEPS": "20000", "STEP_MS": "100"}) as job:
            Path(sys.argv[1]).write_bytes(asyncio.run(take(job, hosts, folder)))


if __name__ == "__main__":
    main()
