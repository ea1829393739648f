"""Writes coded.safetensors: AdamW whose moments take 8 bits, in numpy; common.py says with which versions.

Written from the definition in docs/numerics.md, an array of f32 at a time. A code is found in a table of what codes stand for, not
computed. Bits are compared, so every value between is rounded to f32 as the definition says. Tensors of a case:

    <case>.<numel>.grad.<step>             f32, or the bits of bf16
    <case>.<numel>.param.<step>            the same, before step 1 and after steps 1, 2 and 10
    <case>.<numel>.remainder.<step>        of bf16 with 8 bits more
    <case>.<numel>.moment1_codes.<step>, moment1_units, moment2_codes, moment2_units
"""

import math

import numpy
import safetensors
from common import KEPT, STEPS, versions, write

GROUP = 32
NUMELS = [1, 31, 33, 100]
F32 = numpy.float32
LARGEST = numpy.finfo(F32).max
# Magnitudes 0 to 127 of a float of 8 bits with two bits of exponent, in steps of its smallest.
TABLE = numpy.array([(c % 32 + (32 if c >= 32 else 0)) * 2 ** max(c // 32 - 1, 0) for c in range(128)], dtype=numpy.float64)


def bits(x):
    return x.view(numpy.uint32)


def joined(param, remainder):
    return ((param.astype(numpy.int64) << 16) + (remainder.astype(numpy.int64) << 8)).astype(numpy.uint32).view(F32)


def split(x):
    upper = (bits(x).astype(numpy.int64) + 128) >> 8
    param = (upper + 128) >> 8
    return param.astype(numpy.uint16), (upper - (param << 8)).astype(numpy.int8)


def grouped(x):
    return numpy.pad(x, (0, -len(x) % GROUP)).reshape(-1, GROUP)


def signed_values(codes, units):
    d = F32(TABLE[codes & 127]) * F32(2.0 ** -19)
    return numpy.where(codes > 127, -d, d).astype(F32) * units[:, None]


def factor(most, largest):
    with numpy.errstate(divide="ignore", over="ignore"):
        return numpy.minimum(F32(most) / largest, LARGEST)


def signed_codes(x):
    largest = numpy.abs(x).max(axis=1)
    t = numpy.abs(x) * factor(252, largest)[:, None]
    # The code whose value is nearest; of two, the even one.
    distance = numpy.abs(t[:, :, None].astype(numpy.float64) - TABLE)
    nearest = distance.argmin(axis=2)
    above = numpy.minimum(nearest + 1, 127)
    tie = numpy.take_along_axis(distance, above[:, :, None], 2)[:, :, 0] == numpy.take_along_axis(distance, nearest[:, :, None], 2)[:, :, 0]
    nearest = numpy.where(tie & (nearest % 2 == 1), above, nearest)
    codes = numpy.where((x < 0) & (nearest > 0), nearest + 128, nearest)
    return codes.astype(numpy.uint8), largest * F32(2.0 ** 19 / 252)


def root_codes(r, dither):
    largest = r.max(axis=1)
    x = r * factor(255, largest)[:, None] + dither
    codes = numpy.rint(numpy.clip(x, F32(1), F32(255)))
    return codes.astype(numpy.uint8), largest * F32(1.0 / 255)


def dither(step):
    h = [(step * 0x9E3779B9 + place * 0x85EBCA6B) % 2 ** 32 for place in range(GROUP)]
    return F32([(2 * (x >> 17) + 1) / 65536 - 0.5 for x in h])


def run(name, settings, numel, rng, tensors):
    lr, beta1, beta2, eps = (settings[key] for key in ["lr", "beta1", "beta2", "eps"])
    p = F32(0.1 * rng.standard_normal(numel))
    spread = 10.0 ** rng.uniform(-5, 0, numel)
    remainder = settings["remainder"]
    m_codes = v_codes = numpy.zeros((math.ceil(numel / GROUP), GROUP), dtype=numpy.uint8)
    m_units = v_units = numpy.zeros(len(m_codes), dtype=F32)
    if remainder:
        param, rest = split(p)
    for step in range(STEPS + 1):
        if step:
            g = F32(spread * (0.3 + rng.standard_normal(numel)))
            g[rng.random(numel) < 0.1] = 0
            if remainder:
                g16 = (bits(g) >> 16).astype(numpy.uint16)
                g = (g16.astype(numpy.uint32) << 16).view(F32)
                p = joined(param, rest)
            tensors[f"{name}.{numel}.grad.{step}"] = g16 if remainder else g
            bias = math.sqrt(1 - beta2 ** step)
            step_size, step_eps = F32(lr * bias / (1 - beta1 ** step)), F32(eps * bias)
            decay = F32(1 - lr * settings["weight_decay"])
            g, wide = grouped(g), grouped(p)
            m = F32(beta1) * signed_values(m_codes, m_units) + F32(1 - beta1) * g
            root = F32(v_codes) * v_units[:, None]
            v = F32(beta2) * (root * root) + F32(1 - beta2) * (g * g)
            r = numpy.sqrt(v)
            with numpy.errstate(invalid="ignore", divide="ignore"):
                wide = wide * decay - step_size * (m / (r + step_eps))
            p = wide.reshape(-1)[:numel].copy()
            m.reshape(-1)[numel:] = 0
            r.reshape(-1)[numel:] = 0
            m_codes, m_units = signed_codes(m)
            v_codes, v_units = root_codes(r, dither(step))
            if remainder:
                param, rest = split(p)
        if step in [0] + KEPT:
            key = f"{name}.{numel}"
            tensors[f"{key}.param.{step}"] = param if remainder else p
            if remainder:
                tensors[f"{key}.remainder.{step}"] = rest
            if step:
                tensors[f"{key}.moment1_codes.{step}"] = m_codes.reshape(-1)[:numel].copy()
                tensors[f"{key}.moment1_units.{step}"] = m_units
                tensors[f"{key}.moment2_codes.{step}"] = v_codes.reshape(-1)[:numel].copy()
                tensors[f"{key}.moment2_units.{step}"] = v_units


SEED = 20260223
BASE = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "remainder": False}
CASES = {
    "f32": {},
    "bf16_r8": {"remainder": True},
    "betas": {"beta1": 0.5, "beta2": 0.9, "lr": 0.02, "weight_decay": 0.1, "eps": 1e-4},
}
cases = {name: BASE | changes for name, changes in CASES.items()}
rng = numpy.random.default_rng(SEED)
tensors = {}
for name, settings in cases.items():
    for numel in NUMELS:
        run(name, settings, numel, rng, tensors)
write(__file__, tensors, versions(numpy, safetensors), cases, SEED)
