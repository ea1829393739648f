"""State dicts that `CPUAdam` takes, looked at before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fusestep.offload._cpu_adam import CPUAdam

_LISTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Loaded(NamedTuple):
    """A state dict for PyTorch, and the state that takes the place of what PyTorch makes of it."""

    plain: Dict[str, Any]
    state: Dict[Any, Dict[str, Any]]


def loadable(optimizer: CPUAdam, given: Dict[str, Any]) -> Loaded:
    """A copy of a state dict as the optimizer keeps it.

    Raises ``ValueError`` that names the parameter, what was expected and what was found.
    """
    for group in given.get("param_groups", ()):
        decoupled = group.get("decoupled_weight_decay", optimizer.adam_w_mode)
        if decoupled != optimizer.adam_w_mode:
            raise ValueError(
                f"state dict: expected adamw_mode={optimizer.adam_w_mode}, which this optimizer "
                f"has, found decoupled_weight_decay={decoupled}; make the optimizer with "
                f"`adamw_mode={decoupled}`"
            )
    own = [(f"{i}.{at}", param) for i, group in enumerate(optimizer.param_groups)
           for at, param in enumerate(group["params"])]
    saved = [(index, group.get("amsgrad", False)) for group in given.get("param_groups", ())
             for index in group["params"]]
    state: Dict[Any, Dict[str, Any]] = {}
    for (name, param), (index, amsgrad) in zip(own, saved):
        values = given.get("state", {}).get(index)
        if values:
            state[param] = _of_parameter(optimizer, name, param, values, amsgrad)
    for number, values in given.get("subgroups", {}).items():
        state[number] = {"step": _count(f"sub-group {number}", values)}
        for key in _names(f"sub-group {number}", values, "max_exp_avg_sq" in values):
            state[number][key] = values[key].detach().clone()
    plain = {key: value for key, value in given.items() if key != "subgroups"}
    return Loaded(plain, state)


def _of_parameter(
    optimizer: CPUAdam, name: str, param: Tensor, values: Dict[str, Any], amsgrad: bool
) -> Dict[str, Any]:
    state: Dict[str, Any] = {"step": _count(name, values)}
    for key in _names(name, values, amsgrad):
        value = values[key]
        if value.shape != param.shape:
            raise ValueError(
                f"{key} of `{name}`: expected shape {tuple(param.shape)}, found "
                f"{tuple(value.shape)}"
            )
        dtype = optimizer._state_dtype(param)
        own = torch.empty_like(param.detach(), dtype=dtype, device="cpu")
        state[key] = own.copy_(value.detach())
    return state


def _names(name: str, values: Dict[str, Any], amsgrad: bool) -> List[str]:
    """The lists that a parameter's state has."""
    names = list(_LISTS[: 3 if amsgrad else 2])
    for key in names:
        if not isinstance(values.get(key), Tensor):
            found = ", ".join(f"`{own}`" for own in values) or "nothing"
            raise ValueError(f"state of `{name}`: expected a tensor `{key}`, found {found}")
    return names


def _count(name: str, values: Dict[str, Any]) -> int:
    """How many steps state counts, as a whole number."""
    step = values.get("step")
    count = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if isinstance(count, (int, float)) and not isinstance(count, bool) and count >= 0:
        if float(count).is_integer():
            return int(count)
    raise ValueError(f"step of `{name}`: expected a whole number from 0 on, found {step!r}")
