"""PyTorch's own optimizers: arguments, state and state dicts of the class of that name."""

from __future__ import annotations

from typing import Any, Dict, List, Literal, Union

import torch
from torch import Tensor

from fusestep import _fusestep
from fusestep.torch._optimizer import Fused
from fusestep.torch._tensors import empty_like, is_units

_RULES = _fusestep.rules()


# Of all classes, and of some: `_loading` reads them.
_ALL = frozenset({"maximize", "foreach", "capturable", "differentiable", "fused"})


class _Named(Fused):
    """A rule whose settings have PyTorch's names: numbers, switches and `betas`."""

    _rule = ""
    _fills_in = _ALL

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        settings: Dict[str, Any] = {"rule": self._rule}
        betas = {}
        if "betas" in group:
            betas["beta1"], betas["beta2"] = group["betas"]
        # A rule that this build lacks is refused by its name.
        for name, default in _RULES.get(self._rule, {}).items():
            if name in betas:
                settings[name] = float(betas[name])
            elif name == "decoupled":
                settings[name] = bool(group["decoupled_weight_decay"])
            else:
                settings[name] = type(default)(group[name])
        return settings


class _Adam(Fused):
    _fills_in = _ALL | {"decoupled_weight_decay"}
    # PyTorch's groups say it from 2.7 on.
    _decoupled = False
    _keys = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "max_moment2": "max_exp_avg_sq"}

    def _state_names(self, group: Dict[str, Any]) -> List[str]:
        names = ["exp_avg", "exp_avg_sq"]
        return names + ["max_exp_avg_sq"] if group["amsgrad"] else names

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "rule": "adam",
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "decoupled": bool(group.get("decoupled_weight_decay", self._decoupled)),
            "amsgrad": bool(group["amsgrad"]),
            "maximize": bool(group["maximize"]),
        }


class Adam(_Adam, torch.optim.Adam):
    """``torch.optim.Adam`` with its arguments, and those of every class here."""


class AdamW(_Adam, torch.optim.AdamW):
    """``torch.optim.AdamW`` with its arguments, and those of every class here."""

    _decoupled = True


class SGD(Fused, torch.optim.SGD):
    """``torch.optim.SGD`` with its arguments, and those of every class here."""

    _keys = {"velocity": "momentum_buffer"}
    _fills_in = _ALL
    _counts = False

    def _state_names(self, group: Dict[str, Any]) -> List[str]:
        return ["momentum_buffer"] if group["momentum"] != 0 else []

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        momentum = float(group["momentum"])
        return {
            "rule": "sgd",
            "lr": float(group["lr"]),
            "momentum": momentum,
            # PyTorch reads these where there is momentum.
            "dampening": float(group["dampening"]) if momentum else 0.0,
            "nesterov": bool(group["nesterov"] and momentum),
            "weight_decay": float(group["weight_decay"]),
            "maximize": bool(group["maximize"]),
        }


class Adagrad(_Named, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` with its arguments, and those of every class here."""

    _rule = "adagrad"
    _keys = {"sum": "sum"}

    def __init__(self, params: Any, *args: Any, **settings: Any) -> None:
        super().__init__(params, *args, **settings)
        for group in self.param_groups:
            for tensor in group["params"]:
                # PyTorch makes the sums at once, in the dtype of the parameter.
                own = self._kept_state()[0].get(tensor)
                if own is not None and "sum" in own:
                    if self._is_coded(tensor):
                        for name in self._own_names(tensor, group):
                            own[name] = self._first_value(tensor, name, group)
                        continue
                    own["sum"] = own["sum"].to(self._state_dtype(tensor, "sum"))

    def _first_value(self, tensor: Tensor, name: str, group: Dict[str, Any]) -> Tensor:
        # PyTorch reads none of a group's own.
        first = self.defaults["initial_accumulator_value"]
        if self._is_coded(tensor):
            # The root of the largest is 255 units.
            unit = torch.tensor(first).sqrt() / 255
            filled = super()._first_value(tensor, name, group)
            return filled.fill_(unit if is_units(name) else 255 if first else 0)
        return empty_like(tensor, self._state_dtype(tensor, name)).fill_(first)


class RMSprop(_Named, torch.optim.RMSprop):
    """``torch.optim.RMSprop`` with its arguments, and those of every class here."""

    _rule = "rmsprop"
    _keys = {"moment2": "square_avg", "moment1": "grad_avg", "velocity": "momentum_buffer"}

    def _state_names(self, group: Dict[str, Any]) -> List[str]:
        names = ["square_avg"]
        names += ["momentum_buffer"] if group["momentum"] > 0 else []
        return names + ["grad_avg"] if group["centered"] else names


class Adamax(_Named, torch.optim.Adamax):
    """``torch.optim.Adamax`` with its arguments, and those of every class here."""

    _rule = "adamax"
    _keys = {"moment1": "exp_avg", "max_grad": "exp_inf"}


# What PyTorch keeps a running product in; here it follows from the count of steps.
_PRODUCT = "mu_product"

# The difference from PyTorch's product, which is of float32, that changes no step visibly.
_NEAR = 1e-4


class _WithProduct(torch.optim.NAdam):
    def __setstate__(self, state: Dict[str, Any]) -> None:
        kept = [own for own in state.get("state", {}).values() if own]
        for own in kept:
            # PyTorch looks for it.
            own.setdefault(_PRODUCT, torch.ones(()))
        # PyTorch gives it no types.
        untyped: Any = super()
        untyped.__setstate__(state)
        for own in kept:
            own.pop(_PRODUCT)


class NAdam(_Named, _WithProduct):
    """``torch.optim.NAdam`` with its arguments, and those of every class here.

    ``mu_product`` follows from the count of steps and the group's settings; state dicts have it. A
    state dict in which it does not, because ``betas`` or ``momentum_decay`` changed, is refused.
    """

    _rule = "nadam"
    _keys = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}

    def state_dict(
        self, *, state_dtype: Union[torch.dtype, Literal["f32"], None] = None
    ) -> Dict[str, Any]:
        saved = super().state_dict(state_dtype=state_dtype)
        state = dict(saved["state"])
        for group in saved["param_groups"]:
            for index in group["params"]:
                if "step" in state.get(index, {}):
                    product = torch.tensor(self._product(group, state[index]["step"]))
                    state[index] = {**state[index], _PRODUCT: product}
        saved["state"] = state
        return saved

    def _converted(self, state_dict: Dict[str, Any]) -> Dict[str, Any]:
        state = dict(state_dict["state"])
        for group in state_dict["param_groups"]:
            for index in group["params"]:
                own = dict(state.get(index, {}))
                found = own.pop(_PRODUCT, None)
                if found is None:
                    continue
                expected = self._product(group, own.get("step", 0))
                if not abs(float(found) - expected) <= _NEAR * (1 - expected):
                    raise ValueError(
                        f"mu_product of parameter {index}: expected {expected:.6g}, that of its "
                        f"steps with the group's settings, found {float(found):.6g}; steps with "
                        "other `betas` or another `momentum_decay` cannot be gone on from"
                    )
                state[index] = own
        return {**state_dict, "state": state}

    @staticmethod
    def _product(group: Dict[str, Any], step: Any) -> float:
        beta1, momentum_decay = float(group["betas"][0]), float(group["momentum_decay"])
        return _fusestep.momentum_product(beta1, momentum_decay, int(step))
