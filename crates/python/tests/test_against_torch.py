"""PyTorch's own table of optimizer tests, with our class in place of PyTorch's."""

import copy
import warnings

import pytest
import torch
from support import OURS_OF, give_gradients, largest_difference, same_bits, twins
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    optim_db,
)

import fusestep.torch

THEIRS = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in OURS_OF}
TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-12}


def tolerance(name, dtype):
    # PyTorch keeps NAdam's product of momenta in float32, whatever the parameter.
    return max(TOLERANCE[dtype], 1e-8 if name == "NAdam" else 0.0)


def info_of(name):
    """An `OptimizerInfo` for our class of this name."""
    theirs = THEIRS[name]
    return OptimizerInfo(
        getattr(fusestep.torch, name),
        optim_inputs_func=theirs.optim_inputs_func,
        optim_error_inputs_func=theirs.optim_error_inputs_func,
        scheduler_inputs=theirs.scheduler_inputs,
        supported_impls=(),
        supports_complex=False,
    )


def configurations():
    for name in OURS_OF:
        for given in info_of(name).optim_inputs_func(device="cpu"):
            yield pytest.param(name, given.kwargs, id=f"{name}-{given.desc}")


EVERY = pytest.mark.parametrize(("name", "settings"), list(configurations()))
WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def test_every_class_is_in_the_table():
    assert sorted(THEIRS) == sorted(OURS_OF)


@pytest.mark.parametrize("name", OURS_OF)
@WIDE
def test_every_error_input_is_refused_as_pytorch_does(name, dtype):
    info = info_of(name)
    seen = 0
    for wrong in info.optim_error_inputs_func(device="cpu", dtype=dtype):
        given = wrong.optimizer_error_input
        params = given.params
        if params is None:
            params = [torch.nn.Parameter(torch.randn(2, 3, dtype=dtype))]
        if wrong.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
            if issubclass(wrong.error_type, Warning):
                with pytest.warns(wrong.error_type, match=wrong.error_regex):
                    info.optim_cls(params, **given.kwargs)
            else:
                with pytest.raises(wrong.error_type, match=wrong.error_regex):
                    info.optim_cls(params, **given.kwargs)
        else:
            optimizer = info.optim_cls(params, **given.kwargs)
            with pytest.raises(wrong.error_type, match=wrong.error_regex):
                optimizer.step()
        seen += 1
    assert seen >= 8, "the table has the error inputs that all optimizers share"


@EVERY
@WIDE
def test_every_configuration_gives_pytorchs_numbers(name, settings, dtype):
    ours, theirs = twins(dtype)
    a = getattr(fusestep.torch, name)(ours, **settings)
    b = getattr(torch.optim, name)(theirs, foreach=False, **settings)
    start = [p.detach().clone() for p in ours]
    for step in range(20):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        a.step()
        b.step()
    scale = max(float(p.abs().max()) for p in theirs if p.numel())
    assert largest_difference(ours, theirs) <= tolerance(name, dtype) * max(1.0, scale)
    assert largest_difference(ours, start) > 1e-3, "a step that does nothing proves nothing"


@EVERY
@WIDE
@pytest.mark.parametrize("direction", ["to torch", "from torch"])
def test_state_dicts_go_both_ways(name, settings, dtype, direction):
    ours, theirs = twins(dtype)
    a = getattr(fusestep.torch, name)(ours, **settings)
    b = getattr(torch.optim, name)(theirs, foreach=False, **settings)
    for step in range(7):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        a.step()
        b.step()
    if direction == "to torch":
        assert a.state_dict()["state"].keys() == b.state_dict()["state"].keys()
        fresh = getattr(torch.optim, name)(ours, foreach=False, **settings)
        fresh.load_state_dict(copy.deepcopy(a.state_dict()))
        a = fresh
    else:
        with torch.no_grad():
            for p, q in zip(ours, theirs):
                p.copy_(q)
        a = getattr(fusestep.torch, name)(ours, **settings)
        a.load_state_dict(copy.deepcopy(b.state_dict()))
    for step in range(7, 14):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        a.step()
        b.step()
    scale = max(float(p.abs().max()) for p in theirs if p.numel())
    assert largest_difference(ours, theirs) <= tolerance(name, dtype) * max(1.0, scale)


@EVERY
def test_state_has_pytorchs_names(name, settings):
    ours, theirs = twins(shapes=[(3, 4), (5,)])
    a = getattr(fusestep.torch, name)(ours, **settings)
    b = getattr(torch.optim, name)(theirs, foreach=False, **settings)
    for params, optimizer in ((ours, a), (theirs, b)):
        give_gradients(params, 0, come_and_go=False)
        optimizer.step()
    for index, values in b.state_dict()["state"].items():
        own = a.state_dict()["state"][index]
        expected = {key for key, value in values.items() if value is not None}
        assert set(own) == expected
        for key in expected:
            assert own[key].dtype == values[key].dtype
            assert own[key].shape == values[key].shape
    assert [set(group) for group in a.param_groups] == [set(group) for group in b.param_groups]


@pytest.mark.parametrize("name", OURS_OF)
def test_schedulers_of_the_table(name):
    info = info_of(name)
    count = 0
    for makers in info.scheduler_inputs:
        ours, theirs = twins()
        a = info.optim_cls(ours, lr=0.01)
        b = THEIRS[name].optim_cls(theirs, lr=0.01, foreach=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pairs = [(make(a), make(b)) for make in makers]
        for step in range(25):
            for params, optimizer in ((ours, a), (theirs, b)):
                give_gradients(params, step)
                optimizer.step()
            for pair in pairs:
                for scheduler in pair:
                    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                        scheduler.step(1.0)
                    else:
                        scheduler.step()
            assert [g["lr"] for g in a.param_groups] == [g["lr"] for g in b.param_groups]
        assert largest_difference(ours, theirs) <= 4e-6
        count += 1
    assert count >= 1


@pytest.mark.parametrize("name", OURS_OF)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_parameters_follow_a_float32_run_more_closely_than_pytorchs(name, dtype):
    """Our state is float32 where PyTorch's is as narrow as the parameter."""
    shapes = [(64, 64), (300,)]
    settings = {"lr": 0.01} if name != "SGD" else {"lr": 0.01, "momentum": 0.9}
    if name in ("Adam", "AdamW"):
        settings["eps"] = 1e-3
    narrow, narrow_theirs = twins(dtype, shapes=shapes)
    wide = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    runs = [
        (narrow, getattr(fusestep.torch, name)(narrow, **settings)),
        (narrow_theirs, getattr(torch.optim, name)(narrow_theirs, foreach=False, **settings)),
        (wide, getattr(torch.optim, name)(wide, foreach=False, **settings)),
    ]
    for step in range(10):
        give_gradients(narrow, step, come_and_go=False)
        for params, optimizer in runs:
            for p, q in zip(params, narrow):
                p.grad = q.grad.to(p.dtype)
            optimizer.step()
    ours, theirs = (
        sum(float((p.float() - w).square().sum()) for p, w in zip(params, wide))
        for params in (narrow, narrow_theirs)
    )
    assert ours <= theirs * 1.05
    assert not same_bits(narrow, twins(dtype, shapes=shapes)[0])
