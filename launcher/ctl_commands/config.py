"""`elasticctl config show`: the value of every option of `elasticrun`, and its source.

Nothing is started.
"""

import os
from collections.abc import Sequence

from elastic_driver.errors import UsageError
from elastic_driver.options import FLAG
from launcher.ctl_commands.show import table
from launcher.options.table import OPTIONS
from launcher.options.values import resolve

_USAGE = "usage: elasticctl config show [OPTIONS of elasticrun]"


def config(words: Sequence[str]) -> int:
    """Show the value of every option: those that were set, then the defaults."""
    if words and words[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    if not words or words[0] != "show":
        raise UsageError(f"config can show; {_USAGE}")
    line = resolve(words[1:], os.environ)
    said = line.origins()
    named = {name for name, _, _ in said}
    unsaid = [
        (option.long, option.default_text or ("no" if option.kind is FLAG else "-"), "default")
        for option in OPTIONS
        if option.long not in named
    ]
    print(table(("OPTION", "VALUE", "FROM"), [*said, *unsaid]))
    for warning in line.warnings:
        print(f"note: {warning}")
    return 0
