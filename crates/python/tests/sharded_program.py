"""What processes do whose parameters are DTensors; `test_sharded.py` starts them."""

import copy
import datetime
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import tell_if_late
from torch.distributed.checkpoint import state_dict as whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fusestep.torch

STEPS = 20
# Of what follows from other orders of additions.
NEAR = 1e-6


class Model(torch.nn.Module):
    """Extents that no number of ranks divides, and a parameter that some ranks have nothing of."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(6, 13)
        self.second = torch.nn.Linear(13, 7)
        self.last = torch.nn.Linear(7, 3)

    def forward(self, inputs):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


class Even(torch.nn.Module):
    """Extents that two and four ranks divide, as tensor parallel wants them."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(8, 16)
        self.second = torch.nn.Linear(16, 8)

    def forward(self, inputs):
        return self.second(torch.tanh(self.first(inputs)))


def sharded(mesh, kind=Model, seed=0):
    model = kind(seed)
    for child in model.children():
        fully_shard(child, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def backward(model, step, rank, scale=1.0):
    """Gradients of samples that differ between ranks and steps."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(4, next(model.children()).in_features, generator=generator)
    (model(inputs).square().mean() * scale).backward()


def full(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def near(ours, theirs, bound=NEAR):
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        one, other = full(one), full(other)
        apart = float((one - other).norm() / other.norm())
        assert apart < bound, (name, apart)


def same_everywhere(value):
    """Whether all ranks have these bits."""
    own = torch.tensor([float(value)], dtype=torch.float64)
    all_of = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of, own)
    assert all(torch.equal(one, own) for one in all_of), all_of


def train(model, optimizer, steps, rank, before_step=None):
    for step in steps:
        backward(model, step, rank)
        if before_step is not None:
            before_step(step)
        optimizer.step()
        optimizer.zero_grad()


def fsdp_beside_pytorch(rank, world, folder):
    """AdamW of both for 20 steps, then each from the other's state dict."""
    mesh = init_device_mesh("cpu", (world,))
    ours, theirs = sharded(mesh), sharded(mesh)
    a = fusestep.torch.AdamW(ours.parameters(), lr=1e-2)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    places = [p.to_local().data_ptr() for p in ours.parameters()]
    train(ours, a, range(1), rank)
    plans = a._plans_made
    train(ours, a, range(1, STEPS), rank)
    train(theirs, b, range(STEPS), rank)
    near(ours, theirs)
    assert a._plans_made == plans, "planned once"
    assert [p.to_local().data_ptr() for p in ours.parameters()] == places, "in place"
    state = a.state[ours.first.weight]
    assert isinstance(state["exp_avg"], DTensor) and float(state["step"]) == STEPS
    assert state["exp_avg"].placements == ours.first.weight.placements
    c = fusestep.torch.AdamW(theirs.parameters(), lr=1e-2)
    c.load_state_dict(copy.deepcopy(b.state_dict()))
    d = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    d.load_state_dict(copy.deepcopy(a.state_dict()))
    for model, optimizer in ((ours, d), (theirs, c)):
        train(model, optimizer, range(STEPS, STEPS + 3), rank)
    near(ours, theirs)


def other_rules(rank, world, folder):
    """Element-wise rules of all kinds, with PyTorch's and without."""
    mesh = init_device_mesh("cpu", (world,))
    for name in ("Adam", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam"):
        settings = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
        models = sharded(mesh), sharded(mesh)
        for model, module in zip(models, (fusestep.torch, torch.optim)):
            optimizer = getattr(module, name)(model.parameters(), lr=1e-3, **settings)
            train(model, optimizer, range(5), rank)
        near(*models, bound=1e-5)
    for name in ("Lion", "ScheduleFreeAdamW"):
        model, plain = sharded(mesh), Model()
        kind = getattr(fusestep.torch, name)
        beside_plain(model, plain, lambda p, kind=kind: kind(p, lr=1e-3), 5)
        near(model, plain, bound=1e-5)


def beside_plain(model, plain, make, steps):
    """Trains a plain model with the gradients of the sharded one; its optimizer."""
    optimizers = make(model.parameters()), make(plain.parameters())
    for step in range(steps):
        backward(model, step, dist.get_rank())
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            other.grad = full(own.grad).clone()
        for optimizer in optimizers:
            optimizer.step()
        optimizers[0].zero_grad()
    return optimizers


def norms(rank, world, folder):
    """Clipping, LARS and LAMB by sums over all parts."""
    mesh = init_device_mesh("cpu", (world,))
    for name, settings in (
        ("AdamW", {"clip_norm": 0.02}),
        ("Lars", {"lr": 1.0}),
        ("Lamb", {"lr": 1e-2}),
        ("Lamb", {"lr": 1e-2, "clip_norm": 0.02}),
        ("Lars", {"lr": 1.0, "accumulate": 2}),
    ):
        model, plain = sharded(mesh), Model()
        optimizers = beside_plain(
            model, plain, lambda p, n=name, s=settings: getattr(fusestep.torch, n)(p, **s), 6
        )
        near(model, plain)
        if "clip_norm" in settings:
            own, other = (optimizer.report().grad_norm for optimizer in optimizers)
            assert abs(own - other) < 1e-12 * other, (own, other)
            same_everywhere(own)
    ours, theirs = sharded(mesh), sharded(mesh)
    a = fusestep.torch.AdamW(ours.parameters(), lr=1e-2, clip_norm=0.02)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    train(ours, a, range(5), rank)
    train(
        theirs, b, range(5), rank,
        lambda _: torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.02),
    )
    near(ours, theirs, bound=1e-5)


def skips_together(rank, world, folder):
    """What is not finite in one rank's part skips the step on all."""
    mesh = init_device_mesh("cpu", (world,))
    model = sharded(mesh)
    optimizer = fusestep.torch.AdamW(
        model.parameters(), lr=1e-2, loss_scale="dynamic:start=256"
    )
    for step in range(3):
        backward(model, step, rank, scale=optimizer.loss_scale())
        before = [full(p).clone() for p in model.parameters()]
        if step == 1 and rank == world - 1:
            gradients = [p.grad.to_local() for p in model.parameters()]
            next(own for own in gradients if own.numel()).fill_(float("inf"))
        optimizer.step()
        assert optimizer.report().skipped == (step == 1)
        now = [full(p) for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, now)) == (step == 1)
        same_everywhere(optimizer.loss_scale())
        optimizer.zero_grad()
    assert optimizer.loss_scale() == 128.0


