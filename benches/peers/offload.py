"""Times of the optimizer on the host, ours beside DeepSpeed's and PyTorch's, in turns.

    python benches/peers/offload.py [--elements N] [--rounds N] [--threads N] [large | swapped | small]

`large` steps one tensor of N elements in float32 and bfloat16, also with state of 16 bits, and as
masters with gradients and copies of 16 bits. `swapped` puts another sub-group into the optimizer
before every call, as SuperOffload does. `small` has hundreds of tensors, as LoRA has. DeepSpeed
takes part if it is installed; it builds its kernel at the first run, which takes ninja and a C++
compiler.
Least and median of each are microseconds, and theirs over ours stands beside them.
"""

import argparse
import os
import statistics
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

import fusestep.offload
import fusestep.torch
from fusestep.offload import CPUAdam

try:
    from deepspeed.ops.adam import DeepSpeedCPUAdam
except ImportError:
    DeepSpeedCPUAdam = None

SWAPPED = (1_000, 100_000, 4_000_000)
# Numbers of small tensors, as LoRA has, and their elements.
SMALL = ((192, 12_288), (192, 4_096), (1_000, 1_024))
# Memory that a round of calls walks through, so that no sub-group waits in a cache.
GROUPS = 4


def time_of(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def contest(title, calls, rounds):
    """Prints least and median of calls that take turns; the first is ours."""
    for call in calls.values():
        call()
        call()
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(time_of(call))
    print(title)
    ours = times[next(iter(times))]
    for name, own in times.items():
        least, median = min(own), statistics.median(own)
        print(
            f"  {name:28} {1e6 * least:12.1f} {1e6 * median:12.1f}"
            f"   least {least / min(ours):6.2f}, median {median / statistics.median(ours):6.2f}"
        )


def parameters(shapes, dtype):
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in shapes:
        own = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        own.grad = torch.randn(shape, generator=generator).to(dtype)
        made.append(own)
    return made


def steps(shapes, dtype, **settings):
    """A step of each kind over tensors of its own."""
    calls = {"CPUAdam": CPUAdam(parameters(shapes, dtype), **settings).step}
    if DeepSpeedCPUAdam is not None:
        calls["DeepSpeedCPUAdam"] = DeepSpeedCPUAdam(parameters(shapes, dtype), **settings).step
    if not settings:
        theirs = torch.optim.AdamW(parameters(shapes, dtype), fused=True)
        calls["torch fused"] = theirs.step
        wide = {"precision": "wide"} if dtype != torch.float32 else {}
        planned = fusestep.torch.AdamW(parameters(shapes, dtype), **wide)
        calls["fusestep.torch.AdamW"] = planned.step
    return calls


def masters(elements):
    """Masters with gradients and copies of 16 bits: ours in a pass, the others' in two."""
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(elements, generator=generator).bfloat16()
    own = torch.randn(elements, generator=generator)
    calls = {}
    for name, dtype in (("float32", torch.float32), ("int8", torch.int8)):
        param, state = [own.clone()], fusestep.offload.new_state([own], dtype)
        copy = [torch.zeros(elements, dtype=torch.bfloat16)]

        def step(param=param, state=state, copy=copy):
            fusestep.offload.step(
                param,
                [grad],
                state.exp_avgs,
                state.exp_avg_sqs,
                2,
                units=state.units,
                copies=copy,
            )

        calls[f"step, state in {name}"] = step
    for name, kind in (("DeepSpeedCPUAdam", DeepSpeedCPUAdam), ("torch fused", torch.optim.AdamW)):
        if kind is None:
            continue
        param = torch.nn.Parameter(own.clone())
        optimizer = kind([param], **({"fused": True} if kind is torch.optim.AdamW else {}))
        copy = torch.zeros(elements, dtype=torch.bfloat16)

        def step(param=param, optimizer=optimizer, copy=copy):
            param.grad = grad.float()
            optimizer.step()
            copy.copy_(param.detach())

        calls[f"{name} and two casts"] = step
    return calls


def swapped(numel, repeats, kind, **settings):
    """Calls over sub-groups that take turns in one optimizer."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(numel, generator=generator) for _ in range(GROUPS)]
    grads = [torch.randn(numel, generator=generator) for _ in range(GROUPS)]
    place = torch.nn.Parameter(torch.zeros(1))
    optimizer = kind([place], **settings)

    def calls():
        for number in range(repeats):
            group = number % GROUPS
            place.data, place.grad = values[group], grads[group]
            optimizer.step_subgroup(group)

    # A gradient has the shape of its parameter, whichever is put in first.
    place.grad = None
    return calls


def run(arguments):
    if arguments.which in (None, "large"):
        shapes = [(arguments.elements,)]
        for dtype in (torch.float32, torch.bfloat16):
            title = f"{arguments.elements:,} elements, {dtype}"
            contest(title, steps(shapes, dtype), arguments.rounds)
        title = f"{arguments.elements:,} elements, bfloat16, state too"
        narrow = {"fp32_optimizer_states": False}
        contest(title, steps(shapes, torch.bfloat16, **narrow), arguments.rounds)
        title = f"{arguments.elements:,} elements, masters with gradients and copies of 16 bits"
        contest(title, masters(arguments.elements), arguments.rounds)
    if arguments.which in (None, "swapped"):
        for numel in SWAPPED:
            repeats = max(GROUPS, min(1000, 2_000_000 // numel))
            calls = {"CPUAdam": swapped(numel, repeats, CPUAdam, keep_for_rollback=0)}
            if DeepSpeedCPUAdam is not None:
                calls["DeepSpeedCPUAdam"] = swapped(numel, repeats, DeepSpeedCPUAdam)
            calls["CPUAdam, kept for rollback"] = swapped(numel, repeats, CPUAdam)
            title = f"{repeats} calls over sub-groups of {numel:,} elements"
            contest(title, calls, arguments.rounds)
    if arguments.which in (None, "small"):
        for count, numel in SMALL:
            title = f"{count} tensors of {numel:,} elements"
            contest(title, steps([(16, numel // 16)] * count, torch.float32), arguments.rounds)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("which", nargs="?", choices=("large", "swapped", "small"))
    parser.add_argument("--elements", type=int, default=124_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    print(f"{torch.get_num_threads()} threads, microseconds: least and median")
    run(arguments)


if __name__ == "__main__":
    main()
