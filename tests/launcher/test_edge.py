"""What ends a command becomes its exit status, and a line that bears the command's name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_driver.errors import UsageError
from launcher.ctl import _dispatch
from launcher.edge import handled, run_command
from launcher.run_job import carry_out
from tests.support.job import ROOT


def fails_with(error: BaseException) -> int:
    def act() -> int:
        raise error

    return run_command("elasticctl", act)


def test_what_is_done_says_the_status() -> None:
    assert run_command("elasticctl", lambda: 3) == 3


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails_with(UsageError("no such option")) == 64
    assert capsys.readouterr().err == "elasticctl: no such option\n"


def test_an_interruption_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails_with(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == ""


def test_a_bug_shows_where_and_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails_with(ZeroDivisionError("oops")) == 70
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oops" in err
    assert "this is a bug of elasticctl" in err.splitlines()[-1]


def test_signals_are_ours_for_a_while_but_for_those_that_are_ignored() -> None:
    heard: list[int] = []
    first, second = signal.SIGUSR1, signal.SIGUSR2
    before = signal.getsignal(first), signal.signal(second, signal.SIG_IGN)
    try:
        with handled((first, second), heard.append):
            signal.raise_signal(first)
            signal.raise_signal(second)
        assert heard == [first]
        assert signal.getsignal(first) == before[0]
        assert signal.getsignal(second) is signal.SIG_IGN
    finally:
        signal.signal(second, before[1])


LEAVING = """
import signal, sys
from launcher.edge import handled, run_command

def act():
    with handled([signal.SIGTERM], print):
        return 3

status = run_command("elasticrun", act, ends=sys.argv[1] == "ends")
signal.raise_signal(signal.SIGTERM)
sys.exit(status)
"""


@pytest.mark.parametrize(("given", "status"), [("ends", 3), ("goes on", -signal.SIGTERM)])
def test_a_process_that_ends_with_its_command_has_its_status_and_a_program_its_signals(
    given: str, status: int
) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING, given], cwd=ROOT, check=False)
    assert done.returncode == status


def test_an_output_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "launcher.ctl", "--help"],
        cwd=ROOT,
        stdout=os.open("/dev/full", os.O_WRONLY),
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stderr is not None
        said = command.stderr.read()
    assert (command.returncode, said) == (
        75,
        "elasticctl: cannot write to stdout: No space left on device\n",
    )


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_streams_that_are_closed_are_nobody_else_s(tmp_path: Path, closed: str) -> None:
    script = tmp_path / "open.py"
    script.write_text(
        "import os\n"
        "from launcher.edge import open_streams\n"
        "open_streams()\n"
        f"got = os.open({str(tmp_path / 'other')!r}, os.O_CREAT | os.O_WRONLY)\n"
        "import sys\n"
        "print('to stdout'); print('to stderr', file=sys.stderr)\n"
        f"open({str(tmp_path / 'found')!r}, 'w').write(f'{{got}} {{os.get_inheritable(2)}}')\n"
    )
    command = f"{sys.executable} {script} {closed}"
    subprocess.run(["sh", "-c", command], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    number, inherited = (tmp_path / "found").read_text().split()
    assert int(number) > 2
    assert inherited == "True"
    assert (tmp_path / "other").read_text() == ""


@pytest.mark.parametrize(
    "words", [("-np", "1", "s.py", "caf\udce9"), ("--env", "A=\udce9", "s.py")]
)
def test_bytes_that_are_no_text_are_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    (tmp_path / "s.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"is not UTF-8 text: .*\\xe9; rename it"):
        carry_out(("--state-dir", str(tmp_path / "state"), *words))
    with pytest.raises(UsageError, match="an argument is not UTF-8"):
        _dispatch([*words])


def test_a_folder_whose_name_is_no_text_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    (folder / "s.py").touch()
    monkeypatch.chdir(folder)
    with pytest.raises(UsageError, match="the working folder's path is not UTF-8"):
        carry_out(("--state-dir", str(tmp_path / "state"), "-np", "1", "s.py"))