def tensor_parallel(rank, world, folder):
    """Columns and rows over all ranks; biases that are replicated count once."""
    mesh = init_device_mesh("cpu", (world,))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    rules = {"AdamW": {"clip_norm": 0.05}, "Lamb": {}, "SGD": {"momentum": 0.9}}
    for name, settings in rules.items():
        model, plain = parallelize_module(Even(), mesh, plan), Even()
        settings = {"lr": 1e-2, **settings}
        kind = getattr(fusestep.torch, name)
        optimizers = [kind(m.parameters(), **settings) for m in (model, plain)]
        for step in range(5):
            for m, optimizer in zip((model, plain), optimizers):
                backward(m, step, 0)
                optimizer.step()
                optimizer.zero_grad()
        near(model, plain, bound=1e-5)


def meshes_of_two_dimensions(rank, world, folder):
    """Replicas of shards, and tensor parallel within FSDP2."""
    if world < 4:
        return
    for dims in (("replicate", "shard"), ("shard", "tensor")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=dims)
        for name, settings in (("AdamW", {"clip_norm": 0.05}), ("Lamb", {}), ("Lars", {})):
            model, plain = Even(), Even()
            if "tensor" in dims:
                plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
                parallelize_module(model, mesh["tensor"], plan)
                fully_shard(model, mesh=mesh["shard"])
            else:
                fully_shard(model, mesh=mesh)
            settings = {"lr": 1e-2, **settings}
            optimizers = [
                getattr(fusestep.torch, name)(m.parameters(), **settings) for m in (model, plain)
            ]
            for step in range(5):
                for m, optimizer in zip((model, plain), optimizers):
                    backward(m, step, 0)
                    optimizer.step()
                    optimizer.zero_grad()
            near(model, plain, bound=1e-5)


