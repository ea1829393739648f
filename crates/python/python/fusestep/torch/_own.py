"""Rules that PyTorch does not have."""

from __future__ import annotations

from typing import Any, Dict, Tuple, Union

import torch
from torch import Tensor

from fusestep._checks import is_whole
from fusestep.torch._optimizer import Fused
from fusestep.torch._options import refuse_unknown
from fusestep.torch._schedule_free import BEGINS_AT, converted
from fusestep.torch._sharded import local_of

Betas = Tuple[float, float]


class _Own(Fused):
    """A rule whose settings all stand in the group, under the names that the rule has for them."""

    _rule = ""

    def __init__(self, params: Any, defaults: Dict[str, Any], **options: Any) -> None:
        lr = defaults["lr"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        refuse_unknown(type(self).__name__, defaults, options)
        super().__init__(params, defaults, **options)

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        settings: Dict[str, Any] = {"rule": self._rule}
        # PyTorch adds defaults of its own when it loads.
        for name in self.defaults.keys() & group.keys():
            value = group[name]
            if name == "betas":
                settings["beta1"], settings["beta2"] = (float(beta) for beta in value)
            else:
                settings[name] = _number(value)
        return settings


def _number(value: Any) -> Any:
    """A number of its own for a tensor, which may be written later; others as they are."""
    try:
        return value.item()
    except (AttributeError, RuntimeError, ValueError):
        # What is no number is refused by its name.
        return value


class Lion(_Own):
    """Lion, the sign of a moving mean (Chen et al. 2023, arXiv:2302.06675).

    Takes the arguments of every class here, too. The state is ``exp_avg``.
    """

    _rule = "lion"
    _keys = {"moment1": "exp_avg"}
    _counts = False

    def __init__(
        self,
        params: Any,
        lr: Union[float, Tensor] = 1e-4,
        betas: Betas = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **options)


class Lars(_Own):
    """LARS, momentum with a rate for each parameter (You et al. 2017, arXiv:1708.03888).

    Parameters of groups with ``trust_ratio=False``, biases for example, take the plain rate.
    Takes the arguments of every class here, too. The state is ``momentum_buffer``.
    """

    _rule = "lars"
    _is_layerwise = True
    _keys = {"velocity": "momentum_buffer"}
    _counts = False

    def __init__(
        self,
        params: Any,
        lr: Union[float, Tensor] = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        trust_coefficient: float = 1e-3,
        eps: float = 0.0,
        *,
        trust_ratio: bool = True,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "trust_ratio": trust_ratio,
        }
        super().__init__(params, defaults, **options)


class Lamb(_Own):
    """LAMB, Adam with a rate for each parameter (You et al. 2020, arXiv:1904.00962).

    Parameters of groups with ``trust_ratio=False``, biases for example, take the plain rate.
    Takes the arguments of every class here, too. The state is that of ``AdamW``.
    """

    _rule = "lamb"
    _is_layerwise = True
    _keys = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}

    def __init__(
        self,
        params: Any,
        lr: Union[float, Tensor] = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        trust_ratio: bool = True,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "trust_ratio": trust_ratio,
        }
        super().__init__(params, defaults, **options)


class ScheduleFreeAdamW(_Own):
    """Schedule-Free AdamW: an average in place of a schedule (Defazio et al., arXiv:2405.15682).

    Call :meth:`eval` before evaluating or saving the model and :meth:`train` before going on.
    Takes the arguments of every class here, too. The state is ``z`` and ``exp_avg_sq``; while the
    averages are in place, ``trained`` holds the parameters.
    """

    _rule = "schedule_free"
    _keys = {"moment2": "exp_avg_sq", "base": "z"}

    def __init__(
        self,
        params: Any,
        lr: Union[float, Tensor] = 2.5e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "warmup_steps": warmup_steps,
            "train_mode": True,
        }
        super().__init__(params, defaults, **options)

    @torch.no_grad()
    def eval(self) -> None:
        """Puts the averages in place of the parameters; parameters that never stepped stay."""
        self._refuse_pending("eval")
        for group in self.param_groups:
            if not group["train_mode"]:
                continue
            # The parameter is y; x, the average, is y / β₁ + z·(1 − 1 / β₁).
            beyond = 1 - 1 / float(group["betas"][0])
            for tensor in group["params"]:
                state = self.state.get(tensor, {})
                if "z" not in state or float(state["step"]) == 0:
                    continue
                state["trained"] = tensor.detach().clone()
                own, z = local_of(tensor), local_of(state["z"])
                wide = torch.promote_types(own.dtype, torch.float32)
                own.copy_(own.to(wide).lerp(z.to(wide), beyond))
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Puts the parameters back, with the bits they had."""
        for group in self.param_groups:
            for tensor in group["params"]:
                state = self.state.get(tensor, {})
                trained = state.pop("trained", None)
                if trained is None and not group["train_mode"] and "z" in state:
                    # Of `schedulefree`, which keeps the averages alone.
                    own, z = local_of(tensor), local_of(state["z"])
                    wide = torch.promote_types(own.dtype, torch.float32)
                    share = 1 - float(group["betas"][0])
                    trained = own.to(wide).lerp(z.to(wide), share)
                if trained is not None:
                    local_of(tensor).copy_(local_of(trained))
            group["train_mode"] = True

    def _converted(self, state_dict: Dict[str, Any]) -> Dict[str, Any]:
        return converted(state_dict)

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        begins_at = group.get(BEGINS_AT, 0)
        if not is_whole(begins_at) or begins_at < 0:
            raise ValueError(f"{BEGINS_AT}: expected a count of steps, found {begins_at!r}")
        return super()._settings(group)

    def _first_count(self, group: Dict[str, Any]) -> float:
        return float(group.get(BEGINS_AT, 0))

    def _first_value(self, tensor: Tensor, name: str, group: Dict[str, Any]) -> Tensor:
        first = super()._first_value(tensor, name, group)
        # The kernels begin it where no step was counted.
        return first.copy_(tensor.detach()) if name == "z" and group.get(BEGINS_AT) else first

    def _refuse_step(self) -> None:
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("expected `optimizer.train()` before `step`, found `eval()`")
