"""`lanes`: one process and many end in the same bytes of all parameters."""

import pytest
import rank_lanes
import torch
from rank_lanes import LANES, UPDATES, bytes_of, counts, loss_of, made, samples_of
from test_ranks import run

import fusestep.torch

WORLDS = (1, 2, 3, 4, 5)

CASES = {
    "usual": {},
    "of two": {"own": {"accumulate": 2}},
    "sum": {"own": {"accumulate": 2, "accumulated": "sum"}},
    "weighted": {"weighted": True},
    "clipped": {"own": {"clip_norm": 0.05}},
    "scaled": {"own": {"loss_scale": 4.0}},
    "float64": {"dtype": "float64"},
    "bfloat16": {"dtype": "bfloat16", "own": {"master_weights": True}},
}

# Ways to share out a step, none of which changes a bit of the usual case.
WAYS = {
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2, "bucket_mib": 0.005},
    "buckets": {"bucket_mib": 0.005},
    "no streams": {"comm_streams": 0, "bucket_mib": 0.005},
    "separate": {"separate": True},
    "in backward": {"update_in_backward": True, "bucket_mib": 0.005},
}


def tree(parts, first, end):
    """T(a, b) = T(a, m) + T(m, b), where m − a is the largest power of two below b − a; a part that
    is `None` adds nothing."""
    if end - first == 1:
        return parts[first]
    half = 1
    while 2 * half < end - first:
        half *= 2
    left, right = tree(parts, first, first + half), tree(parts, first + half, end)
    return left if right is None else right if left is None else left + right


def wide_of(value):
    """Sums of lanes, gradients and masters of 16-bit parameters are f32, others as they are."""
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def simulated(case):
    """The bytes of one process that adds gradients as `lanes` says, by PyTorch's additions.

    Means stay wide until the update, so wide copies of the parameters take them, and the model
    takes what these round to. Every pass has the shapes of the ranks' passes, and so their bits,
    whatever kernels PyTorch has for a processor."""
    own = case.get("own", {})
    beside = ("accumulate", "accumulated", "master_weights")
    own = {key: value for key, value in own.items() if key not in beside}
    model, _ = made(case)
    masters = [torch.nn.Parameter(wide_of(param).clone()) for param in model.parameters()]
    optimizer = fusestep.torch.AdamW(masters, lr=1e-2, **own)
    of_lane = case.get("own", {}).get("accumulate", 1)
    sums = case.get("own", {}).get("accumulated") == "sum"
    for update, count in enumerate(counts(case)):
        parts = [[None] * LANES for _ in masters]
        total = 0.0
        for number in range(count):
            weight = samples_of(case, number) if case.get("weighted") else 1
            total += weight
            model.zero_grad()
            loss_of(model, case, update, number).backward()
            for lanes, param in zip(parts, model.parameters()):
                if param.grad is not None:
                    part, lane = wide_of(param.grad) * weight, number // of_lane
                    lanes[lane] = part if lanes[lane] is None else lanes[lane] + part
        for lanes, master in zip(parts, masters):
            whole = tree(lanes, 0, LANES)
            master.grad = None if whole is None else whole / (1.0 if sums else total)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters):
                param.copy_(master)
    return bytes_of(model)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    ways = {name: {"ranks": ranks} for name, ranks in WAYS.items()}
    return {
        world: run("lanes", tmp_path_factory.mktemp(str(world)), world, cases={**CASES, **ways})
        for world in WORLDS
    }


@pytest.mark.parametrize("name", CASES)
def test_one_process_and_many_end_in_the_same_bytes(name, worlds):
    torch.set_num_threads(1)
    expected = simulated(CASES[name])
    norms = set()
    for world, ranks in worlds.items():
        for rank, found in enumerate(ranks):
            assert "error" not in found[name], (world, found[name])
            for param, own in expected.items():
                assert found[name]["bytes"][param] == own, (name, param, world, rank)
            norms.add(found[name]["norm"])
            assert found[name]["without_gradient"] == [1, 1, 2, 1], "of all ranks"
    assert len(norms) == 1, "of the same gradients"


@pytest.mark.parametrize("name", WAYS)
def test_no_way_to_share_out_a_step_changes_a_bit(name, worlds):
    for world, ranks in worlds.items():
        for found in ranks:
            assert "error" not in found[name], (world, found[name])
            assert found[name]["bytes"] == worlds[1][0]["usual"]["bytes"], (name, world)


def test_cases_differ_and_sums_in_the_order_of_micro_batches_are_others(worlds, tmp_path):
    ends = [tuple(worlds[1][0][name]["bytes"].items()) for name in CASES]
    assert len(set(ends)) == len(ends)
    # The same micro-batches without lanes.
    torch.set_num_threads(1)
    model, optimizer = made({"own": {"accumulate": LANES}})
    for update in range(UPDATES - 1):
        for number in range(LANES):
            optimizer.zero_grad()
            loss_of(model, {}, update, number).backward()
            optimizer.step()
    cases = {"three updates": {"end": UPDATES - 1}}
    (found,) = run("lanes", tmp_path, 1, cases=cases)
    assert bytes_of(model) != found["three updates"]["bytes"]


