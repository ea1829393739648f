"""What ranks of `test_whole.py` run: parameters of which each has a part."""

import copy

import torch
from torch.utils.checkpoint import checkpoint

import fusestep.torch


class Layers(torch.nn.Module):
    """Attention, norms, a weight that two modules share, and layers that run twice."""

    def __init__(self, ways):
        super().__init__()
        self.ways = ways
        self.embed = torch.nn.Embedding(29, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.twice = torch.nn.Linear(16, 16)
        self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)
        self.head = torch.nn.Linear(16, 29, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.ones(16))
        self.factor = torch.nn.Parameter(torch.ones(()))
        self.unused = torch.nn.Linear(3, 5)
        # Each rank's own, which has to be the same here.
        torch.nn.init.eye_(self.frozen.weight)
        torch.nn.init.zeros_(self.frozen.bias)

    def block(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + torch.tanh(self.twice(torch.tanh(self.twice(self.norm(x)))))

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale * self.factor
        if self.ways == "plain":
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.ways == "reentrant")
        return self.head(self.frozen(x))


class Own(torch.nn.Module):
    """A module that reads parameters of one within."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 29)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.inner.weight * 2, self.inner.bias)


class Others(torch.nn.Module):
    """Modules of PyTorch that read parameters in ways of their own, and one of a user's."""

    def __init__(self):
        super().__init__()
        self.ways = "others"
        self.embed = torch.nn.Embedding(29, 16)
        self.lstm = torch.nn.LSTM(16, 16, batch_first=True)
        self.convolution = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(16, 16, 1))
        self.batch_norm = torch.nn.BatchNorm1d(16)
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2)
        self.own = Own()

    def forward(self, tokens):
        x = self.lstm(self.embed(tokens))[0].transpose(1, 2)
        x = self.batch_norm(self.convolution(x)).transpose(1, 2)
        return self.own(self.encoder(x))


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(29, (4, 7), generator=generator)


def loss_of(model, step, rank):
    tokens = batch(step, rank)
    found = model(tokens)[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(found, tokens[:, 1:].flatten())


def bytes_of(model):
    """Bytes that parameters which train have now."""
    own = {id(p): p for p in model.parameters() if p.requires_grad}
    lens = [p.untyped_storage().nbytes() for p in own.values()]
    return sum(len_bytes for len_bytes in lens if len_bytes > 4)


def made(options, seed=0):
    torch.manual_seed(seed)
    ways = options.pop("ways", "plain")
    if ways == "others":
        model, options["units"] = Others(), [Own]
    else:
        model = Layers(ways).to(getattr(torch, options.pop("dtype", "float32")))
    optimizer = fusestep.torch.AdamW(model.parameters(), lr=1e-2, **options.pop("settings", {}))
    return model, optimizer, fusestep.torch.DataParallel(model, optimizer, timeout=60, **options)


def write(parallel, out, rank):
    with parallel.whole():
        # Without buffers, which stay each rank's own.
        values = {name: p.detach().clone() for name, p in parallel.module.named_parameters()}
    torch.save({"model": values}, out / f"rank{rank}.pt")


def refused(call, *words):
    try:
        call()
    except (IndexError, RuntimeError, ValueError) as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"expected an error of {words}")


