"""Micro-steps between which groups, parameters or gradients change, or a step is refused."""

import copy
import pickle

import pytest
import torch
from support import assert_unchanged, give_gradients, parameters, same_bits, snapshot

import fusestep.torch


def pair():
    """Two parameters of zeros with gradients of 1 and of 10."""
    one, two = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    one.grad, two.grad = torch.full((3,), 1.0), torch.full((3,), 10.0)
    return one, two


def sums_of(optimizer):
    return {tensor: total.clone() for tensor, total in optimizer._micro.sums.items()}


def assert_same_sums(before, count, optimizer):
    assert optimizer._micro.count == count
    assert before.keys() == optimizer._micro.sums.keys()
    for tensor, total in before.items():
        assert torch.equal(total, optimizer._micro.sums[tensor])


def test_parameters_in_another_order_keep_their_sums():
    one, two = pair()
    optimizer = fusestep.torch.SGD([one, two], lr=1.0, accumulate=2)
    optimizer.step()
    optimizer.param_groups[0]["params"] = [two, one]
    optimizer.step()
    assert one.tolist() == [-1.0] * 3 and two.tolist() == [-10.0] * 3


def test_a_parameter_that_is_moved_to_another_group_keeps_its_sum():
    one, two = pair()
    optimizer = fusestep.torch.SGD([one, two], lr=1.0, accumulate=2)
    optimizer.step()
    optimizer.param_groups[0]["params"] = [two]
    optimizer.add_param_group({"params": [one], "lr": 2.0})
    optimizer.step()
    assert one.tolist() == [-2.0] * 3 and two.tolist() == [-10.0] * 3


def test_a_parameter_that_is_removed_takes_its_sum_along():
    one, two = pair()
    optimizer = fusestep.torch.SGD([one, two], lr=1.0, accumulate=2)
    optimizer.step()
    optimizer.param_groups[0]["params"] = [two]
    optimizer.step()
    assert one.tolist() == [0.0] * 3 and two.tolist() == [-10.0] * 3
    assert not optimizer._micro.sums
    optimizer.param_groups[0]["params"] = [one, two]
    optimizer.step()
    optimizer.step()
    assert one.tolist() == [-1.0] * 3 and two.tolist() == [-20.0] * 3


@pytest.mark.parametrize("planned", [False, True])
def test_a_parameter_that_is_frozen_is_updated_from_its_sum(planned):
    one, two = pair()
    optimizer = fusestep.torch.SGD([one, two], lr=1.0, accumulate=2)
    optimizer.step()
    one.requires_grad_(False)
    one.grad = None
    if planned:
        optimizer.plan()
    optimizer.step()
    assert one.tolist() == [-0.5] * 3 and two.tolist() == [-10.0] * 3
    # It stays as it is from then on.
    for _ in range(2):
        optimizer.step()
    assert one.tolist() == [-0.5] * 3 and two.tolist() == [-20.0] * 3


