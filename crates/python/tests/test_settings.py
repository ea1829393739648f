"""Every setting of the table: it acts on ranks and in one process, or is refused by name.

Sums, means, schedules and averages are compared with the same on whole numbers, without rounding;
what changes no bit by its plan; what rounds with one process on the same gradients.
"""

import math
import pathlib

import pytest
import torch
from rank_settings import LR, SHAPES, STEPS, Net, first, gradient, loss, made, values
from rank_settings import run as run_alone
from test_ranks import run as run_ranks

import fusestep.torch
from fusestep import _fusestep

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs/python.md"

ROWS = {row["name"]: row for row in _fusestep.settings()}

TWO = {"accumulate": 2}
HALVES = "step:2:0.5"
CAP = 0.001

# Settings of groups of PyTorch's: what stands for them, which `_pytorch.py` and `_own.py` read.
GROUPS = {
    "exclude": ("bias", {"weight_decay": 0.0}),
    "lr_scale": ("head=0.5", {"lr": LR / 2}),
    "weight_decay_of": ("body=0.25", {"weight_decay": 0.25}),
    "trust_of": ("head=plain", {"trust_ratio": False}),
}

# Settings that are refused in Python, and what does their work.
REFUSED = {"threads": "torch.set_num_threads"}

BF16 = {"rule": "AdamW", "dtype": "bfloat16", "of_rule": {"lr": 2.0**-6}, "alike": True}
ADAM = {"rule": "AdamW", "of_rule": {"lr": 2.0**-6}, "alike": True}

# Whole tensors of owners, updated apart from their broadcasts on any number of cores.
OWNERS = {"zero": 1, "owners": "tensors", "comm_streams": 2}

# Settings that change no bit of these runs: their plans differ.
LAYOUTS = {
    "reduced": {"own": TWO, "ranks": {"reduced": "per_micro_step"}, "beside": TWO},
    "zero": {"ranks": {"zero": 2}},
    "shard_group": {"ranks": {"zero": 1, "shard_group": 1}},
    "owners": {"ranks": {"zero": 1, "owners": "tensors"}},
    "broadcast_cap_mib": {"ranks": {**OWNERS, "broadcast_cap_mib": CAP}},
    "bucket_cap_mib": {"ranks": {"bucket_cap_mib": CAP}},
    "comm_streams": {"ranks": {"comm_streams": 0}},
    "separate": {"ranks": {"separate": True, "comm_streams": 0}},
    "update_in_backward": {"ranks": {"update_in_backward": True}},
    "argument_bytes": {"own": {"argument_bytes": 150}},
    "tables": {"own": {"tables": "resident"}},
    "naive": {"own": {"naive": True}},
    "reduce_dtype": {"dtype": "bfloat16", "ranks": {"reduce_dtype": torch.float32}},
}

# Settings whose results are those of the same sums and averages on whole numbers.
EXACT = {
    "schedule": {"own": {"schedule": HALVES}},
    "loss_scale": {"own": {"loss_scale": 4.0}},
    "accumulate": {"own": TWO},
    "accumulated": {"own": {**TWO, "accumulated": "sum"}},
    "local_sgd": {"ranks": {"local_sgd": 2}},
    "local_sgd_begin": {"ranks": {"local_sgd": 2, "local_sgd_begin": 3}},
    "local_sgd_averaged": {
        "ranks": {"local_sgd": 2, "local_sgd_averaged": "parameters_and_state"},
        "of_rule": {"momentum": 0.5},
    },
    "local_sgd_interval": {
        "ranks": {"local_sgd": 4, "local_sgd_interval": "adaptive"},
        "tells": True,
    },
    "distributed": {"ranks": {"distributed": ["head.weight"]}},
    "lanes": {"ranks": {"lanes": 4}},
    "initial": {"ranks": {"initial": "own_and_equal"}},
}

