"""The options: each has one field, and reaches every struct that has a field of its name."""

from __future__ import annotations

import dataclasses

import pytest

from elastic_driver.errors import UsageError
from elastic_driver.options import ValueKind
from elastic_driver.runtime.backend import BackendJob
from elastic_driver.settings import DriverOptions, Settings
from elastic_driver.words.orders import JobSpec
from launcher.options.given import CommandLine, resolve
from launcher.options.table import OPTIONS, STRUCTS


def job_spec(line: CommandLine) -> JobSpec:
    return line.fill(JobSpec, run_id="r", command=(), cwd="/", env={}, max_restarts=0)


def test_no_two_options_have_the_same_field() -> None:
    names = [option.field for option in OPTIONS]
    assert len(names) == len(set(names))
    declared = [f for struct in STRUCTS for f in dataclasses.fields(struct) if f.metadata]
    assert sorted(field.name for field in declared) == sorted(names)


def test_without_a_command_line_every_struct_has_its_defaults() -> None:
    line = resolve([], {})
    for struct in (Settings, DriverOptions, BackendJob):
        assert line.fill(struct) == struct()
    assert (job_spec(line).tee, job_spec(line).redirects) == (None, "0")


def test_values_go_to_every_struct_with_a_field_of_that_name() -> None:
    line = resolve(["--heartbeat-timeout", "7", "--grace-period", "3", "--debug"], {})
    settings, spec = line.fill(Settings), job_spec(line)
    assert settings.heartbeat_timeout == spec.heartbeat_timeout == 7.0
    assert line.fill(BackendJob).heartbeat_timeout == 7.0
    assert settings.grace_period == spec.grace_period == 3.0
    assert line.fill(DriverOptions).debug is True


def test_the_heartbeat_timeout_may_be_auto_which_is_thirty_seconds() -> None:
    line = resolve(["--heartbeat-timeout", "auto"], {})
    assert line.fill(Settings).heartbeat_timeout == 30.0
    with pytest.raises(UsageError, match="needs a number of seconds, more than 0"):
        resolve(["--heartbeat-timeout", "automatic"], {})


def test_a_field_that_is_decided_wins_over_an_option() -> None:
    assert resolve(["--max-restarts", "3"], {}).fill(Settings, max_restarts=1).max_restarts == 1


def test_an_option_of_the_launcher_alone_reaches_no_other_struct() -> None:
    line = resolve(["--hosts", "a:1", "--token-file", "f"], {})
    assert line.fill(BackendJob) == BackendJob()


def test_every_option_has_a_reader_and_a_sentence() -> None:
    for option in OPTIONS:
        assert isinstance(option.kind, ValueKind)
        assert option.help.endswith("."), option.long


@pytest.mark.parametrize(("default", "shown"), [(None, ""), (False, ""), (0, "0"), (0.0, "0")])
def test_a_default_is_not_shown_if_the_option_is_unset_or_off(default: object, shown: str) -> None:
    unexplained = next(option for option in OPTIONS if not option.shown)
    assert dataclasses.replace(unexplained, default=default).default_text == shown
