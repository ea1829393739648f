"""State in int8: codes and units as tensors, what they load from, and what has none."""

import copy
import io
import pickle

import pytest
import torch
from support import same_bits

import fusestep.torch

# An embedding, a matrix with a group that ends early, and two that are too small for int8.
SHAPES = {"embedding": (512, 64), "matrix": (67, 131), "norm": (4095,), "bias": (3,)}

RULES = {
    "AdamW": {},
    "Adam": {"amsgrad": True},
    "NAdam": {},
    "Adamax": {},
    "RMSprop": {"momentum": 0.9},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "SGD": {"momentum": 0.9},
    "Lion": {},
    "Lars": {},
    "Lamb": {},
}


def parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    named = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: torch.nn.Parameter(values.to(dtype)) for name, values in named.items()}


def go_on(optimizer, named, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for tensor in named.values():
            tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        optimizer.step()


def made(rule="AdamW", named=None, **settings):
    named = parameters() if named is None else named
    kept = {} if "precision" in settings else {"state_dtype": "int8"}
    settings = {"lr": 1e-3, **kept, **RULES.get(rule, {}), **settings}
    return named, getattr(fusestep.torch, rule)(list(named.items()), **settings)


def trained(rule="AdamW", steps=range(3), **settings):
    named, optimizer = made(rule, **settings)
    go_on(optimizer, named, steps)
    return named, optimizer


@pytest.mark.parametrize("rule", RULES)
def test_codes_and_units_are_tensors_of_the_state(rule):
    named, optimizer = trained(rule)
    for name, tensor in named.items():
        state = {key: own for key, own in optimizer.state[tensor].items() if key != "step"}
        coded = tensor.numel() >= 4096
        assert any(key.endswith("_units") for key in state) == coded
        for key, own in state.items():
            if key.endswith("_units"):
                groups = -(-tensor.numel() // 32)
                assert (own.dtype, tuple(own.shape)) == (torch.float32, (groups,)), (name, key)
            else:
                dtype = torch.uint8 if coded else torch.float32
                assert (own.dtype, own.shape) == (dtype, tensor.shape), (name, key)
    # Close to what state in float32 leads to, and not the same.
    whole, _ = trained(rule, state_dtype=None)
    for name in SHAPES:
        apart = (named[name] - whole[name]).abs().max().item()
        assert (apart == 0) == (named[name].numel() < 4096), name
        assert apart < 2e-2, (name, apart)


@pytest.mark.parametrize("rule", RULES)
def test_a_state_dict_goes_through_a_file_and_on_with_the_same_bits(rule):
    straight, _ = trained(rule, steps=range(6))
    named, optimizer = trained(rule)
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), {n: t.detach() for n, t in named.items()}), file)
    file.seek(0)
    saved, values = torch.load(file)
    others = {name: torch.nn.Parameter(values[name].clone()) for name in SHAPES}
    _, other = made(rule, named=others)
    other.load_state_dict(saved)
    go_on(other, others, range(3, 6))
    assert same_bits(list(straight.values()), list(others.values()))
    for twin in (copy.deepcopy((named, optimizer)), pickle.loads(pickle.dumps((named, optimizer)))):
        go_on(twin[1], twin[0], range(3, 6))
        assert same_bits(list(straight.values()), list(twin[0].values()))


def test_a_state_dict_of_another_kind_of_state_is_refused_by_name():
    _, floats = trained(state_dtype=None)
    named, codes = trained()
    before = {name: tensor.detach().clone() for name, tensor in named.items()}
    with pytest.raises(ValueError, match="exp_avg of `embedding`: expected state of torch.uint8"):
        codes.load_state_dict(floats.state_dict())
    with pytest.raises(ValueError, match="found one of torch.uint8"):
        floats.load_state_dict(codes.state_dict())
    saved = codes.state_dict()
    del saved["state"][0]["exp_avg_units"]
    with pytest.raises(ValueError, match="exp_avg_units of `embedding`: expected a tensor"):
        codes.load_state_dict(saved)
    saved = codes.state_dict()
    saved["state"][0] = {**saved["state"][0], "exp_avg_units": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"exp_avg_units of `embedding`: .* of shape \(1024,\)"):
        codes.load_state_dict(saved)
    assert all(torch.equal(named[name], before[name]) for name in SHAPES)


