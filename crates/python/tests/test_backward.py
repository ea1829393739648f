"""The step inside of ``backward``."""

import copy
import gc

import pytest
import torch
from support import OURS_OF, OWN, bits, parameters, same_bits

import fusestep.torch
from fusestep.torch._taken import Taken

NAMES = [*OURS_OF, *OWN]


class Net(torch.nn.Module):
    """Layers of about one size, one of them used twice, and one that is used now and then."""

    def __init__(self, width=32, depth=24):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.rare = torch.nn.Linear(width, width)
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, x, rare=False):
        for layer in self.layers:
            x = self.norm(x + torch.relu(layer(x)))
        x = self.layers[3](x)
        return self.rare(x) if rare else x


def is_freed(param):
    return param.grad is None or isinstance(param.grad, Taken)


def make(name, model, **settings):
    if name == "SGD":
        settings = {"lr": 0.01, "momentum": 0.9, **settings}
    return getattr(fusestep.torch, name)(model.parameters(), **settings)


def run(model, optimizer, steps, scheduler=None):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        x = torch.randn(8, 32, generator=generator)
        loss = (model(x, rare=step % 3 == 1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return loss


@pytest.mark.parametrize("name", NAMES)
def test_bits_are_as_without(name):
    models = [Net(), Net()]
    optimizers = [make(name, model) for model in models]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
    fusestep.torch.fuse_backward(models[0], optimizers[0])
    for pair in zip(models, optimizers, schedulers):
        run(pair[0], pair[1], 7, pair[2])
    assert same_bits(models[0].parameters(), models[1].parameters())
    assert not same_bits(models[0].parameters(), Net().parameters())
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for index, values in states[1].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[0][index][key]))
    reports = [optimizer.report() for optimizer in optimizers]
    assert reports[0].elements == reports[1].elements > 0
    assert reports[0].without_gradient == reports[1].without_gradient


def test_gradients_need_a_tenth_of_the_model():
    model = Net(width=64, depth=48)
    optimizer = make("AdamW", model)
    fused = fusestep.torch.fuse_backward(model, optimizer)
    model_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    seen = []

    def look(_):
        grads = [p.grad for p in model.parameters() if not is_freed(p)]
        seen.append(sum(g.numel() * g.element_size() for g in grads))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(look)
    for step in range(4):
        model(torch.randn(8, 64), rare=True).square().mean().backward()
        if step > 0:
            # From the second step on buckets follow the order seen.
            assert max(seen) <= model_bytes / 10, (max(seen), model_bytes)
        seen.clear()
        assert all(is_freed(p) for p in model.parameters())
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
    assert fused.peak_gradient_bytes > 0


def test_parameters_change_during_backward_and_not_in_step():
    model = Net()
    optimizer = make("AdamW", model)
    fusestep.torch.fuse_backward(model, optimizer)
    before = bits(model.parameters())
    model(torch.randn(8, 32), rare=True).square().mean().backward()
    after = bits(model.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, after))
    optimizer.step()
    assert same_bits(after, model.parameters())


def test_a_second_pass_before_step_is_refused():
    model = Net()
    optimizer = make("AdamW", model)
    fusestep.torch.fuse_backward(model, optimizer)
    x = torch.randn(8, 32)
    model(x, rare=True).square().mean().backward()
    before = bits(model.parameters())
    with pytest.raises(RuntimeError, match="two backward passes"):
        model(x, rare=True).square().mean().backward()
    assert same_bits(before, model.parameters())


def test_removed_it_is_as_without():
    models = [Net(), Net()]
    optimizers = [make("AdamW", model) for model in models]
    fused = fusestep.torch.fuse_backward(models[0], optimizers[0])
    with pytest.raises(ValueError, match="remove"):
        fusestep.torch.fuse_backward(models[0], optimizers[0])
    run(models[0], optimizers[0], 2)
    fused.remove()
    models[0](torch.randn(8, 32)).sum().backward()
    assert any(p.grad is not None for p in models[0].parameters())
    run(models[0], optimizers[0], 3)
    run(models[1], optimizers[1], 2)
    run(models[1], optimizers[1], 3)
    assert same_bits(models[0].parameters(), models[1].parameters())


