"""State that is loaded is whole, or nothing is changed."""

import copy

import pytest
import torch
from support import OURS_OF, OWN, give_gradients, largest_difference, parameters, twins

import fusestep.torch

SHAPES = [(3, 4), (7,), ()]
OURS = [*OURS_OF, *OWN]
SETTINGS = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "AdamW": {"amsgrad": True},
}


def make(name, params, module=fusestep.torch, **settings):
    return getattr(module, name)(params, lr=0.05, **{**SETTINGS.get(name, {}), **settings})


def stepped(name, params, module=fusestep.torch, steps=3, **settings):
    optimizer = make(name, params, module, **settings)
    for step in range(steps):
        give_gradients(params, step, come_and_go=False)
        optimizer.step()
    return optimizer


def whole(optimizer):
    """All that loading may change."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    state = [copy.deepcopy(dict(optimizer.state.get(p, {}))) for p in params]
    return copy.deepcopy(groups), state, [p.detach().clone() for p in params]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def refused(optimizer, saved, match):
    """That a state dict is refused, and that the next step is as without."""
    before = whole(optimizer)
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)
    assert same(before, whole(optimizer))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    give_gradients(params, 9)
    optimizer.step()


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("other", OURS)
def test_state_of_another_rule_is_refused(name, other):
    saved = stepped(other, parameters(shapes=SHAPES)).state_dict()
    optimizer = stepped(name, parameters(shapes=SHAPES))
    if {name, other} <= {"Adam", "AdamW"}:
        # One rule with two kinds of decay, which groups say; PyTorch takes it.
        saved["param_groups"][0]["amsgrad"] = False
        optimizer.load_state_dict(saved)
    elif name != other:
        # Groups of Adamax have all that Lion's have; its state has more.
        said = r"param_groups\[0\]: expected .* settings|the settings of|expected that of Lion"
        refused(optimizer, saved, said)


def change(saved, of):
    of(saved["state"][0], saved["param_groups"][0])
    return saved


def tensor(key, value):
    return lambda state, group: state.update({key: value})


def setting(key, value):
    return lambda state, group: group.update({key: value})


PART = {
    "no count": (lambda s, g: s.pop("step"), "step of `0.0`: expected a count"),
    "no moment": (lambda s, g: s.pop("exp_avg"), "exp_avg of `0.0`: expected a tensor.*3 times"),
    "no maximum": (lambda s, g: s.pop("max_exp_avg_sq"), "max_exp_avg_sq of `0.0`: expected"),
    "a moment that is none": (tensor("exp_avg_sq", None), "exp_avg_sq of `0.0`: expected a tensor"),
    "a count alone": (lambda s, g: [s.pop(k) for k in list(s) if k != "step"], "exp_avg of `0.0`"),
    "moments at step 0": (tensor("step", 0), "expected zeros, because `step` is 0"),
    "a broken count": (tensor("step", 2.5), "step of `0.0`: expected .* whole .*found 2.5"),
    "a count below 0": (tensor("step", -1.0), "found -1.0"),
    "a count of True": (tensor("step", True), "step of `0.0`.*found bool"),
    "an endless count": (tensor("step", float("inf")), "found inf"),
    "whole numbers": (tensor("exp_avg", torch.ones(3, 4).byte()), "found one of torch.uint8"),
    "truth values": (tensor("exp_avg", torch.ones(3, 4) > 0), "found one of torch.bool"),
    "no values": (tensor("exp_avg", torch.ones(3, 4, device="meta")), "exp_avg of `0.0`: expected"),
    "another shape": (tensor("exp_avg", torch.ones(4, 3)), r"shape \(3, 4\), found"),
    "of bitsandbytes": (
        lambda s, g: (s.clear(), s.update(step=3, state1=torch.ones(3, 4), state2=torch.ones(3))),
        "expected that of AdamW .*found state1, state2",
    ),
    "of Apex": (lambda s, g: (s.pop("step"), g.update(step=3)), r"found step=3"),
    "a master": (tensor("master", torch.ones(3, 4)), "make it with `master_weights=True`"),
    "no correction": (setting("bias_correction", False), "found bias_correction=False"),
    "momentum": (setting("momentum", 0.9), "found momentum=0.9"),
    "nesterov": (setting("nesterov", True), "found nesterov=True"),
    "no betas": (lambda s, g: g.pop("betas"), "settings of AdamW, found none for betas"),
    "no amsgrad, as RAdam": (lambda s, g: g.pop("amsgrad"), "found none for amsgrad"),
    "a rate in words": (setting("lr", "fast"), r"param_groups\[0\]: expected settings of AdamW"),
    "a rate of True": (setting("lr", True), "lr: expected a number, found True"),
    "a rate below 0": (setting("lr", -0.1), r"param_groups\[0\]"),
    "capturable": (setting("capturable", True), "capturable=False"),
    "a norm in a tensor": (setting("max_grad_norm", torch.ones(2)), "found max_grad_norm=tensor"),
    "rates": (setting("lr", torch.ones(2)), r"param_groups\[0\]: expected settings of AdamW"),
    "captured": (setting("capturable", torch.ones(2)), "expected capturable=False"),
    "params that are none": (setting("params", 5), "expected `params`, a list of indexes, found 5"),
    "params of lists": (setting("params", [[0], 1, 2]), "expected `params`, a list of indexes"),
    "params of tuples": (setting("params", [([],), 1, 2]), "expected `params`, a list of indexes"),
    "names that are none": (setting("param_names", 5), "expected `param_names`, a list of 3 names"),
    "too few names": (setting("param_names", ["a"]), "a list of 3 names, found"),
    "one beta": (setting("betas", (0.9,)), r"param_groups\[0\]"),
}


@pytest.mark.parametrize("part", PART)
def test_state_in_part_is_refused(part):
    of, match = PART[part]
    saved = change(stepped("AdamW", parameters(shapes=SHAPES)).state_dict(), of)
    refused(stepped("AdamW", parameters(shapes=SHAPES)), saved, match)


@pytest.mark.parametrize("key", ["0", 3, None, "0.0"])
def test_state_under_a_key_that_is_no_index_is_refused(key):
    saved = stepped("AdamW", parameters(shapes=SHAPES)).state_dict()
    saved["state"][key] = saved["state"].pop(0)
    match = rf"state: expected the indexes of the groups as keys \(0, 1, 2 .*found {key!r}"
    refused(stepped("AdamW", parameters(shapes=SHAPES)), saved, match)


def test_state_that_the_owner_has_under_a_key_stays():
    optimizer = stepped("AdamW", parameters(shapes=SHAPES))
    optimizer.state["mine"] = {"seen": 3}
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state["mine"] == {"seen": 3}


@pytest.mark.parametrize("saved", [{}, [], {"state": {}}, {"param_groups": 3}], ids=str)
def test_what_is_no_state_dict_is_refused(saved):
    optimizer = stepped("AdamW", parameters(shapes=SHAPES))
    before = whole(optimizer)
    with pytest.raises(ValueError, match="expected"):
        optimizer.load_state_dict(saved)
    assert same(before, whole(optimizer))


@pytest.mark.parametrize("key", ["bias_correction", "name", "initial_lr", "lr_scale"])
def test_settings_that_change_nothing_are_taken(key):
    saved = stepped("AdamW", parameters(shapes=SHAPES)).state_dict()
    saved["param_groups"][0][key] = True
    optimizer = make("AdamW", parameters(shapes=SHAPES))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0][key] is True


OWN = {"rho": 0.05, "k": 3, "d": torch.ones(2), "r": 1, "step": 7, "trust_ratio": True}


@pytest.mark.parametrize("key", [*OWN, "max_grad_norm", "momentum"])
def test_a_key_of_ones_own_in_a_group_is_kept(key):
    value = OWN.get(key, 1.5)
    optimizer = stepped("AdamW", parameters(shapes=SHAPES))
    optimizer.param_groups[0][key] = value
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert same(optimizer.param_groups[0][key], value)
    # Not in one that knows nothing of it, or has another value.
    refused(stepped("AdamW", parameters(shapes=SHAPES)), saved, f"found {key}=")
    optimizer.param_groups[0][key] = 0.25
    refused(optimizer, saved, f"found {key}=.*own group has 0.25")


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize("flag", ["maximize", "amsgrad", "nesterov"])
def test_flags_of_a_loaded_group_are_heeded(name, flag):
    """As PyTorch's own class goes on with them."""
    ours, theirs = twins(shapes=SHAPES)
    for module, params in ((fusestep.torch, ours), (torch.optim, theirs)):
        optimizer = stepped(name, params, module)
        if flag not in optimizer.param_groups[0]:
            pytest.skip("another rule's")
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0][flag] = True
        fresh = make(name, params, module)
        fresh.load_state_dict(saved)
        for step in range(3, 6):
            give_gradients(params, step)
            fresh.step()
    assert largest_difference(ours, theirs) < 4e-6


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_state_that_is_lost_between_steps_is_not_made_of_zeros(key):
    params = parameters(shapes=SHAPES)
    optimizer = stepped("AdamW", params)
    optimizer.state[params[1]].pop(key)
    before = whole(optimizer)
    with pytest.raises(ValueError, match=rf"{key} of `0\.1`: expected a tensor.*3 times"):
        optimizer.step()
    assert same(before, whole(optimizer))
    optimizer.state[params[1]].pop("step")
    with pytest.raises(ValueError, match=r"step of `0\.1`: expected a count of steps beside"):
        optimizer.step()
    optimizer.state.pop(params[1])
    optimizer.step()
    assert float(optimizer.state[params[1]]["step"]) == 1


