"""The argument `precision`: what it stands for, what it takes, and what it tells."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from support import assert_unchanged, bits, give_gradients, parameters, same_bits, snapshot

import fusestep.torch
from fusestep.torch import _precision

BF16 = torch.bfloat16

SETTINGS = {
    "pytorch": {"state_dtype": BF16},
    "stochastic": {"state_dtype": "bf16", "rounding": "stochastic"},
    "wide": {"state_dtype": torch.float32},
    "master": {"master_weights": True},
    "remainder": {"master_weights": "remainder"},
}

# Bytes of a parameter's element and of what AdamW keeps beside it.
BYTES = {"pytorch": 6, "stochastic": 6, "wide": 10, "remainder": 12, "master": 14}


def trained(steps=6, seed=0, lr=1e-2, params=None, rule="AdamW", **settings):
    params = params or parameters(BF16, seed)
    optimizer = getattr(fusestep.torch, rule)(params, lr=lr, **settings)
    go_on(optimizer, params, range(steps))
    return params, optimizer


def go_on(optimizer, params, steps):
    for step in steps:
        give_gradients(params, step, come_and_go=False)
        optimizer.step()


def joined(param, remainder):
    """The float32 of a parameter and the bits that it lacks."""
    high = param.detach().view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


@pytest.mark.parametrize("choice", SETTINGS)
def test_a_choice_is_the_settings_that_it_stands_for(choice):
    ours, optimizer = trained(precision=choice)
    others, other = trained(**SETTINGS[choice])
    assert same_bits(ours, others)
    for one, two in zip(ours, others):
        assert optimizer.state[one].keys() == other.state[two].keys()
    ends = (trained(precision=c)[0][0].detach().flatten().tolist() for c in SETTINGS)
    assert len(set(map(tuple, ends))) > 2


@pytest.mark.parametrize("choice", SETTINGS)
def test_the_bytes_of_the_table(choice):
    params, optimizer = trained(steps=1, precision=choice)
    for param in params:
        state = [v for k, v in optimizer.state[param].items() if k != "step"]
        each = param.element_size() + sum(value.element_size() for value in state)
        assert each == BYTES[choice]
        assert all(value.shape == param.shape for value in state)


def test_pytorchs_choice_takes_pytorchs_memory():
    theirs = parameters(BF16)
    optimizer = torch.optim.AdamW(theirs, lr=1e-2)
    give_gradients(theirs, 0, come_and_go=False)
    optimizer.step()
    own = trained(steps=1, precision="pytorch")[1]
    for one, two in zip(own.state.values(), optimizer.state.values()):
        assert {k: v.dtype for k, v in one.items()} == {k: v.dtype for k, v in two.items()}


def test_a_remainder_has_the_bits_of_a_master():
    ours, optimizer = trained(precision="remainder")
    others, other = trained(precision="master")
    assert same_bits(ours, others)
    for one, two in zip(ours, others):
        remainder = optimizer.state[one]["remainder"]
        assert remainder.dtype == torch.int16
        assert torch.equal(joined(one, remainder), other.state[two]["master"])
    assert any(bool(optimizer.state[param]["remainder"].any()) for param in ours)


@pytest.mark.parametrize("choice", ["remainder", "master", "pytorch"])
def test_state_goes_on_from_state_dicts_copies_and_pickles(choice):
    params, optimizer = trained(steps=3, precision=choice)
    saved = io.BytesIO()
    torch.save((optimizer.state_dict(), params), saved)
    saved.seek(0)
    state, loaded = torch.load(saved, weights_only=False)
    other = fusestep.torch.AdamW(loaded, lr=1e-2, precision=choice)
    other.load_state_dict(state)
    runs = [(optimizer, params), (other, loaded)]
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        runs.append((copied, copied.param_groups[0]["params"]))
    for one, own in runs:
        go_on(one, own, range(3, 6))
    whole = trained(steps=6, precision=choice)[0]
    for one, own in runs:
        assert same_bits(own, whole), type(one)


def test_pytorch_goes_on_from_state_with_remainders():
    params, optimizer = trained(steps=3, precision="remainder")
    theirs = torch.optim.AdamW(params, lr=1e-2)
    theirs.load_state_dict(optimizer.state_dict())
    go_on(theirs, params, range(3, 4))


def test_a_write_between_steps_begins_remainders_anew():
    params, optimizer = trained(steps=3, precision="remainder")
    with torch.no_grad():
        params[4].fill_(2.0)
    params[0].data = torch.full((3, 4), 3.0, dtype=BF16)
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    kept = optimizer.state[params[1]]["remainder"].clone()
    optimizer.step()
    assert bool((params[4] == 2.0).all()) and bool((params[0] == 3.0).all())
    assert not optimizer.state[params[4]]["remainder"].any()
    assert not optimizer.state[params[0]]["remainder"].any()
    assert torch.equal(optimizer.state[params[1]]["remainder"], kept) and kept.any()


def test_what_rounding_at_random_keeps_and_rounding_to_nearest_loses():
    """Steps of a hundredth of a bfloat16's spacing."""
    ends = {}
    for choice in ("pytorch", "stochastic", "remainder"):
        param = torch.nn.Parameter(torch.full((4096,), 1.5, dtype=BF16))
        optimizer = fusestep.torch.Adam([param], lr=2**-7 / 100, precision=choice)
        for _ in range(100):
            param.grad = torch.ones_like(param)
            optimizer.step()
        ends[choice] = float(param.detach().double().mean())
    assert ends["pytorch"] == 1.5
    assert abs(ends["remainder"] - (1.5 - 2**-7)) < 1e-3
    assert abs(ends["stochastic"] - (1.5 - 2**-7)) < 1e-3


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"precision": "bf16"}, ValueError, "precision: expected one of pytorch, .*found 'bf16'"),
        ({"precision": True}, ValueError, "precision: expected one of"),
        ({"precision": "wide", "rounding": "stochastic"}, TypeError, "alone.*rounding="),
        ({"precision": "master", "master_weights": True}, TypeError, "alone.*master_weights=True"),
    ],
)
@pytest.mark.parametrize("rule", ["AdamW", "Lamb"])
def test_other_choices_are_refused(rule, settings, error, text):
    with pytest.raises(error, match=text):
        getattr(fusestep.torch, rule)(parameters(BF16), **settings)


