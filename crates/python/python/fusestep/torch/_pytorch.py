"""PyTorch's own optimizers: arguments, state and state dicts of the class of that name."""

from __future__ import annotations

from typing import Any, Dict, List

import torch
from torch import Tensor

from fusestep.torch._optimizer import Fused


class _Adam(Fused):
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


class Adagrad(Fused, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` with its arguments, and those of every class here."""

    _keys = {"sum": "sum"}

    def __init__(self, params: Any, *args: Any, **settings: Any) -> None:
        super().__init__(params, *args, **settings)
        for group in self.param_groups:
            for tensor in group["params"]:
                # PyTorch makes the sums at once, in the dtype of the parameter.
                own = self._kept_state()[0].get(tensor)
                if own is not None and "sum" in own:
                    own["sum"] = own["sum"].to(self._state_dtype(tensor, "sum"))

    def _first_value(self, tensor: Tensor, name: str, group: Dict[str, Any]) -> Tensor:
        # PyTorch reads none of a group's own.
        first = self.defaults["initial_accumulator_value"]
        dtype = self._state_dtype(tensor, name)
        return torch.full(tensor.shape, first, dtype=dtype, device=tensor.device)

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        return {
            "rule": "adagrad",
            "lr": float(group["lr"]),
            "lr_decay": float(group["lr_decay"]),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "maximize": bool(group["maximize"]),
        }


class RMSprop(Fused, torch.optim.RMSprop):
    """``torch.optim.RMSprop`` with its arguments, and those of every class here."""

    _keys = {"moment2": "square_avg", "moment1": "grad_avg", "velocity": "momentum_buffer"}

    def _state_names(self, group: Dict[str, Any]) -> List[str]:
        names = ["square_avg"]
        names += ["momentum_buffer"] if group["momentum"] > 0 else []
        return names + ["grad_avg"] if group["centered"] else names

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        return {
            "rule": "rmsprop",
            "lr": float(group["lr"]),
            "alpha": float(group["alpha"]),
            "eps": float(group["eps"]),
            "momentum": float(group["momentum"]),
            "centered": bool(group["centered"]),
            "weight_decay": float(group["weight_decay"]),
            "maximize": bool(group["maximize"]),
        }
