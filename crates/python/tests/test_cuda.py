"""CUDA tensors: bits of the classes on the CPU, on the emulated driver (`cargo xtask python --cuda`).
"""

import contextlib
import copy
import importlib.util
import os
import pathlib

import pytest
import torch
from support import OURS_OF, OWN, bits, give_gradients, parameters, same_bits

import fusestep.torch

if not os.environ.get("FUSESTEP_EMULATOR_DEVICES"):
    pytest.skip("run by `cargo xtask python --cuda`", allow_module_level=True)

from emulated import OnDevice, emulated

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [(3, 4), (7,), (), (0, 5), (31,), (32,), (33,), (130, 70), (1, 1, 65)]


@pytest.fixture
def device():
    with emulated() as device:
        yield device


def host(tensors):
    """Copies in host memory."""
    return [tensor.detach().cpu() for tensor in tensors]


def twins(device, dtype=F32, seed=0, shapes=SHAPES):
    """The same parameters on the CPU and on the device."""
    own = parameters(dtype, seed, shapes)
    return own, [device.copy(param) for param in own]


def give(device, ours, others, step, **kwargs):
    """The same gradients to both."""
    give_gradients(ours, step, **kwargs)
    for param, other in zip(ours, others):
        other.grad = None if param.grad is None else device.copy(param.grad)


def state_of(optimizer):
    """All tensors of state, by parameter and name, in host memory."""
    state = optimizer.state_dict()["state"]
    return {
        (index, name): value.detach().cpu()
        for index, own in state.items()
        for name, value in own.items()
        if torch.is_tensor(value)
    }


def assert_same(a, b, ours, others):
    """Parameters and state have the same bits, each where it belongs."""
    assert same_bits(bits(ours), host(others))
    expected, found = state_of(a), state_of(b)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert value.dtype == found[key].dtype and torch.equal(value, found[key]), key


def compare(device, kind, dtype=F32, steps=4, shapes=SHAPES, come_and_go=True, **settings):
    """Steps on the CPU and on the device, which end in the same bits."""
    ours, others = twins(device, dtype, shapes=shapes)
    a, b = kind(ours, **settings), kind(others, **settings)
    for step in range(steps):
        give(device, ours, others, step, come_and_go=come_and_go)
        a.step()
        b.step()
    assert all(isinstance(param, OnDevice) for param in others)
    assert_same(a, b, ours, others)
    return a, b


def kind_of(name):
    return getattr(fusestep.torch, name)


def test_adamw_has_the_bits_of_the_cpu(device):
    a, b = compare(device, fusestep.torch.AdamW, lr=1e-2)
    assert b.report().elements == a.report().elements
    for own in b.state.values():
        assert own["exp_avg"].device == torch.device("cuda", 0)
        assert own["step"].device.type == "cpu"
    # Host memory is stepped by the module that asks for no driver.
    assert type(a._whole.session) is fusestep._fusestep.Session
    assert type(b._whole.session) is fusestep._cuda.Session


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
@pytest.mark.parametrize("name", (*OURS_OF, *OWN))
def test_every_rule_in_every_dtype_has_the_bits_of_the_cpu(device, name, dtype):
    compare(device, kind_of(name), dtype, lr=1e-2)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", ("AdamW", "SGD", "Lion", "Lamb"))
def test_gradients_in_float32_of_16_bits_have_the_bits_of_the_cpu(device, name, dtype):
    ours, others = twins(device, dtype)
    for param in (*ours, *others):
        param.grad_dtype = None
    settings = {"lr": 1e-2, "master_weights": True, "clip_norm": 0.5}
    a, b = kind_of(name)(ours, **settings), kind_of(name)(others, **settings)
    for step in range(4):
        give_gradients(ours, step)
        for index, (param, other) in enumerate(zip(ours, others)):
            # In the third step some are of the parameter's own dtype, and in the first all of them.
            wide = step > 0 and (step != 2 or index % 2 == 0)
            if param.grad is not None and wide:
                param.grad = param.grad.to(F32) * 1.001
            other.grad = None if param.grad is None else device.copy(param.grad)
        a.step()
        b.step()
    assert_same(a, b, ours, others)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "maximize": True},
    ],
)
def test_settings_of_sgd_have_the_bits_of_the_cpu(device, settings):
    compare(device, fusestep.torch.SGD, **settings)


