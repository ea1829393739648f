"""What a rank of `test_ranks.py` runs; the first argument names it, the second where it writes."""

import copy
import json
import os
import pathlib
import pickle
import signal
import sys
import threading
import time

import rank_lanes
import rank_others
import rank_settings
import rank_whole
import torch
from processes import tell_if_late

import fusestep.torch


class Model(torch.nn.Module):
    def __init__(self, width=37):
        super().__init__()
        self.first = torch.nn.Linear(12, width)
        self.second = torch.nn.Linear(width, 65)
        self.last = torch.nn.Linear(65, 3)
        self.unused = torch.nn.Parameter(torch.ones(5))
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.ones(0, 3))

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x))))) * self.frozen.mean()


def batch(step):
    generator = torch.Generator().manual_seed(77 + step)
    return torch.randn(8, 12, generator=generator), torch.randn(8, 3, generator=generator)


def loss_of(model, step, rank, world):
    """The loss of a rank's part of a batch of eight."""
    inputs, wanted = batch(step)
    mine = slice(rank * 8 // world, (rank + 1) * 8 // world)
    return torch.nn.functional.mse_loss(model(inputs[mine]), wanted[mine])


def made(seed=0, **options):
    torch.manual_seed(seed)
    model = Model(options.pop("width", 37))
    name = options.pop("rule", "AdamW")
    settings = options.pop("settings", {"lr": 1e-2})
    optimizer = getattr(fusestep.torch, name)(model.parameters(), **settings)
    return model, optimizer, options


def write(model, **more):
    torch.save({"model": model.state_dict(), **more}, OUT / f"rank{RANK}.pt")


def train(parallel, optimizer, steps, accumulate=1):
    for step in range(*steps):
        optimizer.zero_grad()
        loss = loss_of(parallel, step, RANK, WORLD)
        (loss * optimizer.loss_scale()).backward()
        optimizer.step()


def kind_train():
    # Other first values on each rank: those of rank 0 are taken.
    steps = OPTIONS.pop("steps", [0, 6])
    save, resume = OPTIONS.pop("save", None), OPTIONS.pop("resume", None)
    model, optimizer, options = made(seed=RANK, **OPTIONS)
    parallel = fusestep.torch.DataParallel(model, optimizer, timeout=120, **options)
    assert (parallel.rank, parallel.world_size) == (RANK, WORLD)
    if resume:
        assert parallel.resume(resume) == steps[0]
    train(parallel, optimizer, steps)
    if save:
        parallel.save(save, steps[1])
    report = optimizer.report()
    with parallel.whole():
        parallel.close()
    try:
        optimizer.step()
    except RuntimeError as error:
        closed = str(error)
    write(model, report=vars(report), closed=closed)


def refused(call, *words):
    """That the call raises an error with these words."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"expected an error of {words}")


def kind_flush():
    """One micro-step and a flush, or a step, at a rate that is set between gradients and update."""
    model, optimizer, options = made(**OPTIONS)
    parallel = fusestep.torch.DataParallel(model, optimizer, timeout=30, **options)
    optimizer.zero_grad()
    loss_of(parallel, 0, RANK, WORLD).backward()
    if OPTIONS["settings"]["accumulate"] == 1:
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
    else:
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        parallel.flush()
    write(model)


def kind_views():
    model, optimizer, options = made(**OPTIONS)
    parallel = fusestep.torch.DataParallel(model, optimizer, timeout=30, **options)
    place = model.first.weight.data_ptr()
    version = model.first.weight._version
    loss_of(parallel, 0, RANK, WORLD).backward()
    first = model.first.weight.grad
    address = first.data_ptr()
    optimizer.step()
    assert model.first.weight.grad is None
    assert model.first.weight.data_ptr() == place, "the step is in place"
    assert model.first.weight._version > version, "autograd knows that it was written"
    loss_of(parallel, 1, RANK, WORLD).backward()
    assert model.first.weight.grad.data_ptr() == address, "the same memory at every step"
    optimizer.step()
    # The optimizer has no state of its own.
    refused(optimizer.state_dict, "DataParallel")
    for copier in (copy.copy, copy.deepcopy, pickle.dumps):
        refused(lambda copier=copier: copier(optimizer), "`save` of `DataParallel`", "`deepcopy`")
    refused(lambda: optimizer.add_param_group({"params": []}), "DataParallel")
    with torch.no_grad():
        model.first.weight.zero_()
    for call in (optimizer.step, parallel.flush, lambda: parallel.save(OUT / "saved", 2)):
        refused(call, "`first.weight`", "follow_parameters")
    assert not (OUT / "saved").exists()
    parallel.follow_parameters()
    assert not model.first.weight.any()
    model.first.weight.data = torch.full_like(model.first.weight, 2.0 + RANK)
    refused(optimizer.step, "`first.weight`", "moved", "follow_parameters")
    parallel.follow_parameters()
    assert model.first.weight.data_ptr() == place and (model.first.weight == 2.0).all()
    kept = model.second.bias.data
    model.second.bias.data = kept.double()
    refused(parallel.follow_parameters, "`second.bias`", "torch.float32", "torch.float64")
    model.second.bias.data = kept
    parallel.close()
    del parallel, optimizer
    # A view outlives all else.
    assert torch.isfinite(first.sum())
    write(model)


def kind_replaced():
    """Another one trains the model, first beside one that is open, then behind its `close`."""
    model, optimizer, options = made(**OPTIONS)
    first = fusestep.torch.DataParallel(model, optimizer, timeout=30, **options)
    train(first, optimizer, (0, 1))
    another = fusestep.torch.AdamW(model.parameters(), lr=1e-2)
    second = fusestep.torch.DataParallel(model, another, timeout=30, **options)
    refused(optimizer.step, "moved", "`close()`")
    train(second, another, (1, 2))
    refused(lambda: train(second, another, (2, 3)), "second gradient", "`close()`")
    second.close()
    first.close()
    again = fusestep.torch.AdamW(model.parameters(), lr=1e-2)
    third = fusestep.torch.DataParallel(model, again, timeout=30, **options)
    again.zero_grad()
    train(third, again, (3, 5))
    third.close()
    write(model)


def kind_arriving():
    """Gradients that are one element, in another order, or another hook's."""
    model, optimizer, options = made(**OPTIONS)
    seen = {}
    for name in ("bias", "weight"):
        # Called before ours, with what autograd has left.
        getattr(model.second, name).register_post_accumulate_grad_hook(
            lambda param, name=name: seen.update({name: param.grad.data_ptr()})
        )
    parallel = fusestep.torch.DataParallel(model, optimizer, timeout=30, **options)
    model.first.weight.register_hook(lambda gradient: 2 * gradient)
    factors = torch.arange(37.0 * 65).view(37, 65) + RANK
    loss = model.first.weight.sum() * (RANK + 1) + model.second.bias.sum()
    (loss + (model.second.weight.t() * factors).sum()).backward()
    # Nothing is averaged before the step without communication streams.
    assert (model.first.weight.grad == 2.0 * (RANK + 1)).all()
    assert (model.second.bias.grad == 1).all()
    assert torch.equal(model.second.weight.grad, factors.t())
    for name, address in seen.items():
        gradient = getattr(model.second, name).grad
        assert gradient.data_ptr() == address, "written once, where ranks read it"
        assert gradient.is_contiguous()
    optimizer.step()
    parallel.close()
    write(model)


def kind_negated():
    """A gradient that autograd leaves as a view with PyTorch's bit for a minus."""
    model = torch.nn.Module()
    model.imaginary = torch.nn.Parameter(torch.zeros(1))
    optimizer = fusestep.torch.SGD(model.parameters(), lr=1.0)
    parallel = fusestep.torch.DataParallel(model, optimizer, timeout=30, **OPTIONS)
    value = torch.complex(torch.ones(1), model.imaginary)
    # (1 - bi)(3 + 4i) has the real part 3 + 4b.
    (value.conj() * torch.tensor(3 + 4j)).real.sum().backward()
    optimizer.step()
    parallel.close()
    write(model)


def kind_written():
    how, errors = OPTIONS.pop("how"), []
    model, optimizer, options = made(**OPTIONS)
    parallel = fusestep.torch.DataParallel(model, optimizer, timeout=30, **options)
    train(parallel, optimizer, (0, 2))
    before = [value.clone() for value in model.state_dict().values()]
    loss_of(parallel, 2, RANK, WORLD).backward()
    if how == "backward":
        try:
            loss_of(parallel, 2, RANK, WORLD).backward()
        except RuntimeError as error:
            errors.append(str(error))
    elif how == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    else:
        optimizer.zero_grad(set_to_none=False)
    for call in (optimizer.step, parallel.flush, optimizer.step):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
    after = model.state_dict().values()
    same = all(torch.equal(a, b) for a, b in zip(before, after))
    parallel.close()
    write(model, errors=errors, same=same)


def kind_unequal():
    model, optimizer, options = made(width=37 + RANK, **OPTIONS)
    try:
        fusestep.torch.DataParallel(model, optimizer, timeout=20, **options)
    except RuntimeError as error:
        write(model, error=str(error))


def kind_dead_peer():
    model, optimizer, options = made(**OPTIONS)
    parallel = fusestep.torch.DataParallel(model, optimizer, timeout=30, **options)
    train(parallel, optimizer, (0, 2))
    before = [value.clone() for value in model.state_dict().values()]
    loss_of(parallel, 2, RANK, WORLD).backward()
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        optimizer.step()
    except RuntimeError as error:
        after = model.state_dict().values()
        same = all(torch.equal(a, b) for a, b in zip(before, after))
        write(model, error=str(error), same=same, seconds=time.monotonic() - start)


def kind_interrupt():
    model, optimizer, options = made(**OPTIONS)
    parallel = fusestep.torch.DataParallel(model, optimizer, timeout=60, **options)
    train(parallel, optimizer, (0, 2))
    before = [value.clone() for value in model.state_dict().values()]
    loss_of(parallel, 2, RANK, WORLD).backward()
    if RANK == 1:
        # Does not come until rank 0 has been interrupted.
        while not (OUT / "rank0.pt").exists():
            time.sleep(0.05)
        try:
            optimizer.step()
        except RuntimeError as error:
            write(model, error=str(error))
        return
    # Processes in the background of a shell ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        optimizer.step()
    except KeyboardInterrupt:
        after = model.state_dict().values()
        same = all(torch.equal(a, b) for a, b in zip(before, after))
        try:
            optimizer.step()
        except RuntimeError as error:
            write(model, error=str(error), same=same)


def kind_gloo():
    """PyTorch's own, for its losses."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    parallel = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(parallel, step, RANK, WORLD).backward()
        optimizer.step()
    write(model)


def main(kind, out, options, started=None):
    """Runs a kind; `started` is the rank, the world and the session, without a launcher."""
    global OUT, OPTIONS, RANK, WORLD
    OUT, OPTIONS = pathlib.Path(out), options
    if started is not None:
        rank, world, session = started
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            FUSESTEP_SESSION=session,
        )
        told = os.open(OUT / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(told, stream)
        tell_if_late()
    # Of torchrun, or of Open MPI's mpirun.
    RANK, WORLD = (
        int(os.environ.get(name) or os.environ[f"OMPI_COMM_WORLD_{name.removeprefix('WORLD_')}"])
        for name in ("RANK", "WORLD_SIZE")
    )
    torch.set_num_threads(1)
    own = globals().get(f"kind_{kind}")
    if own is not None:
        own()
    else:
        of_kind = {"settings": rank_settings, "lanes": rank_lanes, "lanes_refused": rank_lanes}
        whole = {"layers", "whole", "saved", "lanes_of_layers"}
        others = rank_whole if kind in whole else of_kind.get(kind, rank_others)
        getattr(others, kind)(OUT, OPTIONS, RANK, WORLD)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
