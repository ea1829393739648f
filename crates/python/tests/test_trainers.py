"""Trainers that people use, by the recipes of docs/guides/trainers.md."""

import dataclasses
import importlib.util
import os
import types

import pytest
import recipes
import torch
from recipes import DEEPSPEED, OF_RANKS, run_recipe
from test_sharded import run

import fusestep.torch

# Models and samples are made here, and nothing is fetched.
os.environ["HF_HUB_OFFLINE"] = "1"

ALONE = (
    "trainer", "trainer_by_class", "accelerate", "peft", "lightning", "torchtitan", "axolotl"
)


def test_every_recipe_of_the_page_is_run():
    assert sorted(recipes.recipes()) == sorted((*ALONE, *OF_RANKS, DEEPSPEED))


def test_recipes_of_several_processes(tmp_path):
    run(list(OF_RANKS), tmp_path, 2, recipes.main)


@pytest.mark.parametrize("world", [1, 2])
def test_deepspeed_at_every_stage(world, tmp_path):
    if importlib.util.find_spec(DEEPSPEED) is None:
        pytest.skip("DeepSpeed is not installed")
    run([DEEPSPEED], tmp_path, world, recipes.main)


def samples():
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 64, (12, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def language_model():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def batches():
    return torch.utils.data.DataLoader(samples(), batch_size=2)


def of_trainer(folder):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=5, per_device_train_batch_size=2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, seed=0,
    )
    return {"transformers": transformers, "arguments": arguments, "dataset": samples()}


def of_accelerate(folder):
    accelerator = pytest.importorskip("accelerate").Accelerator(
        cpu=True, gradient_accumulation_steps=2
    )
    return {"accelerator": accelerator, "batches": batches()}


def of_peft(folder):
    return {"peft": pytest.importorskip("peft"), "batches": batches()}


def of_lightning(folder):
    lightning = pytest.importorskip("lightning")
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )
    return {"lightning": lightning, "trainer": trainer, "batches": batches()}


def of_torchtitan(folder):
    parts = pytest.importorskip("torchtitan.components.optimizer")
    names = ("OptimizersContainer", "ParamGroupConfig")
    given = {name: getattr(parts, name) for name in names}
    return {**given, "dataclasses": dataclasses, "batches": batches()}


def of_axolotl(folder):
    pytest.importorskip("axolotl.integrations.base")
    import axolotl

    return {"axolotl": axolotl, **of_trainer(folder)}


def train_by_plugin(names):
    """What axolotl does with a plugin of its configuration, as far as optimizers go."""
    trainer = names["transformers"].Trainer(
        model=names["model"], args=names["arguments"], train_dataset=names["dataset"]
    )
    names["Fusestep"]().post_trainer_create(types.SimpleNamespace(learning_rate=1e-3), trainer)
    trainer.train()
    names["trainer"] = trainer


GIVEN = {
    "torchtitan": of_torchtitan,
    "axolotl": of_axolotl,
    "trainer": of_trainer,
    "trainer_by_class": of_trainer,
    "accelerate": of_accelerate,
    "peft": of_peft,
    "lightning": of_lightning,
}


def optimizer_of(names, used):
    """The optimizer that has stepped, whoever made it."""
    found = used[0] if used else None
    trainer = names.get("trainer")
    if found is None and trainer is not None:
        found = trainer.optimizer if hasattr(trainer, "optimizer") else trainer.optimizers[0]
    # That of a container of several, or of a wrapper.
    found = getattr(found, "optimizers", [found])[0]
    return getattr(found, "optimizer", found)


@pytest.mark.parametrize("name", ALONE)
def test_a_recipe_ends_where_it_ends_with_pytorchs_class(name, tmp_path):
    ends = []
    for module in (fusestep.torch, torch.optim):
        given = {"model": language_model(), **GIVEN[name](tmp_path)}
        torch.manual_seed(1)
        names, used = run_recipe(name, module, given)
        if name == "axolotl":
            train_by_plugin(names)
        optimizer = optimizer_of(names, used)
        assert isinstance(optimizer, module.AdamW), type(optimizer)
        assert any(state for state in optimizer.state.values())
        ends.append([p.detach() for p in names["model"].parameters()])
    assert all(float((one - two).abs().max()) < 1e-5 for one, two in zip(*ends))
    before = language_model().parameters()
    if name != "peft":
        assert not all(torch.equal(one, two) for one, two in zip(before, ends[0]))
