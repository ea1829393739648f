"""Writes lars_momentum.safetensors: ten LARS steps of seeded parameters and gradients, in numpy and f64.

    python -m venv venv && venv/bin/pip install numpy==2.4.6 safetensors==0.8.0
    venv/bin/python tests/golden/lars_momentum.py

Written from the formula of PaddlePaddle's lars_momentum, independently of the Rust code; norms by numpy.linalg.norm. Inputs are f32
values held in f64. Tensor 2 is excluded (no decay, plain rate); tensor 3 has its own rate factor; tensor 1 starts at 0.
"""

import json
import platform
from pathlib import Path

import numpy
import safetensors
from safetensors.numpy import save_file

SEED, STEPS = 20240301, 10
NUMELS = {"0": 1031, "1": 17, "2": 257, "3": 2049}
BASE = {"lr": 0.5, "momentum": 0.9, "trust_coefficient": 0.001, "weight_decay": 0.0005, "eps": 0.0, "rescale": 1.0, "lr_scale_of_3": 0.5}
CASES = {"default": {}, "eps": {"eps": 0.1}, "rescaled": {"rescale": 1 / 256, "weight_decay": 0.01},
         "strong": {"lr": 5.0, "trust_coefficient": 0.02, "momentum": 0.5}, "no_decay": {"weight_decay": 0.0}}


def local_rate(k, lr, decay, trusted, p, g):
    norm_p, norm_g = numpy.linalg.norm(p), abs(k["rescale"]) * numpy.linalg.norm(g)
    if not trusted or norm_p == 0 or norm_g == 0:
        return lr
    return lr * k["trust_coefficient"] * (norm_p / (norm_g + decay * norm_p + k["eps"]))


def main():
    rng = numpy.random.default_rng(SEED)
    single = lambda x: x.astype(numpy.float32).astype(numpy.float64)
    tensors = {}
    for name, numel in NUMELS.items():
        tensors[f"{name}.param.0"] = numpy.zeros(numel) if name == "1" else single(0.05 * rng.standard_normal(numel))
        for step in range(1, STEPS + 1):
            tensors[f"{name}.grad.{step}"] = single(0.01 * rng.standard_normal(numel))
    versions = {"python": platform.python_version(), "numpy": numpy.__version__, "safetensors": safetensors.__version__}
    metadata = {"versions": json.dumps(versions), "seed": str(SEED)}
    for case, changes in CASES.items():
        k = BASE | changes
        metadata[f"case.{case}"] = json.dumps(k)
        for name in NUMELS:
            decay = 0.0 if name == "2" else k["weight_decay"]
            lr = k["lr"] * (k["lr_scale_of_3"] if name == "3" else 1.0)
            p = tensors[f"{name}.param.0"].copy()
            u = numpy.zeros_like(p)
            for step in range(1, STEPS + 1):
                g = tensors[f"{name}.grad.{step}"]
                u = k["momentum"] * u + local_rate(k, lr, decay, name != "2", p, g) * (k["rescale"] * g + decay * p)
                p = p - u
            tensors[f"{case}.{name}.param.{STEPS}"] = p
    path = Path(__file__).with_suffix(".safetensors")
    save_file(tensors, path, metadata)
    print(versions, path.name, path.stat().st_size)


main()
