"""Parameters that take turns in an optimizer: plans are kept, and nothing else is."""

import copy
import gc
import weakref

import pytest
import torch
from torch.nn import Parameter

import fusestep.torch
from fusestep import _fusestep, _plans
from fusestep.torch import _planned

RULES = {
    "AdamW": {"lr": 1e-2},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
    "Adagrad": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-2, "centered": True},
    "Lion": {"lr": 1e-3},
    "Lamb": {"lr": 1e-2},
    "ScheduleFreeAdamW": {"lr": 1e-2},
}


@pytest.fixture
def made(monkeypatch):
    """The plans that are made while a test runs."""
    plans = []

    def session(*arguments):
        plans.append([one.shape for one in arguments[1]])
        return _fusestep.Session(*arguments)

    class Counting:
        Session = staticmethod(session)
        Snapshot = _fusestep.Snapshot

    monkeypatch.setattr(_planned, "_fusestep", Counting)
    return plans


def parameter(shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return Parameter(torch.randn(shape, generator=generator).to(dtype))


def give_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for own in parameters:
        own.grad = torch.randn(own.shape, generator=generator).to(own.dtype)


def step_with(optimizer, parameters, group=0):
    """As DeepSpeed steps a part of a model."""
    optimizer.param_groups[group]["params"] = parameters
    optimizer.step()
    optimizer.param_groups[group]["params"] = []


def bits(tensors):
    return [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]


def is_same(ours, theirs):
    return all(torch.equal(one, other) for one, other in zip(bits(ours), bits(theirs)))


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_lists_that_take_turns_are_planned_once(made, monkeypatch, rule, shown):
    def run(most):
        monkeypatch.setattr(_plans, "MOST_PLANS", most)
        made.clear()
        parts = [[parameter((3 + at, 5), at), parameter((7,), 10 + at)] for at in range(3)]
        optimizer = getattr(fusestep.torch, rule)(parts[0], **RULES[rule])
        if shown:
            optimizer.state
        for step in range(5):
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
            for at, part in enumerate(parts):
                give_gradients(part, 100 * step + at)
                step_with(optimizer, part)
        whole = [own for part in parts for own in part]
        kept = [optimizer.state[own] for own in whole if own in optimizer.state]
        state = [one[name] for one in kept for name in sorted(one)]
        return len(made), whole, state

    plans, ours, state = run(64)
    assert plans == 3
    plans, without, state_without = run(0)
    assert plans == 15
    assert is_same(ours, without) and is_same(state, state_without)
    assert len(state) == len(state_without)


def test_each_part_has_the_bits_of_an_optimizer_of_its_own():
    parts = [[parameter((4, at + 1), at)] for at in range(4)]
    alone = copy.deepcopy(parts)
    optimizer = fusestep.torch.AdamW(parts[0], lr=1e-2)
    each = [fusestep.torch.AdamW(part, lr=1e-2) for part in alone]
    for step in range(4):
        for at, part in enumerate(parts):
            # One part comes less often.
            if at == 2 and step % 2:
                continue
            give_gradients(part, 10 * step + at)
            give_gradients(alone[at], 10 * step + at)
            step_with(optimizer, part)
            each[at].step()
    assert is_same([own for part in parts for own in part], [own for part in alone for own in part])
    steps = [float(optimizer.state[part[0]]["step"]) for part in parts]
    assert steps == [4.0, 4.0, 2.0, 4.0]


def test_parameters_alike_share_a_plan(made):
    parts = [[parameter((16,), at)] for at in range(6)]
    optimizer = fusestep.torch.AdamW(parts[0], lr=1e-2)
    for step in range(3):
        for part in parts:
            give_gradients(part, step)
            step_with(optimizer, part)
    assert len(made) == 1
    assert [float(optimizer.state[part[0]]["step"]) for part in parts] == [3.0] * 6


def test_tensors_whose_memory_takes_turns_are_planned_once_for_each_shape(made):
    own = parameter((4,), 0)
    parts = [torch.full((4 + at % 2,), float(at)) for at in range(4)]
    starts = [part.clone() for part in parts]
    optimizer = fusestep.torch.SGD([own], lr=0.5)
    for _ in range(3):
        for part in parts:
            own.data, own.grad = part, None
            own.grad = torch.ones(part.shape)
            optimizer.step()
    assert len(made) == 2
    assert all(torch.equal(part, start - 1.5) for part, start in zip(parts, starts))


def test_changes_of_shape_and_dtype_find_their_own_plan(made):
    own = parameter((6,), 0)
    optimizer = fusestep.torch.SGD([own], lr=0.5)
    expected = {}
    kinds = [((6,), torch.float32), ((2, 3), torch.float32), ((6,), torch.bfloat16)]
    for turn in range(3):
        for shape, dtype in kinds:
            # `.grad` is of the dtype before.
            own.grad = None
            own.data = torch.full(shape, 2.0, dtype=dtype)
            own.grad = torch.full(shape, float(turn), dtype=dtype)
            optimizer.step()
            expected[shape, dtype] = 2.0 - 0.5 * turn
            assert own.shape == shape and own.dtype == dtype
            assert torch.all(own == expected[shape, dtype])
    assert len(made) == 3


def test_a_plan_that_is_kept_keeps_no_tensor_alive():
    optimizer = fusestep.torch.AdamW([parameter((8,), 0)], lr=1e-2)
    gone = []
    for at in range(4):
        part = [parameter((8 + at,), at)]
        give_gradients(part, at)
        step_with(optimizer, part)
        moment = optimizer.state[part[0]]["exp_avg"]
        gone += [weakref.ref(part[0]), weakref.ref(part[0].grad), weakref.ref(moment)]
        del optimizer.state[part[0]]
        del part, moment
    # The one in use is that of the last step until the next.
    last = [parameter((100,), 0)]
    give_gradients(last, 0)
    step_with(optimizer, last)
    gc.collect()
    assert not any(ref() for ref in gone)


def test_new_parameters_at_old_addresses_are_new_parameters():
    optimizer = fusestep.torch.AdamW([parameter((64,), 0)], lr=1e-2)
    for at in range(40):
        part = [parameter((64,), at)]
        alone = copy.deepcopy(part)
        for step in range(2):
            give_gradients(part, at + step)
            give_gradients(alone, at + step)
            step_with(optimizer, part)
            if step == 0:
                own = fusestep.torch.AdamW(alone, lr=1e-2)
            own.step()
        assert is_same(part, alone)
        assert float(optimizer.state[part[0]]["step"]) == 2.0
        del optimizer.state[part[0]], part, alone, own


def test_plans_that_are_kept_are_bounded(made):
    optimizer = fusestep.torch.SGD([parameter((1,), 0)], lr=0.1)
    for numel in range(1, 100):
        part = [parameter((numel,), 0)]
        give_gradients(part, 0)
        step_with(optimizer, part)
    assert len(optimizer._plans._kept) == _plans.MOST_PLANS
    plans = _plans.Plans()

    class Nothing:
        def release(self):
            pass

    for key in range(5):
        plans.give_back(key, (Nothing(), None), _plans.MOST_PARAMETERS // 3)
    assert list(plans._kept) == [2, 3, 4]
    plans.give_back(9, (Nothing(), None), _plans.MOST_PARAMETERS + 1)
    assert not plans._kept and plans._parameters == 0


def test_settings_that_need_another_plan_get_one(made):
    first, second = [parameter((4,), 0)], [parameter((5,), 1)]
    optimizer = fusestep.torch.SGD(first, lr=0.1)
    theirs = torch.optim.SGD(copy.deepcopy(first), lr=0.1)
    for step in range(6):
        momentum = 0.9 if step >= 3 else 0.0
        for each in (optimizer, theirs):
            each.param_groups[0]["momentum"] = momentum
        give_gradients(first, step)
        give_gradients(second, step)
        give_gradients(theirs.param_groups[0]["params"], step)
        step_with(optimizer, first)
        step_with(optimizer, second)
        theirs.step()
    torch.testing.assert_close(first[0], theirs.param_groups[0]["params"][0])
    assert len(made) == 4


def test_a_moving_loss_scale_goes_on_with_other_parameters():
    parts = [[parameter((4,), 0)], [parameter((5,), 1)]]
    optimizer = fusestep.torch.SGD(parts[0], lr=0.1, loss_scale="dynamic")
    start = optimizer.loss_scale()
    for part in parts:
        part[0].grad = torch.full(part[0].shape, float("inf"))
        step_with(optimizer, part)
        assert optimizer.report().skipped
    assert optimizer.loss_scale() == start / 4
