"""What processes do whose DTensors have parts on an emulated device; `test_sharded_cuda.py` starts
them. PyTorch takes the parts for tensors of the CPU, so its own calls on them go over gloo."""

import contextlib
import datetime
import traceback

import torch
import torch.distributed as dist
from emulated import OnDevice, emulated
from processes import tell_if_late
from sharded_program import is_refused
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fusestep.torch

BF16, F32 = torch.bfloat16, torch.float32

# Longer than a chunk of sums, extents that no number of ranks divides, one row that only the first
# rank has, and a tensor that all ranks have whole.
SHAPES = [(301, 700), (7, 5), (1, 33), (31,), (64, 3)]
LAST = len(SHAPES) - 1


def parameters(mesh, dtype):
    generator = torch.Generator().manual_seed(0)
    made = []
    for at, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=generator).to(dtype)
        placements = [Replicate() if at == LAST else Shard(0)]
        made.append(torch.nn.Parameter(distribute_tensor(values, mesh, placements)))
    return made


def give(device, ours, others, step, scale=1.0):
    """The same gradients to both, whose parts are on the CPU and on the device."""
    generator = torch.Generator().manual_seed(1 + step)
    for own, other in zip(ours, others):
        values = (torch.randn(own.shape, generator=generator) * scale).to(own.dtype)
        own.grad = distribute_tensor(values, own.device_mesh, own.placements)
        other.grad = device.copy(own.grad)


def assert_same(a, b, ours, others):
    """The parts of parameters and state have the same bits, those of the device there."""
    for own, other in zip(ours, others, strict=True):
        assert isinstance(other._local_tensor, OnDevice)
        assert torch.equal(own._local_tensor.detach(), other._local_tensor.detach().cpu())
        expected, found = a.state[own], b.state[other]
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            state = found[key]
            if isinstance(value, DTensor):
                assert isinstance(state._local_tensor, OnDevice), key
                value, state = value._local_tensor, state._local_tensor.cpu()
            assert value.dtype == state.dtype and torch.equal(value, state), key


def compare(device, name, steps=4, dtype=F32, **settings):
    """Steps of parts on the CPU and on the device, which end in the same bits."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ours = parameters(mesh, dtype)
    others = [device.copy(param) for param in ours]
    kind = getattr(fusestep.torch, name)
    a, b = kind(ours, **settings), kind(others, **settings)
    for step in range(steps):
        give(device, ours, others, step)
        a.step()
        b.step()
    assert type(b._whole.session) is fusestep._cuda.Session
    assert_same(a, b, ours, others)
    return a, b


def element_wise(device):
    """Rules that take no sums."""
    for name in ("AdamW", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam", "Lion"):
        settings = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
        compare(device, name, lr=1e-2, **settings)
    for precision in ("master", "remainder", "pytorch"):
        compare(device, "AdamW", dtype=BF16, lr=1e-2, precision=precision)


def norms(device):
    """Clipping, LARS and LAMB, by sums over the parts of all processes."""
    for name, settings in (
        ("AdamW", {"clip_norm": 0.5}),
        ("SGD", {"momentum": 0.9, "clip_norm": 1e6}),
        ("Lars", {"lr": 1.0}),
        ("Lamb", {}),
        ("Lamb", {"clip_norm": 0.5}),
        ("Lars", {"clip_norm": 0.5}),
        ("Lamb", {"clip_norm": 0.5, "dtype": BF16}),
        ("Lamb", {"accumulate": 2}),
    ):
        a, b = compare(device, name, **{"lr": 1e-2, **settings})
        if "clip_norm" in settings:
            assert a.report().grad_norm == b.report().grad_norm > 0


def many_tensors(device):
    """So many that launches of others take their tables from the device's memory."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("AdamW", "Lamb"):
        ours = [
            torch.nn.Parameter(distribute_tensor(torch.ones(at % 67 + 1), mesh, [Shard(0)]))
            for at in range(200)
        ]
        others = [device.copy(param) for param in ours]
        a, b = (getattr(fusestep.torch, name)(p, clip_norm=0.5) for p in (ours, others))
        for step in range(2):
            give(device, ours, others, step)
            a.step()
            b.step()
        assert_same(a, b, ours, others)


