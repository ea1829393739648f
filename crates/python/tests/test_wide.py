"""Gradients in float32 of parameters of 16 bits: nothing rounds them before the update."""

import copy

import numpy as np
import pytest
import torch
from rank_others import Wide
from support import OURS_OF, OWN, assert_unchanged, bits, parameters, same_bits, snapshot
from test_ranks import run as run_ranks

import fusestep.numpy
import fusestep.torch

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
HALVES = (F16, BF16)
SHAPES = [(3, 4), (7,), (), (0, 5), (130, 70), (1, 1, 65)]
HAS_GRAD_DTYPE = hasattr(torch.empty(0), "grad_dtype")


def wide(shape, step, index):
    """A gradient whose values no dtype of 16 bits has."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(shape, generator=generator) * 1.001


def accepts_wide(param):
    """Lets a gradient in float32 stand in ``.grad``, as programs do that add up in float32."""
    if HAS_GRAD_DTYPE:
        param.grad_dtype = F32
    return param


def halves(dtype, seed=0, shapes=SHAPES):
    return [accepts_wide(param) for param in parameters(dtype, seed, shapes)]


def twin_of(params):
    """Parameters in float32 of the same values."""
    return [torch.nn.Parameter(param.detach().to(F32)) for param in params]


def give(params, twins, step, come_and_go=True):
    for index, (param, twin) in enumerate(zip(params, twins)):
        gone = come_and_go and (step + index) % 5 == 4
        twin.grad = None if gone else wide(param.shape, step, index)
        param.grad = None if gone else twin.grad.clone()


def assert_rounded(params, twins, optimizer):
    """Parameters are the twins' rounded once, and their masters the twins."""
    for param, twin in zip(params, twins):
        assert torch.equal(param.detach(), twin.detach().to(param.dtype))
        if param in optimizer.state:
            assert torch.equal(optimizer.state[param]["master"], twin.detach())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", (*OURS_OF, *(name for name in OWN if name[:8] != "Schedule")))
def test_masters_have_the_bits_of_float32(name, dtype):
    params = halves(dtype)
    twins = twin_of(params)
    kind = getattr(fusestep.torch, name)
    a, b = kind(params, lr=1e-2, master_weights=True), kind(twins, lr=1e-2)
    for step in range(5):
        give(params, twins, step)
        a.step()
        b.step()
    assert_rounded(params, twins, a)
    assert a.report().copied_gradients == 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("settings", [{"clip_norm": 0.5}, {"loss_scale": 8.0}, {"naive": True}])
def test_settings_have_the_bits_of_float32(settings, dtype):
    params = halves(dtype)
    twins = twin_of(params)
    a = fusestep.torch.AdamW(params, lr=1e-2, master_weights=True, **settings)
    b = fusestep.torch.AdamW(twins, lr=1e-2, **settings)
    for step in range(4):
        give(params, twins, step)
        a.step()
        b.step()
    assert_rounded(params, twins, a)
    assert a.report().grad_norm == b.report().grad_norm


@pytest.mark.parametrize("dtype", HALVES)
def test_parameters_alone_are_rounded_once_a_step(dtype):
    params = halves(dtype)
    optimizer = fusestep.torch.AdamW(params, lr=1e-2)
    twins = twin_of(params)
    other = fusestep.torch.AdamW(twins, lr=1e-2)
    for step in range(4):
        give(params, twins, step)
        optimizer.step()
        other.step()
        for param, twin in zip(params, twins):
            assert torch.equal(param.detach(), twin.detach().to(dtype))
            with torch.no_grad():
                twin.copy_(param)


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_both_kinds_go_together_and_take_turns(dtype):
    """The dtype of a gradient may differ between parameters, and change between steps."""
    params = halves(dtype)
    twins = twin_of(params)
    a = fusestep.torch.AdamW(params, lr=1e-2, master_weights=True)
    b = fusestep.torch.AdamW(twins, lr=1e-2)
    for step in range(8):
        give(params, twins, step)
        for index, (param, twin) in enumerate(zip(params, twins)):
            # All narrow, then some, then none, and the other way.
            if param.grad is not None and (step % 4 == 0 or (step + index) % (step % 4 + 1) == 0):
                if HAS_GRAD_DTYPE:
                    param.grad_dtype = None
                param.grad = param.grad.to(dtype)
                twin.grad = param.grad.to(F32)
        a.step()
        b.step()
    assert_rounded(params, twins, a)


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_of_micro_steps_are_not_rounded(dtype):
    params = halves(dtype)
    twins = twin_of(params)
    a = fusestep.torch.AdamW(params, lr=1e-2, master_weights=True, accumulate=3)
    b = fusestep.torch.AdamW(twins, lr=1e-2, accumulate=3)
    for step in range(6):
        give(params, twins, step)
        a.step()
        b.step()
    assert_rounded(params, twins, a)


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="PyTorch before 2.10 writes none in float32")
@pytest.mark.parametrize("dtype", HALVES)
def test_what_autograd_writes_in_float32_is_taken(dtype):
    params = halves(dtype, shapes=[(5, 3), (4,)])
    twins = twin_of(params)
    a = fusestep.torch.SGD(params, lr=1e-2, master_weights=True)
    b = fusestep.torch.SGD(twins, lr=1e-2)
    for step in range(3):
        for at, (param, twin) in enumerate(zip(params, twins)):
            factors = wide(param.shape, step, at)
            # Two gradients, whose sum is formed in float32.
            for own in (param, twin):
                Wide.apply(own, factors).backward()
                Wide.apply(own, factors * 0.001).backward()
            assert param.grad.dtype == F32 and torch.equal(param.grad, twin.grad)
        a.step()
        b.step()
        a.zero_grad()
        b.zero_grad()
    assert_rounded(params, twins, a)


