"""State that nobody has asked for: steps do not look at it, and give what they give with a look."""

import copy
import gc
import pickle
import threading
from collections import defaultdict

import pytest
import torch
from support import give_gradients, same_bits, twins

import fusestep.torch

MAKE = {
    "AdamW": lambda params, **more: fusestep.torch.AdamW(params, lr=0.1, **more),
    "amsgrad": lambda params, **more: fusestep.torch.Adam(params, amsgrad=True, **more),
    "SGD": lambda params, **more: fusestep.torch.SGD(params, lr=0.1, momentum=0.9, **more),
    "plain": lambda params, **more: fusestep.torch.SGD(params, lr=0.1, **more),
    "dampened": lambda params, **more: fusestep.torch.SGD(
        params, lr=0.1, momentum=0.9, dampening=0.5, **more
    ),
    "Adagrad": lambda params, **more: fusestep.torch.Adagrad(params, **more),
    "RMSprop": lambda params, **more: fusestep.torch.RMSprop(
        params, momentum=0.5, centered=True, **more
    ),
    "Lion": lambda params, **more: fusestep.torch.Lion(params, **more),
    "Lars": lambda params, **more: fusestep.torch.Lars(params, **more),
    "Lamb": lambda params, **more: fusestep.torch.Lamb(params, **more),
    "ScheduleFree": lambda params, **more: fusestep.torch.ScheduleFreeAdamW(params, **more),
}


def is_private(optimizer):
    return "state" not in vars(optimizer)


def pair(name="AdamW", dtype=torch.float32, **more):
    """Parameters and optimizer twice, of which the second one's state has been asked for."""
    own, looked = twins(dtype)
    ours, theirs = MAKE[name](own, **more), MAKE[name](looked, **more)
    assert theirs.state is theirs.state
    assert is_private(ours) and not is_private(theirs)
    return (own, ours), (looked, theirs)


def run(pairs, steps, **more):
    for step in steps:
        for params, optimizer in pairs:
            give_gradients(params, step, **more)
            optimizer.step()


def assert_same(pairs):
    """The same parameters, state and counts, which shows the state of both."""
    (own, ours), (looked, theirs) = pairs
    assert same_bits(own, looked)
    assert ours.state.keys() == set(own) & ours.state.keys()
    for mine, other in zip(own, looked):
        assert (mine in ours.state) == (other in theirs.state)
        mine, other = ours.state.get(mine, {}), theirs.state.get(other, {})
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key]), key


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MAKE)
def test_steps_without_a_look_give_the_bits_of_steps_with(name, dtype):
    pairs = pair(name, dtype)
    run(pairs, range(12))
    assert is_private(pairs[0][1])
    assert_same(pairs)
    # Shown, it is looked at.
    run(pairs, range(12, 15))
    assert_same(pairs)


@pytest.mark.parametrize(
    "more",
    [
        {"clip_norm": 0.5},
        {"accumulate": 3},
        {"master_weights": True},
        {"update_norms": True},
        {"loss_scale": 8.0},
        {"state_dtype": torch.bfloat16},
    ],
    ids=lambda more: next(iter(more)),
)
def test_options(more):
    pairs = pair(dtype=torch.bfloat16, **more)
    run(pairs, range(9))
    assert is_private(pairs[0][1])
    assert_same(pairs)


def test_skipped_steps_are_not_counted():
    pairs = pair(loss_scale="dynamic")
    for step in range(12):
        # The first one makes the state, which goes with it.
        scale = float("inf") if step in (0, 5, 6) else 1.0
        run(pairs, [step], scale=scale, come_and_go=False)
    (own, ours), (_, theirs) = pairs
    assert ours.loss_scale() == theirs.loss_scale()
    assert is_private(ours)
    assert_same(pairs)
    assert {float(ours.state[param]["step"]) for param in own} == {9.0}


@pytest.mark.parametrize("before", [0, 3])
def test_a_step_that_is_refused_changes_nothing(before):
    pairs = pair()
    run(pairs, range(before), come_and_go=False)
    for params, optimizer in pairs:
        give_gradients(params, 3, come_and_go=False)
        params[4].grad = params[4].grad.to_sparse()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
    if before == 0:
        assert not pairs[0][1].state
        assert_same(pairs)
    run(pairs, range(4, 6))
    assert is_private(pairs[0][1]) == (before > 0)
    assert_same(pairs)


