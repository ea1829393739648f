"""What a rank of `test_nccl.py` runs: trainings on the CPU and on its emulated device."""

import os
import signal
import threading
import time

import torch
from emulated import emulated
from processes import tell_if_late

import fusestep.torch
from fusestep.torch import _rank_memory

SHAPES = {"body.weight": (40, 25), "body.bias": (17,), "head.bias": (), "none": (0, 3)}
SHAPES["head.weight"] = (301,)
STEPS = 4
TIMEOUT = 30


def random(shape, *seeds):
    """Numbers that follow from the seeds alone."""
    generator = torch.Generator().manual_seed(sum(7**at * seed for at, seed in enumerate(seeds)))
    return torch.randn(shape, generator=generator)


class Net(torch.nn.Module):
    """Parameters alone, in memory that `placed` gives them."""

    def __init__(self, dtype=torch.float32, seed=1, placed=None):
        super().__init__()
        for at, (name, shape) in enumerate(SHAPES.items()):
            *parts, own = name.split(".")
            for part in parts:
                if not hasattr(self, part):
                    self.add_module(part, torch.nn.Module())
            value = torch.nn.Parameter(random(shape, at, seed).to(dtype))
            setattr(self.get_submodule(".".join(parts)), own, placed(value) if placed else value)


def loss_of(model, rank, step, on_device):
    """A loss whose gradients are random numbers and what the parameters add to them."""
    total = torch.zeros(())
    for at, (name, value) in enumerate(model.named_parameters()):
        if at == step % 3 and rank == 0:
            # Only the other ranks have a gradient of it.
            continue
        if on_device:
            # Autograd adds to it in place, so that it stays in device memory.
            value.grad = torch.zeros_like(value, dtype=getattr(value, "grad_dtype", value.dtype))
        own = random(SHAPES[name], at, rank, step).to(value.dtype)
        total = total + (value * own + value * value * 0.25).sum().float()
    return total


def host(model):
    return {name: value.detach().cpu().clone() for name, value in model.named_parameters()}


def made(case, rank, device):
    """A model on the CPU or on the rank's device, and its optimizer. Ranks begin with other values,
    unless the case says otherwise."""
    placed = None if device is None else (lambda value: device.copy(value, rank))
    dtype = getattr(torch, case.get("dtype", "float32"))
    model = Net(dtype, 1 + rank * ("same" not in case), placed)
    for value in model.parameters() if "wide" in case else ():
        value.grad_dtype = torch.float32
    settings = {"lr": 1e-2, **case.get("own", {})}
    rule = getattr(fusestep.torch, case.get("rule", "AdamW"))
    return model, rule(model.named_parameters(), **settings)


def joined(model, optimizer, **options):
    return fusestep.torch.DataParallel(model, optimizer, timeout=TIMEOUT, **options)


def train(case, rank, device=None):
    """Trains; what it has come to."""
    model, optimizer = made(case, rank, device)
    parallel = joined(model, optimizer, **case.get("ranks", {}))
    begin, end = case.get("steps", (0, STEPS))
    if "resume" in case:
        assert parallel.resume(case["resume"]) == begin
    found = {"values": [], "reports": []}
    with parallel.whole():
        found["values"].append(host(model))
    turn = 0
    for step in range(begin, end):
        turns = range(case.get("turns", 1))
        if step == case.get("writes"):
            with torch.no_grad():
                model.head.weight[:50] = 2.0 + rank
            parallel.follow_parameters()
        for number in parallel.micro_batches() if "lanes" in case.get("ranks", {}) else turns:
            turn += 1
            if device is not None and case.get("streams"):
                # PyTorch goes on on another stream, the first time on its default one.
                device.streams[rank] = (device.driver.stream(rank), 1) if turn % 3 else (0, 0)
            optimizer.zero_grad()
            if number is not None:
                batch = number if "lanes" in case.get("ranks", {}) else parallel.rank
                with parallel.whole():
                    loss = loss_of(model, batch, step, device is not None) * optimizer.loss_scale()
                    if case.get("not_finite") == (parallel.rank, step):
                        loss = loss * float("inf")
                    loss.backward()
            optimizer.step()
        with parallel.whole():
            found["values"].append(host(model))
        report = optimizer.report()
        told = report and (report.step, report.skipped, str(report.grad_norm))
        found["reports"].append(told)
    if "save" in case:
        parallel.save(case["save"], end)
    parallel.close()
    return found


