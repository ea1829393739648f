"""Writes fused_sgd.safetensors: what PyTorch's SGD makes of seeded parameters and gradients.

    python -m venv venv && venv/bin/pip install torch==2.7.1 numpy safetensors==0.8.0
    venv/bin/python tests/golden/fused_sgd.py

PyTorch runs on the CPU, one tensor at a time, in the parameter's own dtype. It has neither a rescaled gradient nor decoupled decay:
for the one the gradient is multiplied beforehand, for the other the parameter is multiplied by 1 - lr * weight_decay before its
step. All cases start from the same parameters and see the same gradients. Metadata: `versions`, `seed`, and each case's settings as
JSON under `case.<name>`. Tensors:

    <dtype>.<numel>.param.0             before the first step
    <dtype>.<numel>.grad.<step>         gradient of step 1 ..= 10
    <case>.<dtype>.<numel>.param.<step>    after 1, 2 and 10 steps
    <case>.<dtype>.<numel>.velocity.10     with momentum
"""

import json
import platform
from pathlib import Path

import numpy
import safetensors
import torch
from safetensors.numpy import save_file

SEED = 20240301
NUMELS = [0, 1, 17, 257]
STEPS = 10
KEPT = [1, 2, 10]
DTYPES = {"f32": torch.float32, "f64": torch.float64}

BASE = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0, "decay": "l2", "rescale": 1.0,
        "maximize": False}
CASES = {
    "sgd": {"momentum": 0.0},
    "sgd_l2": {"momentum": 0.0, "weight_decay": 0.3, "lr": 0.1},
    "momentum": {},
    "momentum_l2": {"weight_decay": 0.1, "momentum": 0.99},
    "momentum_decoupled": {"weight_decay": 0.5, "decay": "decoupled"},
    "momentum_rescaled": {"rescale": 0.1, "weight_decay": 0.01},
    "dampening": {"dampening": 0.4, "weight_decay": 0.01},
    "nesterov": {"nesterov": True},
    "nesterov_l2_maximize": {"nesterov": True, "weight_decay": 0.05, "maximize": True, "lr": 0.1},
}


def inputs():
    """Parameters as after a usual initialisation; gradients whose sizes differ from element to element and step to step."""
    rng = numpy.random.default_rng(SEED)
    tensors = {}
    for dtype, kind in (("f32", numpy.float32), ("f64", numpy.float64)):
        for numel in NUMELS:
            tensors[f"{dtype}.{numel}.param.0"] = (0.02 * rng.standard_normal(numel)).astype(kind)
            spread = 10.0 ** rng.uniform(-4, 1, numel)
            for step in range(1, STEPS + 1):
                grad = spread * (0.3 + rng.standard_normal(numel))
                grad[rng.random(numel) < 0.05] = 0.0
                tensors[f"{dtype}.{numel}.grad.{step}"] = grad.astype(kind)
    return tensors


def run(name, settings, dtype, numel, tensors):
    key = f"{dtype}.{numel}"
    param = torch.nn.Parameter(torch.from_numpy(tensors[f"{key}.param.0"].copy()).to(DTYPES[dtype]))
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


def main():
    torch.set_num_threads(1)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__,
                "safetensors": safetensors.__version__}
    print(versions)
    tensors = inputs()
    metadata = {"versions": json.dumps(versions), "seed": str(SEED)}
    for name, changes in CASES.items():
        settings = BASE | changes
        metadata[f"case.{name}"] = json.dumps(settings)
        for dtype in DTYPES:
            for numel in NUMELS:
                run(name, settings, dtype, numel, tensors)
    path = Path(__file__).with_suffix(".safetensors")
    save_file(tensors, path, metadata)
    print(f"{path.name}: {len(tensors)} tensors, {path.stat().st_size} bytes")


main()
