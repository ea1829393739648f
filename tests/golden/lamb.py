"""Writes lamb.safetensors: ten LAMB steps of seeded parameters and gradients, in numpy and f64.

    python -m venv venv && venv/bin/pip install numpy==2.4.6 safetensors==0.8.0
    venv/bin/python tests/golden/lamb.py

Written from Algorithm 2 of You et al. 2020 (arXiv:1904.00962), independently of the Rust code; norms by numpy.linalg.norm. Inputs are
f32 values held in f64. Tensor 2 is excluded (no decay, ratio 1); tensor 3 has its own rate factor; tensor 1 starts at 0.
"""

import json
import platform
from pathlib import Path

import numpy
import safetensors
from safetensors.numpy import save_file

SEED, STEPS = 20240302, 10
NUMELS = {"0": 1031, "1": 17, "2": 257, "3": 2049}
BASE = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01, "lr_scale_of_3": 0.5}
CASES = {"default": {}, "large_eps": {"eps": 1e-2}, "strong_decay": {"weight_decay": 0.3}, "no_decay": {"weight_decay": 0.0},
         "other_betas": {"beta1": 0.8, "beta2": 0.95, "lr": 1e-3}}


def main():
    rng = numpy.random.default_rng(SEED)
    single = lambda x: x.astype(numpy.float32).astype(numpy.float64)
    tensors = {}
    for name, numel in NUMELS.items():
        tensors[f"{name}.param.0"] = numpy.zeros(numel) if name == "1" else single(0.05 * rng.standard_normal(numel))
        # A gradient that keeps its sign over the steps, so that no direction is a difference of nearly equal numbers.
        spread = 10.0 ** rng.uniform(-3, 0, numel)
        for step in range(1, STEPS + 1):
            tensors[f"{name}.grad.{step}"] = single(spread * (1 + 0.3 * rng.standard_normal(numel)))
    versions = {"python": platform.python_version(), "numpy": numpy.__version__, "safetensors": safetensors.__version__}
    metadata = {"versions": json.dumps(versions), "seed": str(SEED)}
    for case, changes in CASES.items():
        k = BASE | changes
        metadata[f"case.{case}"] = json.dumps(k)
        for name in NUMELS:
            decay = 0.0 if name == "2" else k["weight_decay"]
            lr = k["lr"] * (k["lr_scale_of_3"] if name == "3" else 1.0)
            p = tensors[f"{name}.param.0"].copy()
            m, v = numpy.zeros_like(p), numpy.zeros_like(p)
            for t in range(1, STEPS + 1):
                g = tensors[f"{name}.grad.{t}"]
                m = k["beta1"] * m + (1 - k["beta1"]) * g
                v = k["beta2"] * v + (1 - k["beta2"]) * g**2
                r = (m / (1 - k["beta1"] ** t)) / (numpy.sqrt(v / (1 - k["beta2"] ** t)) + k["eps"]) + decay * p
                norm_p, norm_r = numpy.linalg.norm(p), numpy.linalg.norm(r)
                ratio = norm_p / norm_r if name != "2" and norm_p > 0 and norm_r > 0 else 1.0
                p = p - lr * ratio * r
            tensors[f"{case}.{name}.param.{STEPS}"] = p
    path = Path(__file__).with_suffix(".safetensors")
    save_file(tensors, path, metadata)
    print(versions, path.name, path.stat().st_size)


main()
