"""What PyTorch's optimizers can do beside stepping, and what must not happen."""

import copy
import gc
import io
import pickle
import sys
import threading
import time

import pytest
import torch
from support import (
    OURS_OF,
    OWN,
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

NAMES = [*OURS_OF, *OWN]
EVERY = pytest.mark.parametrize("name", NAMES)


def make(name, params, **settings):
    if name == "SGD":
        settings.setdefault("momentum", 0.9)
        settings.setdefault("lr", 0.01)
    return getattr(fusestep.torch, name)(params, **settings)


def run(optimizer, params, steps):
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


@EVERY
def test_threads_do_not_change_bits(name):
    shapes = [(300, 400), (7,), (200_000,), (65_537,)]
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        params = parameters(shapes=shapes)
        run(make(name, params), params, range(6))
        results.append(bits(params))
    torch.set_num_threads(2)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])
    assert not same_bits(results[0], bits(parameters(shapes=shapes)))


@EVERY
@pytest.mark.parametrize("copier", ["pickle", "deepcopy", "torch.save", "state_dict"])
def test_copies_go_on_with_the_same_bits(name, copier):
    params = parameters()
    optimizer = make(name, params)
    run(optimizer, params, range(4))
    if copier == "pickle":
        copied, optimizer_2 = pickle.loads(pickle.dumps((params, optimizer)))
    elif copier == "deepcopy":
        copied, optimizer_2 = copy.deepcopy((params, optimizer))
    else:
        copied = copy.deepcopy(params)
        optimizer_2 = make(name, copied)
        saved = optimizer.state_dict()
        if copier == "torch.save":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        optimizer_2.load_state_dict(copy.deepcopy(saved))
    run(optimizer, params, range(4, 9))
    run(optimizer_2, copied, range(4, 9))
    assert same_bits(params, copied)
    assert type(optimizer_2) is type(optimizer)
    assert type(optimizer).__module__ == "fusestep.torch"


@EVERY
def test_a_closure_is_called_once_with_gradients_enabled(name):
    params = parameters(shapes=[(4, 3)])
    optimizer = make(name, params)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    before = bits(params)
    first = float(optimizer.step(closure))
    assert first == pytest.approx(float(before[0].square().sum()))
    assert calls == [True] and not same_bits(before, params)
    for _ in range(20):
        last = float(optimizer.step(closure))
    assert last < first


def test_hooks_before_and_after_a_step():
    params = parameters()
    optimizer = make("AdamW", params)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", bits(params))))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", bits(params))))
    before = bits(params)
    run(optimizer, params, range(1))
    assert [word for word, _ in seen] == ["before", "after"]
    assert same_bits(seen[0][1], before) and same_bits(seen[1][1], params)


def test_a_subclass_steps_once():
    class Own(fusestep.torch.SGD):
        def step(self, closure=None):
            return super().step(closure)

    params, others = twins(shapes=[(3,)])
    run(Own(params, lr=0.5), params, range(3))
    run(fusestep.torch.SGD(others, lr=0.5), others, range(3))
    assert same_bits(params, others)


@pytest.mark.parametrize("name", OURS_OF)
def test_groups_are_added_changed_and_mixed(name):
    ours, theirs = twins()
    results = []
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        optimizer = getattr(module, name)(params[:2], lr=0.01)
        run(optimizer, params, range(3))
        optimizer.add_param_group({"params": params[2:5], "lr": 0.1, "weight_decay": 0.1})
        run(optimizer, params, range(3, 6))
        optimizer.add_param_group({"params": params[5:], "maximize": True})
        optimizer.param_groups[0]["lr"] = 0.002
        run(optimizer, params, range(6, 9))
        results.append(optimizer)
    assert largest_difference(ours, theirs) < 4e-6
    assert [g["lr"] for g in results[0].param_groups] == [0.002, 0.1, 0.01]


def test_a_parameter_that_moves_to_another_group_takes_its_settings():
    ours, theirs = twins(shapes=[(5,), (6,), (7,)])
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.001}]
        optimizer = module.SGD(groups, momentum=0.9)
        run(optimizer, params, range(3))
        moved = optimizer.param_groups[0]["params"].pop()
        optimizer.param_groups[1]["params"].insert(0, moved)
        run(optimizer, params, range(3, 6))
    assert largest_difference(ours, theirs) < 1e-6


