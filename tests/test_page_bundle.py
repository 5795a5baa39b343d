"""The committed bundle of the page is what `make page` makes of its sources."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE, BUNDLE = ROOT / "page", ROOT / "elastic_driver" / "page"


def test_the_bundle_was_made_of_these_sources() -> None:
    names = [f"src/{path.name}" for path in (PAGE / "src").iterdir()]
    digest = hashlib.sha256()
    for name in sorted([*names, "build.mjs", "package.json", "package-lock.json"]):
        digest.update(name.encode() + (PAGE / name).read_bytes())
    found = re.match(r"/\* made by make page; sources: (\w+) \*/", (BUNDLE / "app.js").read_text())
    assert found is not None
    assert found[1] == digest.hexdigest(), "run make page and commit elastic_driver/page/"
    for name in ("index.html", "icon.svg"):
        assert (BUNDLE / name).read_bytes() == (PAGE / "src" / name).read_bytes()


@pytest.mark.skipif(
    not (PAGE / "node_modules").exists() or shutil.which("npm") is None,
    reason="make page has not installed what builds it",
)
def test_a_new_build_is_the_same(tmp_path: Path) -> None:
    copy = tmp_path / "page"
    shutil.copytree(PAGE, copy, symlinks=True)
    argv = ["npm", "run", "build"]
    ran = subprocess.run(argv, cwd=copy, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    made = tmp_path / "elastic_driver" / "page"
    assert {path.name for path in made.iterdir()} == {path.name for path in BUNDLE.iterdir()}
    for path in made.iterdir():
        assert path.read_bytes() == (BUNDLE / path.name).read_bytes(), path.name