def read(name, codes, units):
    """What codes stand for, by the definition of the format."""
    codes = codes.flatten().to(torch.int64)
    unit = units.repeat_interleave(32)[: codes.numel()]
    if name in ("exp_avg", "momentum_buffer"):
        at = codes & 127
        steps = torch.maximum(torch.maximum(at, 2 * at - 64), 4 * at - 256).float() * 2.0**-19
        return torch.where(codes > 127, -steps, steps) * unit
    root = codes.float() * unit
    return root if name == "exp_inf" else root * root


@pytest.mark.parametrize("rule", RULES)
def test_a_state_dict_has_float32_on_request_and_goes_back(rule):
    named, optimizer = trained(rule)
    kept, saved = optimizer.state_dict(), optimizer.state_dict(state_dtype=torch.float32)
    for index, tensor in enumerate(named.values()):
        own, wide = kept["state"][index], saved["state"][index]
        assert not any(key.endswith("_units") for key in wide)
        for key in wide.keys() - {"step", "mu_product"}:
            assert (wide[key].dtype, wide[key].shape) == (torch.float32, tensor.shape), key
            if own[key].dtype == torch.uint8:
                expected = read(key, own[key], own[key + "_units"])
                assert torch.equal(wide[key].flatten(), expected), key
    # The optimizer keeps what it had, and others take what it told.
    assert optimizer.state[named["embedding"]].keys() == kept["state"][0].keys() - {"mu_product"}
    floats = {name: torch.nn.Parameter(tensor.detach().clone()) for name, tensor in named.items()}
    _, other = made(rule, floats, state_dtype=None)
    other.load_state_dict(saved)
    _, again = made(rule, {n: torch.nn.Parameter(t.detach().clone()) for n, t in named.items()})
    again.load_state_dict(saved, any_state_dtype=True)
    for index in range(len(SHAPES)):
        one, two = kept["state"][index], again.state_dict()["state"][index]
        for key in one:
            if one[key].dtype == torch.uint8:
                # Coded once more, a unit moves by a rounding at most.
                ends = [read(key, at[key], at[key + "_units"]) for at in (one, two)]
                assert torch.allclose(*ends, rtol=1e-6, atol=0), key
            elif not key.endswith("_units"):
                assert torch.equal(one[key], two[key]), key
    go_on(other, floats, range(3, 5))
    go_on(optimizer, named, range(3, 5))
    for name in SHAPES:
        assert torch.allclose(floats[name], named[name], atol=5e-3), name


def test_pytorch_goes_on_from_float32_and_its_state_goes_into_int8():
    named, optimizer = trained("AdamW")
    theirs = {name: torch.nn.Parameter(tensor.detach().clone()) for name, tensor in named.items()}
    adamw = torch.optim.AdamW(list(theirs.values()), lr=1e-3)
    adamw.load_state_dict(optimizer.state_dict(state_dtype="f32"))
    go_on(adamw, theirs, range(3, 5))
    ours = {name: torch.nn.Parameter(tensor.detach().clone()) for name, tensor in theirs.items()}
    _, other = made(named=ours)
    other.load_state_dict(adamw.state_dict(), any_state_dtype=True)
    for name, tensor in ours.items():
        own, their = other.state[tensor], adamw.state[theirs[name]]
        assert float(own["step"]) == 5.0
        if tensor.numel() < 4096:
            assert torch.equal(own["exp_avg"], their["exp_avg"])
            continue
        value = read("exp_avg", own["exp_avg"], own["exp_avg_units"])
        apart = (value - their["exp_avg"].flatten()).abs()
        # Half a step of the upper third of the largest.
        most = own["exp_avg_units"].repeat_interleave(32)[: apart.numel()] * (252 * 2.0**-19)
        assert bool((apart <= most * (2.001 / 252)).all())
    go_on(other, ours, range(5, 6))
    floats = made(state_dtype=None)[1]
    floats.load_state_dict(other.state_dict(), any_state_dtype=True)
    wide = other.state_dict(state_dtype=torch.float32)["state"][0]
    assert torch.equal(floats.state_dict()["state"][0]["exp_avg_sq"], wide["exp_avg_sq"])


