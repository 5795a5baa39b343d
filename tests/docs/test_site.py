"""`make docs` builds a site of all pages, with the references made from the code.

It is read from files, in a real browser: search included, and without any network.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_driver
from elastic_driver.features.page.routes import PAGE_FILES
from elastic_driver.runtime.api import ROUTES
from launcher.ctl_commands import catalog
from tests.support.browser import needs_chromium, tab
from tests.support.job import ROOT

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed"
    ),
    pytest.mark.timeout(400),  # seconds on an idle machine
]
# What a browser loads by itself, unlike the target of a link.
LOADED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc="?([^"\s>]+)|<link\b[^>]*\bhref="?([^"\s>]+)|"""
    r"""url\(["']?([^"')]+)"""
)
BAD = """INHERIT: {root}/mkdocs.yml
docs_dir: {docs}
theme: mkdocs
hooks: []
plugins: []
nav:
  - one.md
  - two.md
"""


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT / "mkdocs.yml", folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_the_references_have_every_public_name_route_and_command(site: Path) -> None:
    python = (site / "reference" / "python.html").read_text()
    found = set(re.findall(r'id="elastic_driver\.[\w.]*?(\w+)"', python))
    assert set(elastic_driver.__all__) - found == set()
    http = (site / "reference" / "http.html").read_text()
    shown = [row for row in ROUTES if row.path not in PAGE_FILES]
    assert [row for row in shown if f"{row.method} {row.template}" not in http] == []
    commands = (site / "reference" / "commands.html").read_text()
    assert [c.name for c in catalog.elasticctl() if f"elasticctl {c.name}" not in commands] == []


def test_the_navigation_has_every_page(site: Path) -> None:
    start = (site / "index.html").read_text()
    pages = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")}
    assert [p for p in sorted(pages) if f'href="{p.with_suffix(".html")}"' not in start] == []


def test_a_reader_needs_no_network(site: Path) -> None:
    for file in (path for path in site.rglob("*") if path.suffix in (".html", ".css")):
        loaded = ["".join(groups) for groups in LOADED.findall(file.read_text())]
        assert [address for address in loaded if "//" in address] == [], file


@needs_chromium
def test_search_finds_pages_in_a_browser_without_a_server(site: Path, tmp_path: Path) -> None:
    asyncio.run(search(site, tmp_path))


async def search(site: Path, folder: Path) -> None:
    async with tab(folder) as page:
        await page.order("Page.navigate", url=f"{(site / 'index.html').as_uri()}?q=cool-down")
        results = "[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)"
        await page.until(f"{results}.length", "results of the search")
        found = await page.evaluate(results)
        assert any("hosts.html" in address for address in found), json.dumps(found)


def test_a_dead_link_fails_the_build(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "one.md").write_text("# One\n[gone](gone.md), [no part](two.md#gone)\n")
    (docs / "two.md").write_text("# Two\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(BAD.format(root=ROOT, docs=docs))
    built = build(config, tmp_path / "site")
    assert built.returncode == 1
    assert "'gone.md', but the target is not found" in built.stderr
    assert "'two.md#gone', but the doc 'two.md' does not contain an anchor" in built.stderr
