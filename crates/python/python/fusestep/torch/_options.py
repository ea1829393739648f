"""What every class takes besides PyTorch's arguments."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch

from fusestep._checks import positive


def checked(options: Dict[str, Any]) -> Dict[str, Any]:
    """The options with defaults filled in.

    Raises ``ValueError`` that names the option, what was expected and what was found.
    """
    norm, scale = positive("clip_norm", options.get("clip_norm")), options.get("loss_scale")
    if scale is not None and not (isinstance(scale, str) and scale == "dynamic"):
        try:
            scale = float(scale)
        except (TypeError, ValueError, OverflowError):
            scale = float("nan")
        if not 0.0 < scale < float("inf"):
            raise ValueError(
                "loss_scale: expected a finite number above 0 or \"dynamic\", "
                f"found {options['loss_scale']!r}"
            )
    accumulate = options.get("accumulate")
    accumulate = 1 if accumulate is None else accumulate
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: expected a whole number from 1 on, found {accumulate!r}")
    state_dtype = options.get("state_dtype")
    if state_dtype not in (None, torch.float32, torch.bfloat16):
        raise ValueError(
            f"state_dtype: expected torch.float32 or torch.bfloat16, found {state_dtype}"
        )
    return {
        "clip_norm": norm,
        "loss_scale": scale,
        "accumulate": accumulate,
        "master_weights": bool(options.get("master_weights")),
        "update_norms": bool(options.get("update_norms")),
        "state_dtype": state_dtype,
    }


def scale_loaded(own: Any, saved: Any) -> Tuple[float, int, int]:
    """The dynamic loss scale of a state dict, for an optimizer whose own is ``own``."""
    try:
        scale, good, bad = saved
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