def skips_together(device):
    """What is not finite in one process's part skips the step on all."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("AdamW", "Lamb"):
        ours = parameters(mesh, F32)
        others = [device.copy(param) for param in ours]
        scale = "dynamic:start=256"
        a, b = (
            getattr(fusestep.torch, name)(p, lr=1e-2, loss_scale=scale) for p in (ours, others)
        )
        for step in range(4):
            give(device, ours, others, step, scale=a.loss_scale())
            if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
                for own in (ours, others):
                    own[0].grad._local_tensor[0, 1] = float("inf")
            a.step()
            b.step()
            assert a.report().skipped == b.report().skipped == (step == 1)
            assert a.loss_scale() == b.loss_scale()
        assert_same(a, b, ours, others)


def rates_in_tensors(device):
    """A rate in a tensor on the device, for updates by sums that the host has."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("AdamW", "Lamb"):
        ours = parameters(mesh, F32)
        others = [device.copy(param) for param in ours]
        lr = device.copy(torch.tensor(0.5, dtype=torch.float64))
        kind = getattr(fusestep.torch, name)
        a, b = kind(ours, lr=0.5, clip_norm=0.5), kind(others, lr=lr, clip_norm=0.5)
        for step in range(3):
            a.param_groups[0]["lr"] = 0.5 / (step + 1)
            lr.fill_(0.5 / (step + 1))
            give(device, ours, others, step)
            a.step()
            b.step()
        assert_same(a, b, ours, others)


@contextlib.contextmanager
def as_nccl():
    """Has groups say that they gather from CUDA devices alone, and holds their callers to it."""
    config, gather, calls = dist.get_backend_config, dist.all_gather, []

    def gather_on_device(parts, own, group=None):
        for tensor in (own, *parts):
            assert isinstance(tensor, OnDevice), "no backend type for device type cpu"
        calls.append(own.shape)
        hosts = [torch.empty(own.shape, dtype=own.dtype) for _ in parts]
        gather(hosts, own.cpu(), group=group)
        for part, host in zip(parts, hosts):
            part.copy_(host)

    dist.get_backend_config = lambda group=None: "cuda:nccl"
    dist.all_gather = gather_on_device
    try:
        yield calls
    finally:
        dist.get_backend_config, dist.all_gather = config, gather


def groups_that_take_no_host_memory(device):
    """Sums go as tensors on the parameters' device where a group gathers from nowhere else."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("AdamW", "Lars", "Lamb"):
        ours = parameters(mesh, F32)
        others = [device.copy(param) for param in ours]
        a, b = (getattr(fusestep.torch, name)(p, lr=1e-2, clip_norm=0.5) for p in (ours, others))
        for step in range(3):
            give(device, ours, others, step)
            a.step()
            with as_nccl() as calls:
                b.step()
            # The norm's sums, and before the update those of layer-wise rules.
            assert len(calls) == (1 if name == "AdamW" else 2), calls
        assert_same(a, b, ours, others)


def beside_the_cpu(device):
    """Parts on two devices and on the CPU, each with a plan whose sums are shared in turn."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("AdamW", "Lars", "Lamb"):
        ours = parameters(mesh, F32)
        places = [0, None, 1, None, 0]
        others = [
            torch.nn.Parameter(param.detach().clone()) if at is None else device.copy(param, at)
            for at, param in zip(places, ours)
        ]
        a, b = (getattr(fusestep.torch, name)(p, lr=1e-2) for p in (ours, others))
        for step in range(3):
            give(device, ours, others, step)
            for at, own, other in zip(places, ours, others):
                other.grad = own.grad.clone() if at is None else device.copy(own.grad, at)
            a.step()
            b.step()
        for at, own, other in zip(places, ours, others, strict=True):
            assert isinstance(other._local_tensor, OnDevice) == (at is not None)
            assert torch.equal(own._local_tensor.detach(), other._local_tensor.detach().cpu())


def refusals(device):
    """Graphs, whose replays ask no process for sums; elements alone are recorded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    recorded = {"capturable": True}
    for name, settings in (
        ("AdamW", {"clip_norm": 0.5, **recorded}),
        ("AdamW", {"loss_scale": 8.0, **recorded}),
        ("Lamb", {}),
        ("AdamW", recorded),
    ):
        ours = parameters(mesh, F32)
        others = [device.copy(param) for param in ours]
        kind = getattr(fusestep.torch, name)
        optimizer = kind(others, lr=1e-2, **settings)
        give(device, ours, others, 0)
        optimizer.step()
        if settings is not recorded:
            is_refused(
                RuntimeError,
                "DTensors and norms of them, which processes add up in host memory",
                lambda: device.graph(optimizer.step),
            )
            continue
        a = kind(ours, lr=1e-2)
        a.step()
        replay = device.graph(optimizer.step)
        for _ in range(2):
            a.step()
            replay()
        assert optimizer.report().step == 3
        assert_same(a, optimizer, ours, others)


CHECKS = {
    check.__name__: check
    for check in (
        element_wise,
        norms,
        many_tensors,
        skips_together,
        rates_in_tensors,
        groups_that_take_no_host_memory,
        beside_the_cpu,
        refusals,
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
        with emulated() as device:
            for name in names:
                try:
                    CHECKS[name](device)
                except BaseException as error:
                    raise AssertionError(name) from error
        dist.destroy_process_group()
    except BaseException:
        (folder / f"rank{rank}.txt").write_text(traceback.format_exc())
        raise SystemExit(1) from None
