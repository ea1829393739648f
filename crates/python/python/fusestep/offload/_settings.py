"""Settings of Adam on the host, as groups of parameters have them."""

from __future__ import annotations

from typing import Any, Dict, Tuple

from fusestep import _fusestep

# Names of the settings of a step, in the order of :func:`settings_of`.
NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay")
SWITCHES = ("adamw_mode", "amsgrad", "maximize", "bias_correction")

# What the extension module reads: numbers, then switches.
Settings = Tuple[Tuple[float, ...], Tuple[bool, ...]]


def betas_of(betas: Any) -> Tuple[float, float]:
    """The two decays; raises for what is no pair."""
    try:
        beta1, beta2 = betas
        return float(beta1), float(beta2)
    except (TypeError, ValueError):
        raise ValueError(f"betas: expected two numbers in [0, 1), found {betas!r}") from None


def settings_of(group: Dict[str, Any], adamw_mode: bool) -> Settings:
    """What the extension module reads of a group."""
    beta1, beta2 = group["betas"]
    return (
        (
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
        ),
        (
            adamw_mode,
            bool(group["amsgrad"]),
            bool(group.get("maximize", False)),
            bool(group["bias_correction"]),
        ),
    )


def check(group: Dict[str, Any], adamw_mode: Any) -> None:
    """Raises ``TypeError`` or ``ValueError`` for a setting that is out of range, by its name."""
    beta1, beta2 = betas_of(group["betas"])
    switches = {"adamw_mode": adamw_mode}
    switches.update((name, group[name]) for name in SWITCHES if name in group)
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected True or False, found {value!r}")
    numbers = {name: group[name] for name in ("lr", "eps", "weight_decay")}
    for name, value in numbers.items():
        try:
            numbers[name] = float("nan") if isinstance(value, (str, bool)) else float(value)
        except (TypeError, ValueError, RuntimeError):
            numbers[name] = float("nan")
        if numbers[name] != numbers[name]:
            raise TypeError(f"{name}: expected a number, found {value!r}")
    _fusestep.check(
        {
            "rule": "adam",
            "beta1": beta1,
            "beta2": beta2,
            "decoupled": adamw_mode,
            "amsgrad": bool(group["amsgrad"]),
            "maximize": bool(group.get("maximize", False)),
            **numbers,
        }
    )
