"""Writes lars_momentum.safetensors: ten LARS steps in numpy and f64; common.py says how, and what lies in the file.

Written from the formula of PaddlePaddle's lars_momentum, independently of the Rust code; norms by numpy.linalg.norm.
"""

import numpy
from common import STEPS, layers


def gradients(rng, numel):
    for _ in range(STEPS):
        yield 0.01 * rng.standard_normal(numel)


def local_rate(k, lr, decay, trusted, p, g):
    norm_p, norm_g = numpy.linalg.norm(p), abs(k["rescale"]) * numpy.linalg.norm(g)
    if not trusted or norm_p == 0 or norm_g == 0:
        return lr
    return lr * k["trust_coefficient"] * (norm_p / (norm_g + decay * norm_p + k["eps"]))


def run(k, lr, decay, trusted, p, grads):
    u = numpy.zeros_like(p)
    for g in grads:
        u = k["momentum"] * u + local_rate(k, lr, decay, trusted, p, g) * (k["rescale"] * g + decay * p)
        p = p - u
    return p


layers(
    __file__, gradients, run, seed=20240301,
    base={"lr": 0.5, "momentum": 0.9, "trust_coefficient": 0.001, "weight_decay": 0.0005, "eps": 0.0, "rescale": 1.0, "lr_scale_of_3": 0.5},
    cases={
        "default": {},
        "eps": {"eps": 0.1},
        "rescaled": {"rescale": 1 / 256, "weight_decay": 0.01},
        "strong": {"lr": 5.0, "trust_coefficient": 0.02, "momentum": 0.5},
        "no_decay": {"weight_decay": 0.0},
    },
)
