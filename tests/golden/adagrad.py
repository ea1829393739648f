"""Writes adagrad.safetensors: what PyTorch's Adagrad makes of seeded parameters and gradients.

    python -m venv venv && venv/bin/pip install torch==2.7.1 numpy safetensors==0.8.0
    venv/bin/python tests/golden/adagrad.py

PyTorch runs on the CPU, one tensor at a time, in the parameter's own dtype. All cases start from the same parameters and see the
same gradients. Metadata: `versions`, `seed`, and each case's settings as JSON under `case.<name>`. Tensors:

    <dtype>.<numel>.param.0             before the first step
    <dtype>.<numel>.grad.<step>         gradient of step 1 ..= 10
    <case>.<dtype>.<numel>.param.<step>    after 1, 2 and 10 steps
    <case>.<dtype>.<numel>.sum.10
"""

import json
import platform
from pathlib import Path

import numpy
import safetensors
import torch
from safetensors.numpy import save_file

SEED = 20240302
NUMELS = [0, 1, 17, 257]
STEPS = 10
KEPT = [1, 2, 10]
DTYPES = {"f32": torch.float32, "f64": torch.float64}

BASE = {"lr": 1e-2, "lr_decay": 0.0, "initial_sum": 0.0, "eps": 1e-10, "weight_decay": 0.0, "maximize": False}
CASES = {
    "adagrad": {},
    "lr_decay": {"lr_decay": 0.3, "lr": 0.1},
    "initial_sum": {"initial_sum": 0.1},
    "l2": {"weight_decay": 0.1, "eps": 1e-6},
    "everything": {"lr": 0.05, "lr_decay": 0.01, "initial_sum": 1e-3, "eps": 1e-4, "weight_decay": 0.3, "maximize": True},
}


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
    rule = torch.optim.Adagrad([param], lr=settings["lr"], lr_decay=settings["lr_decay"], eps=settings["eps"],
                               initial_accumulator_value=settings["initial_sum"], weight_decay=settings["weight_decay"],
                               maximize=settings["maximize"], foreach=False)
    for step in range(1, STEPS + 1):
        param.grad = torch.from_numpy(tensors[f"{key}.grad.{step}"].copy())
        rule.step()
        if step in KEPT:
            tensors[f"{name}.{key}.param.{step}"] = param.detach().numpy().copy()
    tensors[f"{name}.{key}.sum.{STEPS}"] = rule.state[param]["sum"].numpy().copy()


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
