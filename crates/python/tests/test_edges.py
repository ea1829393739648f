"""Tensors, settings and state dicts out of the ordinary, which PyTorch takes or refuses."""

import copy

import pytest
import torch
from support import assert_unchanged, give_gradients, largest_difference, same_bits, snapshot, twins

import fusestep.torch


def loaded_with(module, register, change):
    """The momentum of an optimizer that a state dict was loaded into while a hook was there."""
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = module.SGD([param], lr=0.1, momentum=0.9)
    param.grad = torch.ones(3)
    optimizer.step()
    saved = optimizer.state_dict()
    other = module.SGD([param], lr=0.1, momentum=0.9)
    getattr(other, register)(change)
    other.load_state_dict(saved)
    return other.state[param]["momentum_buffer"]


def changed_before(optimizer, saved):
    saved = copy.deepcopy(saved)
    saved["state"][0]["momentum_buffer"].fill_(7.0)
    return saved


def changed_after(optimizer):
    for state in optimizer.state.values():
        state["momentum_buffer"] = torch.full((3,), 5.0)


@pytest.mark.parametrize(
    ("register", "change", "value"),
    [
        ("register_load_state_dict_pre_hook", changed_before, 7.0),
        ("register_load_state_dict_post_hook", changed_after, 5.0),
    ],
)
def test_what_a_hook_changes_of_a_loaded_state_dict_stays(register, change, value):
    for module in (torch.optim, fusestep.torch):
        assert loaded_with(module, register, change).tolist() == [value] * 3, module


def test_inference_tensors_step_in_inference_mode_alone():
    with torch.inference_mode():
        param = torch.ones(3)
        param.grad = torch.ones(3)
        optimizer = fusestep.torch.SGD([param], lr=0.5, momentum=0.9)
        optimizer.step()
    before = snapshot(optimizer, [param])
    with pytest.raises(RuntimeError, match="inference"):
        optimizer.step()
    assert_unchanged(before, optimizer, [param])
    assert param.tolist() == [0.5] * 3


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
def test_state_lies_with_its_parameter_whatever_the_default_device_is(name):
    ours, others = twins()
    settings = {"momentum": 0.9} if name == "SGD" else {}
    for params, device in ((ours, "meta"), (others, "cpu")):
        optimizer = getattr(fusestep.torch, name)(params, lr=0.1, **settings)
        give_gradients(params, 0)
        with torch.device(device):
            optimizer.step()
    assert same_bits(ours, others)


def test_dampening_and_nesterov_mean_nothing_without_momentum():
    ours, theirs = twins()
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        groups = [{"params": params[:3], "dampening": 0.3}, {"params": params[3:]}]
        optimizer = module.SGD(groups, lr=0.1)
        optimizer.param_groups[1].update(nesterov=True)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
    assert largest_difference(ours, theirs) < 1e-6


def test_sums_of_a_group_added_later_start_where_pytorchs_do():
    ours, theirs = twins(shapes=[(3,), (4,)])
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        optimizer = module.Adagrad(params[:1], lr=0.1, initial_accumulator_value=0.5)
        group = {"params": params[1:], "initial_accumulator_value": 2.0}
        optimizer.add_param_group(group)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
    assert largest_difference(ours, theirs) < 1e-6
