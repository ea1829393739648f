"""Steps within functions that PyTorch compiles, and behind models that it has compiled."""

import pytest
import torch
import torch._dynamo
from support import bits, same_bits
from torch._dynamo.utils import counters

import fusestep.torch


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def made(**settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    return model, fusestep.torch.AdamW(model.parameters(), lr=1e-2, **settings)


def batch(step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def trained(how, **settings):
    model, optimizer = made(**settings)
    forward = torch.compile(model, backend="aot_eager") if how == "model" else model

    def step(inputs):
        forward(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = torch.compile(step, backend="eager") if how == "whole" else step
    for number in range(5):
        run(batch(number))
    return bits(model.parameters()), optimizer


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"accumulate": 2}], ids=str)
@pytest.mark.parametrize("how", ["model", "whole"])
def test_what_is_compiled_around_a_step_changes_no_bit(how, settings):
    plain, optimizer = trained("none", **settings)
    compiled, other = trained(how, **settings)
    if how == "whole":
        assert same_bits(plain, compiled)
    else:
        assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(plain, compiled))
    assert optimizer.report() is not None and other.report() is not None


def test_a_step_is_one_break_of_the_graph_of_which_nothing_is_traced():
    model, optimizer = made()
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph.forward

    def step(scale):
        scale = scale * 2
        optimizer.step()
        return scale + 1

    model(batch(0)).sum().backward()
    run = torch.compile(step, backend=backend)
    for _ in range(3):
        assert float(run(torch.tensor(1.0))) == 3.0
    assert sum(counters["graph_break"].values()) == 1, counters["graph_break"]
    assert len(seen) == 2, "one graph before the step and one behind it"
    assert float(optimizer.state[model[0].weight]["step"]) == 3


def test_hooks_run_within_a_compiled_function():
    model, optimizer = made()
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    model(batch(0)).sum().backward()
    run = torch.compile(lambda: optimizer.step(), backend="eager")
    run()
    run()
    assert calls == ["pre", "post"] * 2


def test_a_step_that_is_compiled_itself_steps():
    model, optimizer = made()
    plain, other = made()
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(3):
        for own in (model, plain):
            own.zero_grad()
            own(batch(number)).sum().backward()
        step()
        other.step()
    assert same_bits(model.parameters(), plain.parameters())


def test_a_graph_that_may_not_break_is_refused_and_nothing_has_changed():
    model, optimizer = made()
    model(batch(0)).sum().backward()
    before = bits(model.parameters())
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)()
    assert same_bits(before, model.parameters()) and not optimizer.state
    optimizer.step()
    assert not same_bits(before, model.parameters())