class Package:
    """Runs of `schedulefree.AdamWScheduleFree` and of ours on the same gradients."""

    def __init__(self, **settings):
        self.schedulefree = pytest.importorskip("schedulefree")
        self.theirs, self.ours = twins(torch.float64, shapes=SHAPES)
        self.package = self.schedulefree.AdamWScheduleFree(self.theirs, **settings)
        self.package.train()
        self.settings = settings

    def step(self, optimizer, params, steps, **given):
        for step in range(*steps):
            give_gradients(params, step, **given)
            optimizer.step()

    def load(self, **settings):
        with torch.no_grad():
            for ours, theirs in zip(self.ours, self.theirs):
                ours.copy_(theirs)
        optimizer = fusestep.torch.ScheduleFreeAdamW(self.ours, **settings)
        optimizer.load_state_dict(copy.deepcopy(self.package.state_dict()))
        return optimizer

    def difference(self):
        return largest_difference(self.ours, self.theirs)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("steps", [0, 1, 3, 9])
@pytest.mark.parametrize("warmup", [0, 4])
def test_a_state_of_schedulefree_is_gone_on_from(mode, steps, warmup):
    run = Package(lr=0.02, weight_decay=0.1, warmup_steps=warmup, betas=(0.8, 0.99))
    # One of them has its first gradient behind the others.
    late = [run.theirs[0], run.theirs[2]]
    run.step(run.package, late, (0, steps), come_and_go=False)
    getattr(run.package, mode)()
    optimizer = run.load()
    if mode == "eval":
        with pytest.raises(RuntimeError, match="train"):
            optimizer.step()
    run.package.train()
    optimizer.train()
    assert run.difference() < 1e-12
    run.step(run.package, run.theirs, (steps, steps + 6), come_and_go=False)
    run.step(optimizer, run.ours, (steps, steps + 6), come_and_go=False)
    assert run.difference() < 1e-12
    run.package.eval()
    optimizer.eval()
    assert run.difference() < 1e-12


