"""Ranks with a CUDA device each: the bits of ranks on the CPU, on emulated devices and a stand-in
for NCCL (`cargo xtask python --cuda`).
"""

import os
import time
import uuid

import nccl_program
import pytest
import torch
from test_ranks import starter

if not os.environ.get("FUSESTEP_EMULATOR_DEVICES"):
    pytest.skip("run by `cargo xtask python --cuda`", allow_module_level=True)

BF16 = {"dtype": "bfloat16"}
TWO = {"turns": 2, "own": {"accumulate": 2}}
CAP = {"bucket_cap_mib": 0.01}
DYNAMIC = "dynamic:start=8"

CASES = {
    "usual": {},
    "zero 1": {"ranks": {"zero": 1, **CAP}},
    "zero 2": {"ranks": {"zero": 2, **CAP}},
    "no streams": {"ranks": {"comm_streams": 0}},
    "clip": {"own": {"clip_norm": 0.5}},
    "clip 1": {"own": {"clip_norm": 0.5}, "ranks": {"zero": 1}},
    "bf16": BF16,
    "bf16 master": {**BF16, "own": {"master_weights": True}, "ranks": {"zero": 1}},
    "remainder": {**BF16, "own": {"precision": "remainder"}},
    "bf16 stochastic": {**BF16, "own": {"rounding": "stochastic"}},
    "bf16 f32": {**BF16, "ranks": {"reduce_dtype": torch.float32}},
    "f16": {"dtype": "float16", "own": {"loss_scale": 4.0}},
    "f64": {"dtype": "float64"},
    "int8": {"own": {"state_dtype": "int8"}},
    "scale": {"own": {"loss_scale": DYNAMIC}, "not_finite": (0, 1)},
    "accumulate": TWO,
    "accumulate 2": {**TWO, "ranks": {"zero": 2}},
    "each": {**TWO, "ranks": {"zero": 2, "reduced": "per_micro_step"}},
    "all": {
        "turns": 2,
        "own": {"accumulate": 2, "clip_norm": 0.1, "loss_scale": DYNAMIC},
        "ranks": {"zero": 2},
    },
    "backward": {"ranks": {"update_in_backward": True}},
    "backward 2": {"ranks": {"update_in_backward": True, "zero": 2, **CAP}},
    "lanes": {"ranks": {"lanes": 4}, "turns": 2},
    "lamb": {"rule": "Lamb"},
    "lars": {"rule": "Lars", "ranks": {"zero": 1}},
    "sgd": {"rule": "SGD", "own": {"momentum": 0.9}},
    "local": {"ranks": {"local_sgd": 2}},
    "shard group": {"ranks": {"zero": 1, "shard_group": 1}},
    "owners": {"ranks": {"zero": 1, "owners": "tensors"}},
    "naive": {"own": {"naive": True}},
    "separate": {"ranks": {"separate": True}},
    "norms": {"own": {"update_norms": True}},
    "distributed": {"ranks": {"distributed": ["head.weight"]}},
    "own starts": {"same": True, "ranks": {"initial": "own_and_equal"}},
    "differ": {"ranks": {"initial": "own_and_equal"}},
    "zero 3": {"ranks": {"zero": 3}},
}


def run(out, world, cases):
    """What each rank has found of each case."""
    out.mkdir(exist_ok=True)
    session = uuid.uuid4().hex
    ranks = [
        starter().Process(target=nccl_program.main, args=(out, cases, rank, world, session))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + 60
    for rank in ranks:
        rank.join(max(0, end - time.monotonic()))
    late = [number for number, rank in enumerate(ranks) if rank.exitcode is None]
    for number in late:
        ranks[number].kill()
    assert not late, [(out / f"rank{number}.txt").read_text() for number in late]
    for number, rank in enumerate(ranks):
        assert rank.exitcode == 0, (out / f"rank{number}.txt").read_text()
    return [torch.load(out / f"rank{rank}.pt") for rank in range(world)]


def same(one, other):
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name])
        for name, value in one.items()
    )


def test_it(tmp_path):
    bad = []
    for world in map(int, os.environ.get("WORLDS", "123")):
        for rank in run(tmp_path / f"x{world}", world, CASES):
            for name, found in rank.items():
                e = {k: v.get("error") for k, v in found.items()}
                if any(e.values()):
                    bad.append((world, name, e))
                    continue
                if not all(same(a, b) for a, b in zip(found["cpu"]["values"], found["nccl"]["values"])):
                    bad.append((world, name, "bits"))
                for key in ("reports", "norms", "rank"):
                    if found["cpu"][key] != found["nccl"][key]:
                        bad.append((world, name, key, found["cpu"][key], found["nccl"][key]))
    for b in bad:
        print(b)
    assert 0
