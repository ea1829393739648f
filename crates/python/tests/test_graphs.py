"""Steps that `torch.cuda.graph` records, tables that stay on the device, and steps that wait for no
number of it, on the emulated driver (`cargo xtask python --cuda`).
"""

import copy
import gc
import os

import pytest
import torch
from support import bits, give_gradients, same_bits

import fusestep.torch

if not os.environ.get("FUSESTEP_EMULATOR_DEVICES"):
    pytest.skip("run by `cargo xtask python --cuda`", allow_module_level=True)

from test_cuda import BF16, F32, assert_same, device, give, host, kind_of, twins  # noqa: F401


def fill(ours, others, step):
    """New gradients, of the device where the ones before lie."""
    give_gradients(ours, step, come_and_go=False)
    for param, other in zip(ours, others):
        other.grad.copy_(param.grad)


def recorded(device, kind, dtype=F32, warm=2, on_device=None, **settings):
    """Two optimizers after the same steps, that of the device with one more recorded: both, their
    parameters, and the replay."""
    ours, others = twins(device, dtype)
    a, b = kind(ours, **settings), kind(others, **settings, **(on_device or {}))
    for step in range(warm):
        give(device, ours, others, step, come_and_go=False)
        a.step()
        b.step()
    give(device, ours, others, warm, come_and_go=False)
    before = host(others)
    replay = device.graph(b.step)
    # What is recorded is not done.
    assert same_bits(before, host(others))
    return a, b, ours, others, replay


CAPTURABLE = {"capturable": True}


@pytest.mark.parametrize(
    ("name", "on_device", "settings"),
    [
        ("AdamW", CAPTURABLE, {"lr": 1e-2}),
        ("AdamW", CAPTURABLE, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
        ("AdamW", CAPTURABLE, {"lr": 1e-2, "clip_norm": 0.5}),
        ("AdamW", CAPTURABLE, {"lr": 1e-2, "loss_scale": 8.0}),
        ("Adam", CAPTURABLE, {"lr": 1e-2}),
        ("NAdam", CAPTURABLE, {"lr": 1e-2}),
        ("Adamax", CAPTURABLE, {"lr": 1e-2}),
        ("RMSprop", CAPTURABLE, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
        ("SGD", {}, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1}),
        ("Adagrad", {}, {"lr": 1e-2}),
        ("Lion", {}, {"lr": 1e-3, "clip_norm": 0.5}),
        ("Lars", {}, {"lr": 1e-2}),
        ("Lamb", {}, {"lr": 1e-2, "loss_scale": 4.0}),
    ],
)
def test_replays_have_the_bits_of_as_many_steps(device, name, on_device, settings):
    a, b, ours, others, replay = recorded(device, kind_of(name), on_device=on_device, **settings)
    for step in range(2, 7):
        fill(ours, others, step)
        a.step()
        replay()
    assert_same(a, b, ours, others)
    assert b.report().step == a.report().step
    assert b.report().grad_norm == a.report().grad_norm


@pytest.mark.parametrize("settings", [{}, {"master_weights": True}, {"rounding": "stochastic"}])
def test_replays_have_the_bits_of_steps_in_16_bits(device, settings):
    settings = {"lr": 1e-2, **settings}
    a, b, ours, others, replay = recorded(
        device, fusestep.torch.AdamW, BF16, on_device=CAPTURABLE, **settings
    )
    for step in range(2, 7):
        fill(ours, others, step)
        a.step()
        replay()
    assert_same(a, b, ours, others)


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.5}, {"loss_scale": "dynamic:start=8"}])
def test_replays_and_steps_go_on_from_each_other(device, settings):
    a, b, ours, others, replay = recorded(
        device, fusestep.torch.AdamW, lr=1e-2, on_device=CAPTURABLE, **settings
    )
    kept = [param.grad for param in others]
    again = None
    for step in range(2, 14):
        if step % 4 == 3:
            give(device, ours, others, step, come_and_go=False)
            b.step()
        else:
            for param, grad in zip(others, kept):
                param.grad = grad
            fill(ours, others, step)
            if step == 8:
                again = device.graph(b.step)
            (again if again and step % 2 else replay)()
        if settings.get("loss_scale") and step in (4, 7):
            assert b.loss_scale() == 8.0
        a.step()
        if step in (5, 7, 9):
            assert_same(a, b, ours, others)
    assert_same(a, b, ours, others)
    counts = {float(own["step"]) for own in b.state.values()}
    assert counts == {float(own["step"]) for own in a.state.values()}


