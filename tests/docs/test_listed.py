"""Every command that a page lists without running it is one that the programs take.

The commands' own parsers read it, and `elasticrun` makes its plan of it, as with `--dry-run`.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from launcher.brain.command import parser as brain_parser
from launcher.ctl_commands.catalog import parsers
from launcher.options.given import resolve
from launcher.run_job import carry_out
from tests.docs.test_commands import BLOCKS
from tests.support.job import ROOT
from tests.support.pages import Block

NOT_RUN = [b for b in BLOCKS if b.language == "sh" or "tested by" in b.remarks]
LISTED = [(block, command) for block in NOT_RUN for command in block.commands]
FILES = ("train.py", "hosts.sh", "FILE")
FILLED_IN = {  # what stands for something of the reader's own
    "N": "2",
    "S": "5",
    "R": "0",
    "PORT": "29400",
    "$SLURM_JOB_ID": "4711",
    "/opt/tf/bin/python": sys.executable,
    "/shared/secret": "secret",
}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("listed")
    for name in FILES:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o700)
    (folder / "hosts").write_text("node1:2\nnode2:2\n")
    (folder / "ca.pem").write_text("a certificate")
    (folder / "secret").write_text("0123456789abcdef" * 4)
    (folder / "secret").chmod(0o600)
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


OURS = "elasticrun", "elasticctl", "elasticbrain", "make", "python"


@pytest.mark.parametrize("command", [pytest.param(c, id=f"{b.place} {c}") for b, c in LISTED])
def test_a_listed_command_is_one(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    for words in simple_commands(command):
        name = next((w for w in words if w in OURS), "")
        rest = (
            [FILLED_IN.get(word, word) for word in words[words.index(name) + 1 :]] if name else []
        )
        for variable in takewhile(lambda word: "=" in word, words):
            monkeypatch.setenv(*variable.split("=", 1))
        if name == "elasticrun":
            check_plan(rest)
        elif name == "elasticctl":
            check_words(rest)
        elif name == "elasticbrain":
            brain_parser().parse_args(rest)
        elif name == "make":
            assert {word for word in rest if word.islower()} <= TARGETS
        elif name == "python" and rest[0] == "-m":
            assert importlib.util.find_spec(rest[1]), "no such module"
            files = [word for word in rest[2:] if word.endswith((".py", ".yaml"))]
            assert all((ROOT / file).exists() for file in files), files


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=b.place) for b in BLOCKS if b.language == "sh"]
)
def test_a_list_of_commands_is_good_shell(block: Block) -> None:
    checked = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def simple_commands(line: str) -> list[list[str]]:
    """Return the words of each command of a line, without redirections."""
    spread = re.sub(r'"?\$\((.*?)\)"?', r"; \1", line)  # what $(…) runs is a command, too
    lexer = shlex.shlex(spread, posix=True, punctuation_chars=True)
    lexer.wordchars += "$:@+{}%^,…[]!"
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";|&()"):
            found.append([])
        else:
            found[-1].append(word)
    return [[*takewhile(lambda word: set(word) - set("<>"), words)] for words in found if words]


def check_plan(words: list[str]) -> None:
    """Make the plan of a job, as `--dry-run` does; a wrong option or size raises `UsageError`."""
    line = resolve(words, {})
    assert not [remark for remark in line.warnings if "ignored" in remark]
    if not (line.options.standby or line.options.resume):
        assert carry_out(["--dry-run", *words]) == 0


def check_words(words: list[str]) -> None:
    """Read the words of `elasticctl` with the parser of its subcommand; raises `UsageError`."""
    name, *rest = words
    if parser := parsers().get(name):
        parser.parse_args(rest)
    elif name == "check":
        hosts = [word for word in rest if not word.startswith("-")]
        resolve([*(word for word in rest if word.startswith("-")), "-H", ",".join(hosts)], {})
    else:
        assert words[:2] == ["config", "show"]
        resolve(rest[1:], {})


def test_every_command_stands_in_a_block_that_is_tested() -> None:
    ours = re.compile(
        r"^ *(\$ )?(elasticrun|elasticctl|elasticbrain|torchrun|make|pip|salloc) ", re.MULTILINE
    )
    others = [b for b in BLOCKS if b.language not in ("console", "sh", "python", "yaml", "ini")]
    elsewhere = [block.place for block in others if ours.search(block.text)]
    assert elsewhere == ["docs/architecture.md:8"], "commands stand in blocks of console or sh"


def test_a_page_names_only_tests_that_exist() -> None:
    named = [(b.place, file) for b in BLOCKS for file in b.remarks.get("tested by", "").split()]
    assert [(place, file) for place, file in named if not (ROOT / file).exists()] == []


def test_the_readme_leads_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    assert pages - set(re.findall(r"\]\((docs/[^)#]*)", text)) == set()
