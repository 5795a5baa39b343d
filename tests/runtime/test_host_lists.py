"""Host lists: what each accepted form means, and that everything else is refused with a reason."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import ExitCode
from elastic_driver.runtime.discovery import (
    MAX_SLOTS,
    HostListError,
    check_host,
    parse_host_lines,
    parse_hosts,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", (("a", 1),)),
        ("a:4,b:2", (("a", 4), ("b", 2))),
        ("a, b:2 ", (("a", 1), ("b", 2))),
        ("127.0.0.1:2,127.0.0.2:2", (("127.0.0.1", 2), ("127.0.0.2", 2))),
        ("[::1]:2,[fe80::1%eth0]", (("::1", 2), ("fe80::1%eth0", 1))),
        ("n[01-03,07]:2,x", (("n01", 2), ("n02", 2), ("n03", 2), ("n07", 2), ("x", 1))),
        ("n[9-11]", (("n9", 1), ("n10", 1), ("n11", 1))),
        ("r[1-2]n[1-2]-ib", tuple((f"r{r}n{n}-ib", 1) for r in (1, 2) for n in (1, 2))),
        ("a:0,b", (("a", 0), ("b", 1))),
    ],
)
def test_a_comma_list_names_hosts_and_slots(text: str, hosts: tuple[tuple[str, int], ...]) -> None:
    assert parse_hosts(text) == hosts


def test_a_hostfile_may_be_written_in_any_of_the_usual_forms() -> None:
    text = (
        "# cluster\n\na slots=4   # fast\nb:2\n  c\nd\tslots=3\ne slots = 2 max_slots=8\nn[1-2]:5\n"
    )
    assert parse_host_lines(text, default_slots=7, source="hosts") == (
        ("a", 4),
        ("b", 2),
        ("c", 7),
        ("d", 3),
        ("e", 2),
        ("n1", 5),
        ("n2", 5),
    )


def test_a_host_named_twice_has_the_sum_of_its_slots_in_its_first_place() -> None:
    assert parse_host_lines("a\nb\na\na:2\n", source="nodes") == (("a", 4), ("b", 1))


def test_text_without_hosts_is_an_empty_list_but_an_empty_comma_list_is_an_error() -> None:
    assert parse_host_lines("\n# nobody\n", source="script") == ()
    with pytest.raises(HostListError):
        parse_hosts("")
    with pytest.raises(HostListError):
        parse_hosts("a,,b")


@pytest.mark.parametrize(
    "line",
    [
        "-oProxyCommand=evil",
        "a b",
        "a 4",
        "a:abc",
        "a:-1",
        "a:+1",
        "a:",
        "a:1:2",
        "::1",
        "a:１",  # a digit to int(), none to us
        f"a:{MAX_SLOTS + 1}",
        "a:99999999999999999999",
        "a;reboot",
        "$(reboot)",
        "a/b",
        "..",
        ".hidden",
        "user@a",
        "a\x1b[31m",
        "a\x00b",
        "ä",
        "[::1",
        "[nonsense]:2",
        "[::1]2",
        "[::1%a b]",
        "n[1-",
        "n]1[",
        "n[]",
        "n[a-b]",
        "n[4-1]",
        "n[0-999999999]",
        "n[1-999][1-999]",
        "a slots=4 cpus=2",
        "a:4 slots=4",
        "x" * 254,
        "Traceback (most recent call last):",
    ],
)
def test_a_line_that_is_no_host_is_refused_by_number_and_text(line: str) -> None:
    with pytest.raises(HostListError) as caught:
        parse_host_lines(f"good:2\n{line}\n", source="discover.sh")
    error = caught.value
    assert error.line == 2
    assert str(error).startswith("discover.sh, line 2: ")
    assert line[:20] in error.text
    assert "\n" not in str(error)
    assert "\x1b" not in str(error)
    assert len(str(error)) < 700
    assert error.exit_code == ExitCode.USAGE


def test_ten_thousand_hosts_are_no_trouble() -> None:
    hosts = parse_host_lines("".join(f"node{i}:8\n" for i in range(10_000)), source="script")
    assert len(hosts) == 10_000
    assert hosts[9_999] == ("node9999", 8)


def test_summed_slots_are_bounded_like_single_ones() -> None:
    with pytest.raises(HostListError, match="slots on one host"):
        parse_host_lines(f"a slots={MAX_SLOTS}\na\n", source="script")


@given(st.text(max_size=60))
def test_any_text_is_either_refused_or_gives_names_fit_for_an_argument_list(text: str) -> None:
    try:
        hosts = parse_host_lines(text, source="script")
    except HostListError:
        return
    for host, slots in hosts:
        assert check_host(host) is None
        assert host[0] not in "-./"
        assert host.isprintable()
        assert not any(character.isspace() or character == "/" for character in host)
        assert 0 <= slots <= MAX_SLOTS


def test_a_file_that_an_editor_on_windows_has_written_is_read() -> None:
    text = "\ufeffa slots=2\r\nb\r\n"
    assert parse_host_lines(text, source="hosts") == (("a", 2), ("b", 1))


@pytest.mark.parametrize(
    ("entry", "hint"),
    [
        ("root@node0:1", "say 'Host node0' and 'User root' in ~/.ssh/config"),
        ("node0:2222", "say -p 2222, or Port in ~/.ssh/config"),
        ("ssh://node0", "expected host, host:slots"),
    ],
)
def test_what_belongs_into_sshs_configuration_is_told_so(entry: str, hint: str) -> None:
    for parse in (parse_hosts, parse_host_lines):
        with pytest.raises(HostListError, match=re.escape(hint)):
            parse(entry, source="hosts")


def test_many_slots_can_be_said_in_the_other_form() -> None:
    assert parse_hosts("node0 slots=2222") == (("node0", 2222),)