def test_replays_that_are_skipped_count_nothing(device):
    settings = {"lr": 1e-2, "loss_scale": "dynamic:start=8,growth_interval=2"}
    a, b, ours, others, replay = recorded(
        device, fusestep.torch.AdamW, on_device=CAPTURABLE, **settings
    )
    for step in range(2, 9):
        fill(ours, others, step)
        if step in (3, 6):
            ours[0].grad[1, 2] = others[0].grad[1, 2] = float("inf")
        a.step()
        replay()
    assert_same(a, b, ours, others)
    assert b.loss_scale() == a.loss_scale()
    assert {float(own["step"]) for own in b.state.values()} == {7.0}


def test_a_rate_in_a_tensor_is_read_by_every_step_and_replay(device):
    ours, others = twins(device)
    rates = [torch.tensor(0.25, dtype=torch.float64) for _ in range(2)]
    on_device = [device.copy(rate) for rate in rates]
    a = fusestep.torch.AdamW([{"params": ours[:4]}, {"params": ours[4:]}])
    b = fusestep.torch.AdamW(
        [{"params": own, "lr": lr} for own, lr in zip((others[:4], others[4:]), on_device)],
        capturable=True,
    )
    replay = None
    for step in range(8):
        for index, rate in enumerate(on_device):
            rate.fill_(0.5 / (step + 1 + index))
            a.param_groups[index]["lr"] = 0.5 / (step + 1 + index)
        if step == 2:
            give(device, ours, others, step, come_and_go=False)
            replay = device.graph(b.step)
        if step >= 2:
            fill(ours, others, step)
            replay()
        else:
            give(device, ours, others, step, come_and_go=False)
            if step:
                with device.without_waits():
                    b.step()
            else:
                b.step()
        a.step()
    assert_same(a, b, ours, others)
    assert b.report().lr == 0.5 / 8


def test_memory_of_recorded_steps_outlives_their_plan(device):
    a, b, ours, others, replay = recorded(
        device, fusestep.torch.AdamW, lr=1e-2, on_device=CAPTURABLE
    )
    other = copy.deepcopy(b)
    b.load_state_dict(b.state_dict())
    gc.collect()
    replay()
    assert len(b._recorded) == 1 and not other._recorded


def test_what_cannot_be_recorded_is_refused_by_name(device):
    _, others = twins(device)
    for param in others:
        param.grad = torch.ones_like(param)
    make = fusestep.torch.AdamW
    for settings, expected in (
        ({}, "capturable=False"),
        ({"capturable": True, "accumulate": 2}, "`accumulate`"),
        ({"capturable": True, "schedule": "cosine:9"}, "`schedule`"),
        ({"capturable": True}, "expected one before the first that is recorded"),
    ):
        optimizer = make(others, **settings)
        before = host(others)
        with pytest.raises(RuntimeError, match=expected):
            device.graph(optimizer.step)
        assert same_bits(before, host(others)) and not optimizer._kept_state()[0]
        optimizer.step()
    with pytest.raises(ValueError, match="expected capturable=False, or parameters on a CUDA"):
        make([torch.nn.Parameter(torch.ones(3))], capturable=True)


def test_steps_unlike_the_recorded_one_are_refused(device):
    a, b, ours, others, replay = recorded(
        device, fusestep.torch.AdamW, lr=1e-2, on_device=CAPTURABLE
    )
    replay()
    before = host(others)
    gradient, others[2].grad = others[2].grad, None
    with pytest.raises(RuntimeError, match="`0.2`: expected a gradient, as in the step that was"):
        b.step()
    others[2].grad = gradient
    b.param_groups[0]["betas"] = (0.5, 0.9)
    with pytest.raises(RuntimeError, match="settings: expected those of the step that was rec"):
        b.step()
    assert same_bits(before, host(others))
    b.param_groups[0].update(betas=(0.9, 0.999), lr=0.5)
    b.step()


# Tables on the device.


def stepped(device, optimizer, others):
    """Bytes of tables that a step copies."""
    before = optimizer._whole.session.table_bytes()
    optimizer.step()
    return optimizer._whole.session.table_bytes() - before


@pytest.mark.parametrize(
    ("name", "settings"),
    [("AdamW", {}), ("AdamW", {"clip_norm": 1.0}), ("SGD", {"momentum": 0.9}), ("Lamb", {})],
)
def test_a_step_whose_tensors_have_not_moved_copies_no_table(device, name, settings):
    _, others = twins(device, shapes=[(3 + i,) for i in range(40)])
    optimizer = kind_of(name)(others, lr=1e-2, **settings)
    for param in others:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert stepped(device, optimizer, others) >= 0
    for _ in range(3):
        assert stepped(device, optimizer, others) == 0
    # One gradient elsewhere is one address: 8 bytes, or as many as differ, once for each read.
    others[7].grad = torch.ones_like(others[7])
    reads = 2 if settings.get("clip_norm") else 1
    assert 0 < stepped(device, optimizer, others) <= 8 * reads
    assert stepped(device, optimizer, others) == 0
    # A rate is 8 bytes, in front.
    optimizer.param_groups[0]["lr"] = 0.25
    assert 0 < stepped(device, optimizer, others) <= 8
    assert stepped(device, optimizer, others) == 0