def test_a_group_that_is_refused_is_not_added():
    params = parameters(shapes=[(3,), (4,)])
    optimizer = make("AdamW", params[:1])
    for wrong in ({"lr": float("nan")}, {"betas": (2.0, 0.9)}, {"capturable": True}):
        with pytest.raises(ValueError):
            optimizer.add_param_group({"params": params[1:], **wrong})
        assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[1:]})
    run(optimizer, params, range(2))


def test_settings_changed_between_steps_are_those_of_pytorch():
    ours, theirs = twins()
    a = fusestep.torch.AdamW(ours)
    b = torch.optim.AdamW(theirs, foreach=False)
    for step in range(12):
        for optimizer, params in ((a, ours), (b, theirs)):
            group = optimizer.param_groups[0]
            group["lr"] = 1e-3 * (step + 1)
            group["betas"] = (0.8, 0.99) if step > 3 else (0.9, 0.999)
            group["weight_decay"] = 0.1 * (step % 3)
            group["maximize"] = step % 4 == 1
            # From one group of tensors to another: the kernel has one list more.
            group["amsgrad"] = False
            give_gradients(params, step)
            optimizer.step()
    assert largest_difference(ours, theirs) < 4e-6


def test_momentum_switched_on_later_is_pytorchs():
    ours, theirs = twins()
    a = fusestep.torch.SGD(ours, lr=0.1)
    b = torch.optim.SGD(theirs, lr=0.1, foreach=False)
    for step in range(9):
        for optimizer, params in ((a, ours), (b, theirs)):
            if step == 3:
                optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
            give_gradients(params, step)
            optimizer.step()
    assert largest_difference(ours, theirs) < 1e-6


def test_amsgrad_switched_on_later_has_its_state():
    params = parameters()
    optimizer = make("Adam", params)
    run(optimizer, params, range(2))
    optimizer.param_groups[0]["amsgrad"] = True
    run(optimizer, params, range(2, 8))
    assert "max_exp_avg_sq" in optimizer.state[params[0]]
    assert float(optimizer.state[params[1]]["step"]) == sum((s + 1) % 5 != 4 for s in range(8))


def test_new_storage_shape_and_dtype_are_planned_anew():
    ours, theirs = twins(shapes=[(4, 5), (6,)])
    a = fusestep.torch.SGD(ours, lr=0.1, momentum=0.9)
    b = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, foreach=False)
    for params, optimizer in ((ours, a), (theirs, b)):
        run(optimizer, params, range(3))
        params[0].data = params[0].data.clone()
        run(optimizer, params, range(3, 5))
        params[0].grad = None
        params[0].data = params[0].data.reshape(5, 4)
        buffer = optimizer.state[params[0]]["momentum_buffer"]
        optimizer.state[params[0]]["momentum_buffer"] = buffer.reshape(5, 4)
        run(optimizer, params, range(5, 8))
        for param in params:
            param.grad = None
            param.data = param.data.double()
            optimizer.state[param]["momentum_buffer"] = (
                optimizer.state[param]["momentum_buffer"].double()
            )
        run(optimizer, params, range(8, 12))
    assert ours[0].dtype == torch.float64 and largest_difference(ours, theirs) < 1e-6


def test_an_address_that_is_reused_is_only_an_address():
    """Gradients are freed and made anew, so that others get their memory."""
    ours, theirs = twins(shapes=[(64, 64)] * 8)
    a = fusestep.torch.AdamW(ours)
    b = torch.optim.AdamW(theirs, foreach=False)
    places = set()
    reused = 0
    for step in range(30):
        for params, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad(set_to_none=True)
            order = list(range(8))
            order = order[step % 8 :] + order[: step % 8]
            generator = torch.Generator().manual_seed(step)
            for index in order:
                params[index].grad = torch.randn(64, 64, generator=generator)
                if params is ours:
                    reused += (params[index].grad.data_ptr(), 0) in places
                    places.add((params[index].grad.data_ptr(), 0))
            optimizer.step()
    assert reused > 0, "the test is about addresses that come back"
    assert largest_difference(ours, theirs) < 4e-6


