"""A step of PyTorch on two ranks of one machine, each with one thread: Gloo and fused AdamW.

    pip install torch numpy
    python benches/peers/torch_ranks.py data/shapes/resnet50.json [ranks] [rounds]

Three ways, the best of all rounds in milliseconds, the slowest rank's:
  ddp    all-reduce of flat buckets of 25 MiB, then AdamW(fused=True) on every rank
  shard  reduce-scatter of one flat gradient, AdamW on this rank's part, all-gather
  zero   all-reduce of flat buckets, then ZeroRedundancyOptimizer(AdamW, fused=True)
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.optim import ZeroRedundancyOptimizer

BUCKET = 25 * 2**20 // 4


def numel(shape):
    count = 1
    for length in shape:
        count *= length
    return count


def buckets(grads):
    taken, size = [], 0
    for grad in grads:
        taken.append(grad)
        size += grad.numel()
        if size >= BUCKET:
            yield taken
            taken, size = [], 0
    if taken:
        yield taken


def best(call, rounds):
    times = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        call()
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item() * 1e3)
    return min(times)


def rank(index, world, path, rounds):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("gloo", rank=index, world_size=world)
    torch.set_num_threads(1)
    shapes = json.load(open(path))
    shapes = shapes.get("parameters", shapes) if isinstance(shapes, dict) else shapes
    shapes = [entry["shape"] if isinstance(entry, dict) else entry[1] for entry in shapes]
    total = sum(numel(shape) for shape in shapes)
    padded = -(-total // world) * world

    # Gradients lie in one flat memory, so that buckets are ranges of it and nothing is copied.
    def model():
        flat, params, at = torch.full((padded,), 0.01), [], 0
        for shape in shapes:
            param = torch.nn.Parameter(torch.full(shape, 0.1))
            param.grad = flat[at : at + numel(shape)].view(shape)
            at += numel(shape)
            params.append(param)
        return flat, params

    def reduce_buckets(flat):
        work = [
            dist.all_reduce(flat[at : at + BUCKET], async_op=True)
            for at in range(0, padded, BUCKET)
        ]
        for call in work:
            call.wait()

    flat, params = model()
    whole = torch.optim.AdamW(params, fused=True)
    zero = ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.AdamW, fused=True)
    flat_params = torch.full((padded,), 0.1)
    part = torch.nn.Parameter(torch.full((padded // world,), 0.1))
    part.grad = torch.zeros(padded // world)
    sharded = torch.optim.AdamW([part], fused=True)

    def ddp():
        reduce_buckets(flat)
        whole.step()

    def shard():
        dist.reduce_scatter_tensor(part.grad, flat)
        sharded.step()
        dist.all_gather_into_tensor(flat_params, part.detach())

    def redundancy():
        reduce_buckets(flat)
        zero.step()

    found = {}
    for name, call in [("ddp", ddp), ("shard", shard), ("zero", redundancy)]:
        flat.fill_(0.01)
        try:
            call()
            found[name] = best(call, rounds)
        except (RuntimeError, TypeError) as error:
            found[name] = str(error).splitlines()[0]
    if index == 0:
        print(json.dumps({"torch": torch.__version__, "ranks": world, "ms": found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    path = sys.argv[1]
    world = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 12
    mp.spawn(rank, (world, path, rounds), nprocs=world)