def test_remainders_follow_the_type_of_state():
    named, optimizer = made(named=parameters(torch.bfloat16), precision="remainder8")
    go_on(optimizer, named, range(3))
    saved = optimizer.state_dict(state_dtype=torch.float32)
    byte = optimizer.state[named["matrix"]]["remainder"]
    assert torch.equal(saved["state"][1]["remainder"], byte.to(torch.int16) * 256)
    copies = {name: torch.nn.Parameter(tensor.detach().clone()) for name, tensor in named.items()}
    _, wide = made(named=copies, state_dtype=None, master_weights="remainder")
    wide.load_state_dict(saved)
    others = {name: torch.nn.Parameter(tensor.detach().clone()) for name, tensor in named.items()}
    _, again = made(named=others, precision="remainder8")
    again.load_state_dict(wide.state_dict(), any_state_dtype=True)
    assert torch.equal(again.state[others["matrix"]]["remainder"], byte)
    go_on(wide, copies, range(3, 4))
    with pytest.raises(ValueError, match="remainder of `embedding`: .* lower 8 are 0, found"):
        again.load_state_dict(wide.state_dict(), any_state_dtype=True)
    assert torch.equal(again.state[others["matrix"]]["remainder"], byte)


def test_values_that_have_no_codes_are_refused_by_name():
    _, floats = trained(state_dtype=None)
    named, optimizer = trained()
    before = copy.deepcopy(optimizer.state_dict())
    for key, value, expected in (
        ("exp_avg", float("nan"), "finite values, because 32 elements .*, found nan at element 7"),
        ("exp_avg_sq", -1.0, "finite values of at least 0, .*, found -1.0 at element 7"),
    ):
        saved = copy.deepcopy(floats.state_dict())
        saved["state"][0][key].view(-1)[7] = value
        with pytest.raises(ValueError, match=f"{key} of `embedding`: expected {expected}"):
            optimizer.load_state_dict(saved, any_state_dtype=True)
    saved = copy.deepcopy(floats.state_dict())
    saved["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match="exp_avg of `matrix`: .*torch.uint8"):
        optimizer.load_state_dict(saved, any_state_dtype=True)
    saved = copy.deepcopy(before)
    saved["state"][0]["exp_avg_units"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"exp_avg_units of `embed.* \(1024,\) beside"):
        floats.load_state_dict(saved, any_state_dtype=True)
    saved = copy.deepcopy(before)
    saved["state"][0]["exp_avg_units"][3] = -1.0
    with pytest.raises(ValueError, match="exp_avg_units of `embedding`: expected units of"):
        optimizer.load_state_dict(saved)
    with pytest.raises(ValueError, match="state_dtype: expected torch.float32, or None"):
        optimizer.state_dict(state_dtype=torch.bfloat16)
    for index, own in optimizer.state_dict()["state"].items():
        assert all(torch.equal(own[key], before["state"][index][key]) for key in own)


def test_names_that_are_kept_have_state_of_float32():
    named, optimizer = trained(keep_f32=["embed"])
    assert optimizer.state[named["embedding"]]["exp_avg"].dtype == torch.float32
    assert optimizer.state[named["matrix"]]["exp_avg"].dtype == torch.uint8
    text = optimizer.plan()
    assert "2 tensors of fewer than 4,096 elements and of 1 tensor with `embed`" in text
    with pytest.raises(ValueError, match="keep_f32: expected state_dtype int8 too"):
        made(state_dtype=None, keep_f32=["embed"])


BESIDE = [{}, *({"master_weights": kind} for kind in (True, "remainder", "remainder8"))]


@pytest.mark.parametrize("beside", BESIDE)
def test_parameters_of_bfloat16_have_codes_beside_whatever_else_they_have(beside):
    named = parameters(torch.bfloat16)
    _, optimizer = made(named=named, **beside)
    go_on(optimizer, named, range(3))
    own = optimizer.state[named["matrix"]]
    assert own["exp_avg"].dtype == torch.uint8 and own["exp_avg_sq_units"].dtype == torch.float32
    others = {name: torch.nn.Parameter(tensor.detach().clone()) for name, tensor in named.items()}
    _, other = made(named=others, **beside)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    for pair in ((optimizer, named), (other, others)):
        go_on(*pair, range(3, 5))
    assert same_bits(list(named.values()), list(others.values()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_what_has_no_codes_is_refused_by_name(dtype):
    named = parameters(dtype)
    _, optimizer = made(named=named)
    before = {name: tensor.detach().clone() for name, tensor in named.items()}
    with pytest.raises((ValueError, RuntimeError), match="state of .* parameters: expected .*int8"):
        go_on(optimizer, named, range(1))
    assert all(torch.equal(named[name], before[name]) for name in SHAPES)


class Lent(torch.nn.Module):
    """The parameters as a model, whose gradients are given by a backward pass."""

    def __init__(self, named):
        super().__init__()
        for name, tensor in named.items():
            self.register_parameter(name, tensor)

    def go_on(self, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            optimizer.zero_grad()
            total = torch.zeros(())
            for tensor in self.parameters():
                grad = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                total = total + (tensor * grad).sum().float()
            total.backward()
            optimizer.step()


@pytest.mark.parametrize("rule", ["AdamW", "Lion", "SGD"])
def test_a_remainder_of_8_bits_has_the_bits_of_the_plan_that_keeps_all_tensors(rule, monkeypatch):
    """Beside PyTorch's tensors as in memory of the plan, where `DataParallel` has them."""
    monkeypatch.setenv("FUSESTEP_ALONE", "1")
    named, optimizer = made(rule, parameters(torch.bfloat16), master_weights="remainder8")
    go_on(optimizer, named, range(8))
    model = Lent(parameters(torch.bfloat16))
    named_too = dict(model.named_parameters())
    _, other = made(rule, named_too, master_weights="remainder8")
    parallel = fusestep.torch.DataParallel(model, other)
    model.go_on(other, range(8))
    assert same_bits(list(named.values()), list(named_too.values()))
    parallel.close()
    # It holds what a parameter alone would lose.
    plain, alone = made(rule, parameters(torch.bfloat16))
    go_on(alone, plain, range(8))
    assert not same_bits(list(named.values()), list(plain.values()))


def test_a_remainder_is_of_8_bits_where_state_is_in_codes_and_else_of_16():
    named, optimizer = made(named=parameters(torch.bfloat16), precision="remainder8")
    go_on(optimizer, named, range(3))
    for tensor in named.values():
        own, coded = optimizer.state[tensor], tensor.numel() >= 4096
        dtype = torch.int8 if coded else torch.int16
        assert (own["remainder"].dtype, own["remainder"].shape) == (dtype, tensor.shape)
        assert bool(own["remainder"].any())
        if coded:
            # 5.25 bytes an element: parameter, remainder, codes and units.
            each = [value.element_size() * value.numel() for k, value in own.items() if k != "step"]
            units = -(-tensor.numel() // 32)
            assert sum(each) == 3 * tensor.numel() + 8 * units
    plan = optimizer.plan()
    assert "and remainders in 16 bits, of 2 tensors of fewer than" in plan
    assert "none is left in int8" not in plan
    # A write begins the remainder anew, as that of 16 bits.
    with torch.no_grad():
        named["matrix"].fill_(2.0)
    for tensor in named.values():
        tensor.grad = torch.zeros_like(tensor)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    assert bool((named["matrix"] == 2.0).all())
    assert not optimizer.state[named["matrix"]]["remainder"].any()
    assert optimizer.state[named["embedding"]]["remainder"].any()


def test_remainders_of_8_bits_take_state_in_int8():
    for settings in ({"state_dtype": None}, {"state_dtype": "bf16"}):
        with pytest.raises(ValueError, match="expected none, f32 or remainder, unless .* int8"):
            made(named=parameters(torch.bfloat16), master_weights="remainder8", **settings)
    with pytest.raises(ValueError, match="float16.*found `remainder8`"):
        fusestep.torch.AdamW(parameters(torch.float16).values(), precision="remainder8")


def test_remainders_of_another_length_are_refused_by_name():
    narrow, byte = (parameters(torch.bfloat16) for _ in range(2))
    _, wide = made(named=narrow, master_weights="remainder")
    _, coded = made(named=byte, master_weights="remainder8")
    _, plain = made(named=parameters(torch.bfloat16))
    for optimizer, named in ((wide, narrow), (coded, byte)):
        go_on(optimizer, named, range(1))
    expected = "remainder of `embedding`: expected one of torch.int8, found one of torch.int16"
    with pytest.raises(ValueError, match=f"{expected}; .*, remainder here"):
        coded.load_state_dict(wide.state_dict())
    expected = "remainder of `embedding`: expected one of torch.int16, found one of torch.int8"
    with pytest.raises(ValueError, match=f"{expected}; .*, remainder8 here"):
        wide.load_state_dict(coded.state_dict())
    with pytest.raises(ValueError, match="remainder of `embedding`: expected none.*'remainder8'"):
        plain.load_state_dict(coded.state_dict())


def test_rules_without_codes_are_refused_by_name():
    named, optimizer = made("ScheduleFreeAdamW")
    with pytest.raises((ValueError, RuntimeError), match="expected f32 or bf16, .*int8"):
        go_on(optimizer, named, range(1))


def test_parameters_in_another_order_are_refused():
    named = {"weight": torch.nn.Parameter(torch.randn(64, 128).t())}
    with pytest.raises(ValueError, match="state_dtype: expected f32 or bf16 .*strides"):
        made(named=named)
