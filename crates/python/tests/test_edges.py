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


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_gradient_that_autograd_leaves_negated_keeps_its_sign(shape):
    """That of an imaginary part is a view of one element with PyTorch's bit for a minus."""
    ours, theirs = twins(shapes=[shape])
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        optimizer = module.SGD(params, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            value = torch.complex(torch.ones(shape), params[0])
            (value.conj() * torch.tensor(3 + 4j)).real.sum().backward()
            assert params[0].grad.is_neg(), "the test is about such gradients"
            optimizer.step()
    assert same_bits(ours, theirs)


def test_a_negated_parameter_is_refused():
    param = torch.nn.Parameter(torch.tensor([1 + 2j]).conj().imag)
    param.grad = torch.ones(1)
    with pytest.raises(ValueError, match="0.0.*negated"):
        fusestep.torch.SGD([param], lr=1.0).step()
    assert param.tolist() == [-2.0]


def without_memory(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def emptied(extent):
    return without_memory(torch.ones(extent))


@pytest.mark.parametrize("make", [torch._efficientzerotensor, emptied])
def test_a_gradient_without_memory_is_refused(make):
    ours, _ = twins(shapes=[(4,), (3,)])
    optimizer = fusestep.torch.AdamW(ours)
    give_gradients(ours, 0, come_and_go=False)
    ours[1].grad = make(3)
    before = snapshot(optimizer, ours)
    with pytest.raises(ValueError, match=r"gradient of `0\.1`.*found one without memory"):
        optimizer.step()
    assert_unchanged(before, optimizer, ours)


def test_a_parameter_without_memory_is_refused():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = fusestep.torch.AdamW([param])
    param.grad = torch.ones(3)
    without_memory(param)
    with pytest.raises(ValueError, match="parameter `0.0`.*memory"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_parameter_at_an_odd_address_is_refused(dtype):
    memory = bytearray(4 * dtype.itemsize + 1)
    param = torch.nn.Parameter(torch.frombuffer(memory, dtype=dtype, offset=1, count=4))
    good = torch.nn.Parameter(torch.ones(3))
    optimizer = fusestep.torch.AdamW([good, param])
    good.grad, param.grad = torch.ones(3), torch.ones(4, dtype=dtype)
    before = snapshot(optimizer, [good, param])
    match = rf"parameter `0\.1`.*a multiple of {dtype.itemsize} bytes, found .*`\.clone\(\)`"
    with pytest.raises(ValueError, match=match):
        optimizer.step()
    assert_unchanged(before, optimizer, [good, param])
    param.data = param.clone()
    optimizer.step()
    assert (param < 0).all() and (good < 1).all()


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


def test_state_that_is_handed_to_another_parameter_is_that_ones():
    ours, theirs = twins(shapes=[(3,), (3,)])
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        optimizer = module.SGD(params, lr=1.0, momentum=0.5)
        give_gradients(params[:1], 0)
        optimizer.step()
        params[0].grad = None
        optimizer.step()
        optimizer.state[params[1]] = optimizer.state.pop(params[0])
        give_gradients(params, 1)
        optimizer.step()
    assert largest_difference(ours, theirs) < 1e-6


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


@pytest.mark.parametrize("how", ["data", "copy_", "load_state_dict"])
def test_masters_follow_values_given_to_their_parameters(how):
    model = torch.nn.Linear(4, 3).bfloat16()
    optimizer = fusestep.torch.AdamW(model.parameters(), lr=1e-4, master_weights=True)
    params = list(model.parameters())
    for step in range(3):
        give_gradients(params, step, come_and_go=False)
        optimizer.step()
    given = torch.full((3, 4), 5.0).bfloat16()
    if how == "data":
        model.weight.data = given.clone()
    elif how == "copy_":
        with torch.no_grad():
            model.weight.copy_(given)
    else:
        model.load_state_dict({"weight": given, "bias": model.bias.clone()})
    give_gradients(params, 3, come_and_go=False)
    optimizer.step()
    assert largest_difference([optimizer.state[model.weight]["master"]], [given.float()]) < 1e-2
    assert largest_difference([model.weight], [given]) < 0.1


WRONG = ["text", 3, [1.0], torch.ones(4), torch.ones(()), torch.ones(3).cfloat()]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "RMSprop", "ScheduleFreeAdamW"])
@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_state_that_does_not_fit_is_not_loaded(name, wrong):
    settings = {"momentum": 0.9} if name == "SGD" else {}
    ours, others = twins(shapes=[(2,), (3,)])
    made = [getattr(fusestep.torch, name)(p, lr=0.1, **settings) for p in (ours, others)]
    for params, optimizer, steps in ((ours, made[0], 2), (others, made[1], 3)):
        for step in range(steps):
            give_gradients(params, step)
            optimizer.step()
    key = next(iter(made[0]._keys.values()))
    saved = made[1].state_dict()
    saved["state"][1][key] = wrong
    saved["param_groups"][0]["lr"] = 0.5
    before = snapshot(made[0], ours)
    with pytest.raises(ValueError, match=rf"{key} of `0\.1`: expected a .*\(3,\), found "):
        made[0].load_state_dict(saved)
    assert_unchanged(before, made[0], ours)
    assert made[0].param_groups[0]["lr"] == 0.1
    saved["state"][1] = wrong
    with pytest.raises(ValueError, match=r"state of `0\.1`: expected a dict, found "):
        made[0].load_state_dict(saved)
    assert_unchanged(before, made[0], ours)


def test_a_count_that_is_none_is_not_loaded():
    ours, _ = twins(shapes=[(3,)])
    optimizer = fusestep.torch.AdamW(ours)
    give_gradients(ours, 0)
    optimizer.step()
    saved, before = copy.deepcopy(optimizer.state_dict()), snapshot(optimizer, ours)
    saved["state"][0]["step"] = "three"
    with pytest.raises(ValueError, match=r"step of `0\.0`: expected a number.*found str"):
        optimizer.load_state_dict(saved)
    assert_unchanged(before, optimizer, ours)


@pytest.mark.parametrize("how", ["clear", "pop", "assign"])
def test_state_that_is_dropped_behind_the_first_step_starts_anew(how):
    ours, theirs = twins(shapes=[(3,), (4,)])
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        optimizer = module.SGD(params, lr=0.1, momentum=0.9)
        for index in range(2):
            # The second parameter has its first gradient when the first has a state.
            give_gradients(params, 0, come_and_go=False)
            params[1].grad = None if index == 0 else params[1].grad
            optimizer.step()
        if how == "clear":
            optimizer.state.clear()
        elif how == "pop":
            optimizer.state.pop(params[1])
        else:
            optimizer.state = type(optimizer.state)(dict)
        give_gradients(params, 5, come_and_go=False)
        optimizer.step()
        assert all("momentum_buffer" in optimizer.state[param] for param in params)
    assert largest_difference(ours, theirs) < 1e-6


def test_state_that_is_cleared_behind_the_first_step_starts_anew():
    ours, theirs = twins()
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        optimizer = module.AdamW(params, lr=0.1)
        for step in range(3):
            give_gradients(params, step)
            optimizer.step()
            optimizer.state.clear()
    assert largest_difference(ours, theirs) < 1e-6


@pytest.mark.parametrize("of", [lambda s: s.reshape(1), lambda s: s.long(), int])
def test_counts_of_other_kinds_are_loaded(of):
    ours, theirs = twins(shapes=[(3,)])
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        optimizer = module.AdamW(params, lr=0.1)
        give_gradients(params, 0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0]["step"] = of(saved["state"][0]["step"])
        optimizer.load_state_dict(saved)
        optimizer.step()
        assert int(optimizer.state[params[0]]["step"]) == 2
    assert largest_difference(ours, theirs) < 1e-6


def test_state_is_loaded_for_a_parameter_without_shape_yet():
    weights = []
    for module in (fusestep.torch, torch.optim):
        model, lazy = torch.nn.Linear(3, 2), torch.nn.LazyLinear(2)
        optimizer, later = (module.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, lazy))
        give_gradients(list(model.parameters()), 0)
        optimizer.step()
        later.load_state_dict(optimizer.state_dict())
        lazy(torch.ones(4, 3))
        with torch.no_grad():
            lazy.weight.fill_(1.0)
        give_gradients(list(lazy.parameters()), 1)
        later.step()
        weights.append(lazy.weight)
    assert largest_difference(weights[:1], weights[1:]) < 1e-6