def test_amsgrad_centered_and_groups_have_the_bits_of_the_cpu(device):
    compare(device, fusestep.torch.AdamW, amsgrad=True)
    compare(device, fusestep.torch.RMSprop, centered=True, momentum=0.9)
    ours, others = twins(device)
    a, b = (
        fusestep.torch.AdamW([{"params": p[:4]}, {"params": p[4:], "lr": 0.1, "weight_decay": 0}])
        for p in (ours, others)
    )
    for step in range(4):
        give(device, ours, others, step)
        for own in (a, b):
            own.param_groups[0]["lr"] = 0.1 / (step + 1)
            own.step()
    assert_same(a, b, ours, others)


@pytest.mark.parametrize("precision", ["pytorch", "stochastic", "wide", "remainder", "master"])
@pytest.mark.parametrize("name", ["AdamW", "Lion", "Adagrad"])
def test_every_precision_of_bfloat16_has_the_bits_of_the_cpu(device, name, precision):
    if name == "Lion" and precision == "stochastic":
        precision = "pytorch"
    compare(device, kind_of(name), BF16, lr=1e-2, precision=precision)


# At the border of int8, some of which stay in float32, and with groups that end early.
CODED_SHAPES = [(64, 64), (4095,), (67, 63), (0, 5), (4097,)]

# Rules with state in int8, and what they take for that.
CODED = {
    "AdamW": {"lr": 1e-2},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "NAdam": {"lr": 1e-2},
    "Adamax": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "momentum": 0.9},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Lion": {"lr": 1e-3},
    "Lars": {"lr": 1e-2},
    "Lamb": {"lr": 1e-2},
}


def assert_coded(optimizer, shapes=CODED_SHAPES):
    """State lies on the device, in codes where a parameter has 4,096 elements."""
    for shape, own in zip(shapes, optimizer.state.values(), strict=True):
        units = [name for name in own if name.endswith("_units")]
        assert bool(units) == (torch.Size(shape).numel() >= 4096), (shape, list(own))
        for name in units:
            assert own[name].dtype == F32
            assert own[name.removesuffix("_units")].dtype == torch.uint8
        for name, value in own.items():
            assert value.device.type == ("cpu" if name == "step" else "cuda"), (shape, name)


@pytest.mark.parametrize("name", CODED)
def test_state_in_int8_has_the_bits_of_the_cpu(device, name):
    settings = {**CODED[name], "state_dtype": "int8"}
    _, found = compare(device, kind_of(name), shapes=CODED_SHAPES, come_and_go=False, **settings)
    assert_coded(found)
    compare(device, kind_of(name), shapes=CODED_SHAPES, clip_norm=0.5, **settings)


@pytest.mark.parametrize("master", [None, True, "remainder", "remainder8"])
@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD", "Lamb"])
def test_state_in_int8_of_bfloat16_has_the_bits_of_the_cpu(device, name, master):
    settings = {**CODED[name], "state_dtype": "int8"}
    if master is not None:
        settings["master_weights"] = master
    a, b = compare(device, kind_of(name), BF16, shapes=CODED_SHAPES, **settings)
    remainders = [own["remainder"].dtype for own in b.state.values() if "remainder" in own]
    assert (torch.int8 in remainders) == (master == "remainder8")


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ["AdamW", "Lion", "SGD", "Lamb"])
def test_state_in_int8_goes_from_device_to_cpu_and_back(device, name, dtype):
    settings = {**CODED[name], "state_dtype": "int8"}
    if dtype == BF16:
        settings["master_weights"] = "remainder8"
    a, b = compare(
        device, kind_of(name), dtype, steps=3, shapes=CODED_SHAPES, come_and_go=False, **settings
    )
    ours, others = (own.param_groups[0]["params"] for own in (a, b))
    saved = [own.state_dict() for own in (a, b)]
    a, b = (kind_of(name)(params, **settings) for params in (ours, others))
    a.load_state_dict(saved[1])
    b.load_state_dict(saved[0])
    assert_coded(b)
    for step in range(3, 5):
        give(device, ours, others, step, come_and_go=False)
        a.step()
        b.step()
    assert_same(a, b, ours, others)


