"""Writes rmsprop.safetensors: what PyTorch's RMSprop makes of seeded parameters and gradients.

    python -m venv venv && venv/bin/pip install torch==2.7.1 numpy safetensors==0.8.0
    venv/bin/python tests/golden/rmsprop.py

PyTorch runs on the CPU, one tensor at a time, in the parameter's own dtype. All cases start from the same parameters and see the
same gradients. Metadata: `versions`, `seed`, and each case's settings as JSON under `case.<name>`. Tensors:

    <dtype>.<numel>.param.0             before the first step
    <dtype>.<numel>.grad.<step>         gradient of step 1 ..= 10
    <case>.<dtype>.<numel>.param.<step>    after 1, 2 and 10 steps
    <case>.<dtype>.<numel>.moment2.10      PyTorch's square_avg
    <case>.<dtype>.<numel>.moment1.10      its grad_avg, if centered
    <case>.<dtype>.<numel>.velocity.10     its momentum_buffer, with momentum
"""

import json
import platform
from pathlib import Path

import numpy
import safetensors
import torch
from safetensors.numpy import save_file

SEED = 20261124
NUMELS = [0, 1, 17, 257]
STEPS = 10
KEPT = [1, 2, 10]
DTYPES = {"f32": torch.float32, "f64": torch.float64}

BASE = {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "weight_decay": 0.0, "centered": False, "maximize": False}
CASES = {
    "rmsprop": {},
    "momentum": {"momentum": 0.9, "lr": 1e-3},
    "centered": {"centered": True},
    "l2": {"weight_decay": 0.1, "alpha": 0.9, "eps": 1e-6},
    "everything": {"lr": 5e-3, "alpha": 0.95, "eps": 1e-4, "momentum": 0.5, "weight_decay": 0.3, "centered": True, "maximize": True},
}
LISTS = {"moment2": "square_avg", "moment1": "grad_avg", "velocity": "momentum_buffer"}


def inputs():
    """Parameters as after a usual initialisation; gradients whose sizes differ from element to element and step to step."""
    rng = numpy.random.default_rng(SEED)
    tensors = {}
    for dtype, kind in (("f32", numpy.float32), ("f64", numpy.float64)):
        for numel in NUMELS:
            tensors[f"{dtype}.{numel}.param.0"] = (0.02 * rng.standard_normal(numel)).astype(kind)
            spread = 10.0 ** rng.uniform(-5, 0, numel)
            for step in range(1, STEPS + 1):
                grad = spread * (0.3 + rng.standard_normal(numel))
                grad[rng.random(numel) < 0.05] = 0.0
                tensors[f"{dtype}.{numel}.grad.{step}"] = grad.astype(kind)
    return tensors


def run(name, settings, dtype, numel, tensors):
    key = f"{dtype}.{numel}"
    param = torch.nn.Parameter(torch.from_numpy(tensors[f"{key}.param.0"].copy()).to(DTYPES[dtype]))
    rule = torch.optim.RMSprop([param], lr=settings["lr"], alpha=settings["alpha"], eps=settings["eps"],
                               weight_decay=settings["weight_decay"], momentum=settings["momentum"],
                               centered=settings["centered"], maximize=settings["maximize"], foreach=False)
    for step in range(1, STEPS + 1):
        param.grad = torch.from_numpy(tensors[f"{key}.grad.{step}"].copy())
        rule.step()
        if step in KEPT:
            tensors[f"{name}.{key}.param.{step}"] = param.detach().numpy().copy()
    for list, theirs in LISTS.items():
        if theirs in rule.state[param]:
            tensors[f"{name}.{key}.{list}.{STEPS}"] = rule.state[param][theirs].numpy().copy()


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