def layers(out, options, rank, world):
    """Trains, and looks at what is in memory meanwhile."""
    shares = options.get("zero") == 3 and world > 1
    steps = options.pop("steps", 4)
    micro_steps = options.get("settings", {}).get("accumulate", 1)
    model, optimizer, parallel = made(options, seed=rank)
    at_most = [0]
    for module in model.modules():
        module.register_forward_hook(lambda *_: at_most.append(bytes_of(model)))
    for step in range(steps * micro_steps):
        assert not shares or bytes_of(model) == 0, "freed behind each step"
        loss = loss_of(parallel, step, rank)
        assert not shares or bytes_of(model) == 0, "freed behind forward"
        loss.backward()
        assert not shares or bytes_of(model) <= 4 * (16 + 29 * 16), "freed behind backward"
        optimizer.step()
    with parallel.whole():
        everything = bytes_of(model)
    # The largest are attention's, of which two modules each have a part, and the root's scale.
    is_plain = shares and model.ways == "plain"
    assert not is_plain or 0 < max(at_most) <= 0.6 * everything, (max(at_most), everything)
    model.eval()
    with torch.no_grad():
        parallel(batch(0, 0))
    with torch.inference_mode():
        parallel(batch(0, 0))
    assert not shares or bytes_of(model) == 0
    write(parallel, out, rank)


def lanes_of_layers(out, options, rank, world):
    model, optimizer, parallel = made(options, seed=rank)
    for step in range(3):
        for number in parallel.micro_batches(5 - step):
            if number is not None:
                loss_of(parallel, step, number).backward()
            optimizer.step()
    write(parallel, out, rank)


def whole(out, options, rank, world):
    """State dicts, copies, writes, errors and closing, around parameters that are freed."""
    model, optimizer, parallel = made({"zero": 3})
    refused(lambda: model.embed.weight.sum(), "parameter `embed.weight`", "found `sum`", "units")
    refused(lambda: 1 + model.scale, "parameter `scale`", "with parallel.whole():")
    refused(lambda: torch.stack([model.scale]), "parameter `scale`", "found `stack`")
    refused(model.state_dict, "found `detach`")
    assert model.scale.shape == (16,) and model.scale.numel() == 16 and model.scale.grad is None
    with parallel.whole():
        alone = copy.deepcopy(model)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
    assert bytes_of(model) == 0
    # A copy has its own, and makes no calls.
    if rank == 0:
        loss_of(alone, 0, 0).backward()
        assert alone.scale.grad is not None
    for name, value in alone.state_dict().items():
        assert torch.equal(value, kept[name]), name
    # An error in a forward pass frees what it had, and the next one is as ever.
    refused(lambda: parallel(torch.full((2, 3), 99)), "index out of range")
    assert bytes_of(model) == 0
    with parallel.whole():
        assert all(torch.equal(v, kept[n]) for n, v in model.state_dict().items())
        with torch.no_grad():
            model.scale.mul_(2 + rank)
    assert torch.equal(model.scale, kept["scale"] * (2 + rank)), "what was written is not lost"
    loss_of(parallel, 0, rank).backward()
    refused(optimizer.step, "parameter `scale`", "written since", "follow_parameters")
    parallel.close()
    model, optimizer, parallel = made({"zero": 3})
    refused(parallel.follow_parameters, "whole", "with parallel.whole():")
    parallel.close()
    model, optimizer, parallel = made({"zero": 3})
    with parallel.whole(), torch.no_grad():
        model.scale.mul_(2 + rank)
        parallel.follow_parameters()
        assert torch.equal(model.scale, torch.full((16,), 2.0)), "rank 0's, on all"
    loss_of(parallel, 0, rank).backward()
    optimizer.step()
    with parallel.whole():
        model.norm.weight.data = model.norm.weight.data.clone()
    refused(lambda: parallel.save(out / "folder", 1), "parameter `norm.weight`", "moved")
    write(parallel, out, rank)
    with parallel.whole():
        parallel.close()
    assert bytes_of(model) > 0
    # As they are, for a model that trains alone or among others.
    model(batch(0, 0)).sum().backward()


def saved(out, options, rank, world):
    """Goes on from another stage's checkpoint, or makes one."""
    folder, first = options.pop("folder"), options.pop("first")
    model, optimizer, parallel = made(options, seed=rank)
    assert parallel.resume(folder) == first
    for step in range(first, first + 2):
        loss_of(parallel, step, rank).backward()
        optimizer.step()
    parallel.save(folder, first + 2)
    write(parallel, out, rank)
