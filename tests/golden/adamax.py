"""Writes adamax.safetensors, by PyTorch's Adamax; common.py says how, and what lies in the file."""

import torch
from pytorch import write

write(
    __file__, torch.optim.Adamax, seed=20261129, lists={"moment1": "exp_avg", "max_grad": "exp_inf"},
    base={"lr": 2e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "maximize": False},
    cases={
        "adamax": {},
        "l2": {"weight_decay": 0.1, "lr": 1e-2},
        "short": {"beta1": 0.5, "beta2": 0.8, "eps": 1e-4},
        "everything": {"lr": 5e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.3, "maximize": True},
    },
)
