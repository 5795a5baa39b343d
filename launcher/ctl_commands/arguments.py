"""The options that all subcommands for a running job have, and the way to that job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from elastic_driver.errors import UsageError
from elastic_driver.runtime.run_dir import default_state_dir
from launcher.ctl_commands.connection import JobConnection
from launcher.ctl_commands.find import Where, find


class _Parser(argparse.ArgumentParser):
    """argparse, with our way of saying that something is wrong."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def make_parser(name: str, what: str) -> argparse.ArgumentParser:
    """A parser for a subcommand that speaks to a running job."""
    parser = _Parser(prog=f"elasticctl {name}", description=what, allow_abbrev=False)
    job = parser.add_argument_group("which job (default: the only one running)")
    job.add_argument("--run-id", metavar="ID", help="its name")
    job.add_argument("--endpoint", metavar="URL", help="where its driver listens")
    job.add_argument("--token-file", metavar="F", type=Path, help="the file with its token")
    job.add_argument("--state-dir", metavar="D", type=Path, help="where runs keep their files")
    return parser


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """The words as options; `--run_id` is `--run-id`."""
    return parser.parse_args([_hyphenated(word) for word in words])


def _hyphenated(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def connect(given: argparse.Namespace) -> JobConnection:
    """A connection to the job that the options name; raises ElasticError where there is none."""
    state_dir = given.state_dir or default_state_dir(os.environ)
    where = Where(state_dir.absolute(), given.run_id, given.endpoint, given.token_file)
    return JobConnection(find(where))
