"""Golden files of PyTorch's rules; the script of each rule beside this one calls `write`, and common.py says how.

PyTorch runs on the CPU, one tensor at a time, in the parameter's own dtype.
"""

import numpy
import safetensors
import torch
from common import KEPT, STEPS, elements, versions

DTYPES = {"f32": torch.float32, "f64": torch.float64}


def arguments(settings):
    """Settings under PyTorch's names."""
    given = dict(settings)
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))
    for own, theirs in (("decoupled", "decoupled_weight_decay"), ("initial_sum", "initial_accumulator_value")):
        if own in given:
            given[theirs] = given.pop(own)
    return given


def write(script, make, seed, lists, base, cases):
    """Runs every case of `make`, a class of PyTorch's or what makes one, and writes the file beside `script`."""

    def run(name, settings, dtype, numel, tensors):
        key = f"{dtype}.{numel}"
        # Scalars that a rule keeps as tensors are of the default dtype.
        torch.set_default_dtype(DTYPES[dtype])
        param = torch.nn.Parameter(torch.from_numpy(tensors[f"{key}.param.0"].copy()))
        rule = make([param], **arguments(settings), foreach=False)
        for step in range(1, STEPS + 1):
            param.grad = torch.from_numpy(tensors[f"{key}.grad.{step}"].copy())
            rule.step()
            if step in KEPT:
                tensors[f"{name}.{key}.param.{step}"] = param.detach().numpy().copy()
        for own, theirs in lists.items():
            if theirs in rule.state[param]:
                tensors[f"{name}.{key}.{own}.{STEPS}"] = rule.state[param][theirs].numpy().copy()

    torch.set_num_threads(1)
    elements(script, run, versions(torch, numpy, safetensors), seed, base, cases)
