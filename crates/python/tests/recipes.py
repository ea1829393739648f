"""The recipes of docs/guides/trainers.md, and what they name: models, batches, processes."""

import datetime
import os
import pathlib
import re
import traceback

import torch
import torch.distributed as dist

import fusestep.torch

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs/guides/trainers.md"

# Those that several processes run.
OF_RANKS = ("ddp", "fsdp2", "fsdp1", "zero")

# One of several processes, too, where its package is installed.
DEEPSPEED = "deepspeed"


def recipes():
    """The code of the page's recipes, by name."""
    found = re.findall(r"<!-- recipe: (\w+) -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return dict(found)


def run_recipe(name, module, given):
    """Runs a recipe as it stands, or with PyTorch's class in place of ours; its names."""
    code = recipes()[name]
    if module is torch.optim:
        code = code.replace("fusestep.torch.", "torch.optim.").replace(", clip_norm=1.0", "")
    names = {"torch": torch, "fusestep": fusestep, **given}
    exec(compile(code, f"{PAGE.name}: {name}", "exec"), names)
    used = [own for own in names.values() if isinstance(own, torch.optim.Optimizer)]
    return names, used


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 13), torch.nn.Tanh(), torch.nn.Linear(13, 4))


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(5, 6, generator=generator) for _ in range(6)]


def loss_of(parallel, batch):
    return parallel(batch).square().mean()


def parameters_of(name, names):
    """The trained parameters, whole, on all processes."""
    if name == "fsdp1":
        whole = names["whole"]
        with type(whole).summon_full_params(whole):
            return [p.detach().clone() for p in whole.parameters()]
    if name == "fsdp2":
        return [p.full_tensor().detach() for p in names["model"].parameters()]
    if name == DEEPSPEED:
        parameters = list(names["model"].parameters())
        with names["deepspeed"].zero.GatheredParameters(parameters):
            return [p.detach().clone() for p in parameters]
    return [p.detach() for p in names["parallel"].parameters()]


def inner_of(name, names, used):
    """The optimizer that has stepped."""
    if name == DEEPSPEED:
        outer = names["optimizer"]
        return getattr(outer, "optimizer", outer)
    return getattr(used[0], "optim", used[0])


def check_of_ranks(name, rank, world, **more):
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    ends = []
    for module in (fusestep.torch, torch.optim):
        given = {"model": model(), "batches": batches(rank), "loss_of": loss_of, "mesh": mesh}
        names, used = run_recipe(name, module, {**given, **more})
        inner = inner_of(name, names, used)
        assert type(inner).__module__.split(".")[0] == module.__name__.split(".")[0], inner
        ends.append(parameters_of(name, names))
    for before, one, two in zip(model().parameters(), *ends):
        assert float((one - two).abs().max()) < 1e-6
        assert not torch.equal(before, one)


def check_of_deepspeed(name, rank, world):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    import deepspeed

    # Otherwise it compiles sums of its own when it is first used, for which it takes ninja.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for stage in range(4):
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 5, "zero_optimization": zero}
        taken = {**config, "zero_allow_untested_optimizer": True}
        check_of_ranks(name, rank, world, deepspeed=deepspeed, config=taken)
        if stage > 0:
            refused = {"model": model(), "batches": [], "config": config, "deepspeed": deepspeed}
            try:
                run_recipe(name, fusestep.torch, refused)
            except AssertionError as error:
                assert "zero_allow_untested_optimizer" in str(error), error
            else:
                raise AssertionError("expected DeepSpeed to ask for its setting")


def main(names, folder, rank, world, session):
    """Runs recipes as one of many processes; what failed is in a file."""
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
                check = check_of_deepspeed if name == DEEPSPEED else check_of_ranks
                check(name, rank, world)
            except BaseException as error:
                raise AssertionError(name) from error
        dist.destroy_process_group()
    except BaseException:
        (folder / f"rank{rank}.txt").write_text(traceback.format_exc())
        raise SystemExit(1) from None