@pytest.mark.parametrize("choice", ["pytorch", "stochastic", "remainder"])
def test_choices_that_float16_has_not_are_refused_by_name(choice):
    with pytest.raises(ValueError, match=f"float16.*found `{choice}`.*bfloat16"):
        fusestep.torch.AdamW(parameters(torch.float16), precision=choice)
    optimizer = fusestep.torch.AdamW(parameters(BF16), precision=choice)
    with pytest.raises(ValueError, match="float16"):
        optimizer.add_param_group({"params": parameters(torch.float16)})
    assert len(optimizer.param_groups) == 1


def test_state_of_another_precision_is_refused_before_anything_changes():
    params, optimizer = trained(steps=2, precision="remainder")
    saved = optimizer.state_dict()
    others, other = trained(steps=1, seed=1, precision="wide")
    before = snapshot(other, others)
    with pytest.raises(ValueError, match="remainder of `0.0`: expected none.*'remainder'"):
        other.load_state_dict(saved)
    assert_unchanged(before, other, others)
    wrong = copy.deepcopy(saved)
    wrong["state"][0]["remainder"] = wrong["state"][0]["remainder"].float()
    again = fusestep.torch.AdamW(parameters(BF16), precision="remainder")
    with pytest.raises(ValueError, match="remainder of `0.0`.*float32"):
        again.load_state_dict(wrong)


def test_memory_beyond_pytorchs_is_told_once(monkeypatch):
    def told(params, rule="AdamW", **settings):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(fusestep.torch, rule)(params, lr=1e-2, **settings)
        return [str(one.message) for one in caught]

    monkeypatch.setattr(_precision, "_has_warned", False)
    narrow = parameters(BF16)
    for settings in ({"precision": c} for c in SETTINGS):
        assert not told(narrow, **settings)
    for settings in SETTINGS.values():
        assert not told(narrow, **settings)
    assert not told(parameters(torch.float32))
    # Without momentum there is no state.
    assert not told(narrow, "SGD")
    (text,) = told(narrow)
    assert "AdamW" in text and "4 bytes more" in text and 'precision="pytorch"' in text
    assert not told(narrow, "Lion")
    monkeypatch.setattr(_precision, "_has_warned", False)
    (text,) = told(parameters(torch.float16), "SGD", momentum=0.9)
    assert "2 bytes more" in text


def test_float32_parameters_are_as_ever_with_any_choice():
    plain = parameters(torch.float32)
    optimizer = fusestep.torch.AdamW(plain, lr=1e-2)
    go_on(optimizer, plain, range(3))
    for choice in SETTINGS:
        params = parameters(torch.float32)
        other = fusestep.torch.AdamW(params, lr=1e-2, precision=choice)
        go_on(other, params, range(3))
        assert same_bits(plain, params)
        assert not {"master", "remainder"} & {key for s in other.state.values() for key in s}


def test_parameters_of_two_dtypes_each_have_their_own():
    params = [*parameters(BF16), *parameters(torch.float32)]
    optimizer = fusestep.torch.AdamW(params, lr=1e-2, precision="remainder")
    go_on(optimizer, params, range(3))
    has = ["remainder" in optimizer.state[param] for param in params]
    assert has == [True] * (len(params) // 2) + [False] * (len(params) // 2)
    assert bits(params)
