"""docs/troubleshooting.md has every message that users see, and no other.

Those about mistakes of scripts are in docs/common-mistakes.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.job import ROOT
from tests.support.messages import messages

PAGES = [ROOT / "docs" / name for name in ("troubleshooting.md", "common-mistakes.md")]
BLOCK = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def lines_of_the_page() -> list[str]:
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text())]
    return [line for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    """Return the place of each message of the sources."""
    return {each.text: each.place for each in messages(ROOT)}


def test_every_message_has_its_cause_and_cure(made: dict[str, str]) -> None:
    there = set(lines_of_the_page())
    missing = [f"{text}   ({place})" for text, place in made.items() if text not in there]
    assert missing == [], (
        "write each of these lines into a `text` block of docs/troubleshooting.md, above the text "
        "with its cause and cure"
    )


def test_the_page_has_no_message_that_is_gone_and_none_twice(made: dict[str, str]) -> None:
    there = lines_of_the_page()
    assert sorted(set(there) - set(made)) == []
    assert sorted(line for line in set(there) if there.count(line) > 1) == []


def test_each_entry_has_text_below_its_messages() -> None:
    parts = [part for page in PAGES for part in BLOCK.split(page.read_text())[2::2]]
    assert [part for part in parts if len(part.split()) < 5] == []


@pytest.mark.parametrize(
    "words",
    [
        "cli -np 2 --min-np 3 train.py",
        "cli -np 1 missing.py",
        "cli --journal etcd:/one -np 1 train.py",
        "cli -H n1: -np 1 train.py",
        "ctl status --state-dir nowhere",
        "ctl explain rank first",
    ],
)
def test_what_a_command_says_stands_on_the_page(words: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    name, *rest = words.split()
    argv = [sys.executable, "-m", f"launcher.{name}", *rest]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    ran = subprocess.run(
        argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode in (64, 75), ran.stderr
    assert len(ran.stderr.splitlines()) == 1, "one line, no traceback"
    patterns = [".+".join(map(re.escape, line.split("…"))) for line in lines_of_the_page()]
    told = ran.stderr.replace("`", "")
    assert [pattern for pattern in patterns if re.search(pattern, told)], ran.stderr


def test_messages_are_found_wherever_they_are_made(tmp_path: Path) -> None:
    package = tmp_path / "elastic_driver"
    package.mkdir()
    (package / "one.py").write_text(SOURCE)
    assert [each.text for each in messages(tmp_path)] == [
        "… is too large",
        "cannot read …: …",
        "the disk is full",
        "the disk is …",
        "… of … slots are left",
        "the agent on … has ended",
    ]


SOURCE = '''
class TooLargeError(UsageError):
    def __init__(self, name):
        super().__init__(f"{name} is too large; make it smaller")

class UsageError(ElasticError):
    """No message."""

def act(path, error, state):
    problem = f"cannot read {path}: {error!r}"
    if error:
        raise errors.UsageError(f"{problem}; is it there?")
    raise ClusterError("the disk is full" if state.full else f"the disk is {state}")

def tell(log, state):
    log.warning("%d of %d slots are left", 1, 2)
    log.info("nobody sees this")
    raise KeyError("nor is this a message")

class ClusterError(ElasticError):
    """No message."""

def describe_end(host):
    return f"the agent on {host} has ended; see its log"
'''