def test_state_dicts_groups_and_frozen_layers_in_between():
    models = [Net(), Net()]
    optimizers = [
        fusestep.torch.AdamW([p for n, p in m.named_parameters() if "rare" not in n])
        for m in models
    ]
    fusestep.torch.fuse_backward(models[0], optimizers[0])
    for model, optimizer in zip(models, optimizers):
        run(model, optimizer, 2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        run(model, optimizer, 2)
        optimizer.add_param_group({"params": list(model.rare.parameters()), "lr": 0.1})
        model.layers[5].requires_grad_(False)
        run(model, optimizer, 3)
        model.layers[5].requires_grad_(True)
        run(model, optimizer, 3)
    assert same_bits(models[0].parameters(), models[1].parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_master_weights_and_dtypes(dtype):
    results = []
    for fuse in (True, False):
        model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
        with torch.no_grad():
            for p, value in zip(model.parameters(), parameters(shapes=[(16, 16), (16,)] * 4)):
                p.copy_(value * 0.1)
        model = model.to(dtype)
        optimizer = make("AdamW", model, master_weights=True)
        if fuse:
            fusestep.torch.fuse_backward(model, optimizer, bucket_mib=0.001)
        for step in range(4):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(bits(model.parameters()))
    assert same_bits(*results)


def test_what_needs_all_gradients_is_refused():
    model = Net()
    for option in ({"clip_norm": 1.0}, {"loss_scale": 2.0}, {"accumulate": 2}):
        with pytest.raises(ValueError, match=next(iter(option))):
            fusestep.torch.fuse_backward(model, make("AdamW", model, **option))
    with pytest.raises(TypeError, match="SGD"):
        fusestep.torch.fuse_backward(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="none of them"):
        fusestep.torch.fuse_backward(Net(), make("AdamW", model))
    with pytest.raises(ValueError, match="bucket_mib"):
        fusestep.torch.fuse_backward(model, make("AdamW", model), bucket_mib=0)


def test_averages_in_place_are_refused_in_backward():
    model = Net()
    optimizer = make("ScheduleFreeAdamW", model)
    fusestep.torch.fuse_backward(model, optimizer)
    run(model, optimizer, 2)
    optimizer.eval()
    before = bits(model.parameters())
    with pytest.raises(RuntimeError, match="train"):
        model(torch.randn(8, 32)).sum().backward()
    assert same_bits(before, model.parameters())


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_a_parameter_that_trains_later_is_updated_in_backward(added, alone):
    """Frozen or in no group when `fuse_backward` was called; alone if all others freeze then."""
    models = [Net(), Net()]
    for fuse, model in zip((True, False), models):
        thawed = model.layers[5]
        late = {id(p) for p in thawed.parameters()} if added else set()
        first = [p for p in model.parameters() if id(p) not in late]
        thawed.requires_grad_(added)
        optimizer = fusestep.torch.AdamW(first)
        if fuse:
            fusestep.torch.fuse_backward(model, optimizer)
        run(model, optimizer, 2)
        if alone:
            model.requires_grad_(False)
        if added:
            optimizer.add_param_group({"params": list(thawed.parameters())})
        thawed.requires_grad_(True)
        run(model, optimizer, 3)
        optimizer.zero_grad()
        before = bits(thawed.parameters())
        model(torch.ones(8, 32)).sum().backward()
        if fuse:
            assert all(is_freed(p) for p in thawed.parameters())
            assert not same_bits(before, thawed.parameters())
        optimizer.step()
    assert same_bits(models[0].parameters(), models[1].parameters())


def test_a_grad_scaler_is_refused():
    model = Net()
    optimizer = make("AdamW", model)
    fused = fusestep.torch.fuse_backward(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in (scaler.step, lambda o: (scaler.unscale_(o), scaler.step(o))):
        scaler.scale(model(torch.ones(8, 32)).sum()).backward()
        with pytest.raises(RuntimeError, match="fuse_backward.*GradScaler"):
            step(optimizer)
        optimizer.step()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    fused.remove()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(8, 32)).sum()).backward()
    scaler.step(optimizer)


def test_objects_are_looked_through_once_for_all_orders_of_gradients(monkeypatch):
    looks, objects = [], gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda *given: looks.append(given) or objects(*given))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
    late = torch.nn.Linear(4, 4)
    model = torch.nn.ModuleList([*layers, late])
    optimizer = fusestep.torch.AdamW(layers.parameters())
    fused = fusestep.torch.fuse_backward(model, optimizer)
    orders = set()
    for step in range(6):
        order = list(layers)[:: 1 if step % 2 else -1]
        sum(layer(torch.ones(2, 4)).sum() for layer in order).backward()
        optimizer.step()
        orders.add(tuple(map(id, fused._order)))
    assert len(orders) == 2, "buckets are cut anew at each step"
    # When it was made, and at the first gradient.
    assert len(looks) == 2
    optimizer.add_param_group({"params": list(late.parameters())})
    sum(layer(torch.ones(2, 4)).sum() for layer in model).backward()
    assert len(looks) == 3, "once more for others"


def test_settings_are_read_of_the_groups_that_are_updated(monkeypatch):
    layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(20))
    groups = [{"params": list(layer.parameters())} for layer in layers]
    optimizer = fusestep.torch.AdamW(groups)
    fusestep.torch.fuse_backward(layers, optimizer, bucket_mib=1e-5)
    read, settings = [], optimizer._settings
    for _ in range(3):
        sum(layer(torch.ones(2, 4)).sum() for layer in layers).backward()
        optimizer.step()
    monkeypatch.setattr(optimizer, "_settings", lambda group: read.append(1) or settings(group))
    sum(layer(torch.ones(2, 4)).sum() for layer in layers).backward()
    optimizer.step()
    # Those of 40 buckets of one group each, and of all groups by the step.
    assert 40 <= len(read) <= 60
