"""`elasticrun --network-check` and `elasticctl check` on hosts of which one may have troubles."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from elastic_driver.errors import ClusterError
from elastic_driver.features.checks import command
from elastic_driver.features.checks.driver import CheckSettings
from elastic_driver.runtime.discovery import FixedDiscovery
from launcher import cli, ctl
from launcher.launch import submit as node_check
from launcher.launch.host_source import Facts, MachineFacts
from launcher.launch.plan import LaunchPlan, make_plan
from launcher.options.given import resolve
from tests.support.job import eventually

HOSTS = ("localhost", "127.0.0.2")
TASK = (sys.executable, "-m", "tests.runtime.check_tasks")
SCRIPT = """
import os, pathlib
pathlib.Path(os.environ["OUT"], os.environ["RANK"]).write_text(os.environ["ELASTIC_HOSTNAME"])
"""


@pytest.fixture
def quick_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that need no torch."""
    quick = functools.partial(CheckSettings, command=TASK)
    monkeypatch.setattr(command, "CheckSettings", quick)


def options(tmp_path: Path, troubles: dict[str, str]) -> list[str]:
    shared = ["--warm", "0", "--state-dir", str(tmp_path / "state"), "--run-id", "run"]
    return [*shared, "--env", f"TROUBLES={json.dumps(troubles)}"]


def elasticrun(tmp_path: Path, troubles: dict[str, str], *flags: str) -> tuple[int, list[str]]:
    """The exit status, and the hosts that the job's workers ran on."""
    out, script = tmp_path / "out", tmp_path / "script.py"
    out.mkdir()
    script.write_text(SCRIPT)
    argv = [*options(tmp_path, troubles), "--env", f"OUT={out}", *flags]
    status = cli.main([*argv, "-H", "localhost:1,127.0.0.2:1", str(script)])
    return status, sorted(file.read_text() for file in out.iterdir())


def plan(*flags: str, gpus: int = 0) -> LaunchPlan:
    facts = Facts("run", "/state", "/", sys.executable, MachineFacts(cpus=2, gpus=gpus))
    return make_plan(resolve([*flags, "train.py"], {}), facts)


# ---- what the flags ask for --------------------------------------------------------------


def test_without_a_flag_nothing_is_checked() -> None:
    assert not plan().options.checks_nodes


@pytest.mark.parametrize(
    ("flag", "performance", "model", "exclude"),
    [
        ("--network-check", False, False, False),
        ("--comm-perf-test", True, False, False),
        ("--straggler_detection", False, True, False),
        ("--exclude-straggler", False, True, True),
    ],
)
def test_each_flag_asks_for_a_check_and_for_more_of_it(
    flag: str, performance: bool, model: bool, exclude: bool
) -> None:
    assert plan(flag).options.checks_nodes
    settings = command.check_settings(node_check.check_order(plan(flag)))
    assert settings.exclude_stragglers == exclude
    assert (settings.task.performance, settings.task.model) == (performance, model)
    assert (settings.task_timeout, settings.every_slot) == (120.0, False)


def test_with_gpus_every_slot_is_checked_and_the_timeout_can_be_set() -> None:
    wanted = plan("--network-check", "--check-timeout", "7", gpus=2)
    settings = command.check_settings(node_check.check_order(wanted))
    assert settings.every_slot
    assert settings.task_timeout == settings.task.timeout == settings.start_timeout == 7.0


def test_hosts_that_failed_the_check_are_not_discovered_again() -> None:
    source = FixedDiscovery((("a", 1), ("b", 2), ("c", 1)))
    assert node_check.WithoutHosts(source, {"b": "faulty"}).find() == (("a", 1), ("c", 1))


