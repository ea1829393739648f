"""What the classes do around the rule: clipping, loss scales, micro-steps, masters, norms."""

import copy
import pickle

import pytest
import torch
from support import (
    assert_unchanged,
    bits,
    give_gradients,
    largest_difference,
    parameters,
    same_bits,
    snapshot,
    twins,
)

import fusestep.torch


@pytest.mark.parametrize("norm", [0.01, 1.0, 1e6])
def test_clip_norm_is_pytorchs_clipping_without_touching_gradients(norm):
    ours, theirs = twins()
    a = fusestep.torch.SGD(ours, lr=0.1, clip_norm=norm)
    b = torch.optim.SGD(theirs, lr=0.1, foreach=False)
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        before = bits(p.grad for p in ours if p.grad is not None)
        total = torch.nn.utils.clip_grad_norm_(theirs, norm)
        a.step()
        b.step()
        assert same_bits(before, [p.grad for p in ours if p.grad is not None])
        assert a.report().grad_norm == pytest.approx(float(total), rel=1e-5)
    assert largest_difference(ours, theirs) < 1e-5


def test_a_clip_norm_that_is_not_reached_changes_no_bit():
    ours, others = twins()
    a, b = fusestep.torch.AdamW(ours, clip_norm=1e9), fusestep.torch.AdamW(others)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(others, step)
        a.step()
        b.step()
    assert same_bits(ours, others)


@pytest.mark.parametrize("scale", [1024.0, "dynamic"])
def test_a_loss_scale_of_a_power_of_two_changes_no_bit(scale):
    ours, others = twins()
    a, b = fusestep.torch.AdamW(ours, loss_scale=scale), fusestep.torch.AdamW(others)
    for step in range(6):
        give_gradients(ours, step, scale=a.loss_scale())
        give_gradients(others, step)
        a.step()
        b.step()
    assert a.loss_scale() >= 1024 and same_bits(ours, others)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_gradient_that_is_not_finite_skips_the_step(name):
    params = parameters()
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5} if name == "SGD" else {}
    optimizer = getattr(fusestep.torch, name)(params, loss_scale="dynamic", **settings)
    assert optimizer.loss_scale() == 65536.0
    for step in range(3):
        give_gradients(params, step, come_and_go=False, scale=optimizer.loss_scale())
        if step < 2:
            params[4].grad[5, 6] = float("inf") if step else float("nan")
        before = snapshot(optimizer, params)
        optimizer.step()
        report = optimizer.report()
        assert report.skipped == (step < 2) and report.non_finite == int(step < 2)
        if step < 2:
            assert_unchanged(before, optimizer, params)
            assert optimizer.loss_scale() == 65536.0 / 2 ** (step + 1)
    plain = parameters()
    other = getattr(fusestep.torch, name)(plain, **settings)
    give_gradients(plain, 2, come_and_go=False)
    other.step()
    assert same_bits(params, plain), "the step behind skipped ones is the first"


@pytest.mark.parametrize("copier", ["pickle", "deepcopy", "state_dict"])
def test_a_loss_scale_that_has_moved_is_saved(copier):
    params = parameters(shapes=[(3,)])
    optimizer = fusestep.torch.AdamW(params, loss_scale="dynamic")
    params[0].grad = torch.full((3,), float("inf"))
    optimizer.step()
    if copier == "pickle":
        other = pickle.loads(pickle.dumps(optimizer))
    elif copier == "deepcopy":
        other = copy.deepcopy(optimizer)
    else:
        other = fusestep.torch.AdamW(parameters(shapes=[(3,)]), loss_scale="dynamic")
        other.load_state_dict(optimizer.state_dict())
        torch.optim.AdamW(params).load_state_dict(optimizer.state_dict())
    assert optimizer.loss_scale() == other.loss_scale() == 32768.0
    # A plan that is made anew keeps it.
    optimizer.add_param_group({"params": parameters(shapes=[(4,)])})
    assert optimizer.loss_scale() == 32768.0


