"""What every class takes besides PyTorch's arguments."""

from __future__ import annotations

from typing import Any, Dict

import torch

def checked(options: Dict[str, Any]) -> Dict[str, Any]:
    """The options with defaults filled in.

    Raises ``ValueError`` that names the option, what was expected and what was found.
    """
    norm, scale = options.get("clip_norm"), options.get("loss_scale")
    if norm is not None:
        norm = float(norm)
        if not 0.0 < norm < float("inf"):
            raise ValueError(f"clip_norm: expected a finite value above 0, found {norm}")
    if scale is not None and scale != "dynamic" and not isinstance(scale, tuple):
        try:
            scale = float(scale)
        except ValueError:
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
