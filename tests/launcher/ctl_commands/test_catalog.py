"""Shell completion and man pages, tried in real shells and with a real formatter."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path

import pytest

from launcher import ctl
from launcher.ctl_commands import catalog
from launcher.ctl_commands import catalog as man
from launcher.options.table import OPTIONS

ASK = """
source "$1"
shift
while (( $# )); do
    read -r -a COMP_WORDS <<< "$1"
    [[ $1 == *' ' ]] && COMP_WORDS+=("")
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    COMPREPLY=()
    _${COMP_WORDS[0]}
    echo "${COMPREPLY[*]}"
    shift
done
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert ctl.main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_the_catalog_has_every_command() -> None:
    assert {command.name for command in catalog.elasticctl()} == set(ctl.COMMANDS)
    assert len(catalog.elasticrun()) == len(OPTIONS)
    status = next(c for c in catalog.elasticctl() if c.name == "status")
    assert {"--json", "--watch", "--run-id"} <= {n for a in status.arguments for n in a.names}


def test_bash_completes_commands_options_and_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "completion"
    file.write_text(script("bash", capsys))
    (tmp_path / "elastic-driver" / "run-7").mkdir(parents=True)
    lines = (
        "elasticctl sta",
        "elasticctl logs --ra",
        "elasticctl logs --run-id r",
        "elasticctl completion ",
        "elasticctl config s",
        "elasticrun --min-",
        "elasticrun --log-format ",
        "elasticrun -np 2 --min-np 1 --max-n",
        "elasticrun --blacklist-cooldown-range 1 2 --max-n",
        "elasticrun -np 2 train.py --min-",
    )
    argv = ["bash", "--noprofile", "--norc", "-c", ASK, "ask", str(file), *lines]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True, env=env)
    assert ran.stderr == ""
    found = dict(zip(lines, ran.stdout.splitlines(), strict=True))
    assert set(found["elasticctl sta"].split()) == {"status", "stacks"}
    assert found["elasticctl logs --ra"] == "--rank"
    assert found["elasticctl logs --run-id r"] == "run-7"
    assert {"bash", "zsh"} <= set(found["elasticctl completion "].split())
    assert found["elasticctl config s"] == "show"
    assert set(found["elasticrun --min-"].split()) == {"--min-np", "--min-num-proc"}
    assert found["elasticrun --log-format "] == "text json"
    assert found[lines[7]] == "--max-np --max-num-proc"
    assert found[lines[8]] == "--max-np --max-num-proc", "an option with two values"
    assert found[lines[9]] == "", "the rest belongs to the command"


def test_zsh_completes_commands_options_and_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "_elasticctl").write_text(script("zsh", capsys))
    terminal, its = pty.openpty()
    env = {**os.environ, "TERM": "dumb", "HOME": str(tmp_path)}
    argv = ["zsh", "-f", "-i"]
    shell = subprocess.Popen(
        argv, stdin=its, stdout=its, stderr=its, env=env, start_new_session=True
    )
    os.close(its)
    seen = b""

    def until(pattern: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 60
        while not re.search(pattern, seen):
            assert time.monotonic() < deadline, (pattern, seen)
            if select.select([terminal], [], [], 0.5)[0]:
                seen += os.read(terminal, 65536)
        seen = b""

    try:
        os.write(terminal, f"fpath=({tmp_path} $fpath); autoload -Uz compinit\n".encode())
        os.write(terminal, b"compinit -u -D; echo re''ady\n")
        until(rb"\nready")
        for typed, whole in (
            (b"elasticctl expl", rb"explain "),
            (b"elasticctl logs --work", rb"--worker "),
            (b"elasticrun --log-format js", rb"json "),
            (b"elasticrun --min-num", rb"--min-num-proc "),
        ):
            os.write(terminal, typed + b"\t")
            until(whole)
            os.write(terminal, b"\x15")  # clears the line
    finally:
        os.close(terminal)
        shell.kill()
        shell.wait(30)


@pytest.mark.parametrize("page", ["elasticrun", "elasticctl"])
def test_a_man_page_has_every_option_and_is_good_roff(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(["man", page]) == 0
    source = capsys.readouterr().out
    argv = ["groff", "-man", "-Tutf8", "-Kutf8", "-ww", "-P-cbou"]
    ran = subprocess.run(argv, input=source, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stderr == ""
    shown = ran.stdout.replace("‐", "-").replace("−", "-")
    if page == "elasticrun":
        missing = [option.long for option in OPTIONS if option.long not in shown]
    else:
        missing = [
            name
            for command in catalog.elasticctl()
            for name in (command.name, *(n for a in command.arguments for n in a.names))
            if name not in shown
        ]
    assert not missing
    assert "NAME\n" in shown


def test_text_of_a_page_is_never_taken_for_a_request() -> None:
    assert man._escaped(".so /etc/passwd\n'x\\y --a") == "\\&.so /etc/passwd\n\\&'x\\ey \\-\\-a"
