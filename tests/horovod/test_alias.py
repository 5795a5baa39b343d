"""The package `horovod` that `elasticrun --horovod` puts first on the path of its workers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_driver.horovod
from elastic_driver.errors import UsageError
from launcher.agent.environment import HOROVOD_ALIAS


def answer(script: str, *folders: Path) -> str:
    """What a script prints with these folders first on its path."""
    path = os.pathsep.join(map(str, folders))
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_each_of_its_modules_is_ours_and_no_copy() -> None:
    script = (
        "import sys, horovod, horovod.torch as hvd, horovod.torch.elastic.sampler\n"
        "from horovod.common.exceptions import HorovodInternalError as error\n"
        "import elastic_driver.horovod.torch as ours\n"
        "print(hvd is ours, error is ours.HorovodInternalError, horovod.__version__)"
    )
    assert answer(script, HOROVOD_ALIAS) == "True True 0.28.1"


def test_a_module_that_is_not_there_is_not_found() -> None:
    script = (
        "import importlib.util as util\n"
        "names = 'horovod.torch', 'horovod.paddle', 'horovod.torch.nothing'\n"
        "print([util.find_spec(name) is not None for name in names])\n"
        "try: import horovod.paddle\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    found, error = answer(script, HOROVOD_ALIAS).splitlines()
    assert found == "[True, False, False]"
    assert error == "No module named 'horovod.paddle'"


@pytest.mark.parametrize("package", ["horovod", "elastic_driver.horovod"])
@pytest.mark.parametrize("part", ["tensorflow", "keras", "spark", "ray", "mxnet"])
def test_a_part_that_only_horovod_has_is_answered_by_a_sentence(package: str, part: str) -> None:
    for statement in (f"import {package}.{part} as hvd", f"import {package}.{part}.keras"):
        script = f"try: {statement}\nexcept ImportError as error: print(error)"
        assert answer(script, HOROVOD_ALIAS).startswith(f"horovod.{part} is not here: ")


def test_a_real_horovod_is_found_where_the_alias_is_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'real'\n")
    script = "import horovod; print(horovod.__version__)"
    assert answer(script, tmp_path) == "real"
    assert answer(script, HOROVOD_ALIAS, tmp_path) == "0.28.1"
    assert importlib.util.find_spec("horovod") is None  # we install none


def test_starting_workers_from_python_names_elasticrun() -> None:
    with pytest.raises(UsageError, match="elasticrun -np N --horovod python SCRIPT"):
        elastic_driver.horovod.run(print, np=2)
