"""Times of whole iterations of GPT-2 small, ours beside PyTorch's fused AdamW, in turns.

    python iteration.py [--rounds N] [--tokens N] [--threads N] [whole | lora]

The model is made of its configuration and begins with random weights: 124 M elements, of which
`whole` trains all and `lora` 96 matrices of rank 16. Gradients are clipped to a norm of 1. An
iteration is what a trainer does: zero_grad, forward, backward, clip and step. Prints the medians in
milliseconds of an iteration and of clip and step alone. Needs `transformers` and `peft`.
"""

import argparse
import copy
import statistics
import time

import peft
import torch
import transformers

import fusestep.torch

MATRICES = ["c_attn", "c_proj", "c_fc"]


def model(part):
    torch.manual_seed(0)
    made = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    if part == "lora":
        # Four matrices a layer, with two of low rank each.
        asked = peft.LoraConfig(r=16, target_modules=MATRICES, fan_in_fan_out=True)
        made = peft.get_peft_model(made, asked)
    return made.train()


def ours(params):
    optimizer = fusestep.torch.AdamW(params, lr=1e-4, clip_norm=1.0)
    return optimizer, optimizer.step


def fused(params):
    optimizer = torch.optim.AdamW(params, lr=1e-4, fused=True)

    def step():
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return optimizer, step


def run(part, rounds, tokens):
    kinds, first = {}, model(part)
    for name, make in (("ours", ours), ("torch fused", fused)):
        own = copy.deepcopy(first)
        params = [param for param in own.parameters() if param.requires_grad]
        kinds[name] = (own, *make(params))
    count = sum(param.numel() for param in params)
    print(f"{part}: {len(params)} tensors, {count:,} elements, {torch.get_num_threads()} threads")
    batch = torch.randint(0, 50_000, (1, tokens))
    times = {name: ([], []) for name in kinds}
    for turn in range(rounds + 1):
        for name, (own, optimizer, step) in kinds.items():
            begun = time.perf_counter()
            optimizer.zero_grad()
            own(input_ids=batch, labels=batch).loss.backward()
            stepped = time.perf_counter()
            step()
            ended = time.perf_counter()
            # The first turn makes state and plan.
            if turn > 0:
                times[name][0].append(1e3 * (ended - begun))
                times[name][1].append(1e3 * (ended - stepped))
    for name, own in times.items():
        whole, step = (statistics.median(each) for each in own)
        print(f"  {name:14} iteration {whole:9.1f}, of which clip and step {step:8.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="*", choices=[[], "whole", "lora"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for part in given.part or ("whole", "lora"):
        run(part, given.rounds, given.tokens)


if __name__ == "__main__":
    main()