def attempted(*arguments):
    try:
        return train(*arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def cases(out, options, rank, world):
    """Every case on the CPU and on devices."""
    found = {}
    for name, case in options.items():
        found[name] = {"cpu": attempted(case, rank)}
        with emulated() as device:
            found[name]["nccl"] = attempted(case, rank, device)
    return found


def checkpoints(out, options, rank, world):
    """Runs that begin on the CPU and go on on devices, and the other way round."""
    own = {**options, "save": str(out / "of-cpu"), "steps": (0, 2)}
    on_devices = {**own, "save": str(out / "of-nccl")}
    found = {"whole": train(options, rank), "first": train(own, rank)}
    with emulated() as device:
        train(on_devices, rank, device)
        go_on = {**options, "resume": own["save"], "steps": (2, STEPS)}
        found["nccl"] = train(go_on, rank, device)
    found["cpu"] = train({**go_on, "resume": on_devices["save"]}, rank)
    return found


def refused(call, *words):
    """That the call raises an error with these words."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"expected an error of {words}")


def views(out, options, rank, world):
    """Parameters in memory of the ranks: written, moved, and kept behind all else."""
    with emulated() as device:
        model, optimizer = made({"same": True, **options}, rank, device)
        parallel = joined(model, optimizer, engine="nccl")
        weight = model.head.weight
        place, version = weight.data_ptr(), weight._version
        loss_of(model, rank, 1, True).backward()
        optimizer.step()
        assert weight.data_ptr() == place and weight._version > version
        assert weight.grad is None and weight.device == torch.device("cuda", rank)
        refused(optimizer.state_dict, "DataParallel")
        with torch.no_grad():
            weight.fill_(2.0 + rank)
        refused(optimizer.step, "`head.weight`", "follow_parameters")
        parallel.follow_parameters()
        assert (host(model)["head.weight"] == 2.0).all(), "the values of rank 0"
        kept = weight.data
        weight.data = device.copy(torch.full((301,), 3.0 + rank, dtype=weight.dtype), rank)
        refused(optimizer.step, "`head.weight`", "moved", "follow_parameters")
        parallel.follow_parameters()
        assert weight.data_ptr() == place == kept.data_ptr()
        found = [host(model)]
        for step in (2, 3):
            loss_of(model, rank, step, True).backward()
            optimizer.step()
            found.append(host(model))
        with device.recording(rank):
            refused(optimizer.step, f"cuda:{rank}", "outside of a recording")
        parallel.close()
        refused(optimizer.step, "closed")
        del parallel, optimizer
        # A view outlives all else.
        found.append(host(model))
    return {"found": found}


def ordered(out, options, rank, world):
    """A gradient that is complete when PyTorch's stream has come to it, behind its hook."""
    with emulated() as device:
        model, optimizer = made({"rule": "SGD", "own": {"lr": 1.0}, "same": True}, rank, device)
        parallel = joined(model, optimizer)
        weight, before = model.head.weight, host(model)["head.weight"]
        gradient = weight.grad = torch.zeros_like(weight)
        stream = device.driver.stream(rank)
        device.streams[rank] = stream, 1
        device.driver.occupy(stream)

        def complete():
            # Past the count of versions.
            gradient.data.mul_(3)
            device.driver.vacate(stream)

        later = threading.Timer(0.3, complete)
        later.start()
        (weight * (rank + 1.0)).sum().backward()
        later.join()
        optimizer.step()
        parallel.close()
        # The mean of 3 and 6.
        assert torch.equal(host(model)["head.weight"], before - 4.5)
    return {}


def dead_peer(out, options, rank, world):
    """A process that dies before its step."""
    with emulated() as device:
        model, optimizer = made({}, rank, device)
        joined(model, optimizer, **options)
        loss_of(model, rank, 0, True).backward()
        optimizer.step()
        loss_of(model, rank, 1, True).backward()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            optimizer.step()
        except RuntimeError as error:
            return {"error": str(error), "seconds": time.monotonic() - start}


def shared(out, options, rank, world):
    """Two ranks on one device."""
    with emulated() as device:
        model, optimizer = made({}, 0, device)
        refused(lambda: joined(model, optimizer), "a GPU for each rank", "ranks 0 and 1")
    return {}


def main(kind, out, options, rank, world, session):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        FUSESTEP_SESSION=session,
    )
    told = os.open(out / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(told, stream)
    tell_if_late()
    torch.set_num_threads(1)
    # By its path: PyTorch may have loaded the real one by this name.
    _rank_memory.nccl_of_wheels = lambda: os.environ["FUSESTEP_NCCL_LIBRARY"]
    torch.save(globals()[kind](out, options, rank, world), out / f"rank{rank}.pt")
