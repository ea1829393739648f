"""Writes lion.safetensors: Algorithm 2 of "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675) in numpy.

    python -m venv venv && venv/bin/pip install numpy safetensors==0.8.0
    venv/bin/python tests/golden/lion.py

The moment is kept in the tensor's own dtype and everything between is f64, so that no rounding of f32 decides a sign. All cases
start from the same parameters and see the same gradients. Metadata: `versions`, `seed`, and each case's settings as JSON under
`case.<name>`. Tensors:

    <dtype>.<numel>.param.0             before the first step
    <dtype>.<numel>.grad.<step>         gradient of step 1 ..= 10
    <case>.<dtype>.<numel>.param.<step>    after 1, 2 and 10 steps
    <case>.<dtype>.<numel>.moment1.10
"""

import json
import platform
from pathlib import Path

import numpy
import safetensors
from safetensors.numpy import save_file

SEED = 20240303
NUMELS = [0, 1, 17, 257]
STEPS = 10
KEPT = [1, 2, 10]
DTYPES = {"f32": numpy.float32, "f64": numpy.float64}

BASE = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "maximize": False}
CASES = {
    "lion": {},
    "decay": {"weight_decay": 0.5, "lr": 0.01},
    "betas": {"beta1": 0.95, "beta2": 0.98, "weight_decay": 0.1},
    "sign_of_the_gradient": {"beta1": 0.0, "beta2": 0.0},
    "maximize": {"maximize": True, "weight_decay": 0.3},
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
    key, kind = f"{dtype}.{numel}", DTYPES[dtype]
    beta1, beta2, lr = settings["beta1"], settings["beta2"], settings["lr"]
    theta = tensors[f"{key}.param.0"].astype(numpy.float64)
    m = numpy.zeros(numel)
    for step in range(1, STEPS + 1):
        g = tensors[f"{key}.grad.{step}"].astype(numpy.float64)
        g = -g if settings["maximize"] else g
        c = beta1 * m + (1 - beta1) * g
        theta = (theta - lr * (numpy.sign(c) + settings["weight_decay"] * theta)).astype(kind).astype(numpy.float64)
        m = (beta2 * m + (1 - beta2) * g).astype(kind).astype(numpy.float64)
        if step in KEPT:
            tensors[f"{name}.{key}.param.{step}"] = theta.astype(kind)
    tensors[f"{name}.{key}.moment1.{STEPS}"] = m.astype(kind)


def main():
    versions = {"python": platform.python_version(), "numpy": numpy.__version__, "safetensors": safetensors.__version__}
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