def plain_beside_sharded(rank, world, folder):
    """A replicated parameter of PyTorch's plain kind, with DTensors in one optimizer."""
    mesh = init_device_mesh("cpu", (world,))
    values = torch.linspace(-1, 1, 24).reshape(8, 3)
    own = torch.nn.Parameter(distribute_tensor(values, mesh, [torch.distributed.tensor.Shard(0)]))
    other = torch.nn.Parameter(torch.ones(5))
    optimizer = fusestep.torch.SGD([own, other], lr=1.0, clip_norm=1.0)
    gradient = distribute_tensor(torch.full((8, 3), 2.0), mesh, [torch.distributed.tensor.Shard(0)])
    # As a module leaves it that needs no sum over ranks: placed otherwise than the parameter.
    own.grad = gradient.redistribute(mesh, [torch.distributed.tensor.Replicate()])
    other.grad = torch.ones(5)
    optimizer.step()
    norm = (24 * 4 + 5) ** 0.5
    assert abs(optimizer.report().grad_norm - norm) < 1e-12 * norm
    assert torch.allclose(full(own), values - 2.0 / norm)
    assert torch.allclose(other.detach(), torch.ones(5) - 1.0 / norm)


def state_dicts_of_distributed_checkpoint(rank, world, folder):
    """`get_optimizer_state_dict`, whole and in parts, back into both."""
    mesh = init_device_mesh("cpu", (world,))
    ours, theirs = sharded(mesh), sharded(mesh)
    a = fusestep.torch.AdamW(ours.parameters(), lr=1e-2)
    b = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    train(ours, a, range(3), rank)
    for options in (
        whole.StateDictOptions(),
        whole.StateDictOptions(full_state_dict=True),
    ):
        saved = whole.get_optimizer_state_dict(ours, a, options=options)
        assert "first.weight" in saved["state"]
        model = whole.get_model_state_dict(ours, options=options)
        for other, optimizer in ((theirs, b), (sharded(mesh, seed=1), None)):
            optimizer = optimizer or fusestep.torch.AdamW(other.parameters(), lr=1e-2)
            whole.set_model_state_dict(other, copy.deepcopy(model), options=options)
            whole.set_optimizer_state_dict(
                other, optimizer, copy.deepcopy(saved), options=options
            )
            near(ours, other, bound=1e-12)
            for p, q in zip(ours.parameters(), other.parameters()):
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(full(a.state[p][key]), full(optimizer.state[q][key])), key
                assert float(optimizer.state[q]["step"]) == 3


def saves(rank, world, folder):
    """A checkpoint for another number of processes, and what training on would give."""
    mesh = init_device_mesh("cpu", (world,))
    model = sharded(mesh)
    optimizer = fusestep.torch.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(4), 0)
    state, of_optimizer = whole.get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=folder / "dcp")
    # All ranks take the same samples, so that their number changes no gradient but by rounding.
    train(model, optimizer, range(4, 8), 0)
    values = [full(p) for p in model.parameters()]
    if rank == 0:
        torch.save(values, folder / "expected.pt")


def resumes(rank, world, folder):
    """Goes on from `saves` of another number of processes."""
    mesh = init_device_mesh("cpu", (world,))
    for module in (fusestep.torch, torch.optim):
        model = sharded(mesh, seed=7)
        optimizer = module.AdamW(model.parameters(), lr=1e-2)
        state, of_optimizer = whole.get_state_dict(model, optimizer)
        saved = {"model": state, "optimizer": of_optimizer}
        dcp.load(saved, checkpoint_id=folder / "dcp")
        whole.set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
        train(model, optimizer, range(4, 8), 0)
        for own, expected in zip(model.parameters(), torch.load(folder / "expected.pt")):
            assert float((full(own) - expected).norm() / expected.norm()) < 1e-5


