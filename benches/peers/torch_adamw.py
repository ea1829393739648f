"""Times torch.optim.AdamW(fused=True) on the CPU, for comparison with `fusestep bench` on the same shapes.

usage: torch_adamw.py SHAPES.json THREADS      prints one JSON object; times are the best of all rounds
Needs torch (tried: 2.7.1 from PyPI).
"""
import json
import sys
import time

import torch

shapes, threads = json.load(open(sys.argv[1])), int(sys.argv[2])
torch.set_num_threads(threads)
params = [torch.nn.Parameter(torch.full(entry["shape"], 0.1)) for entry in shapes]
for param in params:
    param.grad = torch.full_like(param, 0.01)
elements = sum(param.numel() for param in params)
optimizer = torch.optim.AdamW(params, lr=1e-3, fused=True)
best = float("inf")
for _ in range(25):
    start = time.perf_counter_ns()
    optimizer.step()
    best = min(best, time.perf_counter_ns() - start)
print(json.dumps({
    "torch": torch.__version__,
    "threads": threads,
    "elements": elements,
    "torch_ns_per_step": best,
    "gb_per_s": 28 * elements / best,
}))
