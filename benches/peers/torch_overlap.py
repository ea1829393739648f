"""Whole iterations of a transformer of 10 million parameters: `DataParallel` beside DDP and FSDP2.

    pip install torch numpy fusestep
    torchrun --nproc-per-node=2 benches/peers/torch_overlap.py [--rounds N] [--windows N]

Two processes of one thread each train on windows of 64 characters: forward, backward, the average
of gradients and AdamW. `DataParallel` steps without communication streams and with two, whose calls
run beside the backward pass, and at ZeRO stages 2 and 3, where parameters come before each module;
DDP reduces by Gloo beside it, and so does FSDP2, where parameters come layer by layer. All take
turns, and so do a forward and backward pass alone, without an exchange or a step. Milliseconds of
the slowest process: median, least and most of all rounds; and what is left of each iteration when
the passes are taken off.
"""

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
import torch_transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fusestep.torch

torch_transformer.LAYERS, torch_transformer.WIDTH = 6, 384
VOCABULARY = 65


def model():
    torch.manual_seed(0)
    return torch_transformer.Transformer(VOCABULARY)


def contestants():
    for zero, streams in ((0, 0), (0, 2), (2, 0), (3, 0)):
        own = model()
        optimizer = fusestep.torch.AdamW(own.parameters(), lr=1e-3)
        parallel = fusestep.torch.DataParallel(own, optimizer, comm_streams=streams, zero=zero)
        name = f"DataParallel, {streams} streams" + (f", zero={zero}" if zero else "")
        yield name, parallel, optimizer
    own = model()
    parallel = torch.nn.parallel.DistributedDataParallel(own, gradient_as_bucket_view=True)
    yield "DDP, fused AdamW", parallel, torch.optim.AdamW(own.parameters(), lr=1e-3, fused=True)
    own = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in own.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(own, mesh=mesh)
    yield "FSDP2, fused AdamW", own, torch.optim.AdamW(own.parameters(), lr=1e-3, fused=True)
    yield "passes alone", model(), None


def slowest(seconds):
    took = torch.tensor(seconds)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return 1e3 * took.item()


def iteration(parallel, optimizer, windows):
    dist.barrier()
    start = time.perf_counter()
    loss = parallel(windows[:, :-1], windows[:, 1:])
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    took = time.perf_counter() - start
    if optimizer is None:
        parallel.zero_grad()
    return slowest(took), loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--windows", type=int, default=4, help="of each process")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = [(*contestant, [], []) for contestant in contestants()]
    generator = torch.Generator().manual_seed(dist.get_rank())
    length = torch_transformer.CONTEXT + 1
    for turn in range(given.rounds + 2):
        windows = torch.randint(VOCABULARY, (given.windows, length), generator=generator)
        for _, parallel, optimizer, times, losses in runs:
            took, loss = iteration(parallel, optimizer, windows)
            losses.append(loss)
            # The first steps make state and buckets.
            if turn > 1:
                times.append(took)
    if dist.get_rank() == 0:
        # All start alike and see the same windows, so they have learned the same.
        ends = [losses[-1] for *_, optimizer, _, losses in runs if optimizer is not None]
        assert max(ends) - min(ends) < 1e-2, ends
        alone = statistics.median(runs[-1][3])
        found = {}
        for name, _, _, times, _ in runs:
            middle = statistics.median(times)
            found[name] = {
                "ms": [round(value, 1) for value in (middle, min(times), max(times))],
                "beside_passes_ms": round(middle - alone, 1),
            }
        elements = sum(p.numel() for p in runs[-1][1].parameters())
        head = {"torch": torch.__version__, "ranks": dist.get_world_size(), "elements": elements}
        print(json.dumps({**head, "windows": given.windows, "found": found}, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