@pytest.mark.parametrize("again", [False, True])
def test_a_state_of_schedulefree_may_be_loaded_before_the_model(again):
    """What has no gradient yet begins where it is at its first."""
    run = Package(lr=0.02, betas=(0.8, 0.99))
    run.step(run.package, run.theirs[:2], (0, 3), come_and_go=False)
    optimizer = fusestep.torch.ScheduleFreeAdamW(run.ours)
    with torch.no_grad():
        for param in run.ours:
            param.fill_(9.0)
    optimizer.load_state_dict(copy.deepcopy(run.package.state_dict()))
    if again:
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = fusestep.torch.ScheduleFreeAdamW(run.ours)
        optimizer.load_state_dict(saved)
    with torch.no_grad():
        for ours, theirs in zip(run.ours, run.theirs):
            ours.copy_(theirs)
    for made in (run.package, optimizer):
        params = run.ours if made is optimizer else run.theirs
        run.step(made, params, (3, 8), come_and_go=False)
    assert run.difference() < 1e-12
    assert [float(optimizer.state[param]["step"]) for param in run.ours] == [8.0] * len(run.ours)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("weight_sum", None, "expected weight_sum, a number, found None"),
        ("weight_sum", float("nan"), "expected weight_sum, a number, found nan"),
        ("lr", "fast", "expected lr, a number, found 'fast'"),
        ("r", torch.ones(2), "expected r, a number, found tensor"),
        ("warmup_steps", float("inf"), "expected warmup_steps, a number, found inf"),
        ("k", 2**60, "expected k, a count of steps"),
    ],
)
def test_books_of_schedulefree_that_are_no_numbers_are_refused(key, value, match):
    run = Package(lr=0.02)
    run.package.add_param_group({"params": parameters(torch.float64, shapes=[(2,)])})
    run.step(run.package, run.theirs, (0, 3), come_and_go=False)
    saved = run.package.state_dict()
    if value is None:
        del saved["param_groups"][1][key]
    else:
        saved["param_groups"][1][key] = value
    refused(stepped("ScheduleFreeAdamW", run.ours), saved, rf"param_groups\[1\]: {match}")


