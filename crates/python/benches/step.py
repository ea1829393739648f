"""Times of a step from Python, ours beside PyTorch's: in turns, then each by itself.

    python step.py [--rounds N] [--shapes gpt2.json]

Prints the least and the median of each in milliseconds, and PyTorch's over ours. In turns a step
finds what the others have left of the caches; by itself it finds its own.
"""

import argparse
import json
import math
import statistics
import time

import torch

import fusestep.torch


def contest(title, shapes, rounds):
    generator = torch.Generator().manual_seed(0)
    kinds = {
        "ours": lambda params: fusestep.torch.AdamW(params),
        "torch default": lambda params: torch.optim.AdamW(params),
        "torch foreach": lambda params: torch.optim.AdamW(params, foreach=True),
        "torch fused": lambda params: torch.optim.AdamW(params, fused=True),
    }
    runs = {}
    for kind, make in kinds.items():
        params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        runs[kind] = make(params)
        # The first step makes state and plan.
        runs[kind].step()
    in_turns = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, optimizer in runs.items():
            in_turns[kind].append(time_of(optimizer))
    alone = {
        kind: [time_of(optimizer) for _ in range(rounds + 1)][1:]
        for kind, optimizer in runs.items()
    }
    numel = sum(math.prod(shape) for shape in shapes)
    print(f"{title}: {len(shapes)} tensors, {numel:,} elements, {torch.get_num_threads()} threads")
    for how, times in (("in turns", in_turns), ("each by itself", alone)):
        print(f" {how}")
        ours = times["ours"]
        for kind, own in times.items():
            least, median = min(own), statistics.median(own)
            print(
                f"  {kind:14} {least:9.3f} {median:9.3f}"
                f"   least {least / min(ours):6.2f}, median {median / statistics.median(ours):6.2f}"
            )


def time_of(optimizer):
    start = time.perf_counter()
    optimizer.step()
    return 1e3 * (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--shapes", default="../../../data/shapes/gpt2.json")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with open(given.shapes, encoding="utf-8") as file:
        shapes = json.load(file)
    shapes = shapes.get("params", shapes) if isinstance(shapes, dict) else shapes
    shapes = [tuple(one["shape"]) for one in shapes]
    contest("small", [(64,)] * 10_000, given.rounds)
    contest("gpt2", shapes, given.rounds)


if __name__ == "__main__":
    main()
