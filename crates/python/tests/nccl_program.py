"""What a rank of `test_nccl.py` runs: the same training on the CPU and on its emulated device."""

import os

import torch
from emulated import emulated

import fusestep.torch
from fusestep.torch import _rank_memory

SHAPES = {"body.weight": (40, 25), "body.bias": (17,), "head.bias": (), "none": (0, 3)}
SHAPES["head.weight"] = (301,)
STEPS = 4


def random(shape, *seeds):
    """Numbers that follow from the seeds alone."""
    generator = torch.Generator().manual_seed(sum(7**at * seed for at, seed in enumerate(seeds)))
    return torch.randn(shape, generator=generator)


class Net(torch.nn.Module):
    """Parameters alone, which ranks begin with differently: those of rank 0 are taken."""

    def __init__(self, dtype, seed, copied):
        super().__init__()
        for at, (name, shape) in enumerate(SHAPES.items()):
            *parts, own = name.split(".")
            for part in parts:
                if not hasattr(self, part):
                    self.add_module(part, torch.nn.Module())
            value = torch.nn.Parameter(random(shape, at, seed).to(dtype))
            setattr(self.get_submodule(".".join(parts)), own, copied(value))


def loss_of(model, rank, step, device):
    """A loss whose gradients are random ones and what the parameters add to them."""
    total = torch.zeros(())
    for at, (name, value) in enumerate(model.named_parameters()):
        if at == step % 3 and rank == 0:
            # Only the other ranks have a gradient of it.
            continue
        if device is not None:
            # Autograd adds to it in place, so that it stays in device memory.
            value.grad = torch.zeros_like(value)
        own = random(SHAPES[name], at, rank, step).to(value.dtype)
        total = total + (value * own + value * value * 0.25).sum().float()
    return total


def host(model):
    return {name: value.detach().cpu().clone() for name, value in model.named_parameters()}


def train(case, rank, device=None):
    """Trains on a device, or on the CPU; what it has come to."""
    dtype = getattr(torch, case.get("dtype", "float32"))
    model = Net(dtype, 1 + rank * ("same" not in case), device or (lambda value: value))
    settings = {"lr": 1e-2, **case.get("own", {})}
    optimizer = getattr(fusestep.torch, case.get("rule", "AdamW"))(model.named_parameters(), **settings)
    parallel = fusestep.torch.DataParallel(model, optimizer, timeout=60, **case.get("ranks", {}))
    begin, end = case.get("steps", (0, STEPS))
    if "resume" in case:
        assert parallel.resume(case["resume"]) == begin
    found = {"values": [host(model)], "reports": [], "rank": parallel.rank}
    for step in range(begin, end):
        for _ in range(case.get("turns", 1)):
            optimizer.zero_grad()
            loss = loss_of(model, parallel.rank, step, device) * optimizer.loss_scale()
            if case.get("not_finite") == (parallel.rank, step):
                loss = loss * float("inf")
            loss.backward()
            optimizer.step()
        found["values"].append(host(model))
        report = optimizer.report()
        found["reports"].append(report and (report.step, report.skipped, report.grad_norm))
    found["norms"] = optimizer.update_norms()
    if "save" in case:
        parallel.save(case["save"], end)
    parallel.close()
    return found


def attempted(*arguments):
    try:
        return train(*arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main(out, cases, rank, world, session):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        FUSESTEP_SESSION=session,
    )
    told = os.open(out / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(told, stream)
    torch.set_num_threads(1)
    # By its path: PyTorch may have loaded the real one by this name.
    _rank_memory.nccl_of_wheels = lambda: os.environ["FUSESTEP_NCCL_LIBRARY"]
    found = {}
    for name, case in cases.items():
        print(name, flush=True)
        own = {"cpu": attempted(case, rank)}
        with emulated() as device:
            own["nccl"] = attempted(case, rank, lambda value: device.copy(value, rank))
        found[name] = own
    torch.save(found, out / f"rank{rank}.pt")
