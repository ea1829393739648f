"""One step of Adam or AdamW over lists that the caller keeps."""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from fusestep._checks import is_whole, positive
from fusestep.offload._lists import Entry, run, square_sum, workers
from fusestep.offload._settings import check, settings_of
from fusestep.torch._tensors import GROUP

# What PyTorch adds to the norm that it divides by.
CLIP_EPS = 1e-6
_STATE = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.bfloat16,
    torch.float16: torch.float16,
    torch.int8: torch.uint8,
    torch.uint8: torch.uint8,
}

Lists = Sequence[Tensor]


class Stepped(NamedTuple):
    """What a step has done."""

    # The norm of all gradients times `gradient_scale`; ``None`` without `max_norm`.
    norm: Optional[float]
    # The factor that gradients were multiplied with.
    factor: float
    # Whether nothing was written, because the norm is not finite.
    skipped: bool


class NewState(NamedTuple):
    """State of parameters that have taken no step, as :func:`step` takes it."""

    exp_avgs: List[Tensor]
    exp_avg_sqs: List[Tensor]
    max_exp_avg_sqs: Optional[List[Tensor]]
    units: Optional[List[Tuple[Tensor, ...]]]


@torch.no_grad()
def new_state(
    params: Lists, dtype: torch.dtype = torch.float32, *, amsgrad: bool = False
) -> NewState:
    """Zeros for the state of parameters, in float32, bfloat16, float16 or int8.

    In int8 an element is a code of a byte, and 32 elements share a float32, their unit.
    """
    if dtype not in _STATE:
        names = "float32, bfloat16, float16 or int8"
        raise TypeError(f"dtype: expected {names}, found {dtype}")
    own = _STATE[dtype]
    count = 3 if amsgrad else 2
    lists = [[torch.zeros_like(p.detach(), dtype=own) for p in params] for _ in range(count)]
    units = None
    if own == torch.uint8:
        units = [
            tuple(torch.zeros(-(-p.numel() // GROUP), device=p.device) for _ in range(count))
            for p in params
        ]
    return NewState(lists[0], lists[1], lists[2] if amsgrad else None, units)


def grad_norm(
    grads: Sequence[Optional[Tensor]], *, gradient_scale: float = 1.0, cores: Any = None
) -> float:
    """The norm of all gradients times ``gradient_scale``; infinite or NaN if one of them is.

    Its bits depend on neither the threads nor the dtypes that other gradients have. A parameter
    without a gradient is a ``None`` in its place.
    """
    total, others = square_sum(grads, workers(cores))
    norm = math.sqrt(total) * gradient_scale
    return math.nan if others and math.isfinite(norm) else norm


@torch.no_grad()
def step(
    params: Lists,
    grads: Sequence[Optional[Tensor]],
    exp_avgs: Lists,
    exp_avg_sqs: Lists,
    steps: Union[int, Sequence[int]],
    *,
    max_exp_avg_sqs: Optional[Lists] = None,
    units: Optional[Sequence[Sequence[Tensor]]] = None,
    copies: Optional[Sequence[Optional[Tensor]]] = None,
    lr: float = 1e-3,
    betas: Tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    adamw_mode: bool = True,
    maximize: bool = False,
    bias_correction: bool = True,
    gradient_scale: float = 1.0,
    clip: Optional[float] = None,
    max_norm: Optional[float] = None,
    norm: Optional[float] = None,
    cores: Any = None,
) -> Stepped:
    """Applies one step to tensors in host memory, in one pass, without the interpreter's lock.

    ``params`` are updated in place: masters of float32, or parameters of 16 bits. ``grads`` are
    float32, bfloat16 or float16; a ``None`` leaves its parameter as it is. State is float32,
    bfloat16, float16, or codes of uint8 with ``units``, as :func:`new_state` makes it; with
    ``max_exp_avg_sqs`` the step is AMSGrad's. ``steps`` is the number of this step, from 1 on: one
    for all, or one for each. ``copies``, bfloat16 or float16, are filled with the new parameters,
    rounded to nearest even: what a device takes.

    Gradients are multiplied with ``gradient_scale``, 1 over a loss scale for example. They are
    clipped by ``clip``, a factor; or to ``max_norm``, by the norm of these gradients, or by
    ``norm`` if it is given, which :func:`grad_norm` has for all. A norm that is not finite skips
    the step.

    A step may be made in pieces, as gradients come: calls over some of the parameters, or over
    parts of tensors. State in codes is cut at multiples of 32 elements.

    ``cores`` is a number of threads, or a set of CPUs with one thread on each; the caller's own
    thread stays where it is.

    Raises ``RuntimeError``, ``TypeError`` or ``ValueError`` that names the tensor, what was expected
    and what was found; nothing has changed then.
    """
    group: Dict[str, Any] = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": max_exp_avg_sqs is not None,
        "maximize": maximize,
        "bias_correction": bias_correction,
    }
    check(group, adamw_mode)
    at = workers(cores)
    entries = _entries(params, grads, (exp_avgs, exp_avg_sqs, max_exp_avg_sqs), steps, units, copies)
    scale = _finite("gradient_scale", gradient_scale)
    found, factor = _clipped(grads, scale, clip, positive("max_norm", max_norm), norm, at)
    if found is not None and not math.isfinite(found):
        return Stepped(found, factor, skipped=True)
    if entries:
        run([(settings_of(group, adamw_mode), entries)], at, factor)
    return Stepped(found, factor, skipped=False)


def _clipped(
    grads: Sequence[Optional[Tensor]],
    scale: float,
    clip: Optional[float],
    max_norm: Optional[float],
    norm: Optional[float],
    at: Union[int, List[int]],
) -> Tuple[Optional[float], float]:
    """The norm that decides, if one does, and the factor on gradients."""
    if clip is not None and max_norm is not None:
        raise ValueError("clip: expected it or max_norm, found both")
    if norm is not None and max_norm is None:
        raise ValueError("norm: expected max_norm beside it, found none")
    if clip is not None:
        return None, _finite("clip", clip) * scale
    if max_norm is None:
        return None, scale
    if norm is None:
        total, others = square_sum(grads, at)
        norm = math.nan if others else math.sqrt(total) * scale
    else:
        norm = float(norm)
        if norm < 0:
            raise ValueError(f"norm: expected at least 0, found {norm}")
    return norm, clip_factor(norm, max_norm) * scale


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that brings a norm to a limit, as PyTorch's ``clip_grad_norm_`` forms it."""
    factor = max_norm / (norm + CLIP_EPS)
    return factor if factor < 1.0 else 1.0


def _finite(name: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, found {value!r}")
    return number


def _entries(
    params: Lists,
    grads: Sequence[Optional[Tensor]],
    state: Tuple[Lists, Lists, Optional[Lists]],
    steps: Union[int, Sequence[int]],
    units: Optional[Sequence[Sequence[Tensor]]],
    copies: Optional[Sequence[Optional[Tensor]]],
) -> List[Entry]:
    """The parameters that have a gradient, with all their lists."""
    count = len(params)
    each: Sequence[Any] = [steps] * count if isinstance(steps, int) else steps
    named = {
        "grads": grads,
        "exp_avgs": state[0],
        "exp_avg_sqs": state[1],
        "max_exp_avg_sqs": state[2],
        "steps": each,
        "units": units,
        "copies": copies,
    }
    for name, own in named.items():
        if own is not None and len(own) != count:
            raise ValueError(f"{name}: expected {count}, one for each of params, found {len(own)}")
    entries: List[Entry] = []
    for at, param in enumerate(params):
        grad = grads[at]
        if grad is None:
            continue
        number = each[at]
        if not is_whole(number) or number < 1:
            raise ValueError(f"steps: expected numbers from 1 on, found {number!r}")
        own = (state[0][at], state[1][at])
        if state[2] is not None:
            own = (*own, state[2][at])
        if units is not None:
            own = (*own, *units[at])
        copy = None if copies is None else copies[at]
        entries.append((str(at), number, param, grad, copy, own, None))
    return entries


__all__ = ["NewState", "Stepped", "clip_factor", "grad_norm", "new_state", "step"]
