"""Who knows that a step has written: autograd, by the versions of tensors."""

import pytest
import torch

import fusestep.torch


def parameters(count):
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(7, generator=generator)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(7, generator=generator)
    return params


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_updated_parameter_has_a_new_version_and_no_other(threads):
    # Enough for every thread to have some.
    params = parameters(9_000)
    groups = [{"params": params[:4_000]}, {"params": params[4_000:], "lr": 0.1}]
    optimizer = fusestep.torch.AdamW(groups)
    for without in ((), (3, 5_000), ()):
        for index, param in enumerate(params):
            param.grad = None if index in without else torch.ones(7)
        before = [param._version for param in params]
        optimizer.step()
        expected = [version + (at not in without) for at, version in enumerate(before)]
        assert [param._version for param in params] == expected


def test_a_skipped_step_makes_no_version():
    params = parameters(3)
    optimizer = fusestep.torch.AdamW(params, loss_scale=2.0)
    params[1].grad[2] = float("inf")
    before = [param._version for param in params]
    optimizer.step()
    assert optimizer.report().skipped
    assert [param._version for param in params] == before


def test_a_backward_pass_through_what_was_written_since_is_refused():
    param = parameters(1)[0]
    loss = (param * param).sum()
    fusestep.torch.SGD([param], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_within_inference_mode_needs_no_version(threads):
    with torch.inference_mode():
        params = [torch.ones(5), torch.ones(3)]
        for param in params:
            param.grad = torch.ones_like(param)
        fusestep.torch.SGD(params, lr=0.5).step()
        assert params[0].tolist() == [0.5] * 5


def test_parameters_of_several_classes_are_one_step():
    class Own(torch.nn.Parameter):
        pass

    values = torch.arange(6.0)
    params = [kind(values.clone()) for kind in (torch.nn.Parameter, Own, torch.Tensor)]
    params[2].requires_grad_()
    for param in params:
        param.grad = torch.ones(6)
    fusestep.torch.SGD(params, lr=0.25).step()
    for param in params:
        assert torch.equal(param.detach().as_subclass(torch.Tensor), values - 0.25)
