"""Times of backward and step of two processes, ours beside PyTorch's DDP, in turns.

    torchrun --nproc-per-node=2 ranks.py [--rounds N] [--shapes resnet50.json]

The loss is a sum of products, whose backward pass does next to nothing: what is left is the
reduction of gradients and the step. Prints the least and the median in milliseconds, and PyTorch's
over ours, of rank 0.
"""

import argparse
import json
import math
import pathlib
import statistics
import time

import torch

import fusestep.torch

SHAPES = pathlib.Path(__file__).resolve().parents[3] / "data" / "shapes"


class Products(torch.nn.Module):
    """The sum of all parameters, each times a number."""

    def __init__(self, shapes):
        super().__init__()
        self.all = torch.nn.ParameterList([torch.full(shape, 0.5) for shape in shapes])

    def forward(self, factor):
        return sum(param.sum() * factor for param in self.all)


def contestants(shapes):
    for streams, zero in ((0, 0), (2, 0), (0, 1), (0, 2)):
        model = Products(shapes)
        optimizer = fusestep.torch.AdamW(model.parameters())
        parallel = fusestep.torch.DataParallel(model, optimizer, comm_streams=streams, zero=zero)
        yield f"ours, {streams} streams, ZeRO {zero}", parallel, optimizer
    for kind in ("fused", "foreach"):
        model = Products(shapes)
        parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        yield f"DDP, {kind}", parallel, torch.optim.AdamW(model.parameters(), **{kind: True})


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shapes", default=SHAPES / "resnet50.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    with open(given.shapes, encoding="utf-8") as file:
        shapes = json.load(file)
    shapes = shapes.get("params", shapes) if isinstance(shapes, dict) else shapes
    shapes = [tuple(one["shape"]) for one in shapes]
    runs = [(*contestant, []) for contestant in contestants(shapes)]
    for turn in range(given.rounds + 1):
        for _, parallel, optimizer, times in runs:
            optimizer.zero_grad()
            loss = parallel(float(turn + 1))
            torch.distributed.barrier()
            start = time.perf_counter()
            loss.backward()
            optimizer.step()
            # The first step makes state.
            if turn > 0:
                times.append(1e3 * (time.perf_counter() - start))
    if torch.distributed.get_rank() == 0:
        numel = sum(math.prod(shape) for shape in shapes)
        print(f"{len(shapes)} tensors, {numel:,} elements, 2 processes of 1 thread")
        ours = runs[0][3]
        for name, _, _, times in runs:
            least, median = min(times), statistics.median(times)
            print(
                f"  {name:24} {least:9.3f} {median:9.3f}"
                f"   least {least / min(ours):6.2f}, median {median / statistics.median(ours):6.2f}"
            )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