@pytest.mark.parametrize("own", [None, 8.0])
def test_a_loss_scale_that_moves_is_not_loaded_where_none_does(own):
    params, others = parameters(), parameters()
    moving = fusestep.torch.AdamW(params, loss_scale="dynamic")
    give_gradients(params, 0, scale=float("inf"))
    moving.step()
    saved, fixed = moving.state_dict(), fusestep.torch.AdamW(others, loss_scale=own)
    before = snapshot(fixed, others)
    with pytest.raises(ValueError, match=f"loss_scale: expected .* is {own}, found .*32768"):
        fixed.load_state_dict(saved)
    assert_unchanged(before, fixed, others)
    assert fixed.loss_scale() == (own or 1.0)
    moving.load_state_dict(fixed.state_dict())
    assert moving.loss_scale() == 32768.0, "a state dict without a scale leaves it as it is"
    for wrong in (None, 3.0, (0.0, 0, 0), ("x", 0, 0), (1.0, -1, 0)):
        with pytest.raises(ValueError, match="loss_scale: expected a number above 0"):
            moving.load_state_dict({**saved, "loss_scale": wrong})
    assert moving.loss_scale() == 32768.0
    del saved["loss_scale"]
    fixed.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_accumulate_is_a_step_on_the_mean(dtype):
    ours, others = twins(dtype)
    a = fusestep.torch.AdamW(ours, accumulate=4)
    b = fusestep.torch.AdamW(others)
    for step in range(3):
        sums = [None] * len(ours)
        for micro in range(4):
            give_gradients(ours, 4 * step + micro)
            before = bits(ours)
            for index, param in enumerate(ours):
                if param.grad is None:
                    continue
                wide = param.grad.to(torch.promote_types(dtype, torch.float32))
                sums[index] = wide.clone() if sums[index] is None else sums[index] + wide
            a.step()
            assert same_bits(before, ours) == (micro < 3)
        for param, total in zip(others, sums):
            param.grad = None if total is None else (total / 4).to(dtype)
        b.step()
    assert same_bits(ours, others)


def test_a_copy_between_micro_steps_has_their_sums():
    params = parameters()
    optimizer = fusestep.torch.AdamW(params, accumulate=3)
    give_gradients(params, 0)
    optimizer.step()
    copied, other = copy.deepcopy((params, optimizer))
    for step in (1, 2):
        for own, stepped in ((params, optimizer), (copied, other)):
            give_gradients(own, step)
            stepped.step()
    assert same_bits(params, copied) and not same_bits(params, parameters())


def test_a_wrong_gradient_is_not_added():
    params = parameters(shapes=[(3,), (4, 5)])
    optimizer = fusestep.torch.AdamW(params, accumulate=2)
    give_gradients(params, 0)
    optimizer.step()
    sums = {tensor: total.clone() for tensor, total in optimizer._micro.sums.items()}
    give_gradients(params, 1)
    params[1].grad = torch.ones(4, 5).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    assert optimizer._micro.count == 1
    assert all(torch.equal(sums[tensor], optimizer._micro.sums[tensor]) for tensor in sums)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_master_weights_are_a_float32_run_rounded(dtype):
    narrow = parameters(dtype)
    wide = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    a = fusestep.torch.AdamW(narrow, lr=1e-5, master_weights=True)
    b = fusestep.torch.AdamW(wide, lr=1e-5)
    for step in range(30):
        give_gradients(narrow, step)
        for p, q in zip(narrow, wide):
            q.grad = None if p.grad is None else p.grad.float()
        a.step()
        b.step()
    assert same_bits(narrow, [p.detach().to(dtype) for p in wide])
    masters = [a.state[p]["master"] for p in narrow]
    assert same_bits(masters, [p.detach() for p in wide])


def test_masters_follow_what_is_written_to_their_parameters():
    param = torch.nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
    optimizer = fusestep.torch.SGD([param], lr=1e-4, momentum=0.9, master_weights=True)
    param.grad = torch.ones(4, dtype=torch.bfloat16)
    for _ in range(3):
        optimizer.step()
    master = optimizer.state[param]["master"].clone()
    assert (master < 1).all() and torch.equal(param, torch.ones(4, dtype=torch.bfloat16))
    with torch.no_grad():
        param[0] = 5.0
    velocity = optimizer.state[param]["momentum_buffer"].clone()
    optimizer.step()
    after = optimizer.state[param]["master"]
    assert float(after[0]) == pytest.approx(5.0, abs=1e-3)
    assert (after[1:] < master[1:]).all(), "the others kept what their 16 bits do not show"
    assert not torch.equal(velocity, optimizer.state[param]["momentum_buffer"])