def test_state_in_float32_goes_on_in_int8_on_the_device_as_on_the_cpu(device):
    a, b = compare(device, fusestep.torch.AdamW, shapes=CODED_SHAPES, come_and_go=False)
    ours, others = (own.param_groups[0]["params"] for own in (a, b))
    saved = [own.state_dict() for own in (a, b)]
    a, b = (fusestep.torch.AdamW(params, state_dtype="int8") for params in (ours, others))
    a.load_state_dict(saved[0], any_state_dtype=True)
    b.load_state_dict(saved[1], any_state_dtype=True)
    assert_coded(b)
    for step in range(4, 6):
        give(device, ours, others, step, come_and_go=False)
        a.step()
        b.step()
    assert_same(a, b, ours, others)
    wide = [own.state_dict(state_dtype=torch.float32)["state"] for own in (a, b)]
    for index, own in wide[0].items():
        for name, value in own.items():
            assert torch.equal(value, wide[1][index][name].cpu()), (index, name)


def test_masters_of_float16_follow_what_is_written_to_parameters(device):
    ours, others = twins(device, F16)
    a, b = (fusestep.torch.AdamW(p, lr=1e-2, master_weights=True) for p in (ours, others))
    for step in range(4):
        give(device, ours, others, step)
        a.step()
        b.step()
        with torch.no_grad():
            ours[0].add_(0.25)
            others[0].add_(0.25)
    assert_same(a, b, ours, others)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lars", "Lamb"])
@pytest.mark.parametrize("norm", [0.01, 1e6])
def test_clipping_has_the_bits_and_the_norm_of_the_cpu(device, name, norm):
    a, b = compare(device, kind_of(name), lr=1e-2, clip_norm=norm)
    assert a.report().grad_norm == b.report().grad_norm > 0


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("scale", [1024.0, "dynamic:start=1024,growth_interval=2"])
def test_a_loss_scale_skips_and_goes_on_as_on_the_cpu(device, scale, dtype):
    ours, others = twins(device, dtype)
    a, b = (fusestep.torch.AdamW(p, lr=1e-2, loss_scale=scale) for p in (ours, others))
    skipped = []
    for step in range(7):
        give(device, ours, others, step, scale=a.loss_scale() / 64)
        if step == 3:
            ours[0].grad[1, 2] = float("inf")
            others[0].grad[1, 2] = float("inf")
        a.step()
        b.step()
        skipped.append(b.report().skipped)
        assert a.report().skipped == skipped[-1] and a.loss_scale() == b.loss_scale()
        assert a.report().non_finite == b.report().non_finite == int(step == 3)
    assert skipped.index(True) == 3 and sum(skipped) == 1
    assert_same(a, b, ours, others)
    assert a.state_dict().get("loss_scale") == b.state_dict().get("loss_scale")


@pytest.mark.parametrize("name", ["AdamW", "Lamb"])
def test_a_thousand_tensors_have_the_bits_of_the_cpu(device, name):
    shapes = [(index % 67,) for index in range(1000)]
    a, b = compare(device, kind_of(name), steps=2, shapes=shapes, come_and_go=False)
    assert b.report().launches < 20
    assert a.report().elements == b.report().elements


def test_a_step_without_gradients_changes_nothing(device):
    _, others = twins(device)
    before = host(others)
    optimizer = fusestep.torch.AdamW(others)
    optimizer.step()
    assert same_bits(before, host(others)) and not optimizer.state_dict()["state"]


def test_gradients_in_another_order_are_copied_on_the_device(device):
    ours, others = twins(device, shapes=[(5, 6), (4, 3, 2, 2)])
    a, b = fusestep.torch.AdamW(ours), fusestep.torch.AdamW(others)
    for step in range(2):
        give(device, ours, others, step, come_and_go=False)
        for params in (ours, others):
            params[0].grad = params[0].grad.t().contiguous().t()
        a.step()
        b.step()
    assert b.report().copied_gradients == a.report().copied_gradients == 1
    assert_same(a, b, ours, others)


