"""How 16-bit parameters and their state are kept: one argument for three settings of the table."""

from __future__ import annotations

import warnings
from typing import Any, Dict, Optional

import torch
from torch import Tensor

PRECISION = "precision"

_SETTINGS = ("master_weights", "state_dtype", "rounding")

# The settings that each choice stands for.
CHOICES: Dict[str, Dict[str, str]] = {
    "pytorch": {"state_dtype": "bf16"},
    "stochastic": {"state_dtype": "bf16", "rounding": "stochastic"},
    "wide": {"state_dtype": "f32"},
    "remainder": {"master_weights": "remainder"},
    "remainder8": {"master_weights": "remainder8", "state_dtype": "int8"},
    "master": {"master_weights": "f32"},
}

SAYS = (
    "How 16-bit parameters are kept: ``pytorch`` has 16-bit state, ``stochastic`` also rounds at "
    "random, ``wide`` has float32 state, ``remainder`` the 16 bits that a parameter lacks beside "
    "it, ``remainder8`` 8 of them with state in int8, ``master`` a float32 copy. It stands for "
    "``master_weights``, ``state_dtype`` and ``rounding``; ``wide`` by default, which is said once."
)

# What kernels have for parameters of float16.
_OF_HALF = (None, "wide", "master")

_has_warned = False


def expanded(settings: Dict[str, Any]) -> Optional[str]:
    """Puts the settings that ``precision`` stands for in its place; returns the choice.

    Raises ``ValueError`` for another choice, ``TypeError`` beside what it stands for.
    """
    choice = settings.pop(PRECISION, None)
    if choice is None:
        return None
    if not isinstance(choice, str) or choice not in CHOICES:
        raise ValueError(
            f"{PRECISION}: expected one of {', '.join(CHOICES)} or None, found {choice!r}"
        )
    beside = [name for name in _SETTINGS if settings.get(name) is not None]
    if beside:
        raise TypeError(
            f"{PRECISION}: expected it alone, as it stands for {', '.join(_SETTINGS)}, found "
            f"{beside[0]}={settings[beside[0]]!r} beside it"
        )
    settings.update(CHOICES[choice])
    return str(choice)


def is_silent(settings: Dict[str, Any]) -> bool:
    """Whether nothing was said of precision, so that memory beyond PyTorch's is news."""
    return all(settings.get(name) is None for name in (PRECISION, *_SETTINGS))


def refuse_half(choice: Optional[str], tensor: Tensor) -> None:
    """Raises for a choice that kernels do not have for float16."""
    if tensor.dtype == torch.float16 and choice not in _OF_HALF:
        raise ValueError(
            f"{PRECISION}: expected `wide` or `master` with parameters of float16, whose state "
            f"kernels keep in float32, found `{choice}`; use bfloat16, or give an optimizer to each"
        )


def tell_memory(kind: str, tensors: int) -> None:
    """Warns, once in a process, of state that takes more memory than PyTorch's."""
    global _has_warned
    if _has_warned or not tensors:
        return
    _has_warned = True
    warnings.warn(
        f"{kind}: state of 16-bit parameters is kept in float32, {2 * tensors} bytes more for each "
        f'element than PyTorch\'s; {PRECISION}="pytorch" keeps 16 bits, {PRECISION}="wide" is this '
        "without the warning",
        stacklevel=2,
    )
