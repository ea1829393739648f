"""Ranks whose gradients others look at, change, average or add; `rank_program.py` runs these."""

import time

import between
import torch
from torch.utils.checkpoint import checkpoint

import fusestep.torch


def streams(out, options, rank, world):
    """A step with the streams that ranks choose; the plan says which, and why."""
    torch.set_num_threads(options.pop("threads")[rank])
    model = torch.nn.Linear(4, 3)
    optimizer = fusestep.torch.SGD(model.parameters(), lr=1.0)
    given = options.pop("given", [None] * world)[rank]
    parallel = fusestep.torch.DataParallel(
        model, optimizer, timeout=60, comm_streams=given, **options
    )
    model(torch.full((1, 4), float(rank))).sum().backward()
    optimizer.step()
    parallel.close()
    told = {"model": model.state_dict(), "plan": parallel._ranks.plan()}
    torch.save(told, out / f"rank{rank}.pt")


def cells(out, options, rank, world):
    """Every row of `between.py`, each with a group of its own."""
    found = {}
    for name, act, *_ in between.ROWS:
        run = between.Run(between.adamw(fusestep.torch))
        parallel = fusestep.torch.DataParallel(run.model, run.optimizer, timeout=60, **options)
        for step in (0, 1, 60):
            run.optimizer.zero_grad()
            between.loss_of(parallel, step, rank, world).backward()
            if step < 2:
                run.step()
        cell, text = between.outcome(run, act)
        found[name] = between.judged(run, act, cell, text, world, 1)
        parallel.close()
    torch.save({"cells": found}, out / f"rank{rank}.pt")


def refused(call, *words):
    """That the call raises an error with these words, and changes no parameter in them."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"expected an error of {words}")


def trained(look, options, rank, world):
    """Parameters behind three steps, with a look at the model before each `backward`."""
    run = between.Run(between.adamw(fusestep.torch))
    parallel = fusestep.torch.DataParallel(run.model, run.optimizer, timeout=60, **options)
    for step in range(3):
        run.optimizer.zero_grad()
        look(run)
        between.loss_of(parallel, step, rank, world).backward()
        run.step()
    parallel.close()
    return between.values(run)


def grads(out, options, rank, world):
    """`torch.autograd.grad` before `backward`, of which ranks know nothing."""
    plain = between.Net()

    def look(run):
        loss = between.loss_of(run.model, 7)
        once = torch.autograd.grad(loss, run.weight, retain_graph=True)[0]
        kept = once.clone()
        twice = torch.autograd.grad(2 * loss, run.weight)[0]
        assert torch.equal(once, kept) and torch.allclose(twice, 2 * once)
        (first,) = torch.autograd.grad(between.loss_of(run.model, 7), run.weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), run.weight)
        plain.load_state_dict(run.model.state_dict())
        loss = between.loss_of(plain, 7)
        (other,) = torch.autograd.grad(loss, plain.first.weight, create_graph=True)
        assert torch.equal(first, other)
        assert torch.equal(second, torch.autograd.grad(other.square().sum(), plain.first.weight)[0])
        assert all(p.grad is None for p in run.params)

    with_look = trained(look, options, rank, world)
    without = trained(lambda run: None, options, rank, world)
    assert all(torch.equal(a, b) for a, b in zip(with_look, without))
    run = between.Run(between.adamw(fusestep.torch))
    parallel = fusestep.torch.DataParallel(run.model, run.optimizer, timeout=60, **options)
    before = between.values(run)
    loss = between.loss_of(parallel, 0)
    refused(lambda: loss.backward(create_graph=True), "without a graph", "create_graph")
    assert all(torch.equal(a, b) for a, b in zip(before, between.values(run)))
    parallel.close()


def resumed(out, options, rank, world):
    """Steps that are refused, and a checkpoint to go on from, beside a run without either."""

    def joined():
        run = between.Run(between.adamw(fusestep.torch))
        return run, fusestep.torch.DataParallel(run.model, run.optimizer, timeout=60, **options)

    results = []
    for guards in (False, True):
        run, parallel = joined()
        for step in range(4):
            run.optimizer.zero_grad()
            between.loss_of(parallel, step, rank, world).backward()
            if guards:
                refused(parallel.flush, "expected `optimizer.step()`", "found `flush`")
                refused(lambda p=parallel: p.save(out / "early", 1), "found `save`")
                refused(lambda p=parallel: p.resume(out / "saved"), "found `resume`")
            run.step()
            if guards and step == 1:
                parallel.save(out / "saved", 2)
                for act in (lambda r: r.optimizer.zero_grad(), between.replace):
                    between.loss_of(parallel, 50, rank, world).backward()
                    act(run)
                    refused(run.step, "gradient of", "found", "`close()`, and `resume`")
                    parallel.close()
                    refused(run.step, "closed")
                    run, parallel = joined()
                    assert parallel.resume(out / "saved") == 2
        parallel.close()
        results.append(between.values(run))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert not (out / "early").exists()


def one_guards(out, options, rank, world):
    """Rank 1 alone drops or writes a gradient, and lives on."""
    for act in (between.drop, between.write):
        run = between.Run(between.adamw(fusestep.torch))
        parallel = fusestep.torch.DataParallel(run.model, run.optimizer, timeout=10, **options)
        before = between.values(run)
        between.loss_of(parallel, 0, rank, world).backward()
        if rank == 1:
            act(run)
        told = ["gradient of `first.weight`", "expected", "found"]
        refused(run.step, *told, *([] if rank else ["rank 1"]))
        assert all(torch.equal(a, b) for a, b in zip(before, between.values(run)))
        # Rank 1 leaves behind rank 0, which does not take it for dead.
        (out / f"{act.__name__}{rank}").touch()
        other = out / f"{act.__name__}{1 - rank}"
        while not other.exists():
            time.sleep(0.02)
        parallel.close()


def checkpoints(out, options, rank, world):
    """A weight that a reentrant checkpoint has, too."""
    for reentrant in (False, True):
        run = between.Run(between.adamw(fusestep.torch))
        parallel = fusestep.torch.DataParallel(run.model, run.optimizer, timeout=60, **options)
        linear = torch.nn.functional.linear
        x = torch.ones(2, 6, requires_grad=True)

        def loss(run=run, x=x, reentrant=reentrant):
            inner = checkpoint(lambda x: linear(x, run.weight), x, use_reentrant=reentrant)
            return (inner.sum() + linear(x, run.weight).sum()).square()

        if reentrant:
            refused(lambda: loss().backward(), "use_reentrant=False")
        else:
            loss().backward()
            run.step()
        parallel.close()


def alone(ours, world):
    """PyTorch's DistributedDataParallel around a model that steps with our optimizer or its own."""
    module, micro = (fusestep.torch, 2) if ours else (torch.optim, 1)
    for accumulate in (1, micro):
        model = between.Net()
        early = [p for name, p in model.named_parameters() if name != "late"]
        options = {"accumulate": accumulate} if accumulate > 1 else {}
        optimizer = between.adamw(module, **options)(early)
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        for step in range(3):
            for _ in range(accumulate):
                optimizer.zero_grad()
                between.loss_of(parallel, step, torch.distributed.get_rank(), world).backward()
                optimizer.step()
        yield [p.detach().clone() for p in early]