def test_channels_last_parameters_keep_their_order(device):
    own = [torch.nn.Parameter(p.to(memory_format=torch.channels_last)) for p in
           parameters(shapes=[(4, 3, 5, 2)])]
    others = [device.copy(p) for p in own]
    assert others[0].stride() == own[0].stride()
    a, b = fusestep.torch.AdamW(own), fusestep.torch.AdamW(others)
    for step in range(3):
        give(device, own, others, step, come_and_go=False)
        a.step()
        b.step()
    assert next(iter(b.state.values()))["exp_avg"].stride() == own[0].stride()
    assert_same(a, b, own, others)


def test_tensors_are_looked_at_by_their_methods_where_the_interface_is_missing():
    with emulated(file=None) as device:
        compare(device, fusestep.torch.AdamW, lr=1e-2, clip_norm=0.5)
        compare(device, fusestep.torch.SGD, BF16, lr=1e-2, momentum=0.9)


# Several devices, and the CPU beside them.


def mixed(device, dtype=F32):
    """The same parameters on the CPU, and by turns on the CPU and two devices."""
    own = parameters(dtype)
    places = [None, 0, 1, 0, None, 1]
    return own, [
        torch.nn.Parameter(param.detach().clone()) if at is None else device.copy(param, at)
        for param, at in zip(own, places)
    ]


def give_mixed(device, ours, others, step):
    give_gradients(ours, step)
    for param, other in zip(ours, others):
        if param.grad is None:
            other.grad = None
        elif other.device.type == "cpu":
            other.grad = param.grad.clone()
        else:
            other.grad = device.copy(param.grad, other.device.index)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lamb"])
def test_parameters_of_several_devices_have_the_bits_of_the_cpu(device, name, dtype):
    ours, others = mixed(device, dtype)
    a, b = (kind_of(name)(params, lr=1e-2) for params in (ours, others))
    for step in range(5):
        give_mixed(device, ours, others, step)
        a.step()
        b.step()
        found, expected = b.report(), a.report()
        assert (found.elements, found.without_gradient) == (
            expected.elements,
            expected.without_gradient,
        )
        if step == 2:
            for own in (a, b):
                own.load_state_dict(copy.deepcopy(own.state_dict()))
    assert_same(a, b, ours, others)
    assert "cpu\n" in b.plan() and "cuda:0\n" in b.plan() and "cuda:1\n" in b.plan()


def test_a_tensor_that_does_not_fit_leaves_all_devices_as_they_were(device):
    _, others = mixed(device)
    optimizer = fusestep.torch.AdamW(others)
    for param in others:
        param.grad = torch.ones_like(param)
    others[-1].grad = torch.ones(1, 1, 65).to_sparse()
    before = host(others)
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert same_bits(before, host(others)) and not optimizer.state_dict()["state"]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lars"])
@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 0.5},
        {"loss_scale": 4.0},
        {"clip_norm": 0.5, "loss_scale": "dynamic:start=8,growth_interval=2"},
    ],
)
def test_norms_over_several_devices_have_the_bits_of_one(device, settings, name):
    ours, others = mixed(device)
    a, b = (kind_of(name)(params, lr=1e-2, **settings) for params in (ours, others))
    for step in range(9):
        if step == 7:
            # None on one of the devices, then none at all.
            give_gradients(ours, step, come_and_go=False)
            for param, other in zip(ours, others):
                if other.device.index == 1:
                    param.grad = None
            for param, other in zip(ours, others):
                kept = param.grad is not None
                other.grad = None
                if kept and other.device.type == "cpu":
                    other.grad = param.grad.clone()
                elif kept:
                    other.grad = device.copy(param.grad, other.device.index)
        else:
            give_mixed(device, ours, others, step)
        if step == 8:
            for param in (*ours, *others):
                param.grad = None
        if step in (0, 4):
            # On one device, and all are left as they are.
            for params in (ours, others):
                if params[3].grad is not None:
                    params[3].grad.view(-1)[:1] = float("inf")
                params[0].grad = params[0].detach().clone()
                params[0].grad[1, 2] = float("nan")
        a.step()
        b.step()
        found, expected = b.report(), a.report()
        # As texts, since no NaN is equal to itself.
        names = ("grad_norm", "skipped", "non_finite", "loss_scale")
        assert [repr(getattr(found, name)) for name in names] == [
            repr(getattr(expected, name)) for name in names
        ], step
        assert b.loss_scale() == a.loss_scale()
        if step == 2:
            for own in (a, b):
                own.load_state_dict(copy.deepcopy(own.state_dict()))
    assert_same(a, b, ours, others)


