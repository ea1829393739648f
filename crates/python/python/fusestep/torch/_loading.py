"""Whether a state dict can be gone on from: looked at as a whole before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusestep import _fusestep
from fusestep.torch._graphs import refuse_capturable
from fusestep.torch._options import refuse_bools, scale_loaded
from fusestep.torch._planned import Member, members_of
from fusestep.torch._retyped import as_kept
from fusestep.torch._sharded import is_sharded, local_of
from fusestep.torch._tensors import BESIDE, FLOATING, has_no_storage, is_units, shape_of

if TYPE_CHECKING:
    from fusestep.torch._optimizer import Fused

# What PyTorch fills in where a group does not say it.
_FILLED_IN: Dict[str, Any] = {
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}

# Settings of other rules and packages, and the value with which each changes nothing; `...` where
# there is none.
_OTHERS: Dict[str, Any] = {
    "adam_w_mode": ...,
    "alpha": ...,
    "amsgrad": False,
    "betas": ...,
    "bias_correction": True,
    "block_wise": ...,
    "caution": False,
    "cautious": False,
    "centered": False,
    "correct_bias": True,
    "d": ...,
    "dampening": 0,
    "decoupled_weight_decay": ...,
    "etas": ...,
    "fixed_decay": False,
    "grad_averaging": True,
    "initial_accumulator_value": 0,
    "k": ...,
    "lambd": ...,
    "lr_decay": 0,
    "lr_max": ...,
    "max_grad_norm": 0,
    "max_unorm": 0,
    "maximize": False,
    "momentum": 0,
    "momentum_decay": ...,
    "nesterov": False,
    "ns_steps": ...,
    "optim_bits": ...,
    "percentile_clipping": 100,
    "r": 0,
    "rectify": False,
    "relative_step": ...,
    "rho": ...,
    "silent_sgd_phase": ...,
    "step": 0,
    "step_sizes": ...,
    "train_mode": ...,
    "trust_coefficient": ...,
    "trust_ratio": ...,
    "warmup_steps": 0,
    "weight_lr_power": ...,
    "weight_sum": ...,
}

# State of other rules and packages.
_OTHER_STATE = {
    "acc_delta",
    "ax",
    "compensation",
    "eta",
    "exp_avg",
    "exp_avg_res_row",
    "exp_avg_sq",
    "exp_avg_sq_col",
    "exp_avg_sq_row",
    "exp_inf",
    "grad_avg",
    "max_exp_avg_sq",
    "momentum_buffer",
    "mu",
    "mu_product",
    "prev",
    "square_avg",
    "state1",
    "state2",
    "step",
    "step_size",
    "sum",
    "trained",
    "x",
    "y",
    "z",
}

# The option of an optimizer that keeps what a parameter has beside it.
_OPTION_OF = {"master": "master_weights", "remainder": "remainder"}

# The types of remainders.
_REMAINDERS = (torch.int16, torch.int8)

# What an optimizer that keeps such a copy or remainder is made with.
_MADE_WITH = {torch.int16: "remainder", torch.int8: "remainder8"}

# Counts of steps are below it, as in the kernels.
_MOST_STEPS = 2**53


def loadable(
    optimizer: Fused, state_dict: Any, *, any_state_dtype: bool = False
) -> Dict[str, Any]:
    """The state dict as the optimizer loads it; raises where a step could not go on from it.

    With ``any_state_dtype`` state is put into the type that the optimizer keeps.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(f"state dict: expected a dict, found {kind_of(state_dict)}")
    for key, kind in (("param_groups", (list, tuple)), ("state", Mapping)):
        if not isinstance(state_dict.get(key), kind):
            found = kind_of(state_dict[key]) if key in state_dict else "none"
            raise ValueError(f"{key}: expected it in the state dict, found {found}")
    for number, group in enumerate(state_dict["param_groups"]):
        _refuse_group(f"param_groups[{number}]", group)
    saved = indexes(state_dict)
    _refuse_keys(optimizer, state_dict["state"], saved)
    given: Dict[str, Any] = optimizer._converted(dict(state_dict))
    members = members_of(optimizer.param_groups)
    if any_state_dtype:
        given = as_kept(optimizer, given, saved, members)
    of_group = [
        _whole_group(optimizer, index, group) for index, group in enumerate(given["param_groups"])
    ]
    for index, member in zip(saved, members):
        if member.group < len(of_group):
            own = given["state"].get(index, {})
            _refuse_state(optimizer, member, own, of_group[member.group])
    if "loss_scale" in given:
        scale_loaded(optimizer._options["loss_scale"], given["loss_scale"])
    return given


