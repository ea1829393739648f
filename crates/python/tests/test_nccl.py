"""Ranks with a CUDA device each: the bits of ranks on the CPU, on emulated devices and a stand-in
for NCCL (`cargo xtask python --cuda`).
"""

import os
import sys
import uuid

import nccl_program
import pytest
import torch
from processes import run_all

import fusestep.torch
from fusestep.torch import _rank_memory
from fusestep.torch._device import CudaLibrary

if not os.environ.get("FUSESTEP_EMULATOR_DEVICES"):
    pytest.skip("run by `cargo xtask python --cuda`", allow_module_level=True)

from emulated import emulated

BF16 = {"dtype": "bfloat16"}
TWO = {"turns": 2, "own": {"accumulate": 2}}
# Cuts the gradients of the program into several buckets.
CAP = {"bucket_cap_mib": 0.002}
SCALED = {"loss_scale": "dynamic:start=8"}

# At any number of ranks.
FEW = {
    "usual": {},
    "zero 1": {"ranks": {"zero": 1, **CAP}},
    "bf16, zero 2": {**BF16, "ranks": {"zero": 2, **CAP}, "own": {"master_weights": True}},
    "lanes": {"ranks": {"lanes": 4}},
    "written": {**BF16, "own": {"master_weights": True}, "writes": 2},
    "all at once": {
        "turns": 2,
        "own": {"accumulate": 2, "clip_norm": 0.1, **SCALED},
        "ranks": {"zero": 2},
        "not_finite": (0, 1),
        "streams": True,
    },
}

CASES = {
    **FEW,
    "no streams": {"ranks": {"comm_streams": 0, **CAP}, "streams": True},
    "clip": {"own": {"clip_norm": 0.5}},
    "bf16": {**BF16, "ranks": {"zero": 1}},
    "remainder": {**BF16, "own": {"precision": "remainder"}},
    "stochastic": {**BF16, "own": {"rounding": "stochastic"}},
    "added in f32": {**BF16, "ranks": {"reduce_dtype": torch.float32}},
    "gradients in f32": {**BF16, "wide": True},
    "f16": {"dtype": "float16", "own": {"loss_scale": 4.0}},
    "f64": {"dtype": "float64"},
    "int8": {"own": {"state_dtype": "int8"}},
    "scale": {"own": SCALED, "not_finite": (0, 1)},
    "accumulate": TWO,
    "sums": {"turns": 2, "own": {"accumulate": 2, "accumulated": "sum"}},
    "each": {**TWO, "ranks": {"zero": 2, "reduced": "per_micro_step"}},
    "in backward": {"ranks": {"update_in_backward": True, **CAP}},
    "in backward, zero 2": {"ranks": {"update_in_backward": True, "zero": 2, **CAP}},
    "lamb": {"rule": "Lamb"},
    "lars": {"rule": "Lars", "ranks": {"zero": 1}},
    "sgd": {"rule": "SGD", "own": {"momentum": 0.9}},
    "averages": {"ranks": {"local_sgd": 2}},
    "owners": {"ranks": {"zero": 1, "owners": "tensors"}},
    "apart": {"own": {"naive": True}, "ranks": {"separate": False}},
    "distributed": {"ranks": {"distributed": ["head.weight"]}},
    "zero 3": {**TWO, "ranks": {"zero": 3, **CAP}},
    "bf16, zero 3": {**BF16, "ranks": {"zero": 3, **CAP}, "own": {"master_weights": True}},
    "own starts": {"same": True, "ranks": {"initial": "own_and_equal"}},
}

# What is refused everywhere, with the words of the CPU, and on devices alone.
REFUSED = {
    "update_in_backward and zero": {"ranks": {"zero": 3, "update_in_backward": True}},
    "`body.weight`: expected hash": {"ranks": {"initial": "own_and_equal"}},
    "ScheduleFreeAdamW": {"rule": "ScheduleFreeAdamW"},
}


# What the first world has come to with lanes.
LANES = {}


def run(kind, out, world, options=None, may_die=()):
    """What each rank has found; `None` for one that died."""
    out.mkdir(exist_ok=True)
    session = uuid.uuid4().hex
    each = [(kind, out, options or {}, rank, world, session) for rank in range(world)]
    found = []
    for number, rank in enumerate(run_all(nccl_program.main, each, out)):
        if number in may_die:
            found.append(None)
            continue
        assert rank.exitcode == 0, (out / f"rank{number}.txt").read_text()
        found.append(torch.load(out / f"rank{number}.pt"))
    return found


def same(one, other):
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name])
        for name, value in one.items()
    )


def all_same(one, other):
    return len(one) == len(other) and all(map(same, one, other))


