"""Writes lamb.safetensors: ten LAMB steps in numpy and f64; common.py says how, and what lies in the file.

Written from Algorithm 2 of You et al. 2020 (arXiv:1904.00962), independently of the Rust code; norms by numpy.linalg.norm.
"""

import numpy
from common import STEPS, layers


def gradients(rng, numel):
    """Gradients that keep their sign over the steps, so that no direction is a difference of nearly equal numbers."""
    spread = 10.0 ** rng.uniform(-3, 0, numel)
    for _ in range(STEPS):
        yield spread * (1 + 0.3 * rng.standard_normal(numel))


def run(k, lr, decay, trusted, p, grads):
    m, v = numpy.zeros_like(p), numpy.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m = k["beta1"] * m + (1 - k["beta1"]) * g
        v = k["beta2"] * v + (1 - k["beta2"]) * g**2
        r = (m / (1 - k["beta1"] ** t)) / (numpy.sqrt(v / (1 - k["beta2"] ** t)) + k["eps"]) + decay * p
        norm_p, norm_r = numpy.linalg.norm(p), numpy.linalg.norm(r)
        ratio = norm_p / norm_r if trusted and norm_p > 0 and norm_r > 0 else 1.0
        p = p - lr * ratio * r
    return p


layers(
    __file__, gradients, run, seed=20240302,
    base={"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.01, "lr_scale_of_3": 0.5},
    cases={
        "default": {},
        "large_eps": {"eps": 1e-2},
        "strong_decay": {"weight_decay": 0.3},
        "no_decay": {"weight_decay": 0.0},
        "other_betas": {"beta1": 0.8, "beta2": 0.95, "lr": 1e-3},
    },
)
