"""Gradient scalers."""

from typing import Any

from torch import Tensor


def numbers_of(scaler: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the scale, and the steps since it grew last, on their device; None: not used yet."""
    return getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)


def steps_of(scaler: Any) -> dict[int, dict[str, Any]]:
    """Return how far the step of each optimizer is, by its identity; a disabled scaler has none."""
    found: dict[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    return found
