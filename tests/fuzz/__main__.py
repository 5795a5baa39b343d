"""Try hostile input on every parser for longer than CI does; an hour before a release.

    python -m tests.fuzz --minutes 60
    python -m tests.fuzz event batch --minutes 5

The parsers take turns. An example that breaks one is shown, and kept in `.hypothesis` until the
parser stands it; put it into `examples` of the parser (`tests/fuzz/parsers.py`). Exit status 1: a
parser failed.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from typing import Any

from hypothesis import HealthCheck, given, settings

from tests.fuzz.parsers import PARSERS, Parser

EXAMPLES = 500  # in one turn of a parser


def one_turn(parser: Parser) -> str:
    """Try new examples; return what broke the parser, or nothing."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(parser.inputs)
    def attempt(found: Any) -> None:
        parser.attempt(found)

    try:
        attempt()
    except Exception:
        return traceback.format_exc(limit=-6)
    return ""


def main() -> int:
    """Take turns until the time is over."""
    names = [parser.name for parser in PARSERS]
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("names", nargs="*", metavar="PARSER", help=", ".join(names))
    asked.add_argument("--minutes", type=float, default=60.0)
    options = asked.parse_args()
    if unknown := [name for name in options.names if name not in names]:
        asked.error(f"no parser {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [parser for parser in PARSERS if parser.name in (options.names or names)]
    broken: dict[str, str] = {}
    tried, end = 0, time.monotonic() + options.minutes * 60
    while time.monotonic() < end and len(broken) < len(chosen):
        for parser in chosen:
            if parser.name in broken or time.monotonic() >= end:
                continue
            tried += EXAMPLES
            if trouble := one_turn(parser):
                broken[parser.name] = trouble
                print(f"=== {parser.name}\n{trouble}", flush=True)
    print(f"{tried} examples, {len(chosen)} parsers: {', '.join(broken) or 'none'} failed")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
