"""Writes schedule_free.safetensors: what the authors' AdamWScheduleFree makes of seeded parameters and gradients.

    python -m venv venv && venv/bin/pip install torch==2.7.1 numpy safetensors==0.8.0 schedulefree==1.4.1
    venv/bin/python tests/golden/schedule_free.py

The package runs on the CPU, one tensor at a time, in the parameter's own dtype, in train mode: `param` is y. All cases start from the same
parameters and see the same gradients. Metadata: `versions`, `seed`, and each case's settings as JSON under `case.<name>`. Tensors:

    <dtype>.<numel>.param.0             before the first step
    <dtype>.<numel>.grad.<step>         gradient of step 1 ..= 10
    <case>.<dtype>.<numel>.param.<step>    y after 1, 2 and 10 steps
    <case>.<dtype>.<numel>.moment2.10      exp_avg_sq
    <case>.<dtype>.<numel>.base.10         z
    <case>.<dtype>.<numel>.average.10      the parameter in eval mode
"""

import json
import platform
from importlib.metadata import version
from pathlib import Path

import numpy
import safetensors
import schedulefree
import torch
from safetensors.numpy import save_file

SEED = 20261124
NUMELS = [0, 1, 17, 257]
STEPS = 10
KEPT = [1, 2, 10]
DTYPES = {"f32": torch.float32, "f64": torch.float64}

BASE = {"lr": 2.5e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "warmup_steps": 0}
CASES = {
    "schedule_free": {},
    "warmup": {"warmup_steps": 4, "lr": 1e-2},
    "long_warmup": {"warmup_steps": 100, "lr": 1.0},
    "decay": {"weight_decay": 0.1},
    "everything": {"lr": 0.05, "beta1": 0.95, "beta2": 0.9, "eps": 1e-4, "weight_decay": 0.3, "warmup_steps": 7},
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


def main():
    torch.set_num_threads(1)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__,
                "safetensors": safetensors.__version__, "schedulefree": version("schedulefree")}
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
