"""Writes lion.safetensors: Lion in numpy; common.py says how, and what lies in the file.

Written from Algorithm 2 of "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675). The moment is kept in the tensor's own
dtype and everything between is f64, so that no rounding of f32 decides a sign.
"""

import numpy
import safetensors
from common import DTYPES, KEPT, STEPS, elements, versions


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


elements(
    __file__, run, versions(numpy, safetensors), seed=20240303,
    base={"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "maximize": False},
    cases={
        "lion": {},
        "decay": {"weight_decay": 0.5, "lr": 0.01},
        "betas": {"beta1": 0.95, "beta2": 0.98, "weight_decay": 0.1},
        "sign_of_the_gradient": {"beta1": 0.0, "beta2": 0.0},
        "maximize": {"maximize": True, "weight_decay": 0.3},
    },
)