@pytest.mark.parametrize(("world", "cases"), [(1, FEW), (2, CASES), (3, FEW)])
def test_devices_have_the_bits_of_ranks_on_the_cpu(tmp_path, world, cases):
    for rank, found in enumerate(run("cases", tmp_path / "ranks", world, cases)):
        for name, own in found.items():
            errors = {where: run["error"] for where, run in own.items() if "error" in run}
            assert not errors, (name, rank, errors)
            cpu, nccl = own["cpu"], own["nccl"]
            assert all_same(cpu["values"], nccl["values"]), (name, rank)
            assert cpu["reports"] == nccl["reports"], (name, rank)
            assert not same(nccl["values"][0], nccl["values"][-1]), (name, rank)
        # Lanes have the bits of any number of ranks.
        values = found["lanes"]["nccl"]["values"]
        assert all_same(LANES.setdefault("values", values), values)


def test_what_ranks_of_the_cpu_refuse_is_refused_on_devices_in_the_same_words(tmp_path):
    for found in run("cases", tmp_path / "ranks", 2, REFUSED):
        for words, own in found.items():
            assert words in own["cpu"]["error"], own
            assert own["cpu"]["error"] == own["nccl"]["error"]


@pytest.mark.parametrize("options", [{}, {**BF16, "own": {"master_weights": True}}])
def test_checkpoints_go_from_the_cpu_to_devices_and_back(tmp_path, options):
    for found in run("checkpoints", tmp_path / "ranks", 2, {**options, "ranks": {"zero": 1}}):
        for where in ("cpu", "nccl"):
            assert all_same(found["whole"]["values"][3:], found[where]["values"][1:]), where


@pytest.mark.parametrize("options", [{}, {**BF16, "own": {"master_weights": True}}])
def test_parameters_stay_where_the_ranks_have_them(tmp_path, options):
    one, other = run("views", tmp_path / "ranks", 2, options)
    written, *steps, kept = one["found"]
    assert all_same(one["found"], other["found"])
    assert (written["head.weight"] == 3.0).all() and same(steps[-1], kept)
    # Masters have followed what was written: the steps are small ones from there.
    assert 0 < (steps[0]["head.weight"] - 3.0).abs().max() < 0.1


def test_gradients_are_read_behind_pytorchs_stream(tmp_path):
    run("ordered", tmp_path / "ranks", 2)


def test_a_dead_peer_is_an_error_that_names_it(tmp_path):
    found = run("dead_peer", tmp_path / "ranks", 2, may_die=(1,))[0]
    assert "rank 1" in found["error"] and found["seconds"] < 20, found


def test_two_ranks_on_one_device_are_refused(tmp_path):
    run("shared", tmp_path / "ranks", 2)


def test_what_devices_cannot_train_is_refused_before_ranks_join(monkeypatch):
    of_one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**of_one, "FUSESTEP_SESSION": uuid.uuid4().hex}.items():
        monkeypatch.setenv(name, value)

    def refused(kind, words, model, **options):
        optimizer = fusestep.torch.AdamW(model.parameters())
        with pytest.raises(kind, match=words):
            fusestep.torch.DataParallel(model, optimizer, **options)

    with emulated() as device:
        both = nccl_program.Net(placed=lambda value: device.copy(value, int(value.ndim < 2)))
        refused(ValueError, "`body.bias`: .* cuda:0, .* cuda:1", both)
        on_device = nccl_program.Net(placed=device.copy)
        words = 'engine: expected "nccl" .* found "processes"'
        refused(ValueError, words, on_device, engine="processes")
        monkeypatch.setattr(_rank_memory, "nccl_of_wheels", lambda: "/nowhere/libnccl.so.2")
        refused(RuntimeError, "expected the library /nowhere/libnccl.so.2", on_device)
        with pytest.raises(ValueError, match="update_norms: expected parameters on the cpu"):
            fusestep.torch.AdamW(on_device.parameters(), update_norms=True)
    refused(ValueError, 'engine: expected "processes" or "mpi"', nccl_program.Net(), engine="nccl")


def test_copies_in_place_of_views_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: torch.zeros(8))
    like = torch.zeros(2)
    with pytest.raises(RuntimeError, match="cuda:1: expected a tensor at address 0x1000"):
        CudaLibrary(1).view(like, 4096, None)


def test_nccl_of_pytorchs_wheels_is_found(monkeypatch, tmp_path):
    folder = tmp_path / "nvidia/nccl/lib"
    folder.mkdir(parents=True)
    for name in [name for name in sys.modules if name.split(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert _rank_memory.nccl_of_wheels() is None
    file = folder / "libnccl.so.2"
    file.write_bytes(b"")
    assert _rank_memory.nccl_of_wheels() == str(file)
