"""Writes fused_sgd.safetensors, by PyTorch's SGD; common.py says how, and what lies in the file.

PyTorch runs on the CPU, one tensor at a time, in the parameter's own dtype. It has neither a rescaled gradient nor decoupled decay:
for the one the gradient is multiplied beforehand, for the other the parameter is multiplied by 1 - lr * weight_decay before its
step. The velocity is there with momentum.
"""

import numpy
import safetensors
import torch
from common import KEPT, STEPS, elements, versions


def run(name, settings, dtype, numel, tensors):
    key = f"{dtype}.{numel}"
    param = torch.nn.Parameter(torch.from_numpy(tensors[f"{key}.param.0"].copy()))
    decoupled = settings["decay"] == "decoupled"
    rule = torch.optim.SGD([param], lr=settings["lr"], momentum=settings["momentum"], dampening=settings["dampening"],
                           nesterov=settings["nesterov"], weight_decay=0.0 if decoupled else settings["weight_decay"],
                           maximize=settings["maximize"], foreach=False)
    for step in range(1, STEPS + 1):
        param.grad = torch.from_numpy(tensors[f"{key}.grad.{step}"].copy()) * settings["rescale"]
        if decoupled:
            param.data.mul_(1 - settings["lr"] * settings["weight_decay"])
        rule.step()
        if step in KEPT:
            tensors[f"{name}.{key}.param.{step}"] = param.detach().numpy().copy()
    if settings["momentum"] > 0:
        tensors[f"{name}.{key}.velocity.{STEPS}"] = rule.state[param]["momentum_buffer"].numpy().copy()


torch.set_num_threads(1)
elements(
    __file__, run, versions(torch, numpy, safetensors), seed=20240301, decades=(-4, 1),
    base={"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "decay": "l2", "rescale": 1.0,
          "maximize": False},
    cases={
        "sgd": {"momentum": 0.0},
        "sgd_l2": {"momentum": 0.0, "weight_decay": 0.3, "lr": 0.1},
        "momentum": {},
        "momentum_l2": {"weight_decay": 0.1, "momentum": 0.99},
        "momentum_decoupled": {"weight_decay": 0.5, "decay": "decoupled"},
        "momentum_rescaled": {"rescale": 0.1, "weight_decay": 0.01},
        "dampening": {"dampening": 0.4, "weight_decay": 0.01},
        "nesterov": {"nesterov": True},
        "nesterov_l2_maximize": {"nesterov": True, "weight_decay": 0.05, "maximize": True, "lr": 0.1},
    },
)