def _refuse_group(where: str, group: Any) -> None:
    """Raises for what is no group at all."""
    if not isinstance(group, Mapping) or "params" not in group:
        raise ValueError(f"{where}: expected a dict with `params`, found {kind_of(group)}")
    params, names = group["params"], group.get("param_names")
    try:
        keys = {*params} if isinstance(params, (list, tuple)) else None
    except TypeError:
        # What is no key of a dict has no state.
        keys = None
    if keys is None:
        raise ValueError(f"{where}: expected `params`, a list of indexes, found {params!r}")
    if names is not None:
        if not isinstance(names, (list, tuple)) or len(names) != len(params):
            raise ValueError(
                f"{where}: expected `param_names`, a list of {len(params)} names, found {names!r}"
            )


def _refuse_keys(optimizer: Fused, state: Mapping[Any, Any], saved: Sequence[Any]) -> None:
    """Raises for state of no parameter, since the parameter that it is of would start anew."""
    owners = {key for key in optimizer._kept_state()[0] if not isinstance(key, Tensor)}
    known = owners.union(saved)
    others = [key for key in state if key not in known]
    if others:
        raise ValueError(
            f"state: expected the indexes of the groups as keys ({', '.join(map(repr, saved[:3]))} "
            f"and so on), found {others[0]!r}; give it its index (JSON makes words of numbers), or "
            "take it out"
        )


def _whole_group(optimizer: Fused, index: int, group: Mapping[str, Any]) -> Dict[str, Any]:
    """A group with what PyTorch fills in; raises unless it is one of the optimizer's rule."""
    kind, where = type(optimizer).__name__, f"param_groups[{index}]"
    filled = {name: _FILLED_IN[name] for name in _FILLED_IN} if optimizer._fills_in else {}
    whole = {**filled, **group}
    missing = sorted(optimizer.defaults.keys() - whole.keys() - {"differentiable"})
    missing = [name for name in missing if name not in optimizer._fills_in]
    if missing:
        raise ValueError(
            f"{where}: expected the settings of {kind}, found none for {', '.join(missing)}; load "
            f"the state of {kind}, or add them to the group if it is that"
        )
    groups = optimizer.param_groups
    _refuse_others(optimizer, where, group, groups[index] if index < len(groups) else {})
    value = whole.get("differentiable")
    if value is not None and not _is_same(value, False):
        raise ValueError(
            f"{where}: expected differentiable=False, because steps run in place, found {value!r}; "
            "set it in the state dict"
        )
    value = whole.get("capturable")
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where}: expected capturable=False or True, found {value!r}")
    refuse_capturable({**whole, "params": groups[index]["params"] if index < len(groups) else ()})
    try:
        refuse_bools(whole)
        _fusestep.check(optimizer._settings(whole))
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"{where}: expected settings of {kind}, found {error}") from error
    return whole