def test_masters_asked_for_later_keep_the_momentum():
    """A master that is missing does not make a step the first."""
    params = parameters(torch.bfloat16, shapes=[(8,)])
    first = fusestep.torch.SGD(params, lr=0.1, momentum=0.9)
    give_gradients(params, 0)
    first.step()
    velocity = first.state[params[0]]["momentum_buffer"].clone()
    later = fusestep.torch.SGD(params, lr=0.1, momentum=0.9, master_weights=True)
    later.load_state_dict(first.state_dict())
    params[0].grad = torch.zeros(8, dtype=torch.bfloat16)
    later.step()
    assert torch.equal(later.state[params[0]]["momentum_buffer"], velocity * 0.9)


def test_update_norms_are_how_far_parameters_moved():
    params = parameters()
    optimizer = fusestep.torch.AdamW(params, update_norms=True)
    give_gradients(params, 0, come_and_go=False)
    before = bits(params)
    optimizer.step()
    norms = optimizer.update_norms()
    moved = [float((p.detach() - q).double().norm()) for p, q in zip(params, before)]
    assert list(norms) == [f"0.{index}" for index in range(len(params))]
    assert list(norms.values()) == pytest.approx(moved, rel=1e-4, abs=1e-9)
    total = sum(m * m for m in moved) ** 0.5
    assert optimizer.report().update_norm == pytest.approx(total, rel=1e-4)
    assert fusestep.torch.AdamW(params).update_norms() is None


def test_named_parameters_keep_their_names():
    model = torch.nn.Linear(3, 2)
    optimizer = fusestep.torch.AdamW(model.named_parameters(), update_norms=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert list(optimizer.update_norms()) == ["weight", "bias"]
    assert "weight" in optimizer.plan()


def test_state_in_bfloat16():
    params = parameters(torch.bfloat16)
    optimizer = fusestep.torch.AdamW(params, state_dtype=torch.bfloat16)
    for step in range(3):
        give_gradients(params, step, come_and_go=False)
        optimizer.step()
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.bfloat16
    assert not same_bits(params, parameters(torch.bfloat16))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("clip_norm", 0.0),
        ("clip_norm", float("nan")),
        ("loss_scale", "static"),
        ("loss_scale", -1.0),
        ("accumulate", 0),
        ("accumulate", 2.5),
        ("state_dtype", torch.float64),
    ],
)
def test_options_out_of_range_are_refused(option, value):
    with pytest.raises(ValueError, match=option):
        fusestep.torch.AdamW(parameters(), **{option: value})


def test_an_argument_that_there_is_not_is_refused():
    for name in ("AdamW", "Lion"):
        with pytest.raises(TypeError):
            getattr(fusestep.torch, name)(parameters(), momentun=0.9)


def test_the_plan_says_what_runs():
    params = parameters()
    text = fusestep.torch.AdamW(params, clip_norm=1.0).plan()
    assert "fused_adam_f32" in text and f"{len(params)} parameters" in text


@pytest.mark.parametrize(
    ("name", "setting", "value", "match"),
    [
        ("ScheduleFreeAdamW", "warmup_steps", 2.0, "a whole number from 0 on, found 2.0"),
        ("ScheduleFreeAdamW", "warmup_steps", -1, "a whole number from 0 on, found -1"),
        ("Lion", "lr", "1", "a number, found '1'"),
        ("Lars", "trust_ratio", 1, "True or False, found 1"),
        ("AdamW", "clip_norm", [], r"a finite number above 0, found \[\]"),
        ("AdamW", "loss_scale", [1.0], r"a power of two .*found \[1.0\]"),
        ("AdamW", "loss_scale", (1.0, 2, 3), r"a power of two .*found \(1.0, 2, 3\)"),
    ],
)
def test_settings_of_a_wrong_type_are_named(name, setting, value, match):
    with pytest.raises(TypeError, match=f"{setting}: expected {match}"):
        getattr(fusestep.torch, name)(parameters(), **{setting: value})