def test_a_grad_scaler_skips_on_all_devices_or_on_none(device):
    for settings in ({}, {"clip_norm": 0.5}):
        ours, others = mixed(device)
        a, b = (fusestep.torch.AdamW(p, lr=1e-2, **settings) for p in (ours, others))
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        for step in range(4):
            give_mixed(device, ours, others, step)
            for scaler, own, params in ((scalers[0], a, ours), (scalers[1], b, others)):
                if step == 2:
                    params[1].grad = torch.full_like(params[1], float("inf")).detach()
                scaler.scale(torch.ones(()))
                scaler.step(own)
                scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0
        assert_same(a, b, ours, others)


def test_a_step_leaves_the_context_of_the_thread(device):
    _, others = twins(device)
    other = device.copy(torch.nn.Parameter(torch.ones(5)), 1)
    optimizer = fusestep.torch.AdamW([*others, other])
    for current in (1, 0):
        device.driver.enter(current)
        for param in [*others, other]:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert device.driver.current() == current
    del optimizer
    assert device.driver.current() == 0


# Streams, and what waits for them.


def fresh_stream(device, index=0, pooled=True):
    """A stream of its own that PyTorch would work on: one of its pools', or another library's."""
    handle = device.driver.stream(index)
    device.streams[index] = handle, (1 if pooled else handle)
    return handle


@pytest.mark.parametrize("pooled", [True, False])
def test_steps_follow_pytorchs_stream_wherever_it_goes(device, pooled):
    ours, others = twins(device)
    a, b = (fusestep.torch.AdamW(p, lr=1e-2, clip_norm=1.0) for p in (ours, others))
    for step in range(4):
        if step % 2:
            fresh_stream(device, pooled=pooled)
        give(device, ours, others, step)
        a.step()
        b.step()
    assert_same(a, b, ours, others)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lars", "ScheduleFreeAdamW"])
def test_a_step_is_enqueued_on_pytorchs_stream_and_waits_for_nothing(device, name, moved):
    _, others = twins(device)
    stream = fresh_stream(device)
    optimizer = kind_of(name)(others, lr=1e-2)
    gradients = [torch.ones_like(param) for param in others]

    def step():
        for param, gradient in zip(others, gradients):
            param.grad = gradient
        optimizer.step()

    step()
    if moved:
        stream = fresh_stream(device)
        step()
    before = host(others)
    # A stream that records refuses to be waited for, and what it is given runs later.
    device.driver.begin_capture(stream)
    step()
    graph, status = device.driver.end_capture(stream)
    assert status == 0 and same_bits(before, host(others))
    device.driver.run(graph, stream)
    assert not same_bits(before, host(others))


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "Lamb"])
@pytest.mark.parametrize("settings", [{"clip_norm": 0.5}, {"loss_scale": 4.0}])
def test_a_step_with_a_norm_waits_for_the_one_before_alone(device, settings, name, shown):
    ours, others = twins(device)
    stream = fresh_stream(device)
    a, b = (kind_of(name)(params, lr=1e-2, **settings) for params in (ours, others))
    for step in range(3):
        give(device, ours, others, step, come_and_go=False)
        a.step()
        b.step()
        if shown:
            assert b.state
    give(device, ours, others, 3, come_and_go=False)
    assert b.report().step == 3
    before = host(others)
    device.driver.begin_capture(stream)
    b.step()
    graph, status = device.driver.end_capture(stream)
    assert status == 0 and same_bits(before, host(others))
    device.driver.run(graph, stream)
    a.step()
    assert same_bits(bits(ours), host(others))


