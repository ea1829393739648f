"""Who knows that a step has written: autograd, by the versions of tensors."""

import gc
import threading
import weakref

import pytest
import torch
from support import same_bits

import fusestep.torch
from fusestep.torch import _planned


class Own(torch.nn.Parameter):
    pass


def parameters(count, kind=torch.nn.Parameter):
    generator = torch.Generator().manual_seed(3)
    params = [kind(torch.randn(7, generator=generator)) for _ in range(count)]
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


def test_a_tensor_that_is_exchanged_has_its_own_versions_counted(threads):
    params = parameters(3)
    optimizer = fusestep.torch.SGD(params, lr=0.5)
    optimizer.step()
    torch.utils.swap_tensors(params[1], torch.nn.Parameter(torch.ones(7)))
    params[1].grad = torch.ones(7)
    before = [param._version for param in params]
    optimizer.step()
    assert [param._version for param in params] == [version + 1 for version in before]
    assert params[1].tolist() == [0.5] * 7


def test_a_tensor_that_is_exchanged_for_one_of_inference_has_no_versions_counted(threads):
    params = parameters(3)
    optimizer = fusestep.torch.SGD(params, lr=0.5)
    optimizer.step()
    with torch.inference_mode():
        other = torch.nn.Parameter(torch.ones(7))
        other.grad = torch.ones(7)
        assert other.is_inference()
    torch.utils.swap_tensors(params[1], other)
    optimizer.step()
    assert params[1].tolist() == [0.5] * 7


@pytest.mark.parametrize("missing", [{"plain": []}, {"file": None}])
def test_where_functions_of_pytorch_are_missing_tensors_are_asked(monkeypatch, missing, threads):
    def trained():
        params = parameters(1_500)
        optimizer = fusestep.torch.AdamW(params, lr=0.1)
        before = [param._version for param in params]
        for _ in range(2):
            optimizer.step()
        assert [param._version for param in params] == [version + 2 for version in before]
        return params

    by_functions = trained()
    with monkeypatch.context() as patched:
        for name, value in missing.items():
            patched.setattr(_planned.Library, name, value)
        by_asking = trained()
    for one, two in zip(by_functions, by_asking):
        assert same_bits(one, two)


def test_a_mode_that_overrides_gradients_is_asked():
    class Halved(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if function == torch.Tensor.grad.__get__ and found is not None:
                with torch._C.DisableTorchFunction():
                    return found * 0.5
            return found

    params = parameters(2)
    before = [param.tolist() for param in params]
    for param in params:
        param.grad = torch.ones(7)
    optimizer = fusestep.torch.SGD(params, lr=0.5)
    with Halved():
        optimizer.step()
    expected = [torch.tensor(old) - 0.25 for old in before]
    for param, wanted in zip(params, expected):
        assert torch.equal(param.detach(), wanted)


def test_parameters_of_several_classes_are_one_step():
    values = torch.arange(6.0)
    params = [kind(values.clone()) for kind in (torch.nn.Parameter, Own, torch.Tensor)]
    params[2].requires_grad_()
    for param in params:
        param.grad = torch.ones(6)
    fusestep.torch.SGD(params, lr=0.25).step()
    for param in params:
        assert torch.equal(param.detach().as_subclass(torch.Tensor), values - 0.25)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}])