def _refuse_others(
    optimizer: Fused, where: str, group: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """Raises for settings of other rules and packages, unless the optimizer's own group has them,
    where they are its owner's."""
    kind = type(optimizer).__name__
    known = optimizer.defaults.keys() | optimizer._fills_in
    for name in sorted(group.keys() & _OTHERS.keys() - known):
        value, neutral = group[name], _OTHERS[name]
        if name in own and _is_same(value, own[name]):
            continue
        if neutral is not ... and _is_same(value, neutral):
            continue
        works = "load the state of that optimizer's own class"
        if neutral is not ...:
            works = f"{kind} goes on from {name}={neutral!r}"
        if name in own:
            works = f"the optimizer's own group has {own[name]!r}: set both alike"
        raise ValueError(
            f"{where}: expected the settings of {kind}, found {name}={value!r}; {works}"
        )


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of any kind are equal, in all elements."""
    try:
        same = one == other
        return bool(same.all() if hasattr(same, "all") else same)
    except (TypeError, ValueError, RuntimeError):
        # Of shapes that do not fit.
        return False


def _refuse_state(optimizer: Fused, member: Member, own: Any, group: Dict[str, Any]) -> None:
    """Raises unless a parameter's state is all that its rule goes on from, or none."""
    kind, name = type(optimizer).__name__, member.name
    if not isinstance(own, Mapping):
        raise ValueError(f"state of `{name}`: expected a dict, found {kind_of(own)}")
    tensors = {*optimizer._all_keys().values()}
    tensors |= {"trained"} if "train_mode" in optimizer.defaults else set()
    known = {*tensors, "step"} if optimizer._counts else tensors
    present = {key for key in tensors if own.get(key) is not None}
    for key in sorted(present):
        _refuse_tensor(optimizer, member, key, own[key])
    others = sorted(key for key in own if key in _OTHER_STATE and key not in known)
    names = optimizer._own_names(member.tensor, group)
    expected = ", ".join(names) or "none"
    if others:
        raise ValueError(
            f"state of `{name}`: expected that of {kind} ({expected}), found {', '.join(others)}"
        )
    for key in sorted(present.intersection(BESIDE)):
        if not optimizer._options.get(_OPTION_OF[key]):
            works = _MADE_WITH.get(own[key].dtype, True)
            raise ValueError(
                f"{key} of `{name}`: expected none, because the optimizer keeps none, found one; "
                f"make it with `master_weights={works!r}`, or take the entry out of the state dict"
            )
    if not optimizer._counts or not own:
        return
    if "step" not in own:
        raise ValueError(
            f"step of `{name}`: expected a count of steps beside its state, found none among "
            f"{', '.join(map(str, own))}"
        )
    count = _count(name, own["step"])
    missing = [key for key in names if key not in present]
    if count and missing:
        raise ValueError(
            f"{missing[0]} of `{name}`: expected a tensor, because it has stepped {count} times, "
            f"found none among {', '.join(map(str, own))}"
        )
    # What Adagrad has before its first step is a setting of PyTorch's.
    for key in sorted(present - {"sum", *BESIDE}) if count == 0 else ():
        if bool(local_of(own[key]).any()):
            raise ValueError(
                f"{key} of `{name}`: expected zeros, because `step` is 0, found other values"
            )


def _refuse_whole(member: Member, key: str, value: Any) -> None:
    """Raises for whole state of a parameter that is a DTensor, and for parts of another's."""
    if isinstance(value, Tensor) and is_sharded(value) != is_sharded(member.tensor):
        kinds = {True: "a DTensor", False: "a whole tensor"}
        raise ValueError(
            f"{key} of `{member.name}`: expected {kinds[is_sharded(member.tensor)]} like the "
            f"parameter, found {kinds[is_sharded(value)]}; `set_optimizer_state_dict` of "
            "torch.distributed.checkpoint.state_dict takes either"
        )


def _refuse_tensor(optimizer: Fused, member: Member, key: str, value: Any) -> None:
    _refuse_whole(member, key, value)
    shape = () if is_lazy(member.tensor) else shape_of(member.tensor, key)
    dtype, kind = optimizer._state_dtype(member.tensor, key), "floats"
    dtypes: Sequence[torch.dtype] = FLOATING
    if key == "remainder":
        _refuse_remainder(optimizer, member, value)
        dtypes, kind = _REMAINDERS, str(dtype)
    elif isinstance(value, Tensor) and torch.uint8 in (dtype, value.dtype):
        if tuple(value.shape) == shape:
            _refuse_codes(member, key, value, dtype)
        dtypes, kind = (torch.uint8,), str(dtype)
    fits = isinstance(value, Tensor) and value.dtype in dtypes
    fits = fits and value.layout.__str__() == "torch.strided" and value.device.type != "meta"
    if fits and is_lazy(member.tensor):
        # It has no shape yet.
        shape = tuple(value.shape)
    if not fits or tuple(value.shape) != shape or has_no_storage(local_of(value)):
        raise ValueError(
            f"{key} of `{member.name}`: expected a dense, real tensor of {kind} of shape {shape}, "
            f"found {kind_of(value)}"
        )
    if is_units(key) and bool((value < 0).any()):
        raise ValueError(
            f"{key} of `{member.name}`: expected units of at least 0, found {value.min().item()}"
        )


def _refuse_remainder(optimizer: Fused, member: Member, value: Any) -> None:
    """Raises for remainders of 16 bits where the optimizer keeps 8, and the other way round."""
    dtype = optimizer._state_dtype(member.tensor, "remainder")
    is_kept = optimizer._options.get("remainder") and isinstance(value, Tensor)
    if is_kept and value.dtype != dtype and value.dtype in _REMAINDERS:
        raise ValueError(
            f"remainder of `{member.name}`: expected one of {dtype}, found one of {value.dtype}; "
            "load it with `any_state_dtype=True`, or make the optimizer with the state dict's own "
            f"`master_weights`, {_MADE_WITH[value.dtype]} here, and its `keep_f32`"
        )


def _refuse_codes(member: Member, key: str, value: Tensor, dtype: torch.dtype) -> None:
    """Raises for codes where the optimizer keeps floats, and for floats where it keeps codes."""
    if value.dtype != dtype:
        works = {True: "int8", False: "f32"}[value.dtype == torch.uint8]
        raise ValueError(
            f"{key} of `{member.name}`: expected state of {dtype}, found one of {value.dtype}; "
            f"load it with `any_state_dtype=True`, or make the optimizer with the state dict's own "
            f"`state_dtype`, {works} here"
        )


def _count(name: str, value: Any) -> int:
    """How many steps a parameter has taken."""
    number = float("nan")
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex() and value.device.type != "meta":
            number = float(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    if not 0 <= number < _MOST_STEPS or number != int(number):
        found = kind_of(value) if number != number else repr(value)
        raise ValueError(
            f"step of `{name}`: expected a number or a tensor of one element, whole and from 0 on, "
            f"found {found}"
        )
    return int(number)


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"one of {value.dtype}, {value.layout}, shape {tuple(value.shape)}"


def indexes(state_dict: Mapping[str, Any]) -> List[Any]:
    """The parameters of a state dict, in the order of its groups."""
    return [index for group in state_dict["param_groups"] for index in group["params"]]
