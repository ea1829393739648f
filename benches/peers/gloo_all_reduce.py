"""Gloo's all-reduce (sum, f32, in place) between two processes: the peer of `fusestep bench --collective all-reduce`.

    python gloo_all_reduce.py bucket SHAPES.json    all gradients of a model in one buffer
    python gloo_all_reduce.py list SHAPES.json      one call for each

Prints bytes, the median and the best time in seconds of 15 rounds. Needs PyTorch.
"""

import json
import math
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROUNDS = 15


def rank_main(rank, mode, lengths):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=rank, world_size=2)
    if mode == "bucket":
        lengths = [sum(lengths)]
    tensors = [torch.full((numel,), float(rank)) for numel in lengths]
    seconds = []
    for round_ in range(-1, ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        for tensor in tensors:
            dist.all_reduce(tensor)
        if round_ >= 0:
            seconds.append(time.perf_counter() - start)
    if rank == 0:
        seconds.sort()
        print(4 * sum(lengths), f"{seconds[ROUNDS // 2]:.6f} {seconds[0]:.6f}")
    dist.destroy_process_group()


def main():
    if len(sys.argv) != 3 or sys.argv[1] not in ("bucket", "list"):
        sys.exit(__doc__)
    shapes = json.load(open(sys.argv[2]))
    lengths = [math.prod(tensor["shape"]) for tensor in shapes]
    mp.spawn(rank_main, (sys.argv[1], lengths), nprocs=2)


if __name__ == "__main__":
    main()
