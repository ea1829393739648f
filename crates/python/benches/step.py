"""Times of a step from Python, ours beside PyTorch's: in turns, then each by itself.

    python step.py [--rounds N] [--shapes gpt2.json] [--threads N] [few | turns | small | lora | gpt2 | clipped]

`few` has 1 to 10 tensors of each rule in microseconds, `turns` lists of parameters that take turns
in one optimizer, beside DeepSpeed's where it is installed. `lora` has the 192 matrices of rank 16
of a model of width 768; `clipped` is `gpt2` behind `clip_grad_norm_`, which is `clip_norm` of ours.
The others print the least and the median of each in milliseconds, and PyTorch's over ours. In turns
a step finds what the others have left of the caches; by itself it finds its own.
"""

import argparse
import inspect
import json
import math
import pathlib
import statistics
import time

import torch

import fusestep.torch

SHAPES = pathlib.Path(__file__).resolve().parents[3] / "data" / "shapes"

PARTS = ("few", "turns", "small", "lora", "gpt2", "clipped")
FEW = (1, 2, 5, 10)
LORA = [(16, 768), (768, 16)] * 96
RULES = {
    "SGD": {},
    "SGD, momentum": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {},
    "Adagrad": {},
    "RMSprop": {},
    "Adamax": {},
    "NAdam": {},
    "Lion": {},
    "Lars": {},
    "Lamb": {},
    "ScheduleFreeAdamW": {},
}
LOOPS = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def parameters(shapes):
    generator = torch.Generator().manual_seed(0)
    made = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for own in made:
        own.grad = torch.randn(own.shape, generator=generator)
    return made


def plain(shapes):
    kinds = {"ours": fusestep.torch.AdamW(parameters(shapes)).step}
    for name, how in LOOPS.items():
        kinds[f"torch {name}"] = torch.optim.AdamW(parameters(shapes), **how).step
    return kinds


def clipped(shapes):
    """Clips in every step: the norm of these gradients is far above 1, and PyTorch's own scaled to
    it are scaled again."""
    kinds = {"ours": fusestep.torch.AdamW(parameters(shapes), clip_norm=1.0).step}
    for name in ("foreach", "fused"):
        params = parameters(shapes)
        optimizer = torch.optim.AdamW(params, **LOOPS[name])

        def step(params=params, optimizer=optimizer):
            torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

        kinds[f"torch {name}"] = step
    return kinds


def contest(title, shapes, rounds, made=plain):
    kinds = made(shapes)
    # The first step makes state and plan.
    for step in kinds.values():
        step()
    in_turns = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, step in kinds.items():
            in_turns[kind].append(time_of(step))
    alone = {
        kind: [time_of(step) for _ in range(rounds + 1)][1:]
        for kind, step in kinds.items()
    }
    numel = sum(math.prod(shape) for shape in shapes)
    print(f"{title}: {len(shapes)} tensors, {numel:,} elements, {torch.get_num_threads()} threads")
    for how, times in (("in turns", in_turns), ("each by itself", alone)):
        print(f" {how}")
        ours = times["ours"]
        for kind, own in times.items():
            least, median = min(own), statistics.median(own)
            print(
                f"  {kind:14} {1e3 * least:9.3f} {1e3 * median:9.3f}"
                f"   least {least / min(ours):6.2f}, median {median / statistics.median(ours):6.2f}"
            )


def few(rounds):
    """Steps that are over before a loop of Python's has begun."""
    print(f"few: 1 to 10 tensors of 64 elements, microseconds, {torch.get_num_threads()} threads")
    for rule, settings in RULES.items():
        name = rule.split(",")[0]
        for count in FEW:
            ours = getattr(fusestep.torch, name)
            runs = {"ours": ours(parameters([(64,)] * count), lr=1e-3, **settings).step}
            for loop, how in LOOPS.items():
                theirs = getattr(torch.optim, name, None)
                # PyTorch has no fused loop of some rules.
                if theirs is None or not set(how) <= set(inspect.signature(theirs).parameters):
                    continue
                made = theirs(parameters([(64,)] * count), lr=1e-3, **settings, **how)
                runs[f"torch {loop}"] = made.step
            row(f"{rule}, {count}", runs, rounds, 50)


def turns(rounds):
    """Four lists of one parameter each, one after the other in place of the group's."""
    print(f"turns: AdamW, microseconds a step, {torch.get_num_threads()} threads")
    kinds = {
        "ours": fusestep.torch.AdamW,
        "torch fused": lambda own, **settings: torch.optim.AdamW(own, fused=True, **settings),
    }
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        kinds["deepspeed"] = DeepSpeedCPUAdam
    except ImportError:
        pass
    for numel in (1_000, 10_000, 100_000, 1_000_000, 4_000_000):
        runs = {kind: in_turn(make, numel) for kind, make in kinds.items()}
        row(f"{numel:,} elements", runs, rounds, max(1, 100_000 // numel), steps=4)


def in_turn(make, numel):
    # Of as many shapes, as parts of a model are.
    parts = parameters([(numel + 16 * part,) for part in range(4)])
    optimizer = make(parts[:1], lr=1e-3, weight_decay=1e-2)

    def run():
        for part in parts:
            optimizer.param_groups[0]["params"] = [part]
            optimizer.step()
            optimizer.param_groups[0]["params"] = []

    return run


def row(title, runs, rounds, times, steps=1):
    for run in runs.values():
        run()
    medians = {kind: [] for kind in runs}
    for _ in range(rounds):
        for kind, run in runs.items():
            each = [time_of(run) for _ in range(times)]
            medians[kind].append(1e6 * statistics.median(each) / steps)
    shown = (f"{kind} {statistics.median(own):8.1f}" for kind, own in medians.items())
    print(f"  {title:24} {', '.join(shown)}", flush=True)


def time_of(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="*", choices=[[], *PARTS])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--shapes", default=SHAPES / "gpt2.json")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with open(given.shapes, encoding="utf-8") as file:
        shapes = json.load(file)
    shapes = shapes.get("params", shapes) if isinstance(shapes, dict) else shapes
    shapes = [tuple(one["shape"]) for one in shapes]
    parts = {
        "few": lambda: few(given.rounds),
        "turns": lambda: turns(given.rounds),
        "small": lambda: contest("small", [(64,)] * 10_000, given.rounds),
        "lora": lambda: contest("lora", LORA, given.rounds),
        "clipped": lambda: contest("clipped", shapes, given.rounds, clipped),
        "gpt2": lambda: contest("gpt2", shapes, given.rounds),
    }
    for name in given.part or parts:
        parts[name]()


if __name__ == "__main__":
    main()