def test_a_count_to_begin_at_is_one():
    optimizer = stepped("ScheduleFreeAdamW", parameters(shapes=SHAPES))
    for count in (-1, 2.5, True, "3"):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["begins_at"] = count
        refused(optimizer, saved, r"param_groups\[0\].*begins_at: expected a count of steps")


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"r": 1.0}, "expected r=0.*found r=1.0"), ({"weight_lr_power": 1.0}, "weight_lr_power=2")],
)
def test_averages_of_other_weights_are_refused(settings, match):
    run = Package(lr=0.02, **settings)
    run.step(run.package, run.theirs, (0, 3))
    optimizer = stepped("ScheduleFreeAdamW", run.ours)
    refused(optimizer, run.package.state_dict(), match)


def test_averages_of_a_rate_that_has_changed_are_refused():
    run = Package(lr=0.02)
    run.step(run.package, run.theirs, (0, 3))
    run.package.param_groups[0]["lr"] = 0.01
    run.step(run.package, run.theirs, (3, 4))
    refused(stepped("ScheduleFreeAdamW", run.ours), run.package.state_dict(), "weight_sum")


@pytest.mark.parametrize(
    "name", ["SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeClosure"]
)
def test_other_classes_of_schedulefree_are_refused(name):
    run = Package(lr=0.02)
    other = getattr(run.schedulefree, name)(run.theirs, lr=0.02)
    if hasattr(other, "train"):
        other.train()
        run.step(other, run.theirs, (0, 3))
    refused(stepped("ScheduleFreeAdamW", run.ours), other.state_dict(), r"param_groups\[0\]")
    refused(stepped("AdamW", run.ours), other.state_dict(), r"param_groups\[0\]")


@pytest.mark.parametrize("name", ["RAdam", "Adadelta", "ASGD", "Rprop", "Muon"])
@pytest.mark.parametrize("ours", OURS)
def test_pytorchs_other_classes_are_refused(name, ours):
    params = [p for p in parameters(shapes=[(3, 4), (2, 5)])]
    other = getattr(torch.optim, name)(params, lr=0.05)
    give_gradients(params, 0, come_and_go=False)
    other.step()
    refused(stepped(ours, parameters(shapes=[(3, 4), (2, 5)])), other.state_dict(), "expected")


@pytest.mark.parametrize("name", OURS)
def test_what_is_loaded_is_no_longer_the_state_dicts(name):
    """Both optimizers go on, each by its own count."""
    first, second = twins(shapes=SHAPES)
    one = stepped(name, first)
    stepped(name, second)
    other = make(name, second)
    other.load_state_dict(one.state_dict())
    for optimizer, params in ((one, first), (other, second)):
        give_gradients(params, 7)
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second))