def test_a_parameter_that_takes_over_an_others_memory():
    ours, theirs = twins(shapes=[(32,), (32,)])
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        optimizer = module.AdamW(params)
        run(optimizer, params, range(3))
        # The two exchange their storage: every address is known, none is of the same tensor.
        params[0].data, params[1].data = params[1].data, params[0].data
        run(optimizer, params, range(3, 8))
    assert largest_difference(ours, theirs) < 4e-6


def test_frozen_parameters_stay_and_come_back():
    ours, theirs = twins()
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        optimizer = module.AdamW(params)
        params[0].requires_grad_(False)
        for step in range(9):
            give_gradients(params, step)
            params[0].requires_grad_(step >= 4)
            if step < 4:
                params[0].grad = None
            if step == 6:
                params[1].requires_grad_(False)
            optimizer.step()
    assert largest_difference(ours, theirs) < 4e-6


def test_nothing_with_a_gradient_is_a_step_that_does_nothing():
    params = parameters()
    optimizer = make("AdamW", params)
    before = snapshot(optimizer, params)
    optimizer.step()
    assert_unchanged(before, optimizer, params)
    assert optimizer.report().elements == 0
    assert optimizer.report().without_gradient == len(params)
    frozen = [torch.nn.Parameter(torch.ones(3), requires_grad=False)]
    make("AdamW", frozen).step()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_a_gradient_that_no_kernel_takes_changes_nothing(name, kind):
    params = parameters(shapes=[(5,), (6, 4), (3,)])
    match, gradient = "sparse", torch.randn(6, 4).to_sparse()
    if kind == "meta":
        # PyTorch lets no gradient of another device be assigned; a parameter of one, which is
        # frozen when the optimizer is made, is refused.
        match, gradient = "cpu", torch.empty(6, 4, device="meta")
        params[1] = torch.nn.Parameter(torch.empty(6, 4, device="meta"), requires_grad=False)
    optimizer = make(name, params)
    params[1].requires_grad_(True)
    good = [params[0], params[2]]
    give_gradients(good, 0)
    params[1].grad = gradient
    before = snapshot(optimizer, good)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=match):
            optimizer.step()
        assert_unchanged(before, optimizer, good)
    params[1].grad = None
    if kind != "meta":
        optimizer.step()
        assert not same_bits(before[0], good)


def test_a_parameter_of_another_device_is_refused_at_once():
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, device="meta"))]
    with pytest.raises(RuntimeError, match="expected a tensor on the cpu or a CUDA device, found one on meta"):
        fusestep.torch.AdamW(params)
    optimizer = fusestep.torch.AdamW(params[:1])
    with pytest.raises(RuntimeError, match="found one on meta"):
        optimizer.add_param_group({"params": params[1:]})
    assert len(optimizer.param_groups) == 1
    params[1].requires_grad_(False)
    fusestep.torch.AdamW(params)


def test_a_refused_first_step_is_still_the_first():
    """PyTorch's SGD takes the first gradient whole, without dampening."""
    ours, theirs = twins(shapes=[(5,), (6, 4)])
    a = fusestep.torch.SGD(ours, lr=0.1, momentum=0.9, dampening=0.5)
    b = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, dampening=0.5)
    give_gradients(ours, 0)
    ours[1].grad = torch.randn(6, 4).to_sparse()
    with pytest.raises(RuntimeError):
        a.step()
    run(a, ours, range(3))
    run(b, theirs, range(3))
    assert largest_difference(ours, theirs) < 1e-6


def test_complex_half_integer_and_strided_parameters():
    with pytest.raises(TypeError, match="complex64"):
        make("AdamW", [torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    strided = torch.nn.Parameter(torch.zeros(4, 12)[:, ::2])
    strided.grad = torch.ones(4, 6)
    optimizer = make("AdamW", [strided])
    with pytest.raises(ValueError, match="gaps"):
        optimizer.step()
    assert torch.equal(strided, torch.zeros(4, 6)) and not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_that_no_kernel_has_are_refused(dtype):
    params = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(3).to(dtype))]
    optimizer = make("AdamW", params)
    for param in params:
        param.grad = torch.ones(param.shape).to(param.dtype)
    with pytest.raises(TypeError, match=f"0.1.*found {dtype}"):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(4)) and not optimizer.state


