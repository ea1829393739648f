"""Writes schedule_free.safetensors, by the authors' AdamWScheduleFree; common.py says how, and what lies in the file.

The package runs on the CPU, one tensor at a time, in the parameter's own dtype, in train mode: `param` is y, `base` is z, `moment2` is
exp_avg_sq, and `average` is the parameter in eval mode.
"""

from importlib.metadata import version

import numpy
import safetensors
import schedulefree
import torch
from common import KEPT, STEPS, elements, versions


def run(name, settings, dtype, numel, tensors):
    key = f"{dtype}.{numel}"
    param = torch.nn.Parameter(torch.from_numpy(tensors[f"{key}.param.0"].copy()))
    rule = schedulefree.AdamWScheduleFree([param], lr=settings["lr"], betas=(settings["beta1"], settings["beta2"]),
                                          eps=settings["eps"], weight_decay=settings["weight_decay"],
                                          warmup_steps=settings["warmup_steps"], foreach=False)
    rule.train()
    for step in range(1, STEPS + 1):
        param.grad = torch.from_numpy(tensors[f"{key}.grad.{step}"].copy())
        rule.step()
        if step in KEPT:
            tensors[f"{name}.{key}.param.{step}"] = param.detach().numpy().copy()
    tensors[f"{name}.{key}.moment2.{STEPS}"] = rule.state[param]["exp_avg_sq"].numpy().copy()
    tensors[f"{name}.{key}.base.{STEPS}"] = rule.state[param]["z"].numpy().copy()
    rule.eval()
    tensors[f"{name}.{key}.average.{STEPS}"] = param.detach().numpy().copy()


torch.set_num_threads(1)
elements(
    __file__, run, versions(torch, numpy, safetensors) | {"schedulefree": version("schedulefree")}, seed=20261124,
    base={"lr": 2.5e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0},
    cases={
        "schedule_free": {},
        "warmup": {"warmup_steps": 4, "lr": 1e-2},
        "long_warmup": {"warmup_steps": 100, "lr": 1.0},
        "decay": {"weight_decay": 0.1},
        "everything": {"lr": 0.05, "beta1": 0.95, "beta2": 0.9, "eps": 1e-4, "weight_decay": 0.3, "warmup_steps": 7},
    },
)