def test_memory_that_moves_once_it_was_shown_is_followed():
    pairs = pair()
    run(pairs, range(3), come_and_go=False)
    for params, optimizer in pairs:
        for param in params:
            own = optimizer.state[param]
            own["exp_avg"].data = own["exp_avg"].clone()
            own["exp_avg_sq"] = own["exp_avg_sq"].clone()
            own["step"].add_(2.0)
    (own, ours), _ = pairs
    lay = {param: ours.state[param]["exp_avg"].data_ptr() for param in own}
    run(pairs, range(3, 5), come_and_go=False)
    assert_same(pairs)
    assert all(ours.state[param]["exp_avg"].data_ptr() == lay[param] for param in own)
    assert {float(ours.state[param]["step"]) for param in own} == {7.0}


def test_a_new_plan_goes_on_counting():
    pairs = pair()
    run(pairs, range(3), come_and_go=False)
    more = twins(seed=9)
    for (params, optimizer), added in zip(pairs, more):
        optimizer.add_param_group({"params": added, "lr": 0.01})
        params += added
    run(pairs, range(3, 6))
    # Another rule within a group takes another plan as well.
    for _, optimizer in pairs:
        optimizer.param_groups[0]["amsgrad"] = True
    run(pairs, range(6, 9))
    assert is_private(pairs[0][1])
    assert_same(pairs)


def test_parameters_that_train_later():
    pairs = pair()
    for params, _ in pairs:
        params[1].requires_grad_(False)
    for step in range(6):
        for params, optimizer in pairs:
            give_gradients(params, step, come_and_go=False)
            if step < 3:
                params[1].grad = None
            params[1].requires_grad_(step >= 3)
            params[2].grad = None if step < 4 else params[2].grad
            optimizer.step()
    assert is_private(pairs[0][1])
    assert_same(pairs)


def test_parameters_that_move_are_looked_at():
    pairs = pair()
    run(pairs, range(2), come_and_go=False)
    for params, _ in pairs:
        for param in params:
            param.data = param.detach().clone()
    run(pairs, range(2, 4))
    assert is_private(pairs[0][1])
    assert_same(pairs)


def test_state_dicts_and_copies():
    pairs = pair()
    run(pairs, range(3))
    (own, ours), (looked, theirs) = pairs
    saved = ours.state_dict()
    assert not is_private(ours)
    plain = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in own], lr=0.1)
    plain.load_state_dict(saved)
    loaded = [plain.state.get(p) for p in plain.param_groups[0]["params"]]
    counts = [float(state["step"]) for state in loaded if state]
    assert counts == [float(theirs.state[p]["step"]) for p in looked if p in theirs.state]
    for copied in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
        (own, ours), _ = pairs = pair()
        run(pairs, range(3))
        other = copied(ours)
        params = other.param_groups[0]["params"]
        assert_same([(params, other), pairs[1]])
        run([(params, other), pairs[1]], range(3, 5))
        assert_same([(params, other), pairs[1]])


def test_loading_replaces_it():
    pairs = pair()
    run(pairs, range(3), come_and_go=False)
    saved = copy.deepcopy(pairs[1][1].state_dict())
    run(pairs, range(3, 5))
    for _, optimizer in pairs:
        optimizer.load_state_dict(copy.deepcopy(saved))
    run(pairs, range(5, 7))
    assert_same(pairs)
    # One that is refused leaves it as it was.
    pairs = pair()
    run(pairs, range(3))
    with pytest.raises(ValueError, match="group"):
        pairs[0][1].load_state_dict({"state": {}, "param_groups": []})
    run(pairs, range(3, 5))
    assert is_private(pairs[0][1])
    assert_same(pairs)


def test_another_mapping_in_its_place():
    pairs = pair()
    run(pairs, range(3), come_and_go=False)
    for _, optimizer in pairs:
        optimizer.state = defaultdict(dict)
    run(pairs, range(3, 5), come_and_go=False)
    assert_same(pairs)
    (own, ours), _ = pairs
    assert {float(ours.state[param]["step"]) for param in own} == {2.0}