def test_a_parameter_that_is_frozen_for_a_while_is_updated_from_its_sum():
    one, two = pair()
    one.requires_grad_(False)
    one.grad = None
    optimizer = fusestep.torch.SGD([one, two], lr=1.0, accumulate=2)
    optimizer.plan()
    one.requires_grad_(True)
    one.grad = torch.ones(3)
    optimizer.step()
    one.requires_grad_(False)
    one.grad = None
    optimizer.step()
    assert one.tolist() == [-0.5] * 3 and two.tolist() == [-10.0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_refused_update_is_tried_again_with_each_gradient_once(dtype):
    params, others = parameters(dtype), parameters(dtype)
    optimizer = fusestep.torch.AdamW(params, lr=0.1, accumulate=2)
    other = fusestep.torch.AdamW(others, lr=0.1, accumulate=2)
    for step in range(4):
        give_gradients(params, step)
        give_gradients(others, step)
        if step % 2:
            sums, before = sums_of(optimizer), snapshot(optimizer, params)
            optimizer.param_groups[0]["lr"] = float("nan")
            for _ in range(2):
                with pytest.raises(ValueError, match="lr"):
                    optimizer.step()
                assert_same_sums(sums, 1, optimizer)
                assert_unchanged(before, optimizer, params)
            optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        other.step()
    assert same_bits(params, others)


def reshaped(param):
    param.data = torch.zeros(5, 3)
    return ValueError, r"parameter `0\.1`.*\(3,\).*found \(5, 3\); .*load_state_dict"


def broadcast(param):
    param.data = torch.zeros(1)
    return ValueError, r"parameter `0\.1`.*\(3,\).*found \(1,\)"


def widened(param):
    param.data = param.data.double()
    return TypeError, r"parameter `0\.1`.*torch\.float32.*found torch\.float64"


@pytest.mark.parametrize("change", [reshaped, broadcast, widened])
@pytest.mark.parametrize("micro", [3, 2])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_a_parameter_that_no_longer_fits_its_sum_is_named(change, micro, has_gradient):
    one, two = pair()
    optimizer = fusestep.torch.SGD([one, two], lr=1.0, accumulate=micro)
    optimizer.step()
    kept, sums = two.data, sums_of(optimizer)
    two.grad = None
    error, match = change(two)
    if has_gradient:
        two.grad = torch.full_like(two, 20.0)
    elif micro == 3:
        # Whether it fits matters once it is added to, or updated from.
        optimizer.step()
        assert optimizer._micro.count == 2
        return
    for _ in range(2):
        with pytest.raises(error, match=match):
            optimizer.step()
        assert_same_sums(sums, 1, optimizer)
    assert not one.any() and not two.any()
    # What the error says works.
    again = copy.deepcopy(optimizer)
    again.load_state_dict(again.state_dict())
    first = again.param_groups[0]["params"][0]
    first.grad = one.grad
    for _ in range(micro):
        again.step()
    assert first.tolist() == [-1.0] * 3
    # So does a change back.
    two.grad = None
    two.data = kept
    two.grad = torch.full((3,), 10.0)
    for _ in range(micro - 1):
        optimizer.step()
    assert one.tolist() == [-1.0] * 3 and two.tolist() == [-10.0] * 3


def test_a_parameter_that_is_named_is_called_so():
    model = torch.nn.Linear(3, 2)
    optimizer = fusestep.torch.SGD(model.named_parameters(), lr=1.0, accumulate=2)
    model(torch.ones(1, 3)).sum().backward()
    model.weight.grad = model.weight.grad.to_sparse()
    with pytest.raises(RuntimeError, match="gradient of `weight`.*sparse"):
        optimizer.step()


def test_sums_of_inference_mode_are_added_to_outside():
    one, two = pair()
    optimizer = fusestep.torch.SGD([one, two], lr=1.0, accumulate=3)
    with torch.inference_mode():
        optimizer.step()
    for _ in range(2):
        optimizer.step()
    assert one.tolist() == [-1.0] * 3 and two.tolist() == [-10.0] * 3


@pytest.mark.parametrize("copier", ["pickle", "deepcopy"])
def test_a_copy_has_the_sums_of_its_own_parameters(copier):
    one, two = pair()
    optimizer = fusestep.torch.SGD([one, two], lr=1.0, accumulate=2)
    optimizer.step()
    optimizer.param_groups[0]["params"] = [two, one]
    if copier == "pickle":
        other = pickle.loads(pickle.dumps(optimizer))
    else:
        other = copy.deepcopy(optimizer)
    tensors = other.param_groups[0]["params"]
    assert list(other.__getstate__()["_sums"]) == list(optimizer.__getstate__()["_sums"]) == [1, 0]
    tensors[0].grad, tensors[1].grad = torch.full((3,), 30.0), torch.full((3,), 3.0)
    other.step()
    assert tensors[0].tolist() == [-20.0] * 3 and tensors[1].tolist() == [-2.0] * 3
    optimizer.step()
    assert one.tolist() == [-1.0] * 3 and two.tolist() == [-10.0] * 3
