"""`import elastic_driver as elastic`: the promised names, cheap to import."""

from __future__ import annotations

import subprocess
import sys

import elastic_driver as elastic


def test_every_promised_name_is_there() -> None:
    for name in elastic.__all__:
        assert getattr(elastic, name) is not None
    assert set(elastic.__all__) <= set(dir(elastic))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(elastic, "wrapp")


def test_importing_loads_no_torch_and_the_place_costs_none_either() -> None:
    code = (
        "import sys, elastic_driver as e\n"
        "assert 'torch' not in sys.modules and 'asyncio' not in sys.modules\n"
        "assert e.is_initialized() is False\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
