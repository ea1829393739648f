"""Every cell of the table of what may happen between ``backward`` and ``step``."""

import functools
import pathlib

import between
import numpy as np
import pytest
import torch
from test_ranks import run

import fusestep.torch

ROWS = pytest.mark.parametrize("row", between.ROWS, ids=between.NAMES)
PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs/python-between.md"


def test_the_page_has_the_table():
    if not PAGE.exists():
        pytest.skip("tests without the repository")
    assert between.page() in PAGE.read_text(encoding="utf-8")


@ROWS
@pytest.mark.parametrize("column", [0, 1, 2], ids=between.COLUMNS[:3])
def test_a_cell_of_one_process(row, column):
    cell, text = between.in_one_process(row[1], column)
    assert cell == row[2 + column], text


@functools.lru_cache(maxsize=None)
def cells(out, zero, streams):
    return run("cells", out / f"{zero}-{streams}", zero=zero, comm_streams=streams)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("between")


@ROWS
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("streams", [0, 2])
def test_a_cell_of_ranks(row, zero, streams, out):
    for rank in cells(out, zero, streams):
        cell, text = rank["cells"][row[0]]
        assert cell == row[6 if zero == 2 else 5], text


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("kind", ["grads", "checkpoints"])
def test_gradients_that_others_look_at_or_add(kind, zero, tmp_path):
    run_alone(kind, tmp_path, zero=zero)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("streams", [0, 2])
def test_a_refused_step_goes_on_from_a_checkpoint(zero, streams, tmp_path):
    run_alone("resumed", tmp_path, zero=zero, comm_streams=streams)


@pytest.mark.parametrize("streams", [0, 2])
def test_a_refusal_on_one_rank_is_told_to_the_others(streams, tmp_path):
    run_alone("one_guards", tmp_path, comm_streams=streams)


def test_models_in_distributed_data_parallel(tmp_path):
    run_alone("wrapped", tmp_path)


def run_alone(kind, out, **options):
    """Ranks that write nothing."""
    run(kind, out, may_die=(0, 1), **options)
    for rank in range(2):
        text = (out / f"rank{rank}.txt").read_text()
        assert "Error" not in text, text


def fused(model, **options):
    optimizer = fusestep.torch.AdamW(model.parameters(), lr=0.05)
    return optimizer, fusestep.torch.fuse_backward(model, optimizer, **options)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_weight_in_and_out_of_a_checkpoint(reentrant):
    model = torch.nn.Linear(3, 3)
    optimizer, _ = fused(model)
    x = torch.ones(2, 3, requires_grad=True)
    inner = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
    loss = (inner.sum() + model(x).sum()).square()
    if reentrant:
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            loss.backward()
    else:
        loss.backward()
        optimizer.step()


def test_a_graph_of_gradients_is_refused_before_anything_is_updated():
    model = between.Net()
    optimizer, _ = fused(model, bucket_mib=1e-5)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="create_graph"):
        between.loss_of(model, 0).backward(create_graph=True)
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_who_undoes_a_change_can_step():
    models = [between.Net(), between.Net()]
    optimizer, _ = fused(models[0])
    plain = fusestep.torch.AdamW(models[1].parameters(), lr=0.05)
    for model in models:
        between.loss_of(model, 0).backward()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="expected lr=0.05.*found lr=0.5"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.step()
    plain.step()
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters()))
    assert all(p.grad is None for p in models[0].parameters())


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Lars", "Lamb", "ScheduleFreeAdamW"])
@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["tensor", "array"])
def test_a_rate_that_is_written_in_place_is_another(name, make):
    model = between.Net()
    rate = make(0.05)
    optimizer = getattr(fusestep.torch, name)(model.parameters(), lr=rate)
    fusestep.torch.fuse_backward(model, optimizer)
    between.loss_of(model, 0).backward()
    rate[...] = 0.5
    with pytest.raises(RuntimeError, match="expected lr=0.05.*found lr=0.5"):
        optimizer.step()
    rate[...] = 0.05
    optimizer.step()


def test_a_removed_one_leaves_what_is_updated_and_another_goes_on():
    model = between.Net()
    optimizer, removed = fused(model)
    between.loss_of(model, 0).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="found it dropped.*remove"):
        optimizer.step()
    removed.remove()
    fusestep.torch.fuse_backward(model, optimizer)
    for step in range(2):
        between.loss_of(model, step).backward()
        optimizer.step()


def clamp(param):
    param.grad.clamp_(-0.01, 0.01)


def drop(param):
    param.grad = None


def test_hooks_of_users_come_first():
    """Those of a tensor always, those behind its accumulation where they were there before."""
    results = []
    for fuse in (False, True):
        model = between.Net()
        model.first.weight.register_hook(lambda gradient: 3 * gradient)
        model.second.weight.register_post_accumulate_grad_hook(clamp)
        model.second.bias.register_post_accumulate_grad_hook(drop)
        optimizer = fusestep.torch.AdamW(model.parameters(), lr=0.05)
        if fuse:
            fusestep.torch.fuse_backward(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            between.loss_of(model, step).backward()
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))
