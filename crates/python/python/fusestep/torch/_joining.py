"""What can be trained by many processes, and what is raised for the rest."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple

import torch

from fusestep._checks import positive
from fusestep.torch._optimizer import Fused
from fusestep.torch._options import (
    LANES,
    OPTIONS_OF_RANKS,
    REDUCE_DTYPE,
    taken,
    texts_of,
    told,
)
from fusestep.torch._planned import Member, members_of
from fusestep.torch._tensors import has_wide_gradient, refuse_parameter


class _Span(NamedTuple):
    start: int
    end: int
    name: str


def trained(model: torch.nn.Module, optimizer: Fused) -> List[Member]:
    """The parameters that the optimizer trains, by the model's names and in its order."""
    groups = {id(m.tensor): m for m in members_of(optimizer.param_groups)}
    members = []
    spans = []
    for name, tensor in model.named_parameters():
        member = groups.pop(id(tensor), None)
        if member is None or not tensor.requires_grad:
            continue
        refuse_parameter(name, tensor)
        if not tensor.is_contiguous():
            raise ValueError(
                f"parameter `{name}`: expected a contiguous tensor, as ranks keep one memory and "
                f"one format of files for all, found strides {tuple(tensor.stride())} of shape "
                f"{tuple(tensor.shape)}; use `parameter.data = parameter.data.contiguous()`"
            )
        start = tensor.data_ptr()
        if tensor.numel():
            spans.append(_Span(start, start + tensor.numel() * tensor.element_size(), name))
        members.append(Member(tensor, member.group, name))
    if groups:
        name = next(iter(groups.values())).name
        raise ValueError(
            f"optimizer: expected parameters of the model, found others, such as `{name}`"
        )
    if not members:
        raise ValueError("model: expected parameters that the optimizer trains, found none")
    spans.sort()
    for before, after in zip(spans, spans[1:]):
        if after.start < before.end:
            raise RuntimeError(
                f"`{before.name}` and `{after.name}`: expected parameters that do not overlap in "
                "memory, found some that do; use `.clone()`"
            )
    return members


def _refuse_state(optimizer: Fused) -> None:
    """Raises for an optimizer that has stepped, since ranks begin without its state."""
    for own in optimizer.state.values():
        # Adagrad has its sums before the first step.
        steps = float(own.get("step", 0.0)) if optimizer._counts else float(bool(own))
        if steps or any(torch.is_tensor(value) and value.any() for value in own.values()):
            raise ValueError(
                "optimizer: expected one before its first step, found state; resume from a "
                "checkpoint"
            )
    if optimizer._micro.count:
        raise ValueError(
            "optimizer: expected one before its first step, found sums of "
            f"{optimizer._micro.count} micro-steps; make `DataParallel` before or behind them"
        )


def check(optimizer: Any, timeout: float) -> None:
    """Raises for what ranks cannot step with."""
    if not isinstance(optimizer, Fused):
        raise TypeError(
            f"optimizer: expected one of fusestep.torch, found {type(optimizer).__name__}"
        )
    if optimizer._backward is not None or optimizer._ranks is not None:
        raise ValueError(
            "optimizer: expected one of its own, found one of `fuse_backward` or `DataParallel`"
        )
    if "train_mode" in optimizer.defaults:
        raise ValueError(
            "optimizer: expected a rule without averages of its own, found ScheduleFreeAdamW"
        )
    if any(group.get("initial_accumulator_value") for group in optimizer.param_groups):
        raise ValueError("initial_accumulator_value: expected 0 with DataParallel, found another")
    _refuse_state(optimizer)
    if timeout is None or positive("timeout", timeout) is None:
        raise ValueError("timeout: expected a finite number above 0, found None")


def with_wide(options: Dict[str, Any], members: List[Member]) -> Dict[str, Any]:
    """The options of ranks whose parameters of 16 bits may have gradients in float32: they add up
    in float32 then, unless told otherwise."""
    texts = options["settings"]
    if LANES in texts or REDUCE_DTYPE in texts:
        return options
    if not any(has_wide_gradient(member.tensor) for member in members):
        return options
    return {**options, "settings": {**texts, REDUCE_DTYPE: ["f32"]}}


def joined(optimizer: Fused, settings: Dict[str, Any]) -> Dict[str, Any]:
    """The options of a rank as the extension module reads them: settings of the optimizer, and
    these of `DataParallel`, whose ``bucket_mib`` is another name of ``bucket_cap_mib``."""
    mib = positive("bucket_mib", settings.pop("bucket_mib", None))
    if mib is not None:
        if settings.get("bucket_cap_mib") is not None:
            raise TypeError("bucket_mib: expected `bucket_cap_mib` alone, found both")
        settings["bucket_cap_mib"] = mib
    own = taken("DataParallel", settings, OPTIONS_OF_RANKS)
    if settings:
        known = ", ".join(sorted(OPTIONS_OF_RANKS))
        raise TypeError(
            f"DataParallel: expected arguments out of {known}, engine, timeout, figures and units, "
            f"found {min(settings)}"
        )
    options = told(optimizer._options)
    # What one needs of the other is known for both together.
    texts = {**options["settings"], **texts_of(own, beside=options["settings"])}
    return {**options, "settings": texts}
