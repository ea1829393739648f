"""Reports of steps, and the hook of the page on watching a run."""

import dataclasses
import pathlib
import sys
import types

import pytest
import torch

import fusestep
import fusestep.torch

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "guides" / "watch.md"


def model_and_optimizer(**settings):
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)
    return model, fusestep.torch.AdamW(model.parameters(), lr=0.01, **settings)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()


def test_a_report_has_the_step_its_rate_and_its_parts():
    model, optimizer = model_and_optimizer(clip_norm=1.0, schedule="warmup:4")
    assert optimizer.report() is None
    step(model, optimizer)
    first = optimizer.report()
    assert (first.step, first.lr, first.seconds) == (1, pytest.approx(0.01 / 5), None)
    assert (first.loss, first.loss_scale, first.calls, first.averaged) == (None, None, 0, False)
    optimizer.time_steps()
    step(model, optimizer)
    second = optimizer.report()
    assert (second.step, second.lr) == (2, pytest.approx(0.02 / 5))
    assert second.seconds["update"] > 0 and second.seconds["norm"] > 0
    assert second.seconds["reduce"] == 0


def test_the_hook_of_the_page_sends_every_report(monkeypatch):
    blocks = PAGE.read_text(encoding="utf-8").split("```python\n")[1:]
    (code,) = [block.split("```")[0] for block in blocks]
    sent = []
    wandb = types.SimpleNamespace(
        init=lambda project: None, log=lambda values, step: sent.append((step, values))
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    model, optimizer = model_and_optimizer(clip_norm=1.0)
    exec(compile(code, str(PAGE), "exec"), {"optimizer": optimizer})
    for _ in range(3):
        step(model, optimizer)
    assert [at for at, _ in sent] == [1, 2, 3]
    assert sent[-1][1] == dataclasses.asdict(optimizer.report())
    assert sent[-1][1]["grad_norm"] > 0
