"""Parameters whose elements lie in another order than that in which the last index is fastest."""

import copy
import io

import pytest
import torch
from support import OURS_OF, OWN, assert_unchanged, bits, largest_difference, same_bits, snapshot

import fusestep.torch
from fusestep.torch._tensors import Library


def permuted(shape, order, seed, dtype=torch.float32):
    """A parameter of this shape whose dimensions lie in this order, the slowest first."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    back = sorted(range(len(order)), key=order.__getitem__)
    lies = values.permute(order).contiguous().permute(back)
    assert torch.equal(lies, values)
    return torch.nn.Parameter(lies)


def made(dtype=torch.float32):
    """Transposed, of channels last, permuted, expanded and cloned, in order; some of extent 1."""
    expanded = torch.arange(5.0).expand(3, 5).clone()
    return [
        permuted((6, 9), (1, 0), 0, dtype),
        permuted((8, 3, 5, 5), (0, 2, 3, 1), 1, dtype),
        permuted((4, 1, 7), (2, 1, 0), 2, dtype),
        permuted((2, 3, 4), (1, 2, 0), 3, dtype),
        permuted((70, 130), (1, 0), 4, dtype),
        torch.nn.Parameter(expanded.to(dtype)),
        permuted((5, 0, 2), (2, 1, 0), 5, dtype),
        permuted((33,), (0,), 6, dtype),
    ]


def give(params, step, in_order_of_parameter=True):
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        value = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        param.grad = torch.empty_like(param).copy_(value) if in_order_of_parameter else value


def contiguous(params):
    plain = torch.contiguous_format
    return [torch.nn.Parameter(param.detach().clone(memory_format=plain)) for param in params]


@pytest.mark.parametrize("name", OURS_OF)
def test_steps_beside_pytorch_with_the_strides_of_its_state(name):
    ours, theirs = made(), made()
    places = [param.data_ptr() for param in ours]
    a, b = getattr(fusestep.torch, name)(ours, lr=1e-2), getattr(torch.optim, name)(theirs, lr=1e-2)
    for step in range(5):
        for params, optimizer in ((ours, a), (theirs, b)):
            give(params, step)
            optimizer.step()
        assert a.report().copied_gradients == 0
    assert largest_difference(ours, theirs) < 1e-6
    assert [param.data_ptr() for param in ours] == places, "in place"
    for one, other in zip(ours, theirs):
        assert one.stride() == other.stride()
        for key, value in b.state[other].items():
            if value is not None and key in a.state[one]:
                assert a.state[one][key].stride() == value.stride(), key


# Norms add elements in the order of memory.
NORMED = ("Lars", "Lamb")


@pytest.mark.parametrize("name", [name for name in (*OURS_OF, *OWN) if name not in NORMED])
def test_the_order_changes_no_bit_of_a_rule_without_norms(name):
    ours = made()
    plain = contiguous(ours)
    optimizers = [getattr(fusestep.torch, name)(params, lr=1e-2) for params in (ours, plain)]
    for step in range(4):
        for params, optimizer in zip((ours, plain), optimizers):
            give(params, step)
            optimizer.step()
    assert same_bits(ours, plain)


@pytest.mark.parametrize("name", NORMED)
def test_rules_with_norms_agree_but_for_rounding(name):
    ours = made()
    plain = contiguous(ours)
    for params in (ours, plain):
        optimizer = getattr(fusestep.torch, name)(params, lr=1e-2, clip_norm=0.5)
        for step in range(4):
            give(params, step)
            optimizer.step()
    assert largest_difference(ours, plain) < 1e-6


@pytest.mark.parametrize("by_methods", [False, True])
def test_a_gradient_in_another_order_is_copied_into_the_parameters(by_methods, monkeypatch):
    if by_methods:
        monkeypatch.setattr(Library, "file", None)
    found = []
    for in_order in (True, False):
        params = made()
        optimizer = fusestep.torch.AdamW(params, lr=1e-2)
        for step in range(3):
            give(params, step, in_order)
            given = [param.grad.clone(memory_format=torch.preserve_format) for param in params]
            optimizer.step()
            # What lies in one order by its extents needs no copy.
            expected = 0 if in_order else sum(not p.is_contiguous() for p in params)
            assert optimizer.report().copied_gradients == expected
            assert same_bits([param.grad for param in params], given)
        found.append(bits(params))
    assert same_bits(*found)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_state_dicts_go_both_ways(name):
    settings = {"lr": 1e-2, **({"momentum": 0.9} if name != "AdamW" else {})}
    for first, second in ((fusestep.torch, torch.optim), (torch.optim, fusestep.torch)):
        params = made()
        before = getattr(first, name)(params, **settings)
        for step in range(3):
            give(params, step)
            before.step()
        stream = io.BytesIO()
        torch.save(before.state_dict(), stream)
        others = copy.deepcopy(params)
        after = getattr(second, name)(others, **settings)
        stream.seek(0)
        after.load_state_dict(torch.load(stream))
        for own, other in zip(params, others):
            for key, value in before.state[own].items():
                if torch.is_tensor(value) and value.dim():
                    assert after.state[other][key].stride() == value.stride() == own.stride()
                    assert torch.equal(after.state[other][key], value)
        for step in range(3, 6):
            give(params, step)
            give(others, step)
            before.step()
            after.step()
        assert largest_difference(params, others) < 1e-6


def test_a_model_that_changes_its_memory_format_goes_on():
    def trained(module, changes):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 3))
        optimizer = module.AdamW(model.parameters(), lr=1e-2)
        for step in range(6):
            if changes and step in (2, 4):
                formats = {2: torch.channels_last, 4: torch.contiguous_format}
                model = model.to(memory_format=formats[step])
            if step == 3:
                assert optimizer.state[model[0].weight], "the state is looked at"
            give(model.parameters(), step)
            optimizer.step()
        return list(model.parameters()), optimizer

    ours, optimizer = trained(fusestep.torch, True)
    assert same_bits(ours, trained(fusestep.torch, False)[0])
    assert largest_difference(ours, trained(torch.optim, True)[0]) < 1e-6
    assert all(optimizer.state[param]["exp_avg"].stride() == param.stride() for param in ours)


def test_state_that_is_brought_to_an_order_stays_the_object_it_was():
    param = torch.nn.Parameter(torch.ones(4, 6))
    optimizer = fusestep.torch.AdamW([param], lr=1e-2)
    give([param], 0)
    optimizer.step()
    held = optimizer.state[param]["exp_avg"]
    values = held.clone()
    param.data = param.data.t().contiguous().t()
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert optimizer.state[param]["exp_avg"] is held and held.stride() == (1, 4)
    assert torch.allclose(held, values * 0.9)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(5).expand(3, 5), "share memory"),
        (lambda: torch.ones(3, 10)[:, ::2], "gaps"),
        (lambda: torch.ones(8).as_strided((3, 3), (2, 1)), "share memory"),
        (lambda: torch.ones(4, 8)[:, :4].t(), "gaps"),
    ],
)
def test_what_is_not_dense_is_refused_by_name_with_a_cure_that_works(make, why):
    param = torch.nn.Parameter(make())
    other = torch.nn.Parameter(torch.ones(3))
    optimizer = fusestep.torch.AdamW([("a", other), ("b", param)], lr=0.1)
    for tensor in (other, param):
        tensor.grad = torch.ones(tensor.shape)
    before = snapshot(optimizer, [other, param])
    with pytest.raises(ValueError, match=f"`b`: expected.*densely.*{why}.*clone"):
        optimizer.step()
    assert_unchanged(before, optimizer, [other, param])
    param.data = param.data.clone()
    optimizer.step()
    assert bool((param != 1).all()) and bool((other != 1).all())


@pytest.mark.parametrize(
    "settings", [{"accumulate": 3}, {"clip_norm": 0.1}, {"update_norms": True}], ids=str
)
def test_settings_of_the_step_act_as_on_plain_tensors(settings):
    ours = made()
    plain = contiguous(ours)
    for params in (ours, plain):
        optimizer = fusestep.torch.AdamW(params, lr=1e-2, **settings)
        for step in range(6):
            give(params, step, in_order_of_parameter=step % 2 == 0)
            optimizer.step()
    assert largest_difference(ours, plain) < 1e-6


def test_masters_and_updates_in_backward():
    def trained(memory_format, dtype, fused, **settings):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 3)).to(dtype)
        model = model.to(memory_format=memory_format)
        optimizer = fusestep.torch.AdamW(model.parameters(), lr=1e-2, **settings)
        if fused:
            fusestep.torch.fuse_backward(model, optimizer)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            shapes = [p.shape for p in model.parameters()]
            values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
            sum((p * v).sum() for p, v in zip(model.parameters(), values)).backward()
            optimizer.step()
            optimizer.zero_grad()
        masters = [optimizer.state[p].get("master") for p in model.parameters()]
        pairs = zip(masters, model.parameters())
        assert all(master is None or master.stride() == p.stride() for master, p in pairs)
        return bits(model.parameters())

    last, plain = torch.channels_last, torch.contiguous_format
    ways = [(form, torch.float32, fused) for form in (last, plain) for fused in (False, True)]
    wide = [trained(*way) for way in ways]
    assert all(same_bits(wide[0], one) for one in wide[1:])
    narrow = [trained(form, torch.bfloat16, False, master_weights=True) for form in (last, plain)]
    assert same_bits(*narrow)


def test_copies_of_an_optimizer_keep_the_order():
    params = made()
    optimizer = fusestep.torch.AdamW(params, lr=1e-2)
    give(params, 0)
    optimizer.step()
    other = copy.deepcopy(optimizer)
    copies = other.param_groups[0]["params"]
    for group in (params, copies):
        give(group, 1)
    optimizer.step()
    other.step()
    assert same_bits(params, copies)
    assert [p.stride() for p in params] == [p.stride() for p in copies]
