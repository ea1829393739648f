"""The transformer of `fusestep train --model transformer` in PyTorch: DDP over Gloo, fused AdamW.

    pip install torch numpy
    python benches/peers/torch_transformer.py [ranks] [steps]

Sixteen windows of 64 characters a step, shared out among ranks of one thread each. Prints the
characters learned from in a second, and the share of the time that is the exchange of gradients
and the update: what a step takes beyond a forward and backward pass alone, measured in turns in the
same run. Medians, of the slowest rank.
"""

import gzip
import json
import os
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 4, 256, 4, 64, 16
TEXT = pathlib.Path(__file__).parents[2] / "crates/models/data/shakespeare.txt.gz"


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.gain, 1e-6)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.query, self.key, self.value, self.out = (linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        normed = self.norms[0](x)
        parts = [part(normed) for part in (self.query, self.key, self.value)]
        heads = [p.view(batch, length, HEADS, -1).transpose(1, 2) for p in parts]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(self.up(self.norms[1](x)).relu().square())


class Transformer(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = Norm(), linear(WIDTH, vocabulary)

    def forward(self, tokens, following):
        x = self.layers(self.tokens(tokens) + self.positions)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def rank(index, world, steps):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    dist.init_process_group("gloo", rank=index, world_size=world)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = gzip.decompress(TEXT.read_bytes()).decode()
    codes = {character: code for code, character in enumerate(sorted(set(text)))}
    text = torch.tensor([codes[character] for character in text])
    model = Transformer(len(codes))
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(1)

    def slowest(start):
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    whole, alone, losses = [], [], []
    for step in range(steps + 1):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        windows = torch.stack([text[at : at + CONTEXT + 1] for at in starts[index::world]])
        seen, following = windows[:, :-1], windows[:, 1:]
        dist.barrier()
        start = time.perf_counter()
        loss = parallel(seen, following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole.append(slowest(start))
        start = time.perf_counter()
        with parallel.no_sync():
            parallel(seen, following).backward()
        alone.append(slowest(start))
        optimizer.zero_grad()
        losses.append(loss.item())
    if index == 0:
        # The first step makes state and buckets.
        whole, alone = statistics.median(whole[1:]), statistics.median(alone[1:])
        print(
            json.dumps(
                {
                    "torch": torch.__version__,
                    "ranks": world,
                    "elements": sum(p.numel() for p in model.parameters()),
                    "losses": [losses[0], losses[-1]],
                    "step_ms": whole * 1e3,
                    "passes_ms": alone * 1e3,
                    "characters_per_second": BATCH * CONTEXT / whole,
                    "step_share": 1 - alone / whole,
                }
            )
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 50
    mp.spawn(rank, (world, steps), nprocs=world)
