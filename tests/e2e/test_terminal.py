"""A job on a real terminal: its status line, whole lines of workers, and what it leaves behind."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from tests.support.job import JOBS, RunningJob, elasticrun, eventually
from tests.support.terminal import Terminal

ARGS = ("-H", "localhost:2", "-np", "2", "--", str(JOBS / "train.py"))
ENV = {"STEPS": "100000", "STEP_MS": "10", "TALK": "1", "TERM": "xterm-256color"}
SAID = re.compile(r"\[[01]\]<stdout>:step (\d+) of rank ([01]) -{40}")


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    with Terminal(columns=120, rows=24) as terminal:
        yield terminal


def until_last_row(job: RunningJob, terminal: Terminal, pattern: str) -> re.Match[str]:
    """Wait until the last row is like this."""
    return eventually(
        lambda: re.search(pattern, terminal.rows()[-1]),
        within=60.0,
        what=f"the last row is {pattern!r}",
        context=lambda: "\n".join(terminal.rows()) + job.describe(),
    )


def until_shown(terminal: Terminal, line: str) -> None:
    """Wait until the terminal has shown the last line that a job wrote."""
    eventually(
        lambda: any(row.endswith(line) for row in terminal.rows()),
        within=60.0,
        what=f"{line!r} is shown",
        context=lambda: "\n".join(terminal.rows()),
    )


def whole_lines(job: RunningJob, terminal: Terminal) -> list[str]:
    """Return the lines above the bottom; the terminal may get the last one in pieces."""
    seen = len(terminal.lines())
    eventually(
        lambda: len(terminal.lines()) > seen, within=60.0, what="more lines", context=job.describe
    )
    return terminal.lines()[: seen - 1]


def test_a_status_line_stays_below_the_lines_of_workers_and_goes_when_the_job_is_over(
    terminal: Terminal,
) -> None:
    before = terminal.state()
    with elasticrun(*ARGS, env=ENV, inside=terminal.inside) as job:
        first = until_last_row(
            job, terminal, r"^2 workers \| step ([\d,]+) of 100,000 \| .* left \| .* \| loss [\d.]+"
        )
        until_last_row(job, terminal, rf"\| step (?!{first[1]} )")
        job.kill(next(iter(job.live())))
        until_last_row(job, terminal, r"\| \d\d:\d\d:\d\d .*(lost|round [2-9])")
        lines = [line for line in whole_lines(job, terminal) if "<stdout>" in line]
        terminal.resize(130, 30)  # what is written before the line moves may run into it
        until_last_row(job, terminal, r"^[12].* workers? \| step")
        terminal.press(b"\x03")
        assert job.wait() == 130
    said = [SAID.fullmatch(line) for line in lines]
    torn = [line for line, found in zip(lines, said, strict=True) if found is None]
    assert torn == [], "every line of a worker is whole"
    seen = [(int(found[1]), found[2]) for found in said if found is not None]
    for rank in "01":
        assert len({step for step, of in seen if of == rank}) > 10
    steps = {step for step, _ in seen}  # after the kill there may be no rank 1 for some steps
    assert steps == set(range(min(steps), max(steps) + 1)), "none is lost"
    until_shown(terminal, "elasticrun: job stopped: interrupted by Ctrl-C")
    # The terminal itself shows Ctrl-C where the cursor is.
    lines = [line.removeprefix("^C") for line in terminal.lines()]
    ended = [line for line in lines if line.startswith("elasticrun: ")]
    assert re.fullmatch(r"elasticrun: ran .*, [\d,]+ steps, goodput [\d.]+%", ended[-5])
    assert re.fullmatch(r"elasticrun: workers, 0 to 2: [▁▂▃▄▅▆▇█ ]+", ended[-4])
    assert re.match(r"elasticrun: 1 worker failure", ended[-3]), job.describe()
    assert f"elasticctl report --run-id {job.run_id} --state-dir" in ended[-2]
    assert ended[-1] == "elasticrun: job stopped: interrupted by Ctrl-C"
    assert terminal.state()[0] in (None, (0, 29))
    assert terminal.state()[1:] == before[1:]


def test_a_job_that_is_told_to_end_leaves_the_terminal_as_it_was(terminal: Terminal) -> None:
    before = terminal.state()
    args = ("-np", "1", "--", "sleep", "1000")
    env = {"TERM": "xterm", "NO_COLOR": "1"}
    with elasticrun(*args, env=env, inside=terminal.inside) as job:
        until_last_row(job, terminal, r"^1 worker \| .* round 1: 1 worker on 1 host")
        job.kill(job.process.pid, signal.SIGTERM)
        assert job.wait() == 143
    until_shown(terminal, "elasticrun: job stopped: told to stop by SIGTERM")
    shown = [row for row in terminal.rows() if row]
    assert shown[-1] == "elasticrun: job stopped: told to stop by SIGTERM"
    assert terminal.state()[0] in (None, (0, 23))
    assert terminal.state()[1:] == before[1:]
