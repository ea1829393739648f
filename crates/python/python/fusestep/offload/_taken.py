"""Which parameters `Offload` takes, and what it refuses of models, optimizers and state dicts."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from fusestep.offload._members import Member
from fusestep.torch._sharded import is_sharded
from fusestep.torch._taken import refuse_wrapped
from fusestep.torch._tensors import refuse_parameter


class Found(NamedTuple):
    """A parameter of the model that the optimizer has, and its place there."""

    name: str
    param: Tensor
    group: Dict[str, Any]
    at: int


def members_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> List[Found]:
    """The parameters that train, in the optimizer's order.

    Raises ``ValueError``, ``TypeError`` or ``RuntimeError`` that names what does not fit.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"optimizer: expected one of PyTorch's kind, found {kind}")
    if getattr(optimizer, "_offload", None) is not None:
        raise ValueError("optimizer: expected one without `Offload`, found one that has it")
    if optimizer.state:
        raise ValueError(
            "optimizer: expected one that has taken no step, found state; make `Offload` first, "
            "then load"
        )
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    found: List[Found] = []
    for index, group in enumerate(optimizer.param_groups):
        for at, param in enumerate(group["params"]):
            name = names.get(id(param))
            if name is None:
                raise ValueError(
                    f"parameter `{index}.{at}`: expected one of the model's, found another; make "
                    "the optimizer with `model.parameters()`"
                )
            if param.requires_grad:
                _refuse(name, param)
                found.append(Found(name, param, group, at))
    if not found:
        raise ValueError("model: expected parameters that train, found none in the optimizer")
    devices = {one.param.device for one in found}
    if len(devices) > 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"model: expected parameters on one device, found {listed}")
    refuse_wrapped("Offload", model, [one.param for one in found])
    return found


def _refuse(name: str, param: Tensor) -> None:
    if is_sharded(param):
        raise ValueError(
            f"parameter `{name}`: expected a tensor with memory of its own, found a DTensor, whose "
            "gradients others reduce; `CPUAdam` steps parts that an engine brings to the host"
        )
    if param.dtype == torch.float64:
        raise TypeError(
            f"parameter `{name}`: expected float32, bfloat16 or float16, found {param.dtype}"
        )
    refuse_parameter(name, param)
    if param.grad is not None:
        raise ValueError(
            f"parameter `{name}`: expected none with a gradient, found one; make `Offload` before "
            "the first backward pass, or call `model.zero_grad()`"
        )


def refuse_strangers(optimizer: torch.optim.Optimizer, members: Sequence[Member]) -> None:
    """Raises for parameters that were frozen, or not there, when `Offload` was made."""
    own = {id(member.master) for member in members}
    for index, group in enumerate(optimizer.param_groups):
        for at, param in enumerate(group["params"]):
            if id(param) not in own and param.grad is not None:
                raise RuntimeError(
                    f"parameter `{index}.{at}`: expected no gradient, because it did not train or "
                    "was not there when `Offload` was made, found one; call `remove()` and make "
                    "`Offload` anew"
                )


def loadable(
    state_dict: Dict[str, Any], members: Sequence[Member]
) -> List[Tuple[Member, Tensor]]:
    """The masters of a state dict, each with its member."""
    for key in ("optimizer", "masters"):
        if key not in state_dict:
            found = ", ".join(f"`{own}`" for own in state_dict) or "nothing"
            raise ValueError(f"state dict: expected `{key}`, found {found}")
    given = state_dict["masters"]
    narrow = {member.name: member for member in members if member.copy is not None}
    for name in narrow.keys() ^ given.keys():
        where = "this model, found none there" if name in given else "the state dict, found none"
        raise ValueError(f"masters: expected `{name}` in {where}")
    pairs = [(member, given[name]) for name, member in narrow.items()]
    for member, master in pairs:
        if master.shape != member.master.shape:
            raise ValueError(
                f"master of `{member.name}`: expected shape {tuple(member.master.shape)}, found "
                f"{tuple(master.shape)}"
            )
    return pairs