def test_tables_of_few_tensors_stay_in_arguments(device):
    _, others = twins(device, shapes=[(3,), (4,)])
    optimizer = fusestep.torch.AdamW(others)
    for param in others:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.report().launches == 1 and optimizer._whole.session.table_bytes() == 0


def test_many_tensors_that_come_and_go_have_the_bits_of_the_cpu(device):
    ours, others = twins(device, shapes=[(1 + i % 37,) for i in range(120)])
    a, b = (fusestep.torch.AdamW(p, lr=1e-2, clip_norm=0.5) for p in (ours, others))
    for step in range(6):
        give(device, ours, others, step)
        if step == 3:
            ours[0].grad[0] = others[0].grad[0] = float("nan")
        a.step()
        b.step()
    assert_same(a, b, ours, others)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("AdamW", {"maximize": True}),
        ("AdamW", {"betas": (0.5, 0.9)}),
        ("AdamW", {"eps": 1e-2, "weight_decay": 0.5}),
        ("SGD", {"maximize": True, "weight_decay": 0.1}),
        ("Lion", {"maximize": True, "lr": 0.5}),
    ],
)
def test_settings_that_change_between_steps_reach_tables(device, name, changes):
    ours, others = twins(device, shapes=[(1 + i % 37,) for i in range(40)])
    settings = {"lr": 1e-2, **({"momentum": 0.9} if name == "SGD" else {})}
    a, b = (kind_of(name)(p, **settings) for p in (ours, others))
    give(device, ours, others, 0, come_and_go=False)
    for step in range(6):
        # The tensors stay where they are, so that the settings alone are new.
        fill(ours, others, step)
        if step in (2, 4):
            for own in (a, b):
                kept = {key: own.param_groups[0][key] for key in changes}
                own.param_groups[0].update(changes)
            changes = kept
        a.step()
        b.step()
    assert_same(a, b, ours, others)


# `GradScaler`.


def scaler_of(device, index=0, **settings):
    """A scaler with its numbers on the device, as that of PyTorch has them with a card."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, **settings)
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    scaler._scale, scaler._growth_tracker = (
        device.copy(one, index) for one in (scaler._scale, scaler._growth_tracker)
    )
    return scaler


@pytest.mark.parametrize("shapes", [None, [(1 + i % 37,) for i in range(40)]])
@pytest.mark.parametrize("skipped", [(2, 5), (0, 1)])
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.5}])
def test_grad_scaler_leaves_scale_and_skips_to_the_device(device, settings, shapes, skipped):
    ours, others = twins(device, **({} if shapes is None else {"shapes": shapes}))
    a, b = (fusestep.torch.AdamW(p, lr=1e-2, **settings) for p in (ours, others))
    scalers = [
        torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
        scaler_of(device, growth_interval=2),
    ]
    for step in range(7):
        give(device, ours, others, step, come_and_go=False)
        for params in (ours, others):
            if step in skipped:
                params[0].grad.view(-1)[0] = float("nan")
        scalers[0].scale(torch.ones(()))
        scalers[0].step(a)
        scalers[0].update()
        if not b._kept_state()[0]:
            # State that a step makes is taken back where it is skipped.
            scalers[1].step(b)
            scalers[1].update()
            continue
        with device.without_waits():
            scalers[1].step(b)
            scalers[1].update()
    assert scalers[0].get_scale() == float(scalers[1]._scale.cpu())
    assert float(next(iter(b.state_dict()["state"].values()))["step"]) == 5
    assert_same(a, b, ours, others)
    # And a step without a scaler divides by nothing.
    give(device, ours, others, 9, come_and_go=False)
    a.step()
    b.step()
    assert_same(a, b, ours, others)


def test_what_grad_scaler_says_is_heeded_by_replays(device):
    a, b, ours, others, _ = recorded(device, fusestep.torch.AdamW, on_device=CAPTURABLE, lr=1e-2)
    scale, found = (device.copy(torch.tensor(value)) for value in (4.0, 0.0))

    def step():
        b.grad_scale, b.found_inf = scale, found
        b.step()
        del b.grad_scale, b.found_inf

    fill(ours, others, 2)
    for param, other in zip(ours, others):
        other.grad.mul_(4.0)
    step()
    a.step()
    replay = device.graph(step)
    for number in range(3, 8):
        fill(ours, others, number)
        found.fill_(float(number == 5))
        scale.fill_(2.0**number)
        for other in others:
            other.grad.mul_(2.0**number)
        # PyTorch records what writes the control block, which has to be done here.
        b._whole._scale.of(scale, found)
        replay()
        if number != 5:
            a.step()
    assert_same(a, b, ours, others)