# ---- before a job ------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_tasks")
def test_a_job_trains_without_the_faulty_host(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, ran_on = elasticrun(
        tmp_path, {HOSTS[1]: "broken"}, "--network-check", "--min-np", "1", "-np", "2"
    )
    err = capfd.readouterr().err
    assert status == 0, err
    assert ran_on == [HOSTS[0]]
    assert "127.0.0.2  faulty" in err
    assert "the device fell off the bus" in err
    kept = json.loads((tmp_path / "state" / "run" / command.REPORT_FILE).read_bytes())
    assert [node["verdict"] for node in kept["nodes"]] == ["good", "faulty"]
    assert len(kept["nodes"][1]["history"]) == kept["rounds"] == 2
    log = (tmp_path / "state" / "run" / "events.jsonl").read_text().splitlines()
    (checked,) = [event for event in map(json.loads, log) if event["event"] == "nodes_checked"]
    assert "1 good, 1 faulty (127.0.0.2)" in checked["reason"]


@pytest.mark.usefixtures("quick_tasks")
def test_a_job_that_needs_the_faulty_host_is_not_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, ran_on = elasticrun(tmp_path, {HOSTS[1]: "broken"}, "--network-check", "-np", "2")
    assert status == 75
    assert ran_on == []
    assert "1 of 2 hosts failed the check" in capfd.readouterr().err


@pytest.mark.usefixtures("quick_tasks")
def test_when_all_nodes_are_bad_the_first_reason_is_the_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, ran_on = elasticrun(
        tmp_path, dict.fromkeys(HOSTS, "broken"), "--network-check", "--min-np", "1"
    )
    assert status == ClusterError.exit_code
    assert ran_on == []
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith(
        "elasticrun: each node failed the check (2); the first: localhost faulty"
    )


@pytest.mark.usefixtures("quick_tasks")
def test_a_slow_host_is_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    flags = ("--exclude-straggler", "--min-np", "1", "-q")
    status, ran_on = elasticrun(tmp_path, {HOSTS[1]: "slow"}, *flags)
    assert status == 0
    assert ran_on == [HOSTS[0]]


@pytest.mark.usefixtures("quick_tasks")
def test_a_signal_ends_the_check_and_everything_it_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 1:  # one signal: a second one may come when nobody handles it any more
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(node_check, "sayer", lambda _plan: say)
    troubles = {HOSTS[0]: "hangs"}
    before = signal.getsignal(signal.SIGTERM)
    status, ran_on = elasticrun(tmp_path, troubles, "--network-check")
    assert signal.getsignal(signal.SIGTERM) == before
    assert status == 143
    assert ran_on == []
    assert "the node check was stopped by SIGTERM" in capfd.readouterr().err
    assert list((tmp_path / "state" / "run" / "node-check").iterdir()) == []


# ---- while a job runs --------------------------------------------------------------------

WAITING = """
import os, pathlib, time
out = pathlib.Path(os.environ["OUT"])
(out / os.environ["ELASTIC_HOSTNAME"]).touch()
while not (out / "end").exists():
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_tasks")
def test_hosts_that_come_in_later_are_checked_before_they_get_workers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, script, hosts = tmp_path / "out", tmp_path / "script.py", tmp_path / "hosts"
    out.mkdir()
    script.write_text(WAITING)
    hosts.write_text("localhost slots=1\n")
    log = tmp_path / "state" / "run" / "events.jsonl"

    def play() -> None:
        eventually((out / "localhost").exists, within=40, what="it trains on the first host")
        hosts.write_text("localhost slots=1\n127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
        eventually((out / "127.0.0.3").exists, within=60, what="the good new host is used")

    def play_and_end() -> None:
        try:
            play()
        finally:
            (out / "end").touch()

    other = threading.Thread(target=play_and_end)
    other.start()
    shared = [*options(tmp_path, {"127.0.0.2": "broken"}), "--env", f"OUT={out}"]
    sizes = ["-np", "1", "--min-np", "1", "--max-np", "3", "--discovery-interval", "0.1"]
    argv = [*shared, *sizes, "--network-check", "--hostfile", str(hosts), str(script)]
    assert cli.main(argv) == 0, capfd.readouterr().err
    other.join(60)
    assert sorted(file.name for file in out.iterdir()) == ["127.0.0.3", "end", "localhost"]
    events = [json.loads(line) for line in log.read_text().splitlines()]
    (begun,) = [e for e in events if e["event"] == "host_check_started"]
    assert "127.0.0.2: it was not there before, 127.0.0.3" in begun["reason"]
    (kept_out,) = [e for e in events if e["event"] == "host_blacklisted"]
    assert kept_out["host"] == "127.0.0.2"
    assert "the device fell off the bus" in kept_out["reason"]
    assert [e["host"] for e in events if e["event"] == "host_checked"] == ["127.0.0.3"]
    kept = json.loads((tmp_path / "state" / "run" / command.REPORT_FILE).read_bytes())
    assert {n["node"]: n["verdict"] for n in kept["nodes"]} == {
        "localhost": "good",
        "127.0.0.2": "faulty",
        "127.0.0.3": "good",
    }
    assert list((tmp_path / "state" / "run" / "node-check").iterdir()) == []


# ---- without a job -----------------------------------------------------------------------


@pytest.mark.usefixtures("quick_tasks")
def test_elasticctl_check_says_which_host_is_faulty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["check", *options(tmp_path, {HOSTS[1]: "dies"}), "--log-format", "json", *HOSTS]
    assert ctl.main(argv) == 1
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert {node["node"]: node["verdict"] for node in report["nodes"]} == {
        HOSTS[0]: "good",
        HOSTS[1]: "faulty",
    }
    assert "elasticctl: node check: round 1, 2 nodes in 1 group" in printed.err


@pytest.mark.usefixtures("quick_tasks")
def test_elasticctl_check_of_healthy_hosts_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(["check", *options(tmp_path, {}), "-q", *HOSTS]) == 0
    printed = capsys.readouterr()
    assert "node check: 2 good; 1 round" in printed.out
    assert printed.err == ""


@pytest.mark.usefixtures("quick_tasks")
def test_what_a_check_found_is_told_by_the_next_one_and_by_the_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(["check", *options(tmp_path, {HOSTS[1]: "dies"}), *HOSTS]) == 1
    assert ctl.main(["check", *options(tmp_path, {}), *HOSTS]) == 0
    again = capsys.readouterr().out.splitlines()
    assert again[-2].startswith("127.0.0.2  good")
    assert again[-2].endswith("before: faulty in 1 of its last check")
    assert ctl.main(["check", "--history", *options(tmp_path, {}), HOSTS[1]]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["node", "last", "check", "checks"]
    assert line.split()[0] == HOSTS[1]
    assert line.split()[3:7] == ["2", "1", "–", "1"]
    shown = ["check", *options(tmp_path, {}), "--history", "--log-format", "json"]
    assert ctl.main(shown) == 0
    assert set(json.loads(capsys.readouterr().out)["nodes"]) == set(HOSTS)


def test_a_history_of_nothing_says_where_it_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(["check", "--history", "--state-dir", str(tmp_path)]) == 0
    assert f"no check was ever kept in {tmp_path}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["chek"], "'chek' is no command; there is status, "),
        (["check", "--no-such-option", "a"], "unknown option --no-such-option"),
        (["check", "a b"], "'b' after the host"),
    ],
)
def test_a_mistake_is_one_line_and_status_64(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(argv) == 64
    err = capsys.readouterr().err
    assert err.startswith("elasticctl: ")
    assert said in err
    assert err.count("\n") == 1


def test_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["check", "--help"]) == 0
    assert "usage: elasticctl check [OPTIONS] [HOSTS…]" in capsys.readouterr().out
