"""Writes rmsprop.safetensors, by PyTorch's RMSprop; common.py says how, and what lies in the file."""

import torch
from pytorch import write

write(
    __file__, torch.optim.RMSprop, seed=20261124,
    lists={"moment2": "square_avg", "moment1": "grad_avg", "velocity": "momentum_buffer"},
    base={"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0, "centered": False, "maximize": False},
    cases={
        "rmsprop": {},
        "momentum": {"momentum": 0.9, "lr": 1e-3},
        "centered": {"centered": True},
        "l2": {"weight_decay": 0.1, "alpha": 0.9, "eps": 1e-6},
        "everything": {"lr": 5e-3, "alpha": 0.95, "eps": 1e-4, "momentum": 0.5, "weight_decay": 0.3, "centered": True,
                       "maximize": True},
    },
)
