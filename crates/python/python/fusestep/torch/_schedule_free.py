"""State of the package ``schedulefree``, as ``ScheduleFreeAdamW`` has it."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping

import torch

from fusestep._checks import is_whole

# What the package's groups have besides the settings that both know.
_BOOKS = ("k", "r", "weight_sum", "lr_max", "scheduled_lr", "weight_lr_power", "foreach")

# Of a group: how many steps a parameter has taken whose first gradient is still to come.
BEGINS_AT = "begins_at"


def converted(state_dict: Dict[str, Any]) -> Dict[str, Any]:
    """The state dict with the steps of ``schedulefree.AdamWScheduleFree``, which counts them in the
    group, at each parameter; another one as it is.

    Raises ``ValueError`` for averages whose weights are others than ours.
    """
    groups = state_dict.get("param_groups", ())
    if not any({"k", "weight_sum"} <= set(group) for group in groups):
        return state_dict
    state = dict(state_dict["state"])
    own = []
    for number, group in enumerate(groups):
        _refuse_weights(f"param_groups[{number}]", group)
        indexes: List[Any] = group["params"]
        for index in indexes:
            own_state = state.get(index)
            if isinstance(own_state, Mapping) and own_state:
                state[index] = {**own_state, "step": torch.tensor(float(group["k"]))}
        kept = {name: value for name, value in group.items() if name not in _BOOKS}
        own.append({**kept, BEGINS_AT: group["k"]})
    return {**state_dict, "state": state, "param_groups": own}


def _refuse_weights(where: str, group: Dict[str, Any]) -> None:
    """Raises unless the averages have been weighed by the warm-up alone."""
    steps: Any = group.get("k")
    if not is_whole(steps) or not 0 <= steps < 2**53:
        raise ValueError(f"{where}: expected k, a count of steps, found {steps!r}")
    for name, expected in (("r", 0), ("weight_lr_power", 2)):
        if _number(where, group, name, expected) != expected:
            raise ValueError(
                f"{where}: expected {name}={expected}, since weights of the average follow from "
                f"the warm-up alone, found {name}={group[name]!r}; go on in the package"
            )
    warm, rate = _number(where, group, "warmup_steps", 0), _number(where, group, "lr")
    rising = min(steps, warm)
    shares = rising * (rising + 1) * (2 * rising + 1) / 6 / warm**2 if warm else 0.0
    expected_sum = rate**2 * (shares + steps - rising)
    found = _number(where, group, "weight_sum")
    if not abs(found - expected_sum) <= 1e-6 * expected_sum:
        raise ValueError(
            f"{where}: expected weight_sum={expected_sum:.6g}, that of {steps} steps at a rate of "
            f"{rate:g}, found {found:.6g}, because the rate has changed on the way; go on in the "
            "package"
        )


def _number(where: str, group: Dict[str, Any], name: str, default: Any = None) -> float:
    value = group.get(name, default)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = float("nan")
    if not abs(number) < 1e100:
        raise ValueError(f"{where}: expected {name}, a number, found {value!r}")
    return number