def test_counts_are_right_again_once_a_skipped_step_is_asked_for(device):
    ours, others = twins(device)
    a, b = (fusestep.torch.AdamW(p, lr=1e-2, clip_norm=0.5) for p in (ours, others))
    for step in range(6):
        give(device, ours, others, step, come_and_go=False)
        if step in (2, 5):
            ours[0].grad[1, 2] = float("inf")
            others[0].grad[1, 2] = float("inf")
        if step == 1:
            assert a.state and b.state
        a.step()
        b.step()
    # By whoever asks: a report, a state dict with its hooks, the next step.
    seen = []
    b.register_state_dict_post_hook(
        lambda _, saved: seen.extend(float(own["step"]) for own in saved["state"].values())
    )
    assert {float(own["step"]) for own in b.state_dict()["state"].values()} == {4.0}
    assert set(seen) == {4.0}
    assert b.report().skipped and b.report().step == a.report().step == 4
    assert_same(a, b, ours, others)
    assert_same(*copy.deepcopy((a, b)), ours, others)


def test_plans_of_one_stream_share_what_is_loaded(device):
    _, others = twins(device)
    one, other = fusestep.torch.AdamW(others[:3]), fusestep.torch.AdamW(others[3:])
    for param in others:
        param.grad = torch.ones_like(param)
    one.step()
    other.step()
    assert one.report().launches == other.report().launches == 1


# What surrounds a step.


def test_grad_scaler_unscales_and_skips_as_on_the_cpu(device):
    ours, others = twins(device)
    a, b = (fusestep.torch.AdamW(p, lr=1e-2) for p in (ours, others))
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        for optimizer, scaler, params in ((a, scalers[0], ours), (b, scalers[1], others)):
            scaler.scale(torch.ones(()))
            if params is ours:
                give(device, ours, others, step, come_and_go=False)
            if step == 2:
                params[0].grad[1, 2] = float("nan")
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert float(next(iter(b.state.values()))["step"]) == 5
    assert_same(a, b, ours, others)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_micro_steps_are_added_as_on_the_cpu(device, dtype):
    compare(device, fusestep.torch.AdamW, dtype, steps=6, accumulate=3, lr=1e-2)


def test_schedules_have_the_bits_of_the_cpu(device):
    compare(device, fusestep.torch.AdamW, steps=5, schedule="warmup:2,cosine:9", lr=1e-2)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lamb", "NAdam"])
def test_state_dicts_go_from_device_to_cpu_and_back(device, name):
    ours, others = twins(device)
    settings = {"lr": 1e-2, **({"momentum": 0.9} if name == "SGD" else {})}
    a, b = (kind_of(name)(p, **settings) for p in (ours, others))
    for step in range(3):
        give(device, ours, others, step, come_and_go=False)
        a.step()
        b.step()
    a, b, saved = kind_of(name)(ours, **settings), kind_of(name)(others, **settings), (
        a.state_dict(),
        b.state_dict(),
    )
    a.load_state_dict(saved[1])
    b.load_state_dict(saved[0])
    assert all(
        value.device.type == ("cpu" if key == "step" else "cuda")
        for own in b.state.values()
        for key, value in own.items()
    )
    for step in range(3, 5):
        give(device, ours, others, step, come_and_go=False)
        a.step()
        b.step()
    assert_same(a, b, ours, others)


def test_counts_of_pytorchs_fused_steps_are_taken_from_the_device(device):
    _, others = twins(device)
    b = fusestep.torch.AdamW(others)
    for param in others:
        param.grad = torch.ones_like(param)
    b.step()
    saved = b.state_dict()
    for own in saved["state"].values():
        own["step"] = own["step"].to("cuda:0")
    b.load_state_dict(saved)
    b.step()
    assert {float(own["step"]) for own in b.state.values()} == {2.0}


def test_a_copy_of_an_optimizer_goes_on_by_itself(device):
    ours, others = twins(device)
    a, b = (fusestep.torch.AdamW(p, lr=1e-2) for p in (ours, others))
    give(device, ours, others, 0, come_and_go=False)
    a.step()
    b.step()
    (others, b), (ours, a) = copy.deepcopy((others, b)), copy.deepcopy((ours, a))
    give(device, ours, others, 1, come_and_go=False)
    a.step()
    b.step()
    assert_same(a, b, ours, others)


