"""PyTorch's wrapper around a step, left out where nobody would see it."""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import Any, Callable, List

import torch
from torch.optim import Optimizer, optimizer


def _recorders() -> Callable[[], bool]:
    """Says whether a profiler or another observer of PyTorch's records what runs."""
    try:
        # `bool at::hasCallbacks()`, which has no name in Python.
        ask = ctypes.PyDLL(torch._C.__file__)._ZN2at12hasCallbacksEv
    except (OSError, AttributeError):
        return lambda: True
    ask.restype = ctypes.c_bool
    ask.argtypes = []
    return ask


_is_recorded = _recorders()

# The hooks of all optimizers; none where this PyTorch keeps them elsewhere.
_HOOKS_OF_ALL: List[Any] = [
    getattr(optimizer, name, None)
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
]


def _leave_graphs(step: Any) -> None:
    """Has a compiled function break its graph at a step, once, and trace nothing of it.

    ``torch.compiler.disable`` does so, too, at the cost of a step over a few small parameters.
    """
    step._torchdynamo_disable = True
    step._torchdynamo_disable_msg = "a step of fusestep runs outside of graphs"
    step._torchdynamo_disable_recursive = True
    try:
        strategies: Any = importlib.import_module("torch._C._dynamo.eval_frame")
        skip = strategies._FrameAction.SKIP
        strategy = strategies._FrameExecStrategy(skip, skip)
        strategies.set_code_exec_strategy(step.__code__, strategy)
    except (ImportError, AttributeError, TypeError):
        # An older PyTorch, whose graphs break at each part of a step.
        pass


def unless_watched(step: Callable[..., Any]) -> Callable[..., Any]:
    """What PyTorch's optimizers do with the step of their class: hooks and a profiler's record.

    The wrapper takes longer than a step over a few small parameters, so it is for a step that has
    hooks or is recorded.
    """
    watched = Optimizer.profile_hook_step(step)
    if None in _HOOKS_OF_ALL:
        return watched
    before_all, after_all = _HOOKS_OF_ALL

    @functools.wraps(step)
    def either(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            before_all
            or after_all
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _is_recorded()
        ):
            return watched(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    _leave_graphs(either)
    return either
