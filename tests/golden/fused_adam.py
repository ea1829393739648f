"""Writes fused_adam.safetensors, by PyTorch's Adam and AdamW; common.py says how, and what lies in the file."""

import torch
from pytorch import write


def make(params, decay, **settings):
    return {"decoupled": torch.optim.AdamW, "l2": torch.optim.Adam}[decay](params, **settings)


write(
    __file__, make, seed=20240229,
    lists={"moment1": "exp_avg", "moment2": "exp_avg_sq", "max_moment2": "max_exp_avg_sq"},
    base={"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01,
          "decay": "decoupled", "amsgrad": False, "maximize": False},
    cases={
        "adamw": {},
        "adamw_strong_decay": {"lr": 1e-2, "weight_decay": 0.3},
        "adamw_no_decay_large_eps": {"lr": 2e-3, "weight_decay": 0.0, "eps": 1e-3},
        "adamw_amsgrad": {"amsgrad": True},
        "adamw_maximize": {"maximize": True, "lr": 5e-3},
        "adam": {"decay": "l2", "weight_decay": 0.0, "beta1": 0.78, "beta2": 0.836, "eps": 1e-4},
        "adam_l2": {"decay": "l2", "weight_decay": 0.1},
        "adam_l2_maximize_amsgrad": {"decay": "l2", "weight_decay": 0.05, "amsgrad": True, "maximize": True, "lr": 0.1, "eps": 1e-6},
        "adam_no_momentum": {"decay": "l2", "weight_decay": 0.0, "beta1": 0.0, "beta2": 0.99},
    },
)