def wrapped(out, options, rank, world):
    """PyTorch's DistributedDataParallel beside each of ours."""
    store = f"file://{out}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    wrap = torch.nn.parallel.DistributedDataParallel
    theirs = next(alone(False, world))
    for ours in alone(True, world):
        assert between.close(ours, theirs)

    def fused(model):
        optimizer = between.adamw(fusestep.torch)(model.parameters())
        return fusestep.torch.fuse_backward(model, optimizer, bucket_mib=1e-5), optimizer

    refused(lambda: fused(wrap(between.Net())), "fuse_backward", "DistributedDataParallel")
    model = between.Net()
    kept = wrap(model)
    refused(lambda: fused(model), "fuse_backward", "DistributedDataParallel")
    optimizer = between.adamw(fusestep.torch)(model.parameters())
    for given in (model, kept):
        refused(
            lambda given=given: fusestep.torch.DataParallel(given, optimizer),
            "DataParallel",
            "DistributedDataParallel",
        )
    del kept
    # Wrapped behind `fuse_backward`, before the first step or later.
    for steps in (0, 1, 2):
        model = between.Net()
        _, optimizer = fused(model)
        for step in range(steps):
            between.loss_of(model, step).backward()
            optimizer.step()
        parallel = wrap(model)
        before = [p.detach().clone() for p in model.parameters()]
        loss = between.loss_of(parallel, 9)
        refused(loss.backward, "expected", "found")
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters())]
        assert all(same) or steps, "nothing is updated before the first step"


class Wide(torch.autograd.Function):
    """The sum of products, whose gradient is in float32 whatever the parameter's dtype."""

    @staticmethod
    def forward(ctx, param, factors):
        ctx.save_for_backward(factors)
        return (param.to(torch.float32) * factors).sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def wide(out, options, rank, world):
    """Gradients in float32 of parameters of 16 bits, beside parameters in float32."""
    f32 = torch.float32
    model = torch.nn.Linear(9, 5).to(torch.bfloat16)
    twin = torch.nn.Linear(9, 5)
    twin.load_state_dict({key: value.to(f32) for key, value in model.state_dict().items()})
    for param in model.parameters():
        param.grad_dtype = f32
    ours = fusestep.torch.AdamW(model.parameters(), lr=1e-2, master_weights=True)
    others = fusestep.torch.AdamW(twin.parameters(), lr=1e-2)
    with_wide = fusestep.torch.DataParallel(model, ours, timeout=60, **options)
    plain = fusestep.torch.DataParallel(twin, others, timeout=60, **options)
    for step in range(3):
        for own in (model, twin):
            for at, param in enumerate(own.parameters()):
                generator = torch.Generator().manual_seed(100 * step + 10 * rank + at)
                factors = torch.randn(param.shape, generator=generator)
                Wide.apply(param, factors).backward()
        ours.step()
        others.step()
    with_wide.close()
    plain.close()

    narrow = torch.nn.Linear(9, 5).to(torch.bfloat16)
    optimizer = fusestep.torch.AdamW(narrow.parameters(), lr=1e-2)
    parallel = fusestep.torch.DataParallel(narrow, optimizer, timeout=60, reduce_dtype="param")
    for param in narrow.parameters():
        param.grad_dtype = f32
    found = ""
    try:
        Wide.apply(narrow.weight, torch.full((5, 9), 1.001)).backward()
    except TypeError as error:
        found = str(error)
    parallel.close()

    def flat(own):
        return torch.cat([param.detach().flatten() for param in own.parameters()])

    torch.save({"values": flat(model), "twins": flat(twin), "refused": found}, out / f"rank{rank}.pt")
