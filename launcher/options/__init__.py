"""Every option of `elasticrun`, one frozen record each, in the order of `--help`.

The table is data: `launcher.commandline` reads argv with it and prints it as help, and the
environment (`ELASTICRUN_MIN_NP`) and configuration files (`min-np: 2`) follow from the names.
Values are looked up with the record itself, `values[MIN_NP]`, so they carry their type.
Defaults that are settings of the job stand in `elastic_driver.settings` and nowhere else.

A module here for each heading; a new option goes there, and is then `options.NAME`. How values of
its kind are read is in `kinds`.
"""

from __future__ import annotations

from typing import Any

from launcher.options.check import *
from launcher.options.foreign import FOREIGN as FOREIGN
from launcher.options.foreign import NEEDLESS as NEEDLESS
from launcher.options.foreign import PET_OPTIONS as PET_OPTIONS
from launcher.options.hosts import *
from launcher.options.join import *
from launcher.options.option import GROUPS as GROUPS
from launcher.options.option import Option as Option
from launcher.options.other import *
from launcher.options.output import *
from launcher.options.policy import *
from launcher.options.size import *
from launcher.options.start import *
from launcher.options.tensorflow import *

OPTIONS: tuple[Option[Any], ...] = tuple(
    sorted(
        (value for value in list(globals().values()) if isinstance(value, Option)),
        key=lambda option: GROUPS.index(option.group),
    )
)