# Settings that round: ranks with the same gradients have the bits of one process.
ROUNDED = {
    "master_weights": {**BF16, "own": {"master_weights": True}},
    "state_dtype": {**BF16, "own": {"state_dtype": torch.bfloat16}},
    "keep_f32": {**BF16, "own": {"state_dtype": "int8", "keep_f32": ["head"]}},
    "rounding": {**BF16, "own": {"rounding": "stochastic"}},
    "rounding_seed": {**BF16, "own": {"rounding": "stochastic", "rounding_seed": 7}},
    "clip_norm": {**ADAM, "own": {"clip_norm": 0.5}},
    "update_norms": {**ADAM, "own": {"update_norms": True}},
}

CASES = {**LAYOUTS, **EXACT, **ROUNDED}

# Runs beside those of the table.
MORE = {
    "usual": {},
    "usual of two": {"own": TWO},
    "usual of zero": {"ranks": {"zero": 1}},
    "usual of bf16": {"dtype": "bfloat16"},
    "usual of owners": {"ranks": OWNERS},
    "usual of streams": {"ranks": {"comm_streams": 2}},
    "brought": {"start": 3},
    "other starts": {"start": 3, "ranks": {"initial": "own_and_equal"}},
    "residual": {**BF16, "own": {"master_weights": "remainder"}},
    "skipped": {
        "ranks": {"local_sgd": 2},
        "own": {"loss_scale": "dynamic:start=1"},
        "not_finite": (0, 1),
    },
    "fixed interval": {"ranks": {"local_sgd": 4}, "tells": True},
    "momentum": {"ranks": {"local_sgd": 2}, "of_rule": {"momentum": 0.5}},
    "last average": {"ranks": {"local_sgd": 2}, "averages_at_the_end": True},
    "rates": {"rates": [LR * 0.5**step for step in range(STEPS)]},
    "rates in backward": {
        "rates": [LR * 0.5**step for step in range(STEPS)],
        "ranks": {"update_in_backward": True},
    },
    "sums in backward": {"own": TWO, "ranks": {"update_in_backward": True, "bucket_cap_mib": CAP}},
    "schedule and scheduler": {
        "own": {"schedule": HALVES},
        "rates": [LR * 0.5**step for step in range(STEPS)],
    },
    "unequal slices": {"ranks": {"zero": 1, "distributed": ["head.weight"]}, "shorter": 101},
    "separate by itself": {"ranks": {"separate": True}},
    "naive at two": {"own": {"naive": True}, "ranks": {"zero": 2}},
    "contradiction": {"own": {"clip_norm": 1.0}, "ranks": {"update_in_backward": True}},
    "nothing to share": {"ranks": {"shard_group": 2}},
    "own to ranks": {"ranks": {"naive": True}},
}


def averages(name):
    """Whether an average is due, by the count of steps and those since the last one."""
    ranks = CASES.get(name, MORE.get(name, {})).get("ranks", {})
    every, begin = ranks.get("local_sgd"), ranks.get("local_sgd_begin", 0)
    if every is None:
        return None
    interval = [every]

    def due(step, since, adapts=ranks.get("local_sgd_interval") == "adaptive"):
        if step > begin and since < interval[0]:
            return False
        if adapts:
            mean = [(loss(0, at) + loss(1, at)) / 2 for at in (0, step - 1)]
            interval[0] = max(1, math.ceil(math.sqrt(mean[1] / mean[0] * every)))
        return True

    return due