def test_overlapping_parameters_are_refused():
    memory = torch.zeros(10)
    params = [torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[5:])]
    optimizer = make("AdamW", params)
    give_gradients(params, 0)
    with pytest.raises(RuntimeError, match="overlap"):
        optimizer.step()
    assert torch.equal(memory, torch.zeros(10)) and not optimizer.state
    own = torch.nn.Parameter(torch.zeros(4))
    own.grad = own.data
    with pytest.raises(RuntimeError, match="overlap"):
        make("AdamW", [own]).step()


def test_gradients_in_another_order_are_copied_and_counted():
    ours, theirs = twins(shapes=[(8, 6)])
    a, b = make("AdamW", ours), torch.optim.AdamW(theirs)
    for params, optimizer in ((ours, a), (theirs, b)):
        params[0].grad = torch.arange(48.0).reshape(6, 8).t()
        optimizer.step()
    assert a.report().copied_gradients == 1
    assert largest_difference(ours, theirs) < 1e-6


def test_state_that_does_not_fit_is_refused():
    params = parameters(shapes=[(4,), (5,)])
    optimizer = make("AdamW", params)
    run(optimizer, params, range(1))
    optimizer.state[params[1]]["exp_avg"] = torch.zeros(7)
    before = snapshot(optimizer, params)
    give_gradients(params, 1)
    with pytest.raises(ValueError, match=r"exp_avg.*0\.1.*shape \[7\]"):
        optimizer.step()
    assert_unchanged(before, optimizer, params)


def test_autograd_sees_that_parameters_were_written():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = make("SGD", [param])
    loss = (param * param).sum()
    param.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_other_threads_run_during_a_step():
    params = parameters(shapes=[(12_000_000,)])
    optimizer = make("AdamW", params)
    give_gradients(params, 0)
    optimizer.step()
    give_gradients(params, 1)
    # On a busy machine others may keep the processor from both threads, but not every time.
    assert any(runs_beside(optimizer) for _ in range(10))


def runs_beside(optimizer):
    """Whether this thread runs while another makes steps."""
    started = threading.Event()
    ended = []

    def work():
        started.set()
        for _ in range(6):
            optimizer.step()
        ended.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    beats = []
    while not ended:
        beats.append(time.perf_counter())
    thread.join()
    gaps = [b - a for a, b in zip(beats, beats[1:])]
    # A step takes milliseconds; whoever held the lock would leave gaps as long as six steps.
    whole = ended[0] - beats[0]
    return len(beats) > 1000 and max(gaps) < whole / 2


def test_grad_scaler_of_pytorch_works():
    ours, theirs = twins(shapes=[(5, 4)])
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        optimizer = module.AdamW(params, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            loss = (params[0] * (step + 1)).square().sum()
            if step == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert largest_difference(ours, theirs) < 1e-6 and torch.isfinite(ours[0]).all()


def test_memory_of_plans_is_given_back():
    params = parameters(shapes=[(10,)])
    optimizer = make("AdamW", params)
    run(optimizer, params, range(2))
    param = params[0]
    held = sys.getrefcount(param)
    run(optimizer, params, range(2, 50))
    gc.collect()
    assert sys.getrefcount(param) == held


@pytest.mark.parametrize("path", ["handles", "methods"])
def test_both_ways_to_find_tensors_find_the_same(path, monkeypatch):
    """PyTorch has a C interface; where it is missing a tensor's methods are called."""
    from fusestep.torch import _planned
    from fusestep.torch._tensors import Library

    calls = []

    class Counting(Library):
        if path == "methods":
            file = "nowhere"

        @staticmethod
        def describe(tensor):
            calls.append(tensor)
            return Library.describe(tensor)

    monkeypatch.setattr(_planned, "Library", Counting)
    ours, others = twins()
    run(make("AdamW", ours), ours, range(4))
    monkeypatch.undo()
    run(make("AdamW", others), others, range(4))
    assert same_bits(ours, others)
    assert bool(calls) == (path == "methods")
    params = parameters(shapes=[(3,), (4, 5)])
    monkeypatch.setattr(_planned, "Library", Counting)
    optimizer = make("AdamW", params)
    for wrong in (torch.ones(4, 5).to_sparse(), torch.zeros(4, 5).to_sparse()):
        give_gradients(params, 0)
        params[1].grad = wrong
        before = snapshot(optimizer, params)
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
        assert_unchanged(before, optimizer, params)