@pytest.mark.parametrize("shown", [False, True])
def test_what_interrupts_a_step_that_is_taken_leaves_it_whole(monkeypatch, threads, options, shown):
    # Of a class of its own, whose versions are counted by a call.
    ours, other = parameters(3, Own), parameters(3, Own)
    optimizer = fusestep.torch.AdamW(ours, **options)
    twin = fusestep.torch.AdamW(other, **options)
    if shown:
        optimizer.state

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(_planned, "increment_version", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    optimizer.step()
    twin.step()
    twin.step()
    for one, two in zip(ours, other):
        assert same_bits(one, two)
        assert optimizer.state[one]["step"] == twin.state[two]["step"] == 2


def test_state_that_could_not_be_made_leaves_nothing_behind(monkeypatch):
    params = parameters(2)
    optimizer = fusestep.torch.AdamW(params)
    make = optimizer._first_value
    calls = []

    def fail(*args):
        calls.append(args)
        if len(calls) == 4:
            raise MemoryError
        return make(*args)

    monkeypatch.setattr(optimizer, "_first_value", fail)
    with pytest.raises(MemoryError):
        optimizer.step()
    assert dict(optimizer.state) == {}


@pytest.mark.parametrize("adds", [False, True])
def test_optimizers_that_share_their_state_count_together(adds):
    counted = []
    for shown in (False, True):
        first, second = parameters(2)
        one = fusestep.torch.AdamW([first])
        if shown:
            one.state
        if adds:
            one.step()
        other = fusestep.torch.AdamW.__new__(fusestep.torch.AdamW)
        other.__dict__ = dict(one.__dict__)
        if adds:
            other.add_param_group({"params": [second]})
        for turn in range(7 - adds):
            (other, one)[turn % 2].step()
        counted.append((first.tolist(), float(one.state[first]["step"])))
    assert counted[0] == counted[1]
    assert counted[0][1] == 7


@pytest.mark.parametrize("how", ["attribute", "fused"])
def test_an_optimizer_that_its_parameters_refer_to_is_collected(how):
    model = torch.nn.Linear(4, 4)
    optimizer = fusestep.torch.AdamW(model.parameters())
    if how == "fused":
        fusestep.torch.fuse_backward(model, optimizer)
    else:
        model.weight.optimizer = optimizer
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    gone = weakref.ref(optimizer), weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert [one() for one in gone] == [None, None]


@pytest.mark.parametrize("how", ["private", "shown", "fused"])
def test_an_optimizer_and_its_state_are_freed_at_once(how):
    model = torch.nn.Linear(4, 4)
    optimizer = fusestep.torch.AdamW(model.parameters(), accumulate=1 if how == "fused" else 2)
    if how == "fused":
        fusestep.torch.fuse_backward(model, optimizer)
    gc.disable()
    try:
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        state = optimizer._kept_state()[0] if how == "private" else optimizer.state
        gone = weakref.ref(optimizer), weakref.ref(state[model.weight]["exp_avg"])
        del optimizer, state
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()
    if how == "fused":
        # Gradients stay where there is nobody to take them.
        model(torch.ones(2, 4)).sum().backward()
        assert model.weight.grad is not None


def test_other_threads_may_ask_during_a_step():
    params = [torch.nn.Parameter(torch.ones(100_000)) for _ in range(8)]
    for param in params:
        param.grad = torch.ones(100_000)
    optimizer = fusestep.torch.AdamW(params, loss_scale="dynamic")
    optimizer.step()
    failed, ended = [], threading.Event()

    def ask(question):
        try:
            while not ended.is_set():
                question()
        except BaseException as error:
            failed.append(error)

    questions = (optimizer.state_dict, optimizer.loss_scale, optimizer.plan, optimizer.step)
    asking = [threading.Thread(target=ask, args=(question,)) for question in questions]
    for thread in asking:
        thread.start()
    for _ in range(50):
        optimizer.step()
    ended.set()
    for thread in asking:
        thread.join()
    assert failed == []


def test_masters_are_made_anew_behind_a_time_in_float32():
    runs = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4).bfloat16()
        optimizer = fusestep.torch.AdamW(model.parameters(), lr=0.01, master_weights=True)
        if fused:
            fusestep.torch.fuse_backward(model, optimizer)
        seen = []
        for dtype in (torch.bfloat16, torch.float32, torch.float32, torch.bfloat16, torch.bfloat16):
            model.to(dtype)
            optimizer.zero_grad()
            model(torch.ones(2, 4, dtype=dtype)).square().sum().backward()
            optimizer.step()
            has_master = "master" in optimizer.state[model.weight]
            assert has_master == (dtype == torch.bfloat16)
            seen.append([param.detach().clone() for param in model.parameters()])
        runs.append(seen)
    for one, two in zip(*runs):
        for a, b in zip(one, two):
            assert same_bits(a, b)
