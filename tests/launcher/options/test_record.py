"""The fields that options fill: each exists, has one option, and gives the option its default."""

from __future__ import annotations

import msgspec.structs

from launcher.options import table as o
from launcher.options.record import FILLED, field_of
from launcher.options.values import resolve


def test_no_field_is_filled_by_two_options() -> None:
    paths = [path for option in o.OPTIONS for path in option.fills]
    assert len(paths) == len(set(paths))


def test_a_default_is_that_of_the_first_field() -> None:
    for option in o.OPTIONS:
        for path in option.fills[:1]:
            assert option.default == field_of(path).default, option.name


def test_values_go_to_every_field_that_the_option_names() -> None:
    values = resolve(["--heartbeat-timeout", "7", "--stop-grace", "3", "--debug"], {}).values
    settings, spec = values.fields("settings"), values.fields("spec")
    assert settings["heartbeat_timeout"] == spec["heartbeat_timeout"] == 7.0
    assert settings["stop_grace"] == spec["grace_period"] == 3.0
    assert values.fields("driver")["debug"] is True
    assert values.fields("backend")["heartbeat_timeout"] == 7.0


def test_the_fields_are_fields_of_their_structs() -> None:
    values = resolve([], {}).values
    for name, struct in FILLED.items():
        known = {field.name for field in msgspec.structs.fields(struct)}
        assert set(values.fields(name)) <= known
