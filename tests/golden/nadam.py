"""Writes nadam.safetensors, by PyTorch's NAdam; common.py says how, and what lies in the file."""

import torch
from pytorch import write

write(
    __file__, torch.optim.NAdam, seed=20261130, lists={"moment1": "exp_avg", "moment2": "exp_avg_sq"},
    base={"lr": 2e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "decoupled": False,
          "momentum_decay": 4e-3, "maximize": False},
    cases={
        "nadam": {},
        "l2": {"weight_decay": 0.1, "lr": 1e-2},
        "decoupled": {"weight_decay": 0.1, "lr": 1e-2, "decoupled": True},
        "late": {"beta1": 0.5, "beta2": 0.8, "eps": 1e-4, "momentum_decay": 1.5},
        "everything": {"lr": 5e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.3, "decoupled": True,
                       "momentum_decay": 0.1, "maximize": True},
    },
)