def is_refused(error, text, call):
    try:
        call()
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"expected {error.__name__} with `{text}`")


def refusals(rank, world, folder):
    """Each by name, the same on all ranks, with nothing changed."""
    mesh = init_device_mesh("cpu", (world,))
    model = sharded(mesh)
    make = fusestep.torch.AdamW
    is_refused(ValueError, "update_norms", lambda: make(model.parameters(), update_norms=True))
    optimizer = make(model.named_parameters(), lr=1e-2)
    is_refused(ValueError, "DTensors", lambda: fusestep.torch.fuse_backward(model, optimizer))
    is_refused(
        ValueError, "DTensor", lambda: fusestep.torch.DataParallel(model, optimizer)
    )
    plain = Model()
    other = make(plain.parameters(), lr=1e-2)
    backward(plain, 0, rank)
    other.step()
    saved = other.state_dict()
    is_refused(
        ValueError, "set_optimizer_state_dict", lambda: optimizer.load_state_dict(saved)
    )
    values = [full(p).clone() for p in model.parameters()]
    weight = model.first.weight
    weight.grad = DTensor.from_local(
        torch.ones(1, 5), mesh, weight.placements, shape=weight.shape, stride=weight.stride()
    )
    is_refused(ValueError, "shape", optimizer.step)
    assert all(torch.equal(v, full(p)) for v, p in zip(values, model.parameters()))
    assert not optimizer.state
    weight.grad = None
    partial = DTensor.from_local(torch.ones(3), mesh, [torch.distributed.tensor.Partial()])
    is_refused(ValueError, "redistribute", lambda: make([torch.nn.Parameter(partial)]))
    backward(model, 0, rank)
    optimizer.step()


def narrow(rank, world, folder):
    """Parameters of bfloat16, with what is kept beside them."""
    mesh = init_device_mesh("cpu", (world,))
    for choice in ("master", "remainder", "pytorch"):
        narrow_as(choice, mesh)


def narrow_as(choice, mesh):
    model, plain = Model().bfloat16(), Model().bfloat16()
    fully_shard(model, mesh=mesh)
    settings = {"lr": 1e-2, "precision": choice}
    optimizers = [fusestep.torch.AdamW(m.parameters(), **settings) for m in (model, plain)]
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for own, other in zip(model.parameters(), plain.parameters()):
            value = torch.randn(other.shape, generator=generator).bfloat16()
            other.grad = value
            own.grad = distribute_tensor(value.clone(), mesh, own.placements)
        for optimizer in optimizers:
            optimizer.step()
        if step == 1:
            with torch.no_grad():
                for p in (*model.parameters(), *plain.parameters()):
                    p.mul_(2)
    for own, other in zip(model.parameters(), plain.parameters()):
        assert torch.equal(full(own), other.detach())
        for key, value in optimizers[1].state[other].items():
            state = optimizers[0].state[own][key]
            if key == "remainder":
                # gloo gathers no 16-bit integers.
                value = distribute_tensor(value.float(), mesh, own.placements).to_local().short()
                assert torch.equal(state.to_local(), value)
            else:
                assert torch.equal(full(state), value), key


CHECKS = {
    check.__name__: check
    for check in (
        fsdp_beside_pytorch,
        other_rules,
        norms,
        skips_together,
        tensor_parallel,
        meshes_of_two_dimensions,
        plain_beside_sharded,
        state_dicts_of_distributed_checkpoint,
        saves,
        resumes,
        refusals,
        narrow,
    )
}


def main(names, folder, rank, world, session):
    """Runs checks as one of many processes; what failed is in a file."""
    tell_if_late()
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/{session}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=120),
        )
        for name in names:
            try:
                CHECKS[name](rank, world, folder)
            except BaseException as error:
                raise AssertionError(name) from error
        dist.destroy_process_group()
    except BaseException:
        (folder / f"rank{rank}.txt").write_text(traceback.format_exc())
        raise SystemExit(1) from None
