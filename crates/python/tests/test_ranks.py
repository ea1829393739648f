"""Processes that train one model together: `DataParallel`."""

import json
import os
import pathlib
import subprocess
import sys
import uuid

import pytest
import torch
from processes import run_all
from rank_program import Model, loss_of, main

import fusestep.torch
from fusestep import _fusestep

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = HERE / "rank_program.py"


def run(kind, out, world=2, may_die=(), **options):
    """Ranks started by plain variables; what each has written, `None` for one that died."""
    out.mkdir(exist_ok=True)
    session = uuid.uuid4().hex
    each = [(kind, out, options, (rank, world, session)) for rank in range(world)]
    found = []
    for rank, process in enumerate(run_all(main, each, out)):
        if rank in may_die:
            found.append(None)
            continue
        assert process.exitcode == 0, (out / f"rank{rank}.txt").read_text()
        found.append(torch.load(out / f"rank{rank}.pt"))
    return found


def same_models(one, other):
    one, other = one["model"], other["model"]
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def alone(world, steps=6, rule="AdamW", lr=1e-2, **settings):
    """One process that averages the parts of each batch in the order of the ranks."""
    torch.manual_seed(0)
    model = Model()
    optimizer = getattr(fusestep.torch, rule)(model.parameters(), lr=lr, **settings)
    for step in range(steps):
        parts = []
        for rank in range(world):
            optimizer.zero_grad()
            loss_of(model, step, rank, world).backward()
            parts.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for param, *gradients in zip(model.parameters(), *parts):
            if gradients[0] is not None:
                total = gradients[0]
                for gradient in gradients[1:]:
                    total = total + gradient
                param.grad = total / world
        optimizer.step()
    return {"model": model.state_dict()}


def test_bits_are_those_of_one_process_at_every_stage(tmp_path):
    torch.set_num_threads(1)
    expected = alone(2)
    for zero in (0, 1, 2, 3):
        for streams in (0, 2):
            out = tmp_path / f"{zero}-{streams}"
            ranks = run("train", out, zero=zero, comm_streams=streams, bucket_mib=0.005)
            assert same_models(*ranks), "both ranks"
            assert same_models(expected, ranks[0]), (zero, streams)
            assert ranks[0]["report"]["without_gradient"] == 2
            assert "closed" in ranks[0]["closed"]


def figures_of(path, version=_fusestep.__version__):
    """A file of figures as `fusestep check` writes it, of slow calls between ranks."""
    link = {"alpha_seconds": 0.01, "beta_bytes_per_second": 5e9}
    costs = {name: link for name in ("all_reduce", "reduce_scatter", "all_gather")}
    costs.update(memory_bytes_per_second=1e10, fresh_bytes_per_second=2e9)
    world = {"engine": "processes", "ranks": 2, "shares_memory": True, "costs": costs}
    world["measured"] = "2026-11-29"
    known = {"format": 1, "version": version, "measured": "2026-11-29", "processor": "any"}
    path.write_text(json.dumps({**known, "processors": 2, "worlds": [world], "threads": []}))
    return str(path)


