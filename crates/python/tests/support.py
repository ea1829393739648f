"""Parameters, gradients and steps that the tests share."""

import torch

OURS_OF = ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "Adamax", "NAdam")
OWN = ("Lion", "Lars", "Lamb", "ScheduleFreeAdamW")
SHAPES = [(3, 4), (7,), (), (0, 5), (130, 70), (1, 1, 65)]


def parameters(dtype=torch.float32, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


def twins(dtype=torch.float32, seed=0, shapes=SHAPES):
    return parameters(dtype, seed, shapes), parameters(dtype, seed, shapes)


def give_gradients(params, step, come_and_go=True, scale=1.0):
    """Gradients that depend on step and position; every fifth parameter has none, if they go."""
    generator = torch.Generator().manual_seed(1000 + step)
    for index, param in enumerate(params):
        value = torch.randn(param.shape, generator=generator, dtype=torch.float64) * scale
        gone = come_and_go and (step + index) % 5 == 4
        param.grad = None if gone else value.to(param.dtype)


def largest_difference(ours, theirs):
    differences = [(a - b).abs().max() for a, b in zip(ours, theirs) if a.numel()]
    return float(max(differences))


def bits(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def same_bits(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def snapshot(optimizer, params):
    """Everything that a step may change."""
    state = {
        index: {key: (value.clone() if torch.is_tensor(value) else value) for key, value in s.items()}
        for index, s in ((i, optimizer.state[p]) for i, p in enumerate(params) if p in optimizer.state)
    }
    return bits(params), state


def assert_unchanged(before, optimizer, params):
    values, state = before
    now_values, now_state = snapshot(optimizer, params)
    assert same_bits(values, now_values)
    assert state.keys() == now_state.keys()
    for index in state:
        assert state[index].keys() == now_state[index].keys()
        for key, value in state[index].items():
            if torch.is_tensor(value):
                assert torch.equal(value, now_state[index][key]), (index, key)