def test_ranks_give_their_own_micro_batches(worlds):
    for world, ranks in worlds.items():
        for name, of_lane in (("usual", 1), ("of two", 2), ("in backward", 1)):
            for update, count in enumerate(counts(CASES.get(name, {}))):
                given = [found[name]["given"][update] for found in ranks]
                numbers = [own for of_rank in given for own in of_rank if own is not None]
                assert numbers == list(range(count)), (world, name)
                for of_rank in given:
                    assert of_rank == [None] or None not in of_rank
                if update == 0:
                    own = [(rank + 1) * LANES // world - rank * LANES // world
                           for rank in range(world)]
                    assert [len(of_rank) for of_rank in given] == [n * of_lane for n in own]
    assert worlds[4][3]["usual"]["given"][-1] == [None], "a rank without samples makes its step"


def test_any_number_of_ranks_goes_on_from_a_checkpoint(worlds, tmp_path):
    folder = str(tmp_path / "saved")
    saves = {"saves": {"save": folder, "save_at": 2}}
    for found in run("lanes", tmp_path / "of 3", 3, cases=saves):
        assert "error" not in found["saves"], found["saves"]
        assert found["saves"]["bytes"] == worlds[1][0]["usual"]["bytes"]
    for world in (1, 2, 5):
        again = {"again": {"resume": folder}}
        for found in run("lanes", tmp_path / f"of {world}", world, cases=again):
            assert "error" not in found["again"], found["again"]
            assert len(found["again"]["given"]) == UPDATES - 2
            assert found["again"]["bytes"] == worlds[1][0]["usual"]["bytes"], world


def test_what_lanes_refuse_is_named_and_changes_nothing(tmp_path):
    expected = run("lanes", tmp_path / "usual", 2, cases={"one": {"end": 1}})
    for rank, found in enumerate(run("lanes_refused", tmp_path / "refused", 2)):
        errors = found["errors"]
        of_update = "ValueError: micro-batches of the update: expected"
        assert errors["too many"] == f"{of_update} 1 to 8, which the plan has, found 9"
        assert errors["none"] == f"{of_update} a whole number from 1 on, found 0"
        assert errors["no number"] == f"{of_update} a whole number from 1 on, found 2.0"
        assert errors["late"].startswith(f"{of_update} a number before the first gradient")
        assert "RuntimeError: flush: expected `set_micro_batches(n)`" in errors["flush"]
        assert "ValueError: weight of the micro-step: expected a number" in errors["weight"]
        assert "expected before its first gradient" in errors["late weight"]
        assert "expected `optimizer.step()` in every turn" in errors["no step"]
        assert "micro_batches: expected a DataParallel with `lanes`" in errors["no lanes"]
        assert "set_micro_batches: expected a Data" in errors["no lanes to limit"]
        assert "set_weight: expected a DataParallel with `lanes`" in errors["no lanes to weigh"]
        assert found["bytes"] == expected[rank]["one"]["bytes"]


def test_settings_that_lanes_do_not_go_with_are_refused(tmp_path):
    cases = {
        "averages": {"ranks": {"local_sgd": 2}},
        "each": {"own": {"accumulate": 2}, "ranks": {"reduced": "per_micro_step"}},
        "slices": {"ranks": {"distributed": ["first.weight"]}},
        "too few": {"ranks": {"lanes": 2}},
        "none": {"ranks": {"lanes": 0}},
    }
    for found in run("lanes", tmp_path, 3, cases=cases):
        assert "ValueError: lanes and local_sgd" in found["averages"]["error"]
        assert "lanes and reduced" in found["each"]["error"]
        assert "lanes and distributed" in found["slices"]["error"]
        assert "at most 2 ranks for 2 lanes" in found["too few"]["error"]
        assert "lanes: expected" in found["none"]["error"]


def test_a_program_that_runs_alone_has_lanes(worlds, monkeypatch):
    monkeypatch.setenv("FUSESTEP_ALONE", "1")
    torch.set_num_threads(1)
    found = rank_lanes.run({}, 0)
    assert found["given"] == [list(range(count)) for count in counts({})]
    assert found["bytes"] == worlds[5][0]["usual"]["bytes"]


def test_one_process_has_lanes_by_data_parallel_alone():
    model = rank_lanes.Mlp()
    for kind in (fusestep.torch.AdamW, fusestep.torch.SGD):
        with pytest.raises(TypeError, match="lanes: expected it as an argument of `DataParallel`"):
            kind(model.parameters(), lanes=8)
    with pytest.raises(TypeError, match="FUSESTEP_ALONE=1.*`accumulate=`"):
        fusestep.torch.AdamW(model.parameters(), lanes=8)
    # The settings of a plan over PyTorch's tensors, however they came there.
    optimizer = fusestep.torch.AdamW(model.parameters())
    optimizer._options["texts"]["lanes"] = ["8"]
    model(torch.ones(1, 12), False).sum().backward()
    with pytest.raises(ValueError, match="lanes of 8: expected `DataParallel`, found one process"):
        optimizer.step()
