"""Settings of the step: arguments that the classes and `DataParallel` have besides PyTorch's."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, Iterable, List, Optional, Sequence, Tuple

import torch

from fusestep import _fusestep
from fusestep.torch._precision import PRECISION

# The rows of the table of settings, by name.
TABLE: Dict[str, Dict[str, Any]] = {row["name"]: row for row in _fusestep.settings()}

# Settings that other modules read or name.
ACCUMULATE = "accumulate"
CLIP_NORM = "clip_norm"
LANES = "lanes"
REDUCE_DTYPE = "reduce_dtype"

# Settings that PyTorch's own objects have, and which.
_ELSEWHERE = {
    "exclude": "a parameter group with `weight_decay=0`",
    "lr_scale": "a parameter group with an `lr` of its own",
    "weight_decay_of": "a parameter group with a `weight_decay` of its own",
    "trust_of": "a parameter group with `trust_ratio=False`",
    "threads": "`torch.set_num_threads`",
}


def _is_of_ranks(row: Dict[str, Any]) -> bool:
    # These act on one rank, too, but their sums lie in memory of ranks.
    is_kept = row["section"] == "backward" or row["name"] in (LANES, REDUCE_DTYPE)
    return bool(row["alone"] != row["name"] or is_kept)


# What every class takes, and what `DataParallel` takes.
OPTIONS = frozenset(n for n, row in TABLE.items() if n not in _ELSEWHERE and not _is_of_ranks(row))
OPTIONS_OF_RANKS = frozenset(name for name, row in TABLE.items() if _is_of_ranks(row))

# Settings that follow the count of steps, which one process has in the state of each parameter.
_COUNTED = ("schedule", "rounding")

Texts = Dict[str, List[str]]

_DTYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int8: "int8",
}

# What state is kept in, where it is not what the parameter says.
_STATE_DTYPES = {"bf16": torch.bfloat16, "int8": torch.uint8}


def described(names: Iterable[str]) -> str:
    """Lines of a docstring on these settings."""
    lines = []
    for name in (name for name in TABLE if name in names):
        row = TABLE[name]
        default = "" if row["default"] is None else f"; {row['default']} by default"
        values = row["range"][0].upper() + row["range"][1:]
        lines.append(f"    * ``{name}``: {row['says']} {values}{default}.\n")
    return "".join(lines)


def _text(name: str, value: Any) -> str:
    """The text of one value."""
    row = TABLE[name]
    is_truth = isinstance(value, bool)
    if row["is_switch"]:
        if is_truth:
            return str(value).lower()
        raise TypeError(f"{name}: expected True or False, found {value!r}")
    if is_truth and name == "master_weights":
        return "f32" if value else "none"
    if isinstance(value, str):
        return value
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value, str(value))
    if not is_truth:
        try:
            return str(value) if isinstance(value, int) else repr(float(value))
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise TypeError(f"{name}: expected {row['range']}, found {value!r}")


def texts_of(given: Dict[str, Any], beside: Optional[Texts] = None) -> Texts:
    """Texts of settings as the table reads them, with those ``beside`` them; ``None`` is a
    setting's default.

    Raises ``TypeError`` and ``ValueError`` in the table's words.
    """
    texts: Texts = {}
    for name, value in given.items():
        if value is None:
            continue
        is_list = TABLE[name]["is_list"] and isinstance(value, (list, tuple, set, frozenset))
        texts[name] = [_text(name, one) for one in (value if is_list else [value])]
    _fusestep.check_settings({**(beside or {}), **texts})
    return texts


def taken(kind: str, settings: Dict[str, Any], own: FrozenSet[str]) -> Dict[str, Any]:
    """Takes settings of the table out of keyword arguments; raises for those of another place."""
    found = {name: settings.pop(name) for name in TABLE if name in settings}
    for name in sorted(found.keys() - own):
        works = _ELSEWHERE.get(name)
        if works is None and name in OPTIONS_OF_RANKS:
            works = "it as an argument of `DataParallel`"
            if TABLE[name]["section"] == "backward":
                works += ", or `fuse_backward(model, optimizer)` in one process"
            if name == LANES:
                works += (
                    ", whose ranks keep sums of lanes apart from PyTorch's tensors (a program that "
                    "runs alone is a rank with FUSESTEP_ALONE=1), or `accumulate=` in one process"
                )
        works = works or "it as an argument of the optimizer"
        raise TypeError(f"{name}: expected {works}, found it as an argument of `{kind}`")
    return found


def checked(given: Dict[str, Any]) -> Dict[str, Any]:
    """The options of an optimizer: texts of its settings, and the values that Python itself reads.

    Raises as :func:`texts_of`.
    """
    texts = texts_of(given)
    said = {name: own[0] for name, own in texts.items() if own}
    master, state = said.get("master_weights"), said.get("state_dtype", "f32")
    if master == "remainder8" and state != "int8":
        raise ValueError(
            "master_weights: expected none, f32 or remainder, unless state is in int8, found "
            f"remainder8 beside state in {state}; give state_dtype=\"int8\" too"
        )
    scale: Any = said.get("loss_scale")
    try:
        scale = None if scale is None else float(scale)
    except ValueError:
        pass  # One that moves.
    return {
        "texts": texts,
        CLIP_NORM: float(said[CLIP_NORM]) if CLIP_NORM in said else None,
        "loss_scale": scale,
        # Where a scale that moves was when its plan was put away.
        "loss_scale_at": None,
        ACCUMULATE: int(said.get(ACCUMULATE, 1)),
        "sums": said.get("accumulated") == "sum",
        "master_weights": master == "f32",
        "remainder": master in ("remainder", "remainder8"),
        "remainder8": master == "remainder8",
        "update_norms": said.get("update_norms") == "true",
        "state_dtype": _STATE_DTYPES.get(state),
        "keep_f32": tuple(texts.get("keep_f32", ())),
    }


def told(options: Dict[str, Any]) -> Dict[str, Any]:
    """The options as the extension module reads them."""
    return {"settings": options["texts"], "loss_scale_at": options["loss_scale_at"]}


def refuse_counted(kind: str, options: Dict[str, Any], why: str) -> None:
    """Raises for settings that follow the count of steps."""
    for name in _COUNTED:
        for text in options["texts"].get(name, []):
            if text != TABLE[name]["default"]:
                raise ValueError(f"{name}: expected {why}, found `{text}` of {kind}")


def refuse_on_device(options: Dict[str, Any], device: str) -> None:
    """Raises for settings that steps on a device do not have."""
    if options["update_norms"]:
        raise ValueError(
            "update_norms: expected parameters on the cpu, because steps on borrowed tensors of a "
            f"device do not sum up what they change, found them on {device}; leave it out"
        )


def refuse_between_devices(
    options: Dict[str, Any], devices: Sequence[str], is_sharded: bool
) -> None:
    """Raises for settings that take sums which plans of several devices do not share."""
    refused = ["update_norms"] + ([CLIP_NORM, "loss_scale"] if is_sharded else [])
    for name in refused:
        if options[name]:
            what = "DTensors" if is_sharded else "parameters"
            raise ValueError(
                f"{name}: expected {what} of one device, because sums are added for each alone, "
                f"found them on {' and '.join(devices)}; make an optimizer for each device, or "
                "leave it out"
            )


# Settings that are numbers, in the groups of all rules.
_NUMBERS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "dampening",
    "alpha",
    "lr_decay",
    "initial_accumulator_value",
    "trust_coefficient",
    "warmup_steps",
)


# Arguments of peers' classes: the value with which they change nothing here, and what has the
# others' effect.
_PEERS: Dict[str, Tuple[Any, str]] = {
    "adam_w_mode": (True, "decay is always taken from the parameter"),
    "adamw_mode": (True, "decay is always taken from the parameter"),
    "amsgrad": (False, "`AdamW` has it"),
    "always_adapt": (False, "groups with `trust_ratio=False` take the plain rate"),
    "bias_correction": (True, "no rule goes without"),
    "capturable": (False, "steps on a CUDA device can be recorded without it"),
    "dampening": (0, "`SGD` has it"),
    "differentiable": (False, "steps run in place"),
    "grad_averaging": (True, "no rule goes without"),
    "max_grad_norm": (None, f"use `{CLIP_NORM}=`"),
    "maximize": (False, "`AdamW`, `SGD`, `Adagrad`, `RMSprop` and `Lion` have it"),
    "nesterov": (False, "`SGD` has it"),
    "r": (0, "weights of the average follow from the warm-up alone"),
    "set_grad_none": (True, "call `zero_grad`"),
    "weight_lr_power": (2, "weights of the average follow from the warm-up alone"),
}
_NO_EFFECT = ("foreach", "fused")


def refuse_unknown(kind: str, settings: Dict[str, Any], given: Dict[str, Any]) -> None:
    """Drops peers' arguments that change nothing from those given besides the settings, and raises
    for others that are unknown."""
    for name in sorted(given.keys() - TABLE.keys() - {PRECISION}):
        peers = _PEERS.get(name)
        if peers is None and name not in _NO_EFFECT:
            own = ", ".join([*settings, *sorted(OPTIONS), PRECISION])
            raise TypeError(f"{kind}: expected arguments out of {own}, found {name}")
        if peers is not None and given[name] != peers[0]:
            raise TypeError(
                f"{kind}: expected {name}={peers[0]!r}, which is what it does, found "
                f"{name}={given[name]!r}; {peers[1]}"
            )
        del given[name]


def refuse_bools(group: Dict[str, Any]) -> None:
    """Raises for a number of a group that is Python's ``True`` or ``False``."""
    for name in _NUMBERS:
        value = group.get(name)
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, bool):
                raise TypeError(f"{name}: expected a number, found {value!r}")


def scale_loaded(own: Any, saved: Any) -> Tuple[float, int, int]:
    """The dynamic loss scale of a state dict, for an optimizer whose own is ``own``."""
    try:
        scale, good, bad = saved
        if any(isinstance(value, bool) for value in saved):
            raise TypeError("True is no number")
        loaded = float(scale), int(good), int(bad)
        fits = 0.0 < loaded[0] < float("inf") and min(loaded[1:]) >= 0
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ValueError(
            "loss_scale: expected a number above 0 and two counts in the state dict, "
            f"found {saved!r}"
        )
    if own is None or isinstance(own, float):
        raise ValueError(
            f"loss_scale: expected a state dict without one, because this optimizer's is {own}, "
            f"found {saved!r}; make the optimizer with `loss_scale=\"dynamic\"`, or take the entry "
            "out of the state dict"
        )
    return loaded
