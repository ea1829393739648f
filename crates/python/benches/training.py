"""Times of a step behind a backward pass that computes, ours beside PyTorch's, in turns.

    python training.py [--rounds N] [--width W] [--layers L] [--threads T]

The model is so many square linear layers with a GELU behind each. PyTorch's threads still spin when
a step begins: whoever steps on other threads shares the cores with them. Prints the medians in
microseconds of the step and of the whole turn: zero_grad, forward, backward and step.
"""

import argparse
import statistics
import time

import torch

import fusestep.torch


def plain(rule, **settings):
    def make(params):
        optimizer = rule(params, **settings)
        return optimizer, optimizer.step

    return make


def clipped(params):
    params = list(params)
    optimizer = torch.optim.AdamW(params, fused=True)

    def step():
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return optimizer, step


KINDS = {
    "ours": plain(fusestep.torch.AdamW),
    "torch fused": plain(torch.optim.AdamW, fused=True),
    "ours, clipped": plain(fusestep.torch.AdamW, clip_norm=1.0),
    "torch fused, clipped": clipped,
    "ours, LAMB": plain(fusestep.torch.Lamb),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    width, count = given.width, given.layers
    data = torch.randn(64, width)
    runs = []
    for kind, make in KINDS.items():
        layers = [(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(count)]
        model = torch.nn.Sequential(*[layer for both in layers for layer in both])
        runs.append((kind, model, *make(model.parameters()), [], []))
    for turn in range(given.rounds + 1):
        for _, model, optimizer, step, steps, wholes in runs:
            began = time.perf_counter()
            optimizer.zero_grad()
            model(data).square().mean().backward()
            start = time.perf_counter()
            step()
            end = time.perf_counter()
            # The first turn makes state and plan.
            if turn > 0:
                steps.append(1e6 * (end - start))
                wholes.append(1e6 * (end - began))
    numel = count * width * (width + 1)
    print(f"{count} layers of {width}, {numel:,} elements, {given.threads} threads")
    for kind, _, _, _, steps, wholes in runs:
        step, whole = statistics.median(steps), statistics.median(wholes)
        print(f"  {kind:22} step {step:9.0f}   whole {whole:9.0f}")


if __name__ == "__main__":
    main()
