"""`elasticctl top`: what a key does, and what the screen shows."""

from __future__ import annotations

import io
import time

import msgspec
import pytest
from rich.console import Console

from elastic_driver.words import wire_events as ev
from launcher.ctl_commands import job_text as show
from launcher.ctl_commands import top
from launcher.ctl_commands.top import Action, View, press, pressed
from tests.job.scenario import Scenario
from tests.launcher.ctl_commands.test_job_text_figures import document, measured

HOSTS = {"a": 2, "b": 1}
WORKERS = ["a.0.1", "a.1.1", "b.0.1"]


def job() -> show.JobDocument:
    return document(HOSTS, measured=measured(WORKERS, [*HOSTS]))


def screen(view: View, lines: int = 40, of: show.JobDocument | None = None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=160, height=lines, no_color=True)
    console.print(top.draw(of or job(), view, 1360.0, lines, console.width))
    return out.getvalue()


def keys(*pressed: str) -> tuple[View, list[Action]]:
    view, actions = View(), []
    for key in pressed:
        view, action = press(view, key, job())
        actions += [] if action is None else [action]
    return view, actions


def test_the_screen_shows_hosts_workers_and_the_keys() -> None:
    text = screen(View())
    assert "step 1,234 of 5,000" in text
    assert "▶  a     usable  2" in text
    assert "4.0 GiB of 16.0 GiB" in text
    assert "a.1.1" in text
    assert "1,235" in text
    assert "by rank" in text
    assert "q quit" in text


def test_a_host_is_drained_only_after_yes() -> None:
    assert keys("down", "d", "y")[1] == [Action("drain", "b")]
    assert keys("down", "d", "n")[1] == []
    assert keys("d", "q")[1] == [], "any other key is a no"
    view, _ = keys("d")
    assert "Drain host a? y/N" in screen(view)
    last = document({"a": 2})
    view, _ = press(View(), "d", last)
    assert "a is the last usable host of the job" in screen(view, of=last)
    assert keys("up", "down", "down", "down", "u")[1] == [Action("undrain", "b")]


def test_stacks_stand_in_place_of_the_job_until_a_key_is_pressed() -> None:
    assert keys("s")[1] == [Action("stacks")]
    view = View(text="\n".join(f"frame {n}" for n in range(100)))
    assert "frame 37" in screen(view)
    assert "frame 99" not in screen(view)
    for _ in range(90):
        view, _ = press(view, "down", job())
    assert "frame 99" in screen(view)
    view, action = press(view, "x", job())
    assert (view.text, action) == ("", None)
    assert keys("q")[1] == [Action("quit")]


def test_keys_are_told_apart_and_escape_is_one() -> None:
    assert pressed(b"\x1b[A\x1bOBq") == ["up", "down", "q"]
    assert pressed(b"\x1b") == ["\x1b"]
    view, _ = press(View(text="the stacks"), *pressed(b"\x1b"), job())
    assert view.text == ""


def test_workers_are_ordered_by_what_is_chosen_unknown_ones_last() -> None:
    known = measured(WORKERS, [])
    known["workers"]["a.1.1"]["samples_per_s"] = 0.5
    known["workers"]["b.0.1"]["samples_per_s"] = 200.0
    del known["workers"]["a.0.1"]["samples_per_s"]
    shown = document(HOSTS, measured=known)
    names = [w.worker for w in top.ordered(shown, "samples/s")]
    assert names == ["b.0.1", "a.1.1", "a.0.1"]
    assert [w.worker for w in top.ordered(shown, "host")] == WORKERS
    assert keys(*"oo")[0].sort == "steps/s"
    assert keys(*"ooooo")[0].sort == "rank"


def test_a_thousand_workers_fit_the_screen_and_are_drawn_soon() -> None:
    many = document({f"n{n:03}": 8 for n in range(125)})
    began = time.process_time()
    text = screen(View(chosen=124), lines=40, of=many)
    assert time.process_time() - began < 1.0
    assert len(text.splitlines()) <= 41
    assert "▶  n124" in text
    assert "more" in text


def test_text_of_others_controls_no_terminal() -> None:
    shown = job()
    odd = msgspec.structs.replace(shown.hosts[0], reason="\x1b[2J[red]x[/red]")
    text = screen(View(), of=msgspec.structs.replace(shown, hosts=(odd, *shown.hosts[1:])))
    assert "\x1b[2J" not in text
    assert "?[2J[red]x[/red]" in text


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_on_a_narrow_terminal_names_and_reasons_stay_and_figures_go(columns: int) -> None:
    s = Scenario(start_np=3, min_np=1).training(alpha=2, bravo=1)
    why = "its disks are replaced by new ones tonight, from ten o'clock until the work is done"
    s.send(ev.DrainRequested("bravo", why))
    told = {"run_id": "r1", "endpoint": "http://127.0.0.1:5", "started": 1000.0}
    picture = msgspec.to_builtins(s.job.status(s.now))
    drained = show.read_job(msgspec.json.encode({**told, **picture}))
    out = io.StringIO()
    Console(file=out, width=columns, height=30).print(
        top.draw(drained, View(chosen=1), 1100.0, 30, columns)
    )
    lines = out.getvalue().splitlines()
    assert all(len(line) <= columns for line in lines)
    flat = " ".join(" ".join(lines).split())
    assert f"bravo: {why}" in flat, "the reason of the chosen host is whole"
    assert f"now: change is coming: host bravo is drained: {why}" in flat
    assert any(line.startswith("▶  bravo  draining") and "its disks are" in line for line in lines)
    assert any("bravo.0.1" in line and "leaves: host bravo is" in line for line in lines)
    assert not any(line.rstrip().endswith("O…") for line in lines)
