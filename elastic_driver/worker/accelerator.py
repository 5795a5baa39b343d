"""This machine's accelerator, of whatever type torch was built for or has a plug-in for."""

import functools
from typing import Any

import torch


def in_use() -> Any:
    """Return torch's module for the accelerator (`torch.xpu`) if this process uses it, else None.

    No device is touched.
    """
    module = _module()
    if module is None or not getattr(module, "is_initialized", module.is_available)():
        return None
    return module


@functools.cache
def _module() -> Any:
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else torch.get_device_module(kind)
