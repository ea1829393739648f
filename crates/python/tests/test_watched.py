"""Who looks at a step: hooks, profilers, and settings that are read only when they change."""

import pytest
import torch
from torch.nn import Parameter
from torch.optim import optimizer as pytorch

import fusestep.torch


def made(kind=None, **settings):
    own = Parameter(torch.ones(4))
    own.grad = torch.ones(4)
    return (kind or fusestep.torch.SGD)([own], lr=0.5, **settings), own


def test_a_step_that_nobody_looks_at_is_not_recorded(monkeypatch):
    optimizer, own = made()
    optimizer.step()
    recorded = []
    record = torch.autograd.profiler.record_function

    def counting(name):
        recorded.append(name)
        return record(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", counting)
    optimizer.step()
    assert recorded == []
    optimizer.register_step_post_hook(lambda *_: None)
    optimizer.step()
    assert recorded == ["Optimizer.step#SGD.step"]
    assert torch.equal(own, torch.full((4,), -0.5))


def test_a_profiler_sees_the_step():
    optimizer, _ = made()
    optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}


def test_hooks_of_one_and_of_all_optimizers_are_called_in_order():
    optimizer, _ = made()
    optimizer.step()
    seen = []
    handles = [
        pytorch.register_optimizer_step_pre_hook(lambda *_: seen.append("all before")),
        pytorch.register_optimizer_step_post_hook(lambda *_: seen.append("all after")),
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    for handle in handles:
        optimizer.step()
        handle.remove()
    optimizer.step()
    assert seen[:4] == ["all before", "before", "after", "all after"]
    assert seen[4:] == ["before", "after", "all after", "before", "after", "after"]


def test_a_subclass_with_a_step_of_its_own_has_its_hooks_called_as_by_pytorch():
    def calls(base):
        class Plain(base):
            """Its step is the one that it has from here."""

        class Own(Plain):
            def step(self, closure=None):
                return super().step(closure)

        # PyTorch wraps the step of a class with its first optimizer, whoever makes that.
        made(base)
        optimizer, _ = made(Own)
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        optimizer.step()
        return len(seen)

    assert calls(fusestep.torch.SGD) == calls(torch.optim.SGD)


def test_settings_are_read_when_they_have_changed(monkeypatch):
    optimizer, _ = made(fusestep.torch.AdamW)
    read = []
    settings = type(optimizer)._settings

    def counting(self, group):
        read.append(group["lr"])
        return settings(self, group)

    monkeypatch.setattr(type(optimizer), "_settings", counting)
    optimizer.step()
    read.clear()
    optimizer.step()
    optimizer.step()
    assert read == []
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    optimizer.step()
    assert read == [0.25]


@pytest.mark.parametrize("change", ["lr", "tensor", "betas", "refused"])
def test_every_change_of_a_setting_is_seen(change):
    ours, own = made(fusestep.torch.AdamW)
    theirs, other = made(torch.optim.AdamW)
    for each in (ours, theirs):
        group = each.param_groups[0]
        if change == "tensor":
            group["lr"] = torch.tensor(0.5)
        group["betas"] = [0.5, 0.75] if change == "betas" else (0.5, 0.75)
        each.step()
        each.step()
        if change == "lr":
            group["lr"] = 0.125
        elif change == "tensor":
            group["lr"].fill_(0.125)
        elif change == "betas":
            group["betas"][0] = 0.25
        elif each is ours:
            before = group["lr"]
            group["lr"] = -1.0
            with pytest.raises(ValueError, match="lr"):
                each.step()
            group["lr"] = before
        each.step()
    torch.testing.assert_close(own, other)