def test_averages_of_schedule_free_are_those_of_the_cpu(device):
    ours, others = twins(device)
    a, b = (fusestep.torch.ScheduleFreeAdamW(p, lr=1e-2) for p in (ours, others))
    for step in range(4):
        give(device, ours, others, step)
        for own in (a, b):
            own.train()
            own.step()
            own.eval()
        assert same_bits(bits(ours), host(others))
    a.train()
    b.train()
    assert_same(a, b, ours, others)


# The step inside of `backward`.


@pytest.mark.filterwarnings("ignore:CUDA initialization")
def test_updates_in_backward_have_the_bits_of_the_cpu(device):
    models, optimizers = [], []
    for where in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
        if where == "cuda":
            for module in (model[0], model[2]):
                module.weight, module.bias = map(device.copy, (module.weight, module.bias))
        optimizer = fusestep.torch.AdamW(model.parameters(), lr=1e-2)
        fusestep.torch.fuse_backward(model, optimizer)
        models.append(model)
        optimizers.append(optimizer)
    for step in range(3):
        for model, optimizer in zip(models, optimizers):
            for param in model.parameters():
                # Autograd adds to it in place, so that it stays in device memory.
                param.grad = torch.zeros_like(param)
            data = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            model(data).square().sum().backward()
            optimizer.step()
    ours, others = (list(model.parameters()) for model in models)
    assert_same(*optimizers, ours, others)


# The script that proves the same on a card (`cargo xtask gpu`).


def test_the_proof_for_cards_passes_here_as_far_as_it_takes_no_card(device, monkeypatch):
    class Graph:
        replay = None

    @contextlib.contextmanager
    def graph(own):
        with device.recording() as made:
            yield
        own.replay = made.replay

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    path = pathlib.Path(__file__).resolve().parents[3] / "benches/peers/device_python.py"
    spec = importlib.util.spec_from_file_location("device_python", path)
    proof = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proof)
    parts = [proof.precisions, proof.norms, proof.skips, proof.replays, proof.micro_steps]
    report = {"bits": [], "failed": [], "left_out": []}
    proof.bits(torch, fusestep.torch, parts, report, float("inf"))
    assert not report["failed"] and len(report["bits"]) == len(parts)


def test_the_package_run_as_a_program_names_the_module():
    from fusestep.__main__ import lines

    assert any(line.endswith("; CUDA, by fusestep._cuda") for line in lines())


# What is refused.


def test_a_wheel_or_machine_without_the_driver_names_the_tensor_and_the_device(device, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "fusestep._cuda", None)
    monkeypatch.delattr(fusestep, "_cuda", raising=False)
    _, others = twins(device)
    with pytest.raises(RuntimeError, match="parameter: expected a tensor on the cpu.*cuda:0.*libcuda"):
        fusestep.torch.AdamW(others)


def test_gradients_on_another_device_than_their_parameter_are_refused(device):
    _, others = twins(device)
    optimizer = fusestep.torch.AdamW(others, accumulate=2)
    others[0].grad = torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="gradient of `0.0`: expected a tensor on cuda:0"):
        optimizer.step()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_units"])
def test_state_that_was_left_on_the_cpu_is_refused_by_name(name):
    with emulated(file=None) as device:
        _, others = twins(device, shapes=CODED_SHAPES)
        optimizer = fusestep.torch.AdamW(others, state_dtype="int8")
        for step in range(2):
            for param in others:
                param.grad = torch.ones_like(param)
            if step == 0:
                optimizer.step()
        own = optimizer.state[others[0]]
        own[name] = own[name].cpu()
        expected = f"{name} of `0.0`.*on cuda:0, found.*a tensor on cpu"
        with pytest.raises(ValueError, match=expected):
            optimizer.step()


def test_norms_of_updates_are_refused_by_name(device):
    _, others = twins(device)
    with pytest.raises(ValueError, match="update_norms: expected parameters on the cpu"):
        fusestep.torch.AdamW(others, update_norms=True)
