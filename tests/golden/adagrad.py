"""Writes adagrad.safetensors, by PyTorch's Adagrad; common.py says how, and what lies in the file."""

import torch
from pytorch import write

write(
    __file__, torch.optim.Adagrad, seed=20240302, lists={"sum": "sum"},
    base={"lr": 1e-2, "lr_decay": 0.0, "initial_sum": 0.0, "eps": 1e-10, "weight_decay": 0.0, "maximize": False},
    cases={
        "adagrad": {},
        "lr_decay": {"lr_decay": 0.3, "lr": 0.1},
        "initial_sum": {"initial_sum": 0.1},
        "l2": {"weight_decay": 0.1, "eps": 1e-6},
        "everything": {"lr": 0.05, "lr_decay": 0.01, "initial_sum": 1e-3, "eps": 1e-4, "weight_decay": 0.3, "maximize": True},
    },
)