def simulated(name, case, world):
    """Parameters behind each step by SGD on whole numbers, for each rank."""
    due, since = averages(name), 0
    own, of_rule = case.get("own", {}), case.get("of_rule", {})
    every, sums = own.get("accumulate", 1), own.get("accumulated") == "sum"
    every *= case.get("ranks", {}).get("lanes", world) // world
    momentum = of_rule.get("momentum", 0.0)
    slices = case.get("ranks", {}).get("distributed", [])
    params = [{key: first(shape) for key, shape in SHAPES.items()} for _ in range(world)]
    speeds = [{key: torch.zeros(shape).double() for key, shape in SHAPES.items()} for _ in params]
    held = [{key: torch.zeros(shape).double() for key, shape in SHAPES.items()} for _ in params]
    behind, updates = [], 0
    for step in range(STEPS):
        for rank, sums_of in enumerate(held):
            for key in SHAPES:
                sums_of[key] += gradient(rank, step, key)
        if (step + 1) % every == 0:
            rate = case["rates"][step] if "rates" in case else LR
            if "schedule" in own:
                rate *= 0.5 ** (updates // 2)
            for rank in range(world):
                for key in SHAPES:
                    alone = due is not None or key in slices
                    total = held[rank][key] if alone else sum(one[key] for one in held) / world
                    total = total / (1 if sums else every) / own.get("loss_scale", 1.0)
                    speeds[rank][key] = momentum * speeds[rank][key] + total
                    params[rank][key] = params[rank][key] - rate * speeds[rank][key]
            held = [{key: torch.zeros(shape).double() for key, shape in SHAPES.items()}
                    for _ in params]
            updates, since = updates + 1, since + 1
            if due is not None and due(step + 1, since):
                since = 0
                whole = [params]
                if case.get("ranks", {}).get("local_sgd_averaged") == "parameters_and_state":
                    whole.append(speeds)
                for lists in whole:
                    for key in SHAPES:
                        mean = sum(one[key] for one in lists) / world
                        for one in lists:
                            one[key] = mean
        behind.append([{key: value.clone() for key, value in one.items()} for one in params])
    return behind


def is_same(one, other):
    return all(torch.equal(one[key].double(), other[key].double()) for key in SHAPES)


def assert_simulated(name, case, found, rank, world):
    for step, expected in enumerate(simulated(name, case, world)):
        assert is_same(found["values"][step], expected[rank]), (name, f"rank {rank}, step {step}")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks("settings", tmp_path_factory.mktemp("settings"), cases={**CASES, **MORE})


def test_every_row_has_a_case():
    assert ROWS.keys() == CASES.keys() | GROUPS.keys() | REFUSED.keys()
    for name, row in ROWS.items():
        assert row["says"].endswith(".") and row["range"] and row["section"], name
        assert row["needs"] is None or row["needs"] in ROWS
        assert row["alone"] in (None, name) or row["alone"] in ROWS
        told = f"``{name}``: {row['says']}"
        doc = fusestep.torch._optimizer.Fused.__doc__ + fusestep.torch.DataParallel.__doc__
        assert (told in doc) == (name in CASES), name


def test_the_page_has_every_row():
    if not PAGE.exists():
        pytest.skip("tests without the repository")
    table = PAGE.read_text(encoding="utf-8").partition("## Settings of the step")[2]
    first_cells = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    named = [(names.split("`")[1::2], place.strip()) for names, place in first_cells]
    places = {name: place for names, place in named for name in names}
    options = fusestep.torch._options
    for name in ROWS:
        place = "the optimizer" if name in options.OPTIONS else "neither"
        assert places[name] == ("`DataParallel`" if name in options.OPTIONS_OF_RANKS else place)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_changes_the_plan_and_no_bit(name, ranks):
    case = LAYOUTS[name]
    usual = {"reduced": "usual of two", "shard_group": "usual of zero", "owners": "usual of zero"}
    usual.update(broadcast_cap_mib="usual of owners", separate="comm_streams")
    usual.update(reduce_dtype="usual of bf16", comm_streams="usual of streams")
    for rank, found in enumerate(ranks):
        assert "error" not in found[name], found[name]
        assert_simulated(name, case, found[name], rank, 2)
        assert found[name]["plan"] != found[usual.get(name, "usual")]["plan"]
        assert found[name]["early"] == (name == "update_in_backward")


@pytest.mark.parametrize("name", EXACT)
def test_sums_rates_and_averages_on_ranks_are_exact(name, ranks):
    unlike = {"local_sgd_averaged": "momentum", "local_sgd_interval": "fixed interval"}
    unlike["local_sgd_begin"] = "local_sgd"
    for rank, found in enumerate(ranks):
        assert "error" not in found[name], found[name]
        assert_simulated(name, EXACT[name], found[name], rank, 2)
        other = found[unlike.get(name, "usual")]
        moved = not all(is_same(*pair) for pair in zip(found[name]["values"], other["values"]))
        assert moved == (name != "initial"), name


@pytest.mark.parametrize("name", ROUNDED)
def test_what_rounds_is_alike_on_ranks_and_in_one_process(name, ranks):
    alone = run_alone(ROUNDED[name], joins=False)
    plain = {key: value for key, value in ROUNDED[name].items() if key != "own"}
    if name == "rounding_seed":
        plain = ROUNDED["rounding"]
    usual = run_alone(plain, joins=False)
    for found in ranks:
        assert "error" not in found[name], found[name]
        for one, other in zip(found[name]["values"], alone["values"]):
            assert is_same(one, other)
        assert found[name]["norms"] == alone["norms"]
    if name == "keep_f32":
        # No parameter here is large enough for int8; `test_int8.py` has some that are.
        assert is_same(alone["values"][-1], usual["values"][-1])
    elif name == "update_norms":
        assert alone["norms"][-1].keys() == SHAPES.keys() and usual["norms"][-1] is None
    else:
        assert not is_same(alone["values"][-1], usual["values"][-1])


def test_first_values_are_rank_0s_or_each_ranks_own(ranks):
    for rank, found in enumerate(ranks):
        assert_simulated("usual", {}, found["brought"], rank, 2)
        error = found["other starts"]["error"]
        assert "values of `body.bias`" in error and "on rank 0, found hash" in error


def test_settings_go_together(ranks):
    for rank, found in enumerate(ranks):
        for name in ("naive at two", "separate by itself"):
            assert_simulated(name, MORE[name], found[name], rank, 2)
        assert found["naive at two"]["plan"] != found["zero"]["plan"]
        # Nothing runs beside the backward pass, and nothing is one pass.
        assert found["separate by itself"]["plan"] == found["separate"]["plan"]


def test_slices_differ_in_length(ranks):
    for rank, found in enumerate(ranks):
        assert "error" not in found["unequal slices"], found["unequal slices"]
        own, whole = found["unequal slices"]["values"][-1], found["distributed"]["values"][-1]
        assert len(own["head.weight"]) == 301 - 101 * rank
        assert all(torch.equal(own[name], whole[name]) for name in SHAPES if name != "head.weight")
        assert torch.equal(own["head.weight"], whole["head.weight"][: len(own["head.weight"])])


def test_residuals_have_the_bits_of_masters(ranks):
    for found in ranks:
        for one, other in zip(found["residual"]["values"], found["master_weights"]["values"]):
            assert is_same(one, other)


def test_an_average_makes_parameters_equal(ranks):
    one, other = [found["last average"]["values"] for found in ranks]
    assert not is_same(one[-2], other[-2]) and is_same(one[-1], other[-1])
    mean = {key: (one[-2][key].double() + other[-2][key].double()) / 2 for key in SHAPES}
    assert is_same(one[-1], mean)


def test_an_average_writes_parameters_behind_a_skipped_step(ranks):
    one, other = simulated("local_sgd", CASES["local_sgd"], 2)[0]
    expected = {key: (one[key] + other[key]) / 2 for key in SHAPES}
    for found in (found["skipped"] for found in ranks):
        assert found["skipped"][:2] == [False, True], "one rank's gradient skips it on all"
        assert is_same(found["values"][1], expected)
        assert found["versions"][1] > found["versions"][0], "autograd knows of it"


def test_rates_of_groups_count_at_once_and_beside_a_schedule(ranks):
    for rank, found in enumerate(ranks):
        for name in ("rates", "rates in backward", "schedule and scheduler", "sums in backward"):
            assert "error" not in found[name], found[name]
            assert_simulated(name, MORE[name], found[name], rank, 2)
        assert "expected the settings of its groups" in found["changed"]


def test_what_ranks_refuse_is_named(ranks):
    for found in ranks:
        assert "update_in_backward and clip_norm" in found["contradiction"]["error"]
        assert "shard_group: expected zero of 1 or more too" in found["nothing to share"]["error"]
        assert "naive: expected it as an argument of the opt" in found["own to ranks"]["error"]


def test_local_steps_go_on_from_a_checkpoint_between_averages(tmp_path):
    local, folder = {"ranks": {"local_sgd": 3}}, str(tmp_path / "saved")
    cases = {
        "whole": {**local, "steps": (0, 6)},
        "first": {**local, "steps": (0, 4), "save": folder},
        "again": {**local, "steps": (4, 6), "resume": folder},
    }
    one, other = run_ranks("settings", tmp_path / "ranks", cases=cases)
    assert not is_same(one["first"]["values"][-1], other["first"]["values"][-1])
    for found in (one, other):
        assert "error" not in found["again"], found["again"]
        for own, whole in zip(found["again"]["values"], found["whole"]["values"][4:]):
            assert is_same(own, whole)


@pytest.mark.parametrize(
    "name", ["accumulate", "accumulated", "loss_scale", "argument_bytes", "naive"]
)
def test_a_setting_acts_in_one_process(name):
    case = CASES[name]
    found, usual = run_alone(case, joins=False), run_alone({}, joins=False)
    assert_simulated(name, case, found, 0, 1)
    changed = not is_same(found["values"][-1], usual["values"][-1])
    assert changed or found["launches"] > usual["launches"] == 1


def test_a_schedule_multiplies_the_rates_of_groups_in_one_process():
    base = {"rule": "AdamW", "of_rule": {"lr": 2.0**-6}}
    rates = [2.0**-6 * 0.25**step for step in range(STEPS)]
    by_hand = [rate * 0.5 ** (step // 2) for step, rate in enumerate(rates)]
    scheduled = run_alone({**base, "own": {"schedule": HALVES}, "rates": rates}, joins=False)
    expected = run_alone({**base, "rates": by_hand}, joins=False)
    usual = run_alone({**base, "rates": rates}, joins=False)
    for one, other in zip(scheduled["values"], expected["values"]):
        assert is_same(one, other)
    assert not is_same(scheduled["values"][-1], usual["values"][-1])
    # Beside a scheduler of PyTorch's, whose rate is the group's.
    model, optimizer = made({**base, "own": {"schedule": HALVES}}, 0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.25)
    for step in range(STEPS):
        for name, value in model.named_parameters():
            value.grad = gradient(0, step, name).to(value.dtype)
        optimizer.step()
        scheduler.step()
    assert is_same(values(model), scheduled["values"][-1])


@pytest.mark.parametrize("name", GROUPS)
def test_groups_of_pytorch_have_the_bits_of_settings_of_some_parameters(name):
    text, of_group = GROUPS[name]
    kind = fusestep.torch.Lamb if name == "trust_of" else fusestep.torch.AdamW
    with pytest.raises(TypeError, match=f"{name}: expected a parameter group with"):
        kind(Net().parameters(), **{name: text})
    with pytest.raises(TypeError, match=f"{name}: expected a parameter group with"):
        fusestep.torch.DataParallel(Net(), kind(Net().parameters()), **{name: text})
    part = text.partition("=")[0]
    grouped, planned, usual = Net(), Net(), Net()
    named = list(grouped.named_parameters())
    groups = [
        {"params": [(key, value) for key, value in named if part in key], **of_group},
        {"params": [(key, value) for key, value in named if part not in key]},
    ]
    optimizers = [kind(groups, lr=LR, weight_decay=0.125)]
    for model in (planned, usual):
        optimizers.append(kind(model.named_parameters(), lr=LR, weight_decay=0.125))
    # The planner's own, which the extension module reads.
    optimizers[1]._options["texts"][name] = [text]
    for step in range(STEPS):
        for model, optimizer in zip((grouped, planned, usual), optimizers):
            for key, value in model.named_parameters():
                value.grad = gradient(0, step, key).float()
            optimizer.step()
    assert is_same(values(grouped), values(planned))
    assert not is_same(values(grouped), values(usual))


@pytest.mark.parametrize("name", [name for name in ROWS if name not in GROUPS])
def test_what_one_process_has_not_is_refused_by_name(name):
    of_class = name in fusestep.torch._options.OPTIONS
    own, of_ranks = CASES.get(name, {}).get("own", {}), CASES.get(name, {}).get("ranks", {})
    if of_class:
        assert name in own and name not in of_ranks
        with pytest.raises(TypeError, match=f"{name}: expected it as an argument of the optim"):
            fusestep.torch.DataParallel(Net(), made({}, 0)[1], **{name: own[name]})
        return
    value = of_ranks.get(name, 2)
    with pytest.raises(TypeError, match=f"{name}: expected .*found it as an argument of `AdamW`"):
        fusestep.torch.AdamW(Net().parameters(), **{name: value})
    if name in REFUSED:
        with pytest.raises(TypeError, match=f"{name}: expected `{REFUSED[name]}`"):
            fusestep.torch.DataParallel(Net(), made({}, 0)[1], **{name: value})


@pytest.mark.parametrize(
    ("own", "rule", "text"),
    [
        ({"tables": "resident"}, "AdamW", "tables of resident: expected `DataParallel`"),
        ({"schedule": HALVES}, "SGD", "schedule: expected a rule with a count of steps"),
        ({"rounding": "stochastic"}, "Lion", "rounding: expected a rule with a count of steps"),
    ],
)
def test_values_that_one_process_has_not_are_refused_before_a_step(own, rule, text):
    model, optimizer = made({"own": own, "rule": rule}, 0)
    before = values(model)
    for value in model.parameters():
        value.grad = torch.ones_like(value)
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    assert is_same(before, values(model)) and not optimizer.state


@pytest.mark.parametrize("name", ["schedule", "rounding"])
def test_the_step_in_backward_refuses_what_counts_whole_steps(name):
    model, optimizer = made({"rule": "AdamW", "own": CASES[name]["own"]}, 0)
    with pytest.raises(ValueError, match=f"{name}: expected one for `step` alone"):
        fusestep.torch.fuse_backward(model, optimizer)


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"schedule": "up"}, ValueError, "schedule: expected constant, warmup, linear"),
        ({"rounding": "down"}, ValueError, "rounding: expected nearest or stochastic, found .down"),
        ({"rounding_seed": 7}, ValueError, "rounding_seed: expected rounding stochastic too"),
        ({"accumulated": "sum"}, ValueError, "accumulated: expected accumulate of 2 or more too"),
        ({"argument_bytes": 0}, ValueError, "argument_bytes: expected a whole number from 1 on"),
        ({"argument_bytes": 1.5}, ValueError, "a whole number from 1 on, found `1.5`"),
        ({"naive": 1}, TypeError, "naive: expected True or False, found 1"),
        ({"schedule": [1]}, TypeError, r"schedule: expected phases .*found \[1\]"),
        ({"loss_scale": 3.0}, ValueError, "loss_scale: expected a power of two"),
    ],
)
def test_values_out_of_range_are_refused_in_the_words_of_the_table(settings, kind, text):
    with pytest.raises(kind, match=text):
        fusestep.torch.AdamW(Net().parameters(), **settings)


def test_a_loss_scale_keeps_its_policy_when_its_plan_is_made_anew():
    param = torch.nn.Parameter(torch.ones(3))
    scale = "dynamic:start=256,backoff=0.25"
    optimizer = fusestep.torch.AdamW([param], loss_scale=scale)
    assert optimizer.loss_scale() == 256.0
    for expected in (64.0, 16.0):
        param.grad = torch.full((3,), float("inf"))
        optimizer.step()
        assert optimizer.loss_scale() == expected
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
        assert optimizer.loss_scale() == expected
