"""Writes golden files of PyTorch's rules; the script of each rule beside this one calls `write`.

    python -m venv venv && venv/bin/pip install torch==2.7.1 numpy safetensors==0.8.0
    venv/bin/python tests/golden/adamax.py

PyTorch runs on the CPU, one tensor at a time, in the parameter's own dtype. All cases start from the same parameters and see the
same gradients. Settings have the names of the rule's rows in Rust. Metadata: `versions`, `seed`, and each case's settings as JSON
under `case.<name>`. Tensors:

    <dtype>.<numel>.param.0             before the first step
    <dtype>.<numel>.grad.<step>         gradient of step 1 ..= 10
    <case>.<dtype>.<numel>.param.<step>    after 1, 2 and 10 steps
    <case>.<dtype>.<numel>.<list>.10       the state, by our names
"""

import json
import platform
from pathlib import Path

import numpy
import safetensors
import torch
from safetensors.numpy import save_file

NUMELS = [0, 1, 17, 257]
STEPS = 10
KEPT = [1, 2, 10]
DTYPES = {"f32": (torch.float32, numpy.float32), "f64": (torch.float64, numpy.float64)}


def inputs(seed):
    """Parameters as after a usual initialisation; gradients whose sizes differ from element to element and step to step."""
    rng = numpy.random.default_rng(seed)
    tensors = {}
    for dtype, (_, kind) in DTYPES.items():
        for numel in NUMELS:
            tensors[f"{dtype}.{numel}.param.0"] = (0.02 * rng.standard_normal(numel)).astype(kind)
            spread = 10.0 ** rng.uniform(-5, 0, numel)
            for step in range(1, STEPS + 1):
                grad = spread * (0.3 + rng.standard_normal(numel))
                grad[rng.random(numel) < 0.05] = 0.0
                tensors[f"{dtype}.{numel}.grad.{step}"] = grad.astype(kind)
    return tensors


def arguments(settings):
    """Settings under PyTorch's names."""
    given = dict(settings)
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))
    for own, theirs in (("decoupled", "decoupled_weight_decay"), ("initial_sum", "initial_accumulator_value")):
        if own in given:
            given[theirs] = given.pop(own)
    return given


def run(make, lists, name, settings, dtype, numel, tensors):
    key = f"{dtype}.{numel}"
    # Scalars that a rule keeps as tensors are of the default dtype.
    torch.set_default_dtype(DTYPES[dtype][0])
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


def write(script, make, seed, lists, base, cases):
    """Runs every case of `make`, a class of PyTorch's or what makes one, and writes the file beside `script`."""
    torch.set_num_threads(1)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__,
                "safetensors": safetensors.__version__}
    print(versions)
    tensors = inputs(seed)
    metadata = {"versions": json.dumps(versions), "seed": str(seed)}
    for name, changes in cases.items():
        settings = base | changes
        metadata[f"case.{name}"] = json.dumps(settings)
        for dtype in DTYPES:
            for numel in NUMELS:
                run(make, lists, name, settings, dtype, numel, tensors)
    path = Path(script).with_suffix(".safetensors")
    save_file(tensors, path, metadata)
    print(f"{path.name}: {len(tensors)} tensors, {path.stat().st_size} bytes")
