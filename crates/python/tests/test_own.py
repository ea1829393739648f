"""The rules that PyTorch does not have, beside their equations in Python's own float64."""

import math

import pytest
import torch
from support import bits, give_gradients, parameters, same_bits

import fusestep.torch

LR, B1, B2, EPS, DECAY = 0.02, 0.9, 0.99, 1e-6, 0.05
SHAPES = [(3, 4), (7,), (), (130,)]


def norm(values):
    return math.sqrt(math.fsum(x * x for x in values))


def lion(t, p, g, s):
    m = s.setdefault("m", [0.0] * len(p))
    for i, gi in enumerate(g):
        c = B1 * m[i] + (1 - B1) * gi
        p[i] = p[i] * (1 - LR * DECAY) - LR * ((c > 0) - (c < 0))
        m[i] = B2 * m[i] + (1 - B2) * gi


def lars(t, p, g, s):
    u = s.setdefault("u", [0.0] * len(p))
    local = LR * 0.01 * norm(p) / (norm(g) + DECAY * norm(p))
    for i, gi in enumerate(g):
        u[i] = B1 * u[i] + local * (gi + DECAY * p[i])
        p[i] -= u[i]


def lamb(t, p, g, s):
    m, v = s.setdefault("m", [0.0] * len(p)), s.setdefault("v", [0.0] * len(p))
    r = []
    for i, gi in enumerate(g):
        m[i] = B1 * m[i] + (1 - B1) * gi
        v[i] = B2 * v[i] + (1 - B2) * gi * gi
        root = math.sqrt(v[i] / (1 - B2**t)) + EPS
        r.append(m[i] / (1 - B1**t) / root + DECAY * p[i])
    ratio = norm(p) / norm(r)
    for i, ri in enumerate(r):
        p[i] -= LR * ratio * ri


def schedule_free(t, p, g, s):
    """y in `p`; z and the average x in `s`."""
    z, x = s.setdefault("z", list(p)), s.setdefault("x", list(p))
    v = s.setdefault("v", [0.0] * len(p))
    rates = [min(1.0, k / 4) for k in range(1, t + 1)]
    share = rates[-1] ** 2 / sum(rate**2 for rate in rates)
    for i, gi in enumerate(g):
        v[i] = B2 * v[i] + (1 - B2) * gi * gi
        n = gi / (math.sqrt(v[i] / (1 - B2**t)) + EPS) + DECAY * p[i]
        z[i] -= LR * rates[-1] * n
        x[i] = (1 - share) * x[i] + share * z[i]
        p[i] = (1 - B1) * z[i] + B1 * x[i]


CASES = {
    "Lion": (lion, {"betas": (B1, B2)}),
    "Lars": (lars, {"momentum": B1, "trust_coefficient": 0.01}),
    "Lamb": (lamb, {"betas": (B1, B2), "eps": EPS}),
    "ScheduleFreeAdamW": (schedule_free, {"betas": (B1, B2), "eps": EPS, "warmup_steps": 4}),
}


def both(name, dtype, steps=9):
    """A run of ours, and of the equation in float64 on the same gradients."""
    reference, settings = CASES[name]
    params = parameters(dtype, shapes=SHAPES)
    optimizer = getattr(fusestep.torch, name)(params, lr=LR, weight_decay=DECAY, **settings)
    plain = [p.detach().double().flatten().tolist() for p in params]
    states = [{} for _ in params]
    counts = [0] * len(params)
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
        for index, param in enumerate(params):
            if param.grad is not None:
                counts[index] += 1
                gradient = param.grad.double().flatten().tolist()
                reference(counts[index], plain[index], gradient, states[index])
    return params, optimizer, plain, states


def assert_close(params, plain, tolerance):
    for param, expected in zip(params, plain):
        found = param.detach().double().flatten().tolist()
        for one, other in zip(found, expected):
            assert one == pytest.approx(other, abs=tolerance, rel=tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.float64, 1e-12)])
def test_runs_are_those_of_the_equations(name, dtype, tolerance):
    params, _, plain, _ = both(name, dtype)
    assert_close(params, plain, tolerance)
    assert not same_bits(params, parameters(dtype, shapes=SHAPES))


def test_schedule_free_evaluates_at_the_average_and_comes_back():
    params, optimizer, plain, states = both("ScheduleFreeAdamW", torch.float64)
    trained = bits(params)
    optimizer.eval()
    assert_close(params, [state["x"] for state in states], 1e-11)
    with pytest.raises(RuntimeError, match="train"):
        optimizer.step()
    optimizer.eval()
    optimizer.train()
    optimizer.train()
    assert same_bits(params, trained)
    before = bits(params)
    give_gradients(params, 9)
    optimizer.step()
    assert not same_bits(before, params)


def test_a_state_dict_of_averages_comes_back_to_the_parameters():
    params, optimizer, _, _ = both("ScheduleFreeAdamW", torch.float32)
    trained = bits(params)
    optimizer.eval()
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = fusestep.torch.ScheduleFreeAdamW(others)
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="train"):
        other.step()
    other.train()
    assert same_bits(others, trained)


@pytest.mark.parametrize("name", ["Lars", "Lamb"])
def test_groups_without_trust_ratio_take_the_plain_rate(name):
    _, settings = CASES[name]
    params, scaled, plain = (parameters(shapes=SHAPES) for _ in range(3))
    make = getattr(fusestep.torch, name)
    groups = [{"params": params[:2]}, {"params": params[2:], "trust_ratio": False}]
    runs = [
        (params, make(groups, lr=LR, weight_decay=DECAY, **settings)),
        (scaled, make(scaled, lr=LR, weight_decay=DECAY, **settings)),
        (plain, make(plain, lr=LR, weight_decay=DECAY, trust_ratio=False, **settings)),
    ]
    for step in range(3):
        for own, optimizer in runs:
            give_gradients(own, step)
            optimizer.step()
    assert same_bits(params[:2], scaled[:2]) and same_bits(params[2:], plain[2:])
    assert not same_bits(scaled[2:], plain[2:])
    # Asked for between two steps it counts from the next one on.
    before = bits(params)
    runs[0][1].param_groups[0]["lr"] = 0.0
    runs[0][1].param_groups[1]["trust_ratio"] = True
    give_gradients(params, 3)
    runs[0][1].step()
    give_gradients(plain, 3)
    runs[2][1].step()
    assert not same_bits(params[2:], before[2:]) and not same_bits(params[2:], plain[2:])
    start = parameters(shapes=SHAPES)
    give_gradients(start, 0, come_and_go=False)
    grads = bits(p.grad for p in start)
    optimizer = make(start, lr=LR, weight_decay=0.0, trust_ratio=False, **settings)
    values = bits(start)
    optimizer.step()
    if name == "Lars":
        for value, gradient, found in zip(values, grads, start):
            assert torch.allclose(value - LR * gradient, found, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Lion", {"lr": -1.0}),
        ("Lion", {"betas": (1.0, 0.9)}),
        ("Lars", {"momentum": -0.1}),
        ("Lars", {"trust_coefficient": float("inf")}),
        ("Lamb", {"eps": -1.0}),
        ("Lamb", {"weight_decay": float("nan")}),
        ("ScheduleFreeAdamW", {"betas": (0.0, 0.999)}),
        ("ScheduleFreeAdamW", {"lr": torch.ones(2)}),
    ],
)
def test_settings_out_of_range_are_refused(name, wrong):
    with pytest.raises(ValueError):
        getattr(fusestep.torch, name)(parameters(shapes=SHAPES), **wrong)
