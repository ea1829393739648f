"""The loss scale of `Offload`: fixed, or found as PyTorch's `GradScaler` finds it."""

from __future__ import annotations

import math
from typing import Any, List

_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000
_LEAST, _LARGEST = 1.0, 2.0**126


class Scale:
    """A factor on the loss, a power of two."""

    def __init__(self, asked: Any) -> None:
        self._moves = asked == "dynamic" if isinstance(asked, str) else False
        self.value = 65536.0 if self._moves else 1.0
        self._good_steps = 0
        if asked is not None and not self._moves:
            self.value = _checked("loss_scale", asked)

    def after(self, finite: bool) -> None:
        """Takes note of a step, whose gradients were finite or not."""
        if not self._moves:
            return
        if not finite:
            self._good_steps = 0
            self.value = max(self.value * _BACKOFF, _LEAST)
            return
        self._good_steps += 1
        if self._good_steps >= _INTERVAL:
            self._good_steps = 0
            self.value = min(self.value * _GROWTH, _LARGEST)

    def saved(self) -> List[float]:
        """What a state dict has."""
        return [self.value, self._good_steps]

    def load(self, saved: Any) -> None:
        """Goes on from what a state dict has; a fixed scale stays."""
        try:
            value, steps = saved
            value, steps = _checked("loss_scale", value), int(steps)
        except (TypeError, ValueError):
            raise ValueError(
                "loss_scale: expected a power of two and a number of steps in the state dict, "
                f"found {saved!r}"
            ) from None
        if self._moves:
            self.value, self._good_steps = value, steps


def _checked(name: str, value: Any) -> float:
    """A power of two in range."""
    try:
        number = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not _LEAST <= number <= _LARGEST or math.frexp(number)[0] != 0.5:
        raise ValueError(
            f"{name}: expected \"dynamic\" or a power of two from 1 to 2^126, found {value!r}"
        )
    return number