def test_figures_of_a_machine_change_no_bit(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setenv("FUSESTEP_FIGURES", "none")
    expected = alone(2)
    for index, figures in enumerate((figures_of(tmp_path / "figures.json"), "kept", None)):
        ranks = run("train", tmp_path / str(index), figures=figures)
        assert same_models(*ranks) and same_models(expected, ranks[0]), figures


def test_clipping_scales_and_micro_steps_change_alike_at_every_stage(tmp_path):
    settings = {"lr": 1e-2, "clip_norm": 0.1, "loss_scale": "dynamic", "accumulate": 2}
    found = [
        run("train", tmp_path / str(zero), zero=zero, settings=settings)[0]
        for zero in (0, 1, 2, 3)
    ]
    assert all(same_models(found[0], other) for other in found[1:])
    assert found[0]["report"]["grad_norm"] > 0.1
    assert not same_models(found[0], alone(2))


def test_adagrad_whose_sums_are_there_at_once_has_the_bits_of_one_process(tmp_path):
    torch.set_num_threads(1)
    settings = {"lr": 1e-2, "lr_decay": 0.1}
    expected = alone(2, rule="Adagrad", **settings)
    for zero in (0, 1):
        ranks = run("train", tmp_path / str(zero), zero=zero, rule="Adagrad", settings=settings)
        assert same_models(*ranks) and same_models(expected, ranks[0]), zero


def test_a_flush_takes_the_rate_of_the_moment(tmp_path):
    step, flush = [
        run("flush", tmp_path / str(micro), settings={"lr": 1e-2, "accumulate": micro})[0]
        for micro in (1, 2)
    ]
    assert same_models(step, flush)


def test_a_checkpoint_goes_on_at_another_number_of_ranks(tmp_path):
    folder = str(tmp_path / "checkpoint")
    whole = run("train", tmp_path / "whole", zero=1, steps=[0, 8])
    run("train", tmp_path / "first", zero=1, steps=[0, 4], save=folder)
    again = run("train", tmp_path / "again", zero=2, steps=[4, 8], resume=folder)
    assert same_models(whole[0], again[0])
    one = run("train", tmp_path / "one", world=1, steps=[4, 8], resume=folder)
    three = run("train", tmp_path / "three", world=3, zero=1, steps=[4, 8], resume=folder)
    assert same_models(three[0], three[2])
    # A mean over other parts of the batch differs by rounding.
    for other in (one, three):
        pairs = zip(whole[0]["model"].values(), other[0]["model"].values())
        assert all(torch.allclose(a, b, atol=2e-2) for a, b in pairs)


@pytest.mark.parametrize("options", [{}, {"comm_streams": 0}])
def test_gradients_are_views_and_what_is_wrong_is_refused(tmp_path, options):
    run("views", tmp_path, **options)


def test_a_model_that_another_one_trains_is_left_by_close(tmp_path):
    assert same_models(*run("replaced", tmp_path))


def test_gradients_are_written_where_ranks_read_them(tmp_path):
    assert same_models(*run("arriving", tmp_path, comm_streams=0))


@pytest.mark.parametrize("zero", [0, 2])
def test_a_negated_gradient_keeps_its_sign(tmp_path, zero):
    for found in run("negated", tmp_path, zero=zero):
        assert found["model"]["imaginary"].tolist() == [-4.0]


@pytest.mark.parametrize("how", ["backward", "clip", "zeros"])
def test_gradients_written_while_ranks_average_them_are_refused(tmp_path, how):
    for found in run("written", tmp_path, how=how):
        *second, step, flush, again = found["errors"]
        assert [("second gradient" in text) for text in second] == [True] * (how == "backward")
        assert all("found it written" in text for text in (step, flush, again)), found["errors"]
        assert found["same"]


def test_unequal_models_are_named(tmp_path):
    for found in run("unequal", tmp_path):
        assert "first.weight" in found["error"] or "first.bias" in found["error"], found["error"]


@pytest.mark.parametrize("streams", [0, 2])
def test_a_dead_peer_is_an_exception_and_changes_nothing(tmp_path, streams):
    found = run("dead_peer", tmp_path, may_die=(1,), comm_streams=streams)[0]
    assert "rank 1" in found["error"] and found["same"]
    assert found["seconds"] < 20


@pytest.mark.parametrize("streams", [0, 2])
def test_ctrl_c_during_a_collective(tmp_path, streams):
    interrupted, other = run("interrupt", tmp_path, comm_streams=streams)
    assert interrupted["same"] and "interrupted" in interrupted["error"]
    assert "interrupted" in other["error"] or "rank 0" in other["error"], other["error"]


def test_torchrun_starts_ranks_whose_losses_are_pytorchs(tmp_path):
    def torchrun(kind):
        out = tmp_path / kind
        out.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", str(PROGRAM), kind, str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]

    ours, theirs = torchrun("train"), torchrun("gloo")
    assert same_models(*ours) and same_models(ours[0], alone(2))
    for name, value in theirs[0]["model"].items():
        # PyTorch's has zeros for parameters that nobody uses, and decays them.
        if name != "unused":
            assert torch.allclose(value, ours[0]["model"][name], atol=1e-5), name


@pytest.mark.skipif("mpi" not in _fusestep.engines, reason="a build without MPI")
@pytest.mark.parametrize("engine", ["mpi", None])
def test_mpirun_starts_ranks_with_the_bits_of_one_process(tmp_path, engine):
    for zero in (0, 1, 2):
        out = tmp_path / str(zero)
        out.mkdir()
        command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
        options = json.dumps({"zero": zero, "engine": engine, "bucket_mib": 0.005})
        command += [str(PROGRAM), "train", str(out), options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        ranks = [torch.load(out / f"rank{rank}.pt") for rank in range(2)]
        assert same_models(*ranks) and same_models(ranks[0], alone(2)), zero
        assert "closed" in ranks[0]["closed"]


def model_of(param):
    model = torch.nn.Module()
    model.param = param
    return model


def stepped(refused):
    """Optimizers whose state would be lost."""

    def after(name, change=None, **settings):
        def make(params):
            optimizer = getattr(fusestep.torch, name)(params, **settings)
            params[0].grad = torch.ones_like(params[0])
            if change is None:
                optimizer.step()
            else:
                change(optimizer.state[params[0]])
            return optimizer

        return make

    for name in ("AdamW", "Adagrad", "Lion"):
        refused(ValueError, "before its first step, found state", make=after(name))
    written = after("Adagrad", lambda own: own["sum"].fill_(2.0))
    refused(ValueError, "before its first step, found state", make=written)
    first = after("Adagrad", lambda own: None, initial_accumulator_value=0.5)
    refused(ValueError, "initial_accumulator_value", make=first)
    micro = after("AdamW", accumulate=2)
    refused(ValueError, "found sums of 1 micro-steps", make=micro)


ONE_OF_SEVERAL = [
    "RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
    "RANK=1 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1",
    "RANK=0",
    "WORLD_SIZE=4",
    "RANK=0 WORLD_SIZE=5000 MASTER_ADDR=a MASTER_PORT=1",
    "OMPI_COMM_WORLD_RANK=0",
    "OMPI_COMM_WORLD_SIZE=4 RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1",
    "SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0 RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1",
    "PMI_RANK=0",
    "PMIX_RANK=0",
    "SLURM_STEP_NUM_TASKS=2",
    "PALS_RANKID=0",
    "FLUX_TASK_RANK=0",
    "JSM_NAMESPACE_SIZE=2",
]


@pytest.mark.parametrize("variables", ONE_OF_SEVERAL)
def test_one_process_of_several_never_trains_alone(monkeypatch, variables):
    for variable in variables.split(" "):
        monkeypatch.setenv(*variable.split("="))
    param = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = fusestep.torch.AdamW([param])
    engine = "processes" if "mpi" in _fusestep.engines else None
    with pytest.raises(RuntimeError, match="expected"):
        fusestep.torch.DataParallel(model_of(param), optimizer, engine=engine)


def test_what_cannot_be_trained_is_refused_before_ranks_join(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    param = torch.nn.Parameter(torch.ones(3, 4))

    def refused(kind, text, param=param, make=fusestep.torch.AdamW, **options):
        optimizer = make([param])
        with pytest.raises(kind, match=text):
            fusestep.torch.DataParallel(model_of(param), optimizer, **options)

    refused(ValueError, "zero", zero=4)
    refused(ValueError, "bucket_mib", bucket_mib=0)
    refused(ValueError, "comm_streams", comm_streams=-1)
    refused(ValueError, "timeout", timeout=0)
    refused(ValueError, "figures of missing: no figures", figures="missing")
    old = figures_of(tmp_path / "old.json", version="0.0.1")
    refused(ValueError, "found format 1 by fusestep 0.0.1", figures=old)
    refused(TypeError, "figures: expected a path", figures=1)
    refused(TypeError, "found AdamW", make=torch.optim.AdamW)
    refused(ValueError, "ScheduleFreeAdamW", make=fusestep.torch.ScheduleFreeAdamW)
    refused(ValueError, "contiguous", param=torch.nn.Parameter(torch.ones(3, 4).t()))
    refused(ValueError, "trains, found none", param=torch.nn.Parameter(torch.ones(3), False))
    refused(RuntimeError, "found WORLD_SIZE=.not set")
    refused(RuntimeError, "expected processes or mpi, found smoke", engine="smoke")
    if "mpi" not in _fusestep.engines:
        refused(RuntimeError, "--features mpi", engine="mpi")
    stepped(refused)
    whole = torch.ones(8)
    model = torch.nn.Module()
    model.one, model.two = torch.nn.Parameter(whole[:5]), torch.nn.Parameter(whole[4:])
    with pytest.raises(RuntimeError, match="`one` and `two`"):
        fusestep.torch.DataParallel(model, fusestep.torch.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="found others"):
        other = torch.nn.Parameter(torch.ones(2))
        fusestep.torch.DataParallel(model_of(param), fusestep.torch.AdamW([param, other]))


def test_streams_are_chosen_by_rank_0_for_all(tmp_path):
    cores = len(os.sched_getaffinity(0))
    # By itself rank 1 would say that its threads fill the cores.
    for at, threads in enumerate(([1, 4 * cores], [cores, 1])):
        count = 2 if 2 * threads[0] < cores else 0
        what = "leave some of" if count else "fill"
        plural = "" if threads[0] == 1 else "s"
        expected = (
            f"note comm_streams applied: {count} communication streams: 2 ranks on the machine of "
            f"rank 0, on {threads[0]} thread{plural} each, {what} {cores} core"
        )
        ranks = run("streams", tmp_path / f"chosen{at}", threads=threads)
        assert all(expected in found["plan"] for found in ranks), ranks[0]["plan"]
        assert same_models(*ranks)
    others = {"given": [3, None]}, {"separate": True}, {"update_in_backward": True}
    for at, options in enumerate(others):
        for found in run("streams", tmp_path / f"not{at}", threads=[1, 1], **options):
            assert "note comm_streams" not in found["plan"], options
