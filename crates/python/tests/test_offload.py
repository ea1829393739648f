"""The optimizer on the host: DeepSpeed's class, steps over lists, and a whole model."""

import contextlib
import copy
import pickle

import pytest
import torch
from support import bits, give_gradients, parameters, same_bits

import fusestep.offload
import fusestep.torch
from fusestep.offload import CPUAdam, Offload, grad_norm, new_state
from fusestep.offload import _model
from fusestep.offload._transfers import CudaTransfers

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The cases of DeepSpeed's unit test, and lengths around a vector and a thread's share.
SIZES = (64, 22, 128, 1024, 1048576, 1, 17, 100_003)


def gradient(size, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(dtype)


def parameter(size, dtype, seed=0):
    return torch.nn.Parameter(gradient(size, dtype, seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_it_steps_as_pytorch_does(dtype, size):
    own = parameter(size, dtype)
    theirs = torch.nn.Parameter(own.detach().to(torch.float32))
    mine = CPUAdam([own], lr=0.05, weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=0.05, weight_decay=0.1)
    for step in range(10):
        own.grad = gradient(size, dtype, 1 + step)
        theirs.grad = own.grad.to(torch.float32)
        mine.step()
        reference.step()
    difference = (own.detach().float() - theirs.detach()).abs().max()
    assert difference < {torch.float32: 5e-6, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    moved = (own.detach().float() - parameter(size, dtype).detach().float()).abs().max()
    assert moved > 0.02


SETTINGS = [
    {},
    {"weight_decay": 0.1, "lr": 0.02},
    {"weight_decay": 0.1, "adamw_mode": False},
    {"amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-6},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("narrow", (False, True))
def test_bits_are_those_of_the_planned_step(dtype, settings, narrow):
    if narrow and dtype != torch.bfloat16:
        pytest.skip("state of 16 bits is that of bfloat16 there")
    shapes = [(3, 4), (7,), (), (0, 5), (130, 70), (70_001,)]
    ours, theirs = parameters(dtype, shapes=shapes), parameters(dtype, shapes=shapes)
    one = CPUAdam(ours, fp32_optimizer_states=not narrow, **settings)
    given = {"weight_decay": 0.0, **settings}
    rule = fusestep.torch.AdamW if given.pop("adamw_mode", True) else fusestep.torch.Adam
    other = rule(theirs, state_dtype=torch.bfloat16 if narrow else None, **given)
    for step in range(6):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        one.step()
        other.step()
        assert same_bits(ours, theirs), step
    for own, their in zip(ours, theirs):
        for name, value in other.state[their].items():
            found = one.state[own][name]
            if name == "step":
                assert found == int(value) and isinstance(found, int)
            else:
                assert found.dtype == value.dtype and torch.equal(found, value)


def test_state_has_the_dtypes_and_names_that_deepspeed_gives():
    for dtype in DTYPES:
        for is_wide in (True, False):
            own = parameter(64, dtype)
            optimizer = CPUAdam([own], fp32_optimizer_states=is_wide)
            own.grad = gradient(64, dtype, 1)
            optimizer.step()
            state = optimizer.state[own]
            assert list(state) == ["step", "exp_avg", "exp_avg_sq"] and state["step"] == 1
            expected = torch.float32 if is_wide else dtype
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == expected


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_state_of_16_bits_follows_that_of_32(dtype):
    wide, narrow = parameter(1024, dtype), parameter(1024, dtype)
    one, other = CPUAdam([wide]), CPUAdam([narrow], fp32_optimizer_states=False)
    for step in range(10):
        wide.grad = gradient(1024, dtype, step + 1)
        narrow.grad = wide.grad.clone()
        one.step()
        other.step()
    norms = wide.detach().float().norm(), narrow.detach().float().norm()
    assert abs(norms[0] - norms[1]) < 0.05 * norms[0]
    assert not torch.equal(wide, narrow)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_a_gradient_of_another_dtype_is_read_as_it_is(dtype, other):
    own, same = parameter(5000, dtype), parameter(5000, dtype)
    one, two = CPUAdam([own]), CPUAdam([same])
    own.grad_dtype = other if hasattr(own, "grad_dtype") else None
    for step in range(3):
        values = gradient(5000, torch.bfloat16, step)
        # Whole numbers below 2^8 over 4: both dtypes have them.
        values = (values * 8).round().clamp(-200, 200).to(torch.float32) / 4
        own.grad, same.grad = values.to(other), values.to(dtype)
        one.step()
        two.step()
    assert torch.equal(own, same)
    assert torch.equal(one.state[own]["exp_avg_sq"], two.state[same]["exp_avg_sq"])


def test_bias_correction_acts():
    own = torch.nn.Parameter(torch.ones(3))
    own.grad = torch.full((3,), 0.5)
    CPUAdam([own], lr=0.1, bias_correction=False).step()
    expected = 1 - 0.1 * (0.1 * 0.5) / ((0.001 * 0.25) ** 0.5 + 1e-8)
    assert torch.allclose(own, torch.full((3,), expected), rtol=1e-6)
    corrected = torch.nn.Parameter(torch.ones(3))
    corrected.grad = torch.full((3,), 0.5)
    CPUAdam([corrected], lr=0.1).step()
    assert torch.allclose(corrected, torch.full((3,), 0.9), rtol=1e-6)


def test_parameters_may_be_others_at_every_call():
    sizes = (5, 1000, 40_000, 17)
    groups = [parameter(size, torch.float32, seed) for seed, size in enumerate(sizes)]
    apart = [torch.nn.Parameter(group.detach().clone()) for group in groups]
    place = torch.nn.Parameter(torch.zeros(1))
    swapped, own = CPUAdam([place]), [CPUAdam([group]) for group in apart]
    for step in range(3):
        for number, size in enumerate(sizes):
            values = gradient(size, torch.float32, 10 * step + number)
            swapped.param_groups[0]["params"] = [torch.nn.Parameter(groups[number].detach())]
            swapped.param_groups[0]["params"][0].grad = values.clone()
            swapped.step_subgroup(number)
            apart[number].grad = values
            own[number].step()
    assert same_bits(groups, apart)
    assert {key: swapped.state[key]["step"] for key in swapped.state} == dict.fromkeys(range(4), 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amsgrad", (False, True))
def test_a_step_that_is_taken_back_was_never_there(dtype, amsgrad):
    own = parameter(3001, dtype)
    optimizer = CPUAdam([own], lr=0.1, amsgrad=amsgrad, fp32_optimizer_states=False)
    own.grad = gradient(3001, dtype, 1)
    optimizer.step_subgroup(3)
    before = bits([own]), copy.deepcopy(optimizer.state[3])
    own.grad = gradient(3001, dtype, 2) * float("inf")
    optimizer.step_subgroup(3)
    assert own.isnan().any() and optimizer.state[3]["step"] == 2
    optimizer.rollback_subgroup(3)
    assert same_bits(before[0], [own])
    for name, value in before[1].items():
        found = optimizer.state[3][name]
        assert torch.equal(found, value) if torch.is_tensor(value) else found == value
    with pytest.raises(RuntimeError, match="none left at keep_for_rollback=1"):
        optimizer.rollback_subgroup(3)


def test_steps_are_taken_back_one_by_one_and_sub_groups_apart():
    own = parameter(64, torch.bfloat16)
    optimizer = CPUAdam([own], keep_for_rollback=3)
    seen = []
    own.grad = gradient(64, torch.bfloat16, 1)
    for step in range(1, 4):
        seen.append(own.detach().clone())
        optimizer.step_subgroup(0)
        assert optimizer.state[0]["step"] == step
    for step in (2, 1, 0):
        optimizer.rollback_subgroup(0)
        assert optimizer.state[0]["step"] == step
        assert torch.equal(own, seen.pop())
    optimizer.step_subgroup(0)
    optimizer.step_subgroup(1)
    optimizer.step_subgroup(0)
    optimizer.rollback_subgroup(0)
    assert (optimizer.state[0]["step"], optimizer.state[1]["step"]) == (1, 1)
    optimizer.forget_rollbacks()
    with pytest.raises(RuntimeError, match="none left"):
        optimizer.rollback_subgroup(1)


def test_the_same_steps_of_two_sub_groups_have_the_same_bits():
    one, two = parameter(128, torch.float32), parameter(128, torch.float32)
    optimizer = CPUAdam([one], keep_for_rollback=0)
    for step in range(1, 5):
        for number, own in enumerate((one, two)):
            optimizer.param_groups[0]["params"] = [own]
            own.grad = gradient(128, torch.float32, step)
            optimizer.step_subgroup(number)
        assert torch.equal(one, two)
        assert torch.equal(optimizer.state[0]["exp_avg"], optimizer.state[1]["exp_avg"])
    with pytest.raises(RuntimeError, match="none left at keep_for_rollback=0"):
        optimizer.rollback_subgroup(0)


REFUSED = [
    ({"lr": -1.0}, ValueError, "lr"),
    ({"lr": "fast"}, TypeError, "lr: expected a number"),
    ({"betas": (0.9, 1.0)}, ValueError, "beta2"),
    ({"betas": 0.9}, ValueError, "betas: expected two numbers"),
    ({"eps": float("nan")}, TypeError, "eps"),
    ({"adamw_mode": 1}, TypeError, "adamw_mode: expected True or False, found 1"),
    ({"bias_correction": "yes"}, TypeError, "bias_correction"),
    ({"fp32_optimizer_states": None}, TypeError, "fp32_optimizer_states"),
    ({"keep_for_rollback": -1}, ValueError, "keep_for_rollback"),
    ({"cores": 0}, ValueError, "cores: expected a number of threads from 1 on.*found 0"),
    ({"cores": "2"}, TypeError, "cores"),
    ({"cores": [0, -1]}, ValueError, "found -1 among them"),
]


@pytest.mark.parametrize("settings, kind, message", REFUSED)
def test_settings_out_of_range_are_named(settings, kind, message):
    with pytest.raises(kind, match=message):
        CPUAdam([parameter(3, torch.float32)], **settings)


def sparse(own):
    own.grad = torch.sparse_coo_tensor([[0]], [1.0], (8,))


def shorter(own):
    own.data = own.data[:5].clone()


def missing(own):
    own.exp_avg = None


DEFECTS = [
    ("exp_avg", lambda state: torch.zeros(7), ValueError, r"exp_avg of `0.1`.*\[8\].*\[7\]"),
    ("exp_avg_sq", lambda state: torch.zeros(8, dtype=torch.float64), TypeError, "float64"),
    ("exp_avg_sq", lambda state: torch.zeros(8, dtype=torch.bfloat16), TypeError, "bf16"),
    ("exp_avg_sq", lambda state: torch.zeros(16)[::2], ValueError, "parameter's order"),
    ("exp_avg_sq", lambda state: state["exp_avg"], RuntimeError, "do not overlap"),
    ("exp_avg", lambda state: [0.0] * 8, TypeError, "expected a tensor, found list"),
    ("exp_avg", lambda state: torch.zeros(8, device="meta"), RuntimeError, "found one on meta"),
]


@pytest.mark.parametrize("name, value, kind, message", DEFECTS)
def test_state_that_does_not_fit_is_named_and_nothing_changes(name, value, kind, message):
    params = [parameter(8, torch.float32, seed) for seed in range(2)]
    optimizer = CPUAdam(params)
    for step in range(2):
        for own in params:
            own.grad = gradient(8, torch.float32, step)
        if step == 0:
            optimizer.step()
    kept = optimizer.state[params[1]]
    optimizer.state[params[1]] = {**kept, name: value(kept)}
    before = bits(params), copy.deepcopy(optimizer.state[params[0]])
    with pytest.raises(kind, match=message):
        optimizer.step()
    assert same_bits(before[0], params)
    state = optimizer.state[params[0]]
    assert state["step"] == 1 and torch.equal(state["exp_avg"], before[1]["exp_avg"])
    optimizer.state[params[1]] = {"step": 1}
    with pytest.raises(ValueError, match="state of `0.1`: expected 'exp_avg', found `step`"):
        optimizer.step()
    optimizer.state[params[1]] = kept
    optimizer.step()
    assert not same_bits(before[0], params)


def test_gradients_and_parameters_that_do_not_fit_are_named():
    own = parameter(8, torch.float32)
    optimizer = CPUAdam([own])
    sparse(own)
    with pytest.raises(RuntimeError, match="gradient of `0.0`: expected a dense tensor"):
        optimizer.step()
    own.grad = gradient(8, torch.float32, 1)
    shorter(own)
    with pytest.raises(ValueError, match=r"gradient of `0.0`: expected shape \[5\], found \[8\]"):
        optimizer.step()
    own.data = torch.zeros(16)[::2]
    own.grad = torch.zeros(8)
    with pytest.raises(ValueError, match="parameter `0.0`: expected elements that lie densely"):
        optimizer.step()
    assert not optimizer.state
    own.data = torch.zeros(8)
    own.grad = None
    with pytest.raises(ValueError, match="step_subgroup.*found none"):
        optimizer.step_subgroup(0)
    with pytest.raises(RuntimeError, match="rollback_subgroup.*found 0 without state"):
        optimizer.rollback_subgroup(0)
    with pytest.raises(TypeError, match="number of a sub-group"):
        optimizer.step_subgroup("first")
    with pytest.raises(TypeError, match="parameter `0.0`: expected float32.*float64"):
        CPUAdam([parameter(3, torch.float64)])


def test_orders_of_elements_are_those_of_the_parameter():
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    own, plain = torch.nn.Parameter(last), torch.nn.Parameter(last.contiguous())
    one, two = CPUAdam([own]), CPUAdam([plain])
    for step in range(3):
        values = gradient((2, 3, 4, 5), torch.float32, step)
        own.grad = values
        plain.grad = values.to(memory_format=torch.channels_last)
        one.step()
        two.step()
    assert torch.equal(own, plain)
    assert one.state[own]["exp_avg"].stride() == own.stride()


def test_a_backward_pass_through_an_old_value_is_refused():
    own = torch.nn.Parameter(torch.ones(3))
    loss = (own * own).sum()
    loss.backward(retain_graph=True)
    CPUAdam([own]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_state_dicts_go_on_with_the_same_bits():
    for narrow in (False, True):
        own, other = parameters(torch.bfloat16), parameters(torch.bfloat16)
        optimizer = CPUAdam(own, fp32_optimizer_states=not narrow, weight_decay=0.1)
        for step in range(3):
            give_gradients(own, step)
            optimizer.step()
        saved = pickle.loads(pickle.dumps(optimizer.state_dict()))
        again = CPUAdam(other, fp32_optimizer_states=not narrow)
        again.load_state_dict(saved)
        for one, two in zip(own, other):
            two.data.copy_(one.data)
        for step in range(3, 6):
            for params, stepped in ((own, optimizer), (other, again)):
                give_gradients(params, step)
                stepped.step()
        assert same_bits(own, other)
        assert again.param_groups[0]["weight_decay"] == 0.1


def test_pytorchs_state_dict_is_taken():
    own, theirs = parameters(), parameters()
    reference = torch.optim.AdamW(theirs, weight_decay=0.1, amsgrad=True)
    for step in range(3):
        give_gradients(theirs, step)
        reference.step()
    optimizer = CPUAdam(own)
    optimizer.load_state_dict(reference.state_dict())
    for one, two in zip(own, theirs):
        one.data.copy_(two.data)
    for step in range(3, 6):
        give_gradients(own, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
    assert all(torch.allclose(a, b, atol=2e-6) for a, b in zip(own, theirs))
    decoupled = CPUAdam(parameters(), adamw_mode=False)
    if "decoupled_weight_decay" in reference.state_dict()["param_groups"][0]:
        with pytest.raises(ValueError, match="adamw_mode=False.*found decoupled_weight_decay=True"):
            decoupled.load_state_dict(reference.state_dict())


def test_state_dicts_that_do_not_fit_change_nothing():
    own = [parameter(8, torch.float32)]
    optimizer = CPUAdam(own)
    own[0].grad = gradient(8, torch.float32, 1)
    optimizer.step()
    good = copy.deepcopy(optimizer.state_dict())
    for change, message in [
        ({"exp_avg": torch.zeros(7)}, "exp_avg of `0.0`: expected shape"),
        ({"exp_avg": None}, "expected a tensor `exp_avg`"),
        ({"step": 1.5}, "step of `0.0`: expected a whole number"),
    ]:
        bad = copy.deepcopy(good)
        bad["state"][0].update(change)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(bad)
    assert torch.equal(optimizer.state[own[0]]["exp_avg"], good["state"][0]["exp_avg"])


def test_sub_groups_have_their_own_part_of_a_state_dict():
    own = parameter(64, torch.float32)
    optimizer = CPUAdam([own])
    own.grad = gradient(64, torch.float32, 1)
    optimizer.step()
    optimizer.step_subgroup(0)
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [0] and list(saved["subgroups"]) == [0]
    other = torch.nn.Parameter(own.detach().clone())
    again = CPUAdam([other])
    again.load_state_dict(copy.deepcopy(saved))
    other.grad = own.grad.clone()
    optimizer.step_subgroup(0)
    again.step_subgroup(0)
    assert torch.equal(own, other) and again.state[0]["step"] == 2


def test_a_copy_of_the_optimizer_keeps_its_own_settings():
    own = parameter(8, torch.bfloat16)
    optimizer = CPUAdam([own], adamw_mode=False, fp32_optimizer_states=False, cores=1)
    for again in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (again.adam_w_mode, again.fp32_optimizer_states) == (False, False)
        params = again.param_groups[0]["params"]
        params[0].grad = gradient(8, torch.bfloat16, 1)
        again.step()
        assert again.state[params[0]]["exp_avg"].dtype == torch.bfloat16


def test_closures_hooks_and_schedulers_work():
    own = parameter(8, torch.float32)
    optimizer = CPUAdam([own], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))

    def closure():
        optimizer.zero_grad()
        loss = (own * own).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == (parameter(8, torch.float32) ** 2).sum()
    schedule.step()
    assert (seen, optimizer.param_groups[0]["lr"]) == ([1], 0.05)


def test_bits_are_those_of_any_cores():
    import os

    threads = set(range(os.cpu_count())) & os.sched_getaffinity(0)
    before = os.sched_getaffinity(0)
    results = []
    for cores in (1, 3, {min(threads)}, threads):
        own = parameter(200_003, torch.bfloat16)
        optimizer = CPUAdam([own], cores=cores)
        for step in range(3):
            own.grad = gradient(200_003, torch.bfloat16, step)
            optimizer.step()
        results.append(own.detach())
    assert same_bits(results, results[:1] * len(results))
    assert os.sched_getaffinity(0) == before
    own = parameter(3, torch.float32)
    own.grad = gradient(3, torch.float32, 1)
    with pytest.raises(ValueError, match="cores: expected CPUs that this process may run on.*8000"):
        CPUAdam([own], cores={8000}).step()
    assert torch.equal(own, parameter(3, torch.float32))


def lists(params, dtype=torch.float32, **settings):
    """Masters, and zeros for their state."""
    masters = [own.detach().float().clone() for own in params]
    return masters, new_state(masters, dtype, **settings)


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("copy_dtype", (None, torch.bfloat16, torch.float16))
def test_lists_step_as_the_class_does_and_copies_are_rounded(grad_dtype, copy_dtype):
    shapes = [(130, 70), (7,), (5000,), (0,)]
    masters, state = lists(parameters(shapes=shapes))
    copies = None
    if copy_dtype is not None:
        copies = [torch.zeros_like(own, dtype=copy_dtype) for own in masters]
    reference = [torch.nn.Parameter(own.clone()) for own in masters]
    optimizer = CPUAdam(reference, weight_decay=0.1)
    for step in range(1, 4):
        give_gradients(reference, step)
        grads = [None if p.grad is None else p.grad.to(grad_dtype) for p in reference]
        for own, value in zip(reference, grads):
            own.grad = None if value is None else value.float() * 0.25
        optimizer.step()
        counts = [int(optimizer.state.get(own, {"step": 1})["step"]) for own in reference]
        done = fusestep.offload.step(
            masters,
            grads,
            state.exp_avgs,
            state.exp_avg_sqs,
            counts,
            copies=copies,
            weight_decay=0.1,
            gradient_scale=0.25,
        )
        assert done == (None, 0.25, False)
        assert same_bits(masters, reference)
        if copies is not None:
            for own, value, grad in zip(masters, copies, grads):
                assert grad is None or torch.equal(value, own.to(copy_dtype))


def test_state_in_codes_steps_as_int8_state_does():
    shapes = [(4096,), (70, 70), (5003,)]
    ours, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    masters, state = lists(ours, torch.int8)
    other = fusestep.torch.AdamW(theirs, state_dtype=torch.int8)
    copies = [torch.zeros_like(own, dtype=torch.bfloat16) for own in masters]
    for step in range(1, 5):
        give_gradients(theirs, step, come_and_go=False)
        grads = [own.grad.clone() for own in theirs]
        other.step()
        fusestep.offload.step(
            masters,
            grads,
            state.exp_avgs,
            state.exp_avg_sqs,
            step,
            units=state.units,
            copies=copies,
        )
        assert same_bits(masters, theirs)
    assert same_bits(copies, [own.detach().bfloat16() for own in theirs])


def test_clipping_is_that_of_the_planned_step():
    shapes = [(130, 70), (7,), (70_001,)]
    theirs = parameters(shapes=shapes)
    other = fusestep.torch.AdamW(theirs, clip_norm=0.5)
    masters, state = lists(theirs)
    apart, state_apart = lists(theirs)
    for step in range(1, 4):
        give_gradients(theirs, step, come_and_go=step > 1)
        grads = [None if own.grad is None else own.grad.clone() for own in theirs]
        before = bits(masters)
        other.step()
        own = (state.exp_avgs, state.exp_avg_sqs)
        counts = [1 if other.state.get(p) is None else int(other.state[p]["step"]) for p in theirs]
        done = fusestep.offload.step(masters, grads, *own, counts, max_norm=0.5)
        assert same_bits(masters, theirs) and not done.skipped
        present = [g for g in grads if g is not None]
        expected = torch.nn.utils.get_total_norm(present)
        assert done.norm == pytest.approx(float(expected), rel=1e-5)
        assert grad_norm(grads) == done.norm
        # In pieces: the norm of all first, then a parameter at a time.
        for at in range(len(apart)):
            fusestep.offload.step(
                [apart[at]],
                [grads[at]],
                [state_apart.exp_avgs[at]],
                [state_apart.exp_avg_sqs[at]],
                counts[at],
                max_norm=0.5,
                norm=done.norm,
            )
        assert same_bits(apart, masters) and not same_bits(before, masters)
    # Gradients below the limit keep their bits.
    apart, state_apart = lists(masters)
    plain, state_plain = lists(masters)
    grads = [torch.full_like(own, 1e-3) for own in masters]
    for own, kept, limit in ((apart, state_apart, 1e9), (plain, state_plain, None)):
        moments = (kept.exp_avgs, kept.exp_avg_sqs)
        done = fusestep.offload.step(own, grads, *moments, 1, max_norm=limit)
        assert done.factor == 1.0 and not done.skipped
    assert same_bits(apart, plain)
    own = (state.exp_avgs, state.exp_avg_sqs)
    grads = [torch.full_like(own, float("nan")) for own in masters]
    before = bits(masters)
    done = fusestep.offload.step(masters, grads, *own, 4, max_norm=0.5)
    assert done.skipped and same_bits(before, masters)


def test_arguments_of_a_step_over_lists_are_named():
    masters, state = lists(parameters(shapes=[(8,)]))
    grads = [torch.ones(8)]
    own = (masters, grads, state.exp_avgs, state.exp_avg_sqs)
    for change, message in [
        ({"steps": 0}, "steps: expected numbers from 1 on, found 0"),
        ({"steps": [1, 1]}, "steps: expected 1, one for each of params, found 2"),
        ({"copies": [torch.zeros(8)]}, "copy of `0`: expected torch.bfloat16, float16"),
        ({"copies": [torch.zeros(7).half()]}, r"copy of `0`: expected shape \[8\], found \[7\]"),
        ({"clip": 0.5, "max_norm": 1.0}, "clip: expected it or max_norm, found both"),
        ({"norm": 1.0}, "norm: expected max_norm beside it"),
        ({"clip": float("nan")}, "clip: expected a finite number"),
        ({"max_norm": 0.0}, "max_norm: expected a finite value above 0"),
        ({"gradient_scale": None}, "gradient_scale: expected a finite number"),
        ({"units": [(torch.zeros(1),)]}, "state of `0`: expected 2 lists, found 3"),
        ({"lr": -1.0}, "lr"),
    ]:
        before = bits(masters)
        with pytest.raises((ValueError, TypeError), match=message):
            fusestep.offload.step(*own, **{"steps": 1, **change})
        assert same_bits(before, masters)
    codes = new_state(masters, torch.int8)
    short = [(torch.zeros(2), torch.zeros(1))]
    with pytest.raises(ValueError, match="exp_avg_units of `0`"):
        own = (masters, grads, codes.exp_avgs, codes.exp_avg_sqs, 1)
        fusestep.offload.step(*own, units=short)
    with pytest.raises(RuntimeError, match="do not overlap"):
        fusestep.offload.step(masters, masters, state.exp_avgs, state.exp_avg_sqs, 1)


def model(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(13, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Tanh()
    return torch.nn.Sequential(*layers, torch.nn.Linear(40, 3)).to(dtype)


def loss_of(net, step, dtype=torch.float32):
    inputs = gradient((9, 13), dtype, 500 + step)
    return (net(inputs).float() ** 2).mean()


def reference_of(net, **settings):
    """A planned step on masters, beside the model."""
    narrow = next(net.parameters()).dtype != torch.float32
    return fusestep.torch.AdamW(
        net.parameters(), lr=0.01, weight_decay=0.1, master_weights=narrow or None, **settings
    )


def offloaded(net, kind=CPUAdam, bucket_mib=0.002, **settings):
    optimizer = kind(net.parameters(), lr=0.01, weight_decay=0.1)
    return optimizer, Offload(net, optimizer, bucket_mib=bucket_mib, **settings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", (CPUAdam, fusestep.torch.AdamW))
@pytest.mark.parametrize("max_norm", (None, 0.05))
def test_a_model_steps_as_without_offload(dtype, kind, max_norm):
    own, plain = model(dtype), model(dtype)
    reference = reference_of(plain, clip_norm=max_norm)
    optimizer, offload = offloaded(own, kind, max_norm=max_norm)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (optimizer, reference)]
    for step in range(5):
        for net, zero in ((own, offload.zero_grad), (plain, reference.zero_grad)):
            zero()
            loss_of(net, step, dtype).backward()
        assert all(repr(param.grad).startswith("Taken") for param in own.parameters())
        # Parameters stay what they were until `step`.
        done = offload.step()
        reference.step()
        for schedule in schedules:
            schedule.step()
        offload.wait()
        assert same_bits(own.parameters(), plain.parameters()), step
        assert done.norm is None or done.norm == reference.report().grad_norm
    assert not same_bits(own.parameters(), model(dtype).parameters())


def test_the_optimizers_own_step_does_the_same():
    own, plain = model(), model()
    (optimizer, offload), reference = offloaded(own), reference_of(plain)
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        loss_of(own, step).backward()
        loss_of(plain, step).backward()
        optimizer.step()
        reference.step()
    offload.wait()
    assert same_bits(own.parameters(), plain.parameters())
    other, whole = offloaded(model(), torch.optim.AdamW)
    with pytest.raises(RuntimeError, match="expected `step` of `Offload`"):
        other.step()


def test_parameters_do_not_change_before_step():
    own = model()
    _, offload = offloaded(own)
    before = bits(own.parameters())
    loss_of(own, 0).backward()
    assert all(bucket.is_handed_over for bucket in offload._buckets)
    assert same_bits(before, own.parameters())
    offload.step()
    offload.wait()
    assert not same_bits(before, own.parameters())


def test_micro_steps_add_up_on_the_device():
    own, plain = model(torch.bfloat16), model(torch.bfloat16)
    (_, offload), reference = offloaded(own), reference_of(plain)
    for step in range(3):
        for micro in range(3):
            loss_of(plain, 3 * step + micro, torch.bfloat16).backward()
            if micro < 2:
                with offload.no_sync():
                    loss_of(own, 3 * step + micro, torch.bfloat16).backward()
                assert all(param.grad is not None for param in own.parameters())
            else:
                loss_of(own, 3 * step + micro, torch.bfloat16).backward()
        offload.step()
        reference.step()
        reference.zero_grad()
        assert all(param.grad is None for param in own.parameters())
        offload.wait()
        assert same_bits(own.parameters(), plain.parameters())
    loss_of(own, 1, torch.bfloat16).backward()
    with pytest.raises(RuntimeError, match="gradient of `.*`: expected `step` before it is used"):
        loss_of(own, 2, torch.bfloat16).backward()
    with pytest.raises(RuntimeError, match="clip by `max_norm=`"):
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)


def test_a_parameter_without_a_gradient_stays():
    own, plain = model(), model()
    (_, offload), reference = offloaded(own, bucket_mib=16.0), reference_of(plain)
    for step in range(3):
        for net in (own, plain):
            first = net[0](gradient((9, 13), torch.float32, step))
            (first**2).mean().backward()
        offload.step()
        reference.step()
        reference.zero_grad()
    offload.wait()
    assert same_bits(own.parameters(), plain.parameters())
    assert torch.equal(own[4].weight, model()[4].weight)
    # Those of micro-steps alone are taken, too.
    with offload.no_sync():
        loss_of(own, 5).backward()
    loss_of(plain, 5).backward()
    offload.step()
    reference.step()
    offload.wait()
    assert same_bits(own.parameters(), plain.parameters())


@pytest.mark.parametrize("scale", ("dynamic", 1024.0))
def test_a_loss_scale_skips_what_is_not_finite(scale):
    own, plain = model(torch.float16), model(torch.float16)
    _, offload = offloaded(own, loss_scale=scale)
    reference = reference_of(plain, loss_scale=scale)
    for step in range(5):
        factor = float("inf") if step == 2 else 1.0
        for net, by in ((own, offload), (plain, reference)):
            (loss_of(net, step, torch.float16) * by.loss_scale() * factor).backward()
        done = offload.step()
        reference.step()
        reference.zero_grad()
        offload.wait()
        assert done.skipped == (step == 2)
        assert same_bits(own.parameters(), plain.parameters())
        assert offload.loss_scale() == reference.loss_scale()
    for wrong in (3.0, "fast", 0.0, True):
        with pytest.raises(ValueError, match="loss_scale: expected \"dynamic\" or a power of two"):
            offloaded(model(), loss_scale=wrong)


@pytest.mark.parametrize("is_model_first", (True, False))
def test_a_checkpoint_goes_on_with_the_same_bits(is_model_first):
    own = model(torch.bfloat16)
    _, offload = offloaded(own, loss_scale="dynamic")

    def train(net, by, steps):
        for step in steps:
            (loss_of(net, step, torch.bfloat16) * by.loss_scale()).backward()
            by.step()
        by.wait()

    train(own, offload, range(3))
    saved = copy.deepcopy((own.state_dict(), offload.state_dict()))
    train(own, offload, range(3, 6))
    again = model(torch.bfloat16, seed=5)
    _, other = offloaded(again, loss_scale="dynamic")
    if is_model_first:
        again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    if not is_model_first:
        again.load_state_dict(saved[0])
    train(again, other, range(3, 6))
    assert same_bits(own.parameters(), again.parameters())
    masters = [[member.master for member in by._members] for by in (offload, other)]
    assert same_bits(*masters)
    bad = {**saved[1], "masters": {**saved[1]["masters"], "0.weight": torch.zeros(3)}}
    with pytest.raises(ValueError, match="master of `0.weight`: expected shape"):
        other.load_state_dict(bad)
    del bad["masters"]["0.weight"]
    with pytest.raises(ValueError, match="masters: expected `0.weight` in the state dict"):
        other.load_state_dict(bad)


def test_values_that_the_program_writes_are_the_masters_from_then_on():
    own, plain = model(torch.bfloat16), model(torch.bfloat16)
    _, offload = offloaded(own)
    for net in (own, plain):
        with torch.no_grad():
            net[0].weight.mul_(0.5)
    reference = reference_of(plain)
    for step in range(3):
        for net, by in ((own, offload), (plain, reference)):
            loss_of(net, step, torch.bfloat16).backward()
            by.step()
        reference.zero_grad()
    offload.wait()
    assert same_bits(own.parameters(), plain.parameters())


def test_gradients_are_dropped_until_they_are_stepped():
    own, plain = model(), model()
    (_, early), (_, late) = offloaded(own), offloaded(plain, max_norm=1e9)
    loss_of(own, 0).backward()
    with pytest.raises(RuntimeError, match="zero_grad: expected `step` first"):
        early.zero_grad()
    with pytest.raises(RuntimeError, match="state_dict: expected `step` first"):
        early.state_dict()
    early.step()
    loss_of(plain, 7).backward()
    late.zero_grad()
    loss_of(plain, 0).backward()
    late.step()
    for by in (early, late):
        by.wait()
    assert same_bits(own.parameters(), plain.parameters())


def test_gradients_that_the_program_drops_or_puts_in_are_heeded():
    own, plain = model(), model()
    (_, late), reference = offloaded(own, max_norm=1e9), reference_of(plain)
    for net, by in ((own, late), (plain, reference)):
        loss_of(net, 0).backward()
        net[0].weight.grad = None
        net[2].weight.grad = torch.ones(40, 40)
        by.step()
    late.wait()
    assert same_bits(own.parameters(), plain.parameters())
    assert torch.equal(own[0].weight, model()[0].weight)
    net = model()
    _, early = offloaded(net)
    loss_of(net, 0).backward()
    net.zero_grad()
    with pytest.raises(RuntimeError, match="expected the one that backward has stepped with, found"):
        early.step()
    penalised = model()
    offloaded(penalised)
    with pytest.raises(RuntimeError, match="found `create_graph=True`"):
        loss_of(penalised, 0).backward(create_graph=True)


def test_settings_that_change_behind_backward_are_refused():
    own = model()
    optimizer, offload = offloaded(own)
    loss_of(own, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="lr of group 0: expected 0.01, with which backward"):
        offload.step()
    optimizer.param_groups[0]["lr"] = 0.01
    offload.step()


def test_models_and_optimizers_that_do_not_fit_are_named():
    net = model()
    with pytest.raises(ValueError, match="parameter `0.0`: expected one of the model's"):
        Offload(net, CPUAdam(model().parameters()))
    with pytest.raises(TypeError, match="optimizer: expected one of PyTorch's kind, found str"):
        Offload(net, "adam")
    with pytest.raises(ValueError, match="bucket_mib"):
        offloaded(net, bucket_mib=0)
    optimizer, _ = offloaded(net)
    with pytest.raises(ValueError, match="found one that has it"):
        Offload(net, optimizer)
    stepped = model()
    used = CPUAdam(stepped.parameters())
    loss_of(stepped, 0).backward()
    used.step()
    stepped.zero_grad()
    with pytest.raises(ValueError, match="expected one that has taken no step"):
        Offload(stepped, used)
    frozen = model()
    frozen[0].requires_grad_(False)
    optimizer, offload = offloaded(frozen)
    loss_of(frozen, 0).backward()
    offload.step()
    frozen[0].requires_grad_(True)
    loss_of(frozen, 1).backward()
    with pytest.raises(RuntimeError, match="parameter `0.0`: expected no gradient"):
        offload.step()


def test_what_is_removed_goes_on_without():
    own, plain = model(), model()
    optimizer, offload = offloaded(own)
    reference = reference_of(plain)
    for step in range(4):
        loss_of(own, step).backward()
        loss_of(plain, step).backward()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
        if step == 1:
            offload.remove()
    assert same_bits(own.parameters(), plain.parameters())


def test_a_model_without_parts_waits_before_its_forward_pass():
    class Alone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(gradient((40_000,), torch.float32, 1))

        def forward(self, inputs):
            return (self.weight * inputs).sum()

    own, plain = Alone(), Alone()
    (_, offload), reference = offloaded(own), reference_of(plain)
    for step in range(5):
        own(gradient((40_000,), torch.float32, step)).backward()
        plain(gradient((40_000,), torch.float32, step)).backward()
        offload.step()
        reference.step()
        reference.zero_grad()
        assert offload._is_sent
        own(torch.ones(40_000))
        assert not offload._is_sent
        assert same_bits(own.parameters(), plain.parameters())


def test_a_compiled_model_waits_before_its_forward_pass():
    own, plain = model(), model()
    (_, offload), reference = offloaded(own), reference_of(plain)
    compiled = torch.compile(own, backend="eager")
    for step in range(3):
        loss_of(compiled, step).backward()
        loss_of(plain, step).backward()
        offload.step()
        reference.step()
        reference.zero_grad()
    offload.wait()
    assert same_bits(own.parameters(), plain.parameters())


class Recorded:
    """A device that is late: copies up are made when somebody joins their mark."""

    def __init__(self):
        self.log, self.later, self.plain = [], [], _model.transfers_of(torch.device("cpu"))

    def room(self, like, dtype):
        return self.plain.room(like, dtype)

    def down(self, source, to):
        self.log.append("down")
        to.copy_(source)

    def mark_down(self):
        return ("down", self.log.count("down"))

    def wait(self, mark):
        kind, count = mark
        assert kind == "down" or not self.later[:count], "a copy is waited for behind its join"

    def fence(self):
        self.log.append("fence")
        return "fence"

    def up(self, source, to, behind):
        assert behind == "fence"
        self.log.append("up")
        self.later.append((source, to))

    def mark_up(self):
        return ("up", len(self.later))

    def join(self, mark):
        self.log.append("join")
        for source, to in self.later[: mark[1]]:
            to.copy_(source)
        self.later = self.later[mark[1] :] if len(self.later) > mark[1] else []


class Stream:
    """A stream of CUDA's kind: it notes what is asked of it, and copies are made at once."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.text}")


def on_streams(monkeypatch, log):
    """`CudaTransfers` on the CPU, with streams and events that note their calls."""
    names = iter(("down", "up"))
    current = [Stream(log, "main")]

    class Event:
        def record(self, stream):
            self.text = f"a mark of {stream.name}"
            log.append(f"{self.text} is made")

        def synchronize(self):
            log.append(f"the host waits for {self.text}")

    @contextlib.contextmanager
    def entered(stream):
        current.append(stream)
        yield
        current.pop()

    plain = torch.empty_strided

    def pinned(*arguments, pin_memory=False, **how):
        log.append("pinned" if pin_memory else "pageable")
        return plain(*arguments, **how)

    for name, value in {
        "Stream": lambda device: Stream(log, next(names)),
        "Event": Event,
        "stream": entered,
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda device: current[-1],
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty_strided", pinned)
    noted = lambda tensor, stream: log.append(f"memory is kept for {stream.name}")  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", noted)
    return CudaTransfers(torch.device("cpu"))


def test_streams_of_a_device_wait_for_each_other(monkeypatch):
    log = []
    transfers = on_streams(monkeypatch, log)
    grad, here, there = torch.ones(3), transfers.room(torch.empty(3), torch.float32), torch.zeros(3)
    assert log == ["pinned"]
    log.clear()
    transfers.down(grad, here)
    transfers.wait(transfers.mark_down())
    transfers.up(here, there, transfers.fence())
    transfers.join(transfers.mark_up())
    assert torch.equal(there, grad)
    assert log == [
        "down waits for main",
        "memory is kept for down",
        "a mark of down is made",
        "the host waits for a mark of down",
        "a mark of main is made",
        "up waits for a mark of main",
        "a mark of up is made",
        "main waits for a mark of up",
    ]


@pytest.mark.parametrize("max_norm", (None, 0.05))
def test_a_model_steps_on_streams_with_the_same_bits(monkeypatch, max_norm):
    own, plain = model(torch.bfloat16), model(torch.bfloat16)
    log = []
    device = on_streams(monkeypatch, log)
    monkeypatch.setattr(_model, "transfers_of", lambda _: device)
    (_, offload), reference = offloaded(own, max_norm=max_norm), None
    monkeypatch.undo()
    reference = reference_of(plain, clip_norm=max_norm)
    for step in range(3):
        with monkeypatch.context() as patch:
            offload._transfers = on_streams(patch, log)
            loss_of(own, step, torch.bfloat16).backward()
            offload.step()
            offload.wait()
        loss_of(plain, step, torch.bfloat16).backward()
        reference.step()
        reference.zero_grad()
        assert same_bits(own.parameters(), plain.parameters())
    assert log.count("main waits for a mark of up") >= 3 * len(offload._buckets)


def test_copies_go_down_in_backward_and_up_behind_step_and_forward_waits(monkeypatch):
    device = Recorded()
    monkeypatch.setattr(_model, "transfers_of", lambda _: device)
    own, plain = model(torch.bfloat16), model(torch.bfloat16)
    (_, offload), reference = offloaded(own), reference_of(plain)
    count = len(offload._members)
    for step in range(3):
        device.log.clear()
        loss = loss_of(own, step, torch.bfloat16)
        # The forward pass has joined what the step before has sent.
        assert not device.later
        device.log.clear()
        loss.backward()
        assert device.log == ["down"] * count
        old = bits(own.parameters())
        offload.step()
        assert device.log[count] == "fence"
        for bucket in offload._buckets:
            bucket.work.result()
        assert device.log[count + 1 :] == ["up"] * count
        # The device is late, and nobody has waited for it.
        assert same_bits(old, own.parameters())
        loss_of(plain, step, torch.bfloat16).backward()
        reference.step()
        reference.zero_grad()
    offload.wait()
    assert same_bits(own.parameters(), plain.parameters())