def test_a_wrapper_that_shares_what_an_optimizer_has():
    pairs = pair()
    (own, ours), _ = pairs
    run(pairs, range(3), come_and_go=False)
    wrapper = fusestep.torch.AdamW.__new__(fusestep.torch.AdamW)
    wrapper.__dict__ = dict(vars(ours))
    assert {float(wrapper.state[param]["step"]) for param in own} == {3.0}
    # What was shown by one of them is looked at by the other.
    for param in own:
        wrapper.state[param]["exp_avg"].data = wrapper.state[param]["exp_avg"].clone()
    run(pairs, range(3, 5), come_and_go=False)
    assert {float(wrapper.state[param]["step"]) for param in own} == {5.0}
    assert_same(pairs)
    assert wrapper.state is ours.state


def test_a_wrapper_outlives_the_optimizer_whose_plan_it_has():
    own, others = twins()
    ours = fusestep.torch.AdamW(own, loss_scale="dynamic")
    theirs = fusestep.torch.AdamW(others, loss_scale="dynamic")
    for optimizer, params in ((ours, own), (theirs, others)):
        give_gradients(params, 0, scale=float("inf"))
        optimizer.step()
        give_gradients(params, 1)
        optimizer.step()
    wrapper = fusestep.torch.AdamW.__new__(fusestep.torch.AdamW)
    wrapper.__dict__ = dict(vars(ours))
    del ours
    gc.collect()
    assert wrapper.loss_scale() == theirs.loss_scale()
    for optimizer, params in ((wrapper, own), (theirs, others)):
        give_gradients(params, 2)
        optimizer.step()
    assert same_bits(own, others)
    assert float(wrapper.state[own[0]]["step"]) == float(theirs.state[others[0]]["step"]) == 2


def test_buckets_in_backward_count_on():
    pairs = pair()
    run(pairs, range(2), come_and_go=False)
    for params, optimizer in pairs:
        model = torch.nn.ParameterList(params)
        fused = fusestep.torch.fuse_backward(model, optimizer)
        for step in (2.0, 3.0):
            optimizer.zero_grad()
            sum((param * step).sum() for param in model).backward()
            optimizer.step()
        fused.remove()
    run(pairs, range(4, 6), come_and_go=False)
    assert_same(pairs)
    own, ours = pairs[0]
    assert {float(ours.state[param]["step"]) for param in own if param.numel()} == {6.0}


def test_a_thread_that_looks_during_steps():
    pairs = pair()
    (own, ours), _ = pairs
    run(pairs, [0], come_and_go=False)
    seen, done = [], threading.Event()

    def look():
        for _ in range(3):
            seen.append({float(state["step"]) for state in ours.state.values()})
        done.set()

    thread = threading.Thread(target=look)
    thread.start()
    steps = 1
    while not done.is_set() or steps < 5:
        run(pairs, [steps], come_and_go=False)
        steps += 1
    thread.join()
    assert len(seen) == 3
    assert {float(ours.state[param]["step"]) for param in own} == {float(steps)}
    assert_same(pairs)


class Looking(torch.Tensor):
    """A tensor that looks at an optimizer's state when it is asked for anything."""

    optimizer = None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if cls.optimizer is not None:
            cls.optimizer.state  # noqa: B018
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_look_in_the_middle_of_a_step_is_refused():
    pairs = pair()
    own, ours = pairs[0]
    ours.add_param_group({"params": [torch.zeros(2).as_subclass(Looking)]})
    run(pairs, range(2), come_and_go=False)
    give_gradients(own, 9)
    Looking.optimizer = ours
    try:
        with pytest.raises(RuntimeError, match="found one during it"):
            ours.step()
    finally:
        Looking.optimizer = None
    assert is_private(ours)
    run(pairs, range(2, 4), come_and_go=False)
    assert_same(pairs)


def test_other_attributes_are_missing_as_ever():
    optimizer = pair()[0][1]
    with pytest.raises(AttributeError, match="'AdamW' object has no attribute 'stat'"):
        optimizer.stat
    assert is_private(optimizer)
    blank = fusestep.torch.AdamW.__new__(fusestep.torch.AdamW)
    with pytest.raises(AttributeError, match="state"):
        blank.state