@pytest.mark.parametrize("dtype", HALVES)
def test_updates_in_backward_take_them(dtype):
    if not HAS_GRAD_DTYPE:
        pytest.skip("PyTorch before 2.10 writes none in float32")
    model = torch.nn.Linear(7, 5).to(dtype)
    for param in model.parameters():
        accepts_wide(param)
    other = copy.deepcopy(model)
    for param in other.parameters():
        accepts_wide(param)
    one = fusestep.torch.AdamW(model.parameters(), lr=1e-2)
    two = fusestep.torch.AdamW(other.parameters(), lr=1e-2)
    fusestep.torch.fuse_backward(model, one)
    for step in range(3):
        inputs = wide((4, 7), step, 0).to(dtype)
        for own, optimizer in ((model, one), (other, two)):
            optimizer.zero_grad()
            own(inputs).to(F32).square().mean().backward()
            optimizer.step()
    assert same_bits(bits(model.parameters()), bits(other.parameters()))


def test_another_order_of_elements_is_kept():
    values = torch.randn(2, 3, 4, 5).to(BF16).to(memory_format=torch.channels_last)
    param = accepts_wide(torch.nn.Parameter(values))
    twin = torch.nn.Parameter(param.detach().to(F32).contiguous())
    a = fusestep.torch.AdamW([param], lr=1e-2, master_weights=True)
    b = fusestep.torch.AdamW([twin], lr=1e-2)
    for step in range(3):
        twin.grad = wide(twin.shape, step, 0)
        param.grad = twin.grad.clone()
        a.step()
        b.step()
    assert param.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(param.detach(), twin.detach().to(BF16))


@pytest.mark.parametrize("dtype, found", [(BF16, F64), (BF16, F16), (F16, BF16), (F32, F64)])
def test_other_dtypes_are_refused(dtype, found):
    params = parameters(dtype, shapes=[(3,), (4,)])
    if not HAS_GRAD_DTYPE:
        pytest.skip("PyTorch before 2.10 takes no gradient of another dtype")
    optimizer = fusestep.torch.AdamW(params, lr=1e-2)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    params[1].grad_dtype = None
    params[1].grad = torch.ones(4, dtype=found)
    before = snapshot(optimizer, params)
    with pytest.raises(TypeError, match=f"gradient of `0.1`: expected {dtype}.*found {found}"):
        optimizer.step()
    assert_unchanged(before, optimizer, params)


@pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="PyTorch before 2.10 writes none in float32")
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_ranks_take_them(tmp_path, zero):
    """Ranks whose parameters ask for gradients in float32 add them up in it, each way alike."""
    found = run_ranks("wide", tmp_path / "ranks", zero=zero)
    assert all(torch.equal(found[0][key], found[1][key]) for key in ("values", "twins"))
    assert torch.equal(found[0]["values"], found[0]["twins"].to(BF16))
    assert "torch.bfloat16" in found[0]["refused"]
    assert "reduce_dtype=torch.float32" in found[0]["refused"]


@pytest.mark.parametrize("rule", fusestep.numpy.RULES)
def test_arrays_of_numpy(rule):
    shapes = {"a": (3, 4), "b": (7,), "c": ()}
    generator = np.random.default_rng(3)
    params = {k: np.array(generator.standard_normal(s), np.float16) for k, s in shapes.items()}
    narrow = {k: v.copy() for k, v in params.items()}
    twins = {k: v.astype(np.float32) for k, v in params.items()}
    ours, others = fusestep.numpy.State(), fusestep.numpy.State()
    for step in range(3):
        grads = {k: np.array(generator.standard_normal(s), np.float32) for k, s in shapes.items()}
        if step == 1:
            # One gradient of the parameter's own dtype among others.
            grads["b"] = grads["b"].astype(np.float16)
        fusestep.numpy.step(rule, params, grads, ours)
        wider = {k: v.astype(np.float32) for k, v in grads.items()}
        fusestep.numpy.step(rule, twins, wider, others)
        for name in shapes:
            if rule != "schedule_free_adamw":
                assert np.array_equal(params[name], twins[name].astype(np.float16)), name
            twins[name][...] = params[name].astype(np.float32)
    with pytest.raises(TypeError, match="expected float16 or float32, found float64"):
        fusestep.numpy.step(rule, narrow, {"a": np.ones((3, 4))}, fusestep.numpy.State())
