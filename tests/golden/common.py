"""Golden files: seeded inputs, the cases of a rule, and the file that tests read.

    python -m venv venv && venv/bin/pip install numpy==2.4.6 safetensors==0.8.0 torch==2.7.1 schedulefree==1.4.1
    venv/bin/python tests/golden/lion.py

A script beside this one has a rule's settings and cases, and takes the steps of one case by an implementation that is not ours. All
cases of a script start from the same parameters and see the same gradients. Settings have the names of the rule's rows in Rust.
Metadata: `versions`, `seed`, and each case's settings as JSON under `case.<name>`. Tensors of a rule of single elements:

    <dtype>.<numel>.param.0                before the first step
    <dtype>.<numel>.grad.<step>            gradient of step 1 ..= 10
    <case>.<dtype>.<numel>.param.<step>    after 1, 2 and 10 steps
    <case>.<dtype>.<numel>.<list>.10       the state, by our names

Tensors of a rule with norms, f32 values held in f64:

    <layer>.param.0              before the first step; zeros in layer 1
    <layer>.grad.<step>          gradient of step 1 ..= 10
    <case>.<layer>.param.10      after 10 steps; layer 2 is excluded (no decay, no ratio), layer 3 has its own rate factor

The order of metadata differs from run to run: the library keeps it in a hash map.
"""

import json
import platform
from pathlib import Path

import numpy
import safetensors
from safetensors.numpy import save_file

STEPS = 10
KEPT = [1, 2, 10]
NUMELS = [0, 1, 17, 257]
DTYPES = {"f32": numpy.float32, "f64": numpy.float64}
LAYERS = {"0": 1031, "1": 17, "2": 257, "3": 2049}


def versions(*modules):
    """Versions of Python and of modules, in this order."""
    return {"python": platform.python_version()} | {module.__name__: module.__version__ for module in modules}


def write(script, tensors, versions, cases, seed=None):
    """Writes tensors and each case's settings beside `script`."""
    print(versions)
    metadata = {"versions": json.dumps(versions)}
    if seed is not None:
        metadata["seed"] = str(seed)
    metadata |= {f"case.{name}": json.dumps(settings) for name, settings in cases.items()}
    path = Path(script).with_suffix(".safetensors")
    save_file(tensors, path, metadata)
    print(f"{path.name}: {len(tensors)} tensors, {path.stat().st_size} bytes")


def inputs(seed, decades):
    """Parameters as after a usual initialisation; gradients whose sizes differ by `decades` from element to element and step to step."""
    rng = numpy.random.default_rng(seed)
    tensors = {}
    for dtype, kind in DTYPES.items():
        for numel in NUMELS:
            tensors[f"{dtype}.{numel}.param.0"] = (0.02 * rng.standard_normal(numel)).astype(kind)
            spread = 10.0 ** rng.uniform(*decades, numel)
            for step in range(1, STEPS + 1):
                grad = spread * (0.3 + rng.standard_normal(numel))
                grad[rng.random(numel) < 0.05] = 0.0
                tensors[f"{dtype}.{numel}.grad.{step}"] = grad.astype(kind)
    return tensors


def elements(script, run, versions, seed, base, cases, decades=(-5, 0)):
    """Writes the file of a rule of single elements.

    `run(name, settings, dtype, numel, tensors)` takes the steps of one case and puts results into `tensors`.
    """
    tensors = inputs(seed, decades)
    cases = {name: base | changes for name, changes in cases.items()}
    for name, settings in cases.items():
        for dtype in DTYPES:
            for numel in NUMELS:
                run(name, settings, dtype, numel, tensors)
    write(script, tensors, versions, cases, seed)


def layers(script, gradients, run, seed, base, cases):
    """Writes the file of a rule with norms.

    `gradients(rng, numel)` yields a layer's gradients. `run(settings, lr, decay, trusted, p, gradients)` gives the parameter after
    all steps of one case, for a layer with its own lr and decay.
    """
    rng = numpy.random.default_rng(seed)
    single = lambda x: x.astype(numpy.float32).astype(numpy.float64)
    tensors = {}
    for layer, numel in LAYERS.items():
        tensors[f"{layer}.param.0"] = numpy.zeros(numel) if layer == "1" else single(0.05 * rng.standard_normal(numel))
        for step, grad in enumerate(gradients(rng, numel), 1):
            tensors[f"{layer}.grad.{step}"] = single(grad)
    cases = {name: base | changes for name, changes in cases.items()}
    for name, settings in cases.items():
        for layer in LAYERS:
            lr = settings["lr"] * (settings["lr_scale_of_3"] if layer == "3" else 1.0)
            decay = 0.0 if layer == "2" else settings["weight_decay"]
            grads = [tensors[f"{layer}.grad.{step}"] for step in range(1, STEPS + 1)]
            p = run(settings, lr, decay, layer != "2", tensors[f"{layer}.param.0"].copy(), grads)
            tensors[f"{name}.{layer}.param.{STEPS}"] = p
    write(script, tensors, versions(numpy, safetensors), cases, seed)
