"""What is said of parameters and arguments that peers take and ours do not."""

import pytest
import torch
from support import OURS_OF, OWN, parameters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fusestep.torch

NAMES = [*OURS_OF, *OWN]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = f"file://{tmp_path_factory.mktemp('gloo')}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_the_parts_of_a_dtensor_step_by_themselves_too(mesh):
    whole = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
    part, plain = whole.to_local().detach(), torch.nn.Parameter(torch.ones(4, 3))
    ours, theirs = fusestep.torch.AdamW([part], lr=0.1), torch.optim.AdamW([plain], lr=0.1)
    (whole * whole).sum().backward()
    (plain * plain).sum().backward()
    part.grad = whole.grad.to_local()
    ours.step()
    theirs.step()
    assert torch.allclose(whole.to_local(), plain)


def test_a_gradient_that_is_a_dtensor_is_named(mesh):
    param = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = fusestep.torch.AdamW([param])
    param.grad = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="gradient of `0.0`.*found a DTensor"):
        optimizer.step()
    assert (param == 1).all()


def test_a_fake_tensor_is_named():
    with FakeTensorMode():
        fake = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="found a FakeTensor.*outside of `FakeTensorMode`"):
        fusestep.torch.AdamW([fake])


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("ScheduleFreeAdamW", {"r": 1.0}, "expected r=0.*found r=1.0"),
        ("ScheduleFreeAdamW", {"weight_lr_power": 1.0}, "expected weight_lr_power=2"),
        ("Lamb", {"max_grad_norm": 1.0}, "clip_norm"),
        ("Lamb", {"bias_correction": False}, "expected bias_correction=True"),
        ("Lars", {"nesterov": True}, "expected nesterov=False.*`SGD` has it"),
        ("Lion", {"weigth_decay": 1.0}, "arguments out of lr, betas.*found weigth_decay"),
    ],
)
def test_arguments_of_peers_are_named(name, given, match):
    with pytest.raises(TypeError, match=match):
        getattr(fusestep.torch, name)(parameters(), **given)


@pytest.mark.parametrize("name", OWN)
def test_arguments_of_peers_that_change_nothing_are_taken(name):
    given = {"foreach": True, "fused": False, "bias_correction": True, "differentiable": False}
    optimizer = getattr(fusestep.torch, name)(parameters(), **given)
    assert not given.keys() & optimizer.param_groups[0].keys()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", ["accumulate", "clip_norm", "loss_scale", "lr", "weight_decay"])
def test_truth_values_are_no_numbers(name, option):
    if option == "weight_decay" or option == "lr":
        with pytest.raises(TypeError, match=f"{option}: expected a number"):
            getattr(fusestep.torch, name)(parameters(), **{option: True})
    with pytest.raises((TypeError, ValueError), match=option):
        getattr(fusestep.torch, name)(parameters(), **{option: True})


@pytest.mark.parametrize("option", ["zero", "comm_streams", "timeout", "bucket_mib"])
def test_truth_values_are_no_numbers_of_ranks(option):
    model = torch.nn.Linear(2, 2)
    optimizer = fusestep.torch.AdamW(model.parameters())
    with pytest.raises((TypeError, ValueError), match=f"{option}: expected .* found True"):
        fusestep.torch.DataParallel(model, optimizer, **{option: True})


@pytest.mark.parametrize("name", [name for name in NAMES if name != "Adagrad"])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_lazy_parameter_is_skipped_until_it_has_a_shape(name, fuse):
    """PyTorch's Adagrad refuses it, since it makes its sums at once."""
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.Linear(3, 2))
    optimizer = getattr(fusestep.torch, name)(model.parameters(), lr=0.1)
    if fuse:
        fusestep.torch.fuse_backward(model, optimizer)
    model[1].weight.grad = torch.ones(2, 3)
    before = model[1].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[1].weight)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        before = model[0].bias.detach().clone()
        optimizer.step()
        assert fuse or not torch.equal(before, model[0].bias)
    assert not torch.equal(model[0].bias, torch.zeros(3))


def test_a_lazy_parameter_is_no_ranks():
    model = torch.nn.LazyLinear(3)
    with pytest.raises(ValueError, match="parameter `weight`.*lazy module"):
        fusestep.torch.DataParallel(model, fusestep.torch.AdamW(model.parameters()))
