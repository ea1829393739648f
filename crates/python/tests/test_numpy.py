"""Steps on NumPy's arrays, and on other libraries' by DLPack."""

import copy
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

import fusestep.numpy
from fusestep import _fusestep, _plans

RULES = list(fusestep.numpy.RULES)
SHAPES = {"a": (3, 4), "b": (7,), "c": (), "d": (0, 2), "e": (300, 40)}


def arrays(seed, dtype=np.float32, scale=1.0):
    generator = np.random.default_rng(seed)
    return {
        name: np.array(generator.standard_normal(shape) * scale, dtype)
        for name, shape in SHAPES.items()
    }


def settings_of(rule):
    return {"momentum": 0.9} if rule in ("sgd", "rmsprop") else {}


def same(ours, others):
    return all(np.array_equal(ours[name], others[name]) for name in SHAPES)


def run(rule, params, state, steps, **settings):
    for step in steps:
        grads = arrays(100 + step, params["a"].dtype)
        for index, name in enumerate(SHAPES):
            if (step + index) % 5 == 4:
                grads[name] = None
        fusestep.numpy.step(rule, params, grads, state, **settings_of(rule), **settings)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_steps_have_the_bits_of_the_torch_classes(rule, dtype):
    torch = pytest.importorskip("torch")
    import fusestep.torch

    names = {name.lower(): name for name in fusestep.torch.__all__}
    names["schedule_free"] = "ScheduleFreeAdamW"
    params, state = arrays(0, dtype), fusestep.numpy.State()
    tensors = [torch.nn.Parameter(torch.from_numpy(np.copy(p))) for p in params.values()]
    optimizer = getattr(fusestep.torch, names[rule])(tensors, **settings_of(rule))
    run(rule, params, state, range(9))
    for step in range(9):
        for index, (tensor, value) in enumerate(zip(tensors, arrays(100 + step, dtype).values())):
            tensor.grad = None if (step + index) % 5 == 4 else torch.from_numpy(value)
        optimizer.step()
    for array, tensor in zip(params.values(), tensors):
        assert np.array_equal(array, tensor.detach().numpy())
    assert not same(params, arrays(0, dtype))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("copier", ["pickle", "deepcopy", "arrays"])
def test_a_copied_state_goes_on_with_the_same_bits(rule, copier):
    params, state = arrays(0), fusestep.numpy.State()
    run(rule, params, state, range(4))
    others = copy.deepcopy(params)
    if copier == "pickle":
        other = pickle.loads(pickle.dumps(state))
    elif copier == "deepcopy":
        other = copy.deepcopy(state)
    else:
        other = fusestep.numpy.State(
            {name: {key: value.copy() for key, value in own.items()} for name, own in state.items()}
        )
    run(rule, params, state, range(4, 9))
    run(rule, others, other, range(4, 9))
    assert same(params, others)


def test_parts_that_take_turns_are_planned_once(monkeypatch):
    def run_parts(most):
        made = []

        class Counting:
            check = staticmethod(_fusestep.check)

            @staticmethod
            def Session(*arguments):
                made.append(arguments[1])
                return _fusestep.Session(*arguments)

        monkeypatch.setattr(fusestep.numpy, "_fusestep", Counting)
        monkeypatch.setattr(_plans, "MOST_PLANS", most)
        state = fusestep.numpy.State()
        parts = [{f"{at}": np.ones(3 + at, np.float32)} for at in range(3)]
        for step in range(4):
            for part in parts:
                grads = {name: np.full_like(own, step + 1) for name, own in part.items()}
                fusestep.numpy.step("adamw", part, grads, state, lr=0.1 / (step + 1))
        return len(made), [own.tobytes() for part in parts for own in part.values()]

    plans, ours = run_parts(64)
    without, theirs = run_parts(0)
    assert (plans, without) == (3, 12) and ours == theirs


def test_threads_change_no_bit_and_the_plan_is_kept():
    results = []
    for threads in (1, 2, 3):
        params, state = arrays(0), fusestep.numpy.State()
        run("adamw", params, state, range(3), threads=threads)
        session = state._session
        run("adamw", params, state, range(3, 6), threads=threads, lr=0.1)
        assert state._session is session, "another rate needs no other plan"
        results.append(params)
    assert same(results[0], results[1]) and same(results[0], results[2])
    assert "fused_adam_f32" in state.plan()


def test_new_arrays_shapes_and_names():
    params, state = arrays(0), fusestep.numpy.State()
    others, other = arrays(0), fusestep.numpy.State()
    run("adamw", params, state, range(2))
    run("adamw", others, other, range(2))
    moved = {name: array.copy() for name, array in params.items()}
    run("adamw", moved, state, range(2, 4))
    run("adamw", others, other, range(2, 4))
    assert same(moved, others)
    grown = {"new": np.ones(3, np.float32), **moved}
    grads = {"new": np.ones(3, np.float32)}
    report = fusestep.numpy.step("adamw", grown, grads, state)
    assert report.elements == 3 and report.without_gradient == len(SHAPES)
    assert state["new"]["step"] == 1 and state["a"]["step"] == other["a"]["step"]


def test_clipping():
    params = {"x": np.zeros(2, np.float32)}
    grads = {"x": np.array([3.0, 4.0], np.float32)}
    state = fusestep.numpy.State()
    report = fusestep.numpy.step("sgd", params, grads, state, lr=1.0, clip_norm=1.0)
    assert report.grad_norm == pytest.approx(5.0)
    assert np.allclose(params["x"], [-0.6, -0.8], atol=1e-5)


def wrong():
    ones = np.ones(4, np.float32)
    read_only = ones.copy()
    read_only.flags.writeable = False
    yield "dtype", {"x": ones.astype(np.int32)}, {}, TypeError, "parameter `x`.*i4"
    yield "order", {"x": ones.astype(">f4")}, {}, TypeError, "byte order"
    yield "strides", {"x": np.ones(8, np.float32)[::2]}, {}, ValueError, "strides"
    yield "read-only", {"x": read_only}, {}, ValueError, "read-only"
    yield "list", {"x": [1.0]}, {}, TypeError, "list"
    yield "unknown", {"x": ones}, {"y": ones}, ValueError, "grads.*y"
    yield "shape", {"x": ones}, {"x": np.ones(5, np.float32)}, ValueError, r"\(4,\).*\(5,\)"
    yield "gradient", {"x": ones}, {"x": np.ones(4)}, TypeError, "float32.*float64"
    yield "overlap", {"x": ones, "y": ones}, {"x": ones + 1, "y": ones + 1}, RuntimeError, "overlap"


@pytest.mark.parametrize("case", list(wrong()), ids=lambda case: case[0])
def test_wrong_arrays_change_nothing(case):
    _, params, grads, error, match = case
    good = np.full(3, 2.0, np.float32)
    state = fusestep.numpy.State()
    with pytest.raises(error, match=match):
        given = {"good": good, **params}
        fusestep.numpy.step("adamw", given, {"good": np.ones(3, np.float32), **grads}, state)
    assert np.array_equal(good, np.full(3, 2.0)) and not state
    fusestep.numpy.step("adamw", {"good": good}, {"good": np.ones(3, np.float32)}, state)
    assert (good < 2).all() and state["good"]["step"] == 1


def test_wrong_rules_settings_and_states():
    params, grads = {"x": np.ones(2)}, {"x": np.ones(2)}
    state = fusestep.numpy.State()
    with pytest.raises(ValueError, match="adafactor"):
        fusestep.numpy.step("adafactor", params, grads, state)
    with pytest.raises(TypeError, match="momentum"):
        fusestep.numpy.step("adamw", params, grads, state, momentum=0.9)
    with pytest.raises(ValueError, match="lr"):
        fusestep.numpy.step("adamw", params, grads, state, lr=float("nan"))
    with pytest.raises(TypeError, match="State"):
        fusestep.numpy.step("adamw", params, grads, {})


@pytest.mark.parametrize(
    ("threads", "error", "match"),
    [
        (-1, ValueError, "threads: expected 1 to 256, found -1"),
        (0, ValueError, "threads: expected 1 to 256, found 0"),
        (257, ValueError, "threads: expected 1 to 256, found 257"),
        (20000, ValueError, "threads: expected 1 to 256, found 20000"),
        (2**70, ValueError, "threads: expected 1 to 256"),
        (2.0, TypeError, "threads: expected a whole number, found float"),
        ("2", TypeError, "threads: expected a whole number, found str"),
        (True, TypeError, "threads: expected a whole number, found bool"),
    ],
)
def test_threads_that_there_cannot_be_are_refused(threads, error, match):
    params, state = {"x": np.ones(2)}, fusestep.numpy.State()
    with pytest.raises(error, match=match):
        fusestep.numpy.step("adamw", params, {"x": np.ones(2)}, state, threads=threads)
    assert params["x"].tolist() == [1.0] * 2 and not state
    fusestep.numpy.step("adamw", params, {"x": np.ones(2)}, state, threads=np.int64(2))
    assert (params["x"] < 1).all()


def test_gradients_in_another_order_are_copied():
    params = {"x": np.zeros((3, 2))}
    grads = {"x": np.arange(6.0).reshape(2, 3).T}
    report = fusestep.numpy.step("sgd", params, grads, fusestep.numpy.State(), lr=1.0)
    assert report.copied_gradients == 1 and np.array_equal(params["x"], -grads["x"])


class Foreign:
    """An array of another library: DLPack and nothing else."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def test_dlpack_is_used_without_a_copy():
    own, plain = np.ones((5, 6), np.float32), {"x": np.ones((5, 6), np.float32)}
    gradient = arrays(3)["e"][:5, :6].copy()
    fusestep.numpy.step("adamw", plain, {"x": gradient}, fusestep.numpy.State())
    report = fusestep.numpy.step(
        "adamw", {"x": Foreign(own)}, {"x": Foreign(gradient)}, fusestep.numpy.State()
    )
    assert report.copied_gradients == 0
    assert np.array_equal(own, plain["x"]) and not np.array_equal(own, np.ones((5, 6)))


def test_a_parameter_that_dlpack_says_is_read_only_is_refused():
    own = np.ones(3, np.float32)
    own.flags.writeable = False
    with pytest.raises((ValueError, TypeError), match="parameter `x`"):
        fusestep.numpy.step("adamw", {"x": Foreign(own)}, {"x": np.ones(3, np.float32)},
                            fusestep.numpy.State())  # fmt: skip


def test_torch_is_not_imported():
    program = "import sys, fusestep.numpy; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.split() == ["False"], out.stderr


def test_gradients_of_jax_are_read_where_they_lie():
    jax = pytest.importorskip("jax")
    params = {"w": np.ones((4, 3), np.float32), "b": np.zeros(3, np.float32)}
    x = np.arange(8.0, dtype=np.float32).reshape(2, 4)

    def loss(params):
        return (jax.numpy.tanh(x @ params["w"] + params["b"]) ** 2).sum()

    state, losses = fusestep.numpy.State(), []
    for _ in range(30):
        value, grads = jax.value_and_grad(loss)(params)
        report = fusestep.numpy.step("adamw", params, grads, state, lr=0.05)
        assert report.copied_gradients == 0 and report.without_gradient == 0
        losses.append(float(value))
    assert losses[-1] < losses[0] - 1
    with pytest.raises((ValueError, TypeError), match="parameter `w`"):
        frozen = {"w": jax.numpy.ones((4, 3))}
        fusestep.numpy.step("adamw", frozen, {"w": grads["w"]}, fusestep.numpy.State())


@pytest.mark.parametrize("key", ["velocity", "step"])
def test_state_that_may_not_be_written_is_refused(key):
    """A file that `numpy.load` maps for reading is memory that no process may write."""
    own = {"velocity": np.zeros(4, np.float32), "step": np.array(1.0)}
    own[key].flags.writeable = False
    state, params = fusestep.numpy.State(w=own), {"w": np.ones(4, np.float32)}
    with pytest.raises(ValueError, match=f"{key} of `w`.*written.*read-only"):
        fusestep.numpy.step("sgd", params, {"w": np.ones(4, np.float32)}, state, momentum=0.9)
    assert params["w"].tolist() == [1.0] * 4
    assert own["velocity"].tolist() == [0.0] * 4 and float(own["step"]) == 1.0


@pytest.mark.parametrize(
    ("argument", "value", "error", "match"),
    [
        ("rule", [], ValueError, r"rule: expected one of adam.*found \[\]"),
        ("params", [np.ones(2)], TypeError, "params: expected a mapping.*found list"),
        ("params", {1: np.ones(2)}, TypeError, "params: expected names of type str, found 1"),
        ("params", {"x": np.ma.array(np.ones(2))}, TypeError, "parameter `x`.*mask.*MaskedArray"),
        ("grads", None, TypeError, "grads: expected a mapping of names, found NoneType"),
        ("grads", {1: np.ones(2)}, TypeError, "grads: expected names of type str, found 1"),
        ("grads", {"x": np.ma.array(np.ones(2))}, TypeError, "gradient of `x`.*mask.*MaskedArray"),
        ("clip_norm", "1", TypeError, "clip_norm: expected a finite value above 0, found '1'"),
        ("clip_norm", 0, ValueError, "clip_norm: expected a finite value above 0, found 0"),
        ("clip_norm", 10**400, TypeError, "clip_norm: expected a finite value above 0, found 1000"),
        ("lr", "1", TypeError, "lr: expected a number, found '1'"),
        ("amsgrad", 1, TypeError, "amsgrad: expected True or False, found 1"),
        ("state", fusestep.numpy.State(x=3), TypeError, "state of `x`: expected a dict, found int"),
        ("state", fusestep.numpy.State(x={"moment1": [1.0, 2.0]}), TypeError, "moment1.*list"),
        (
            "state",
            fusestep.numpy.State(x={"moment1": np.ma.array(np.ones(2))}),
            TypeError,
            "moment1 of `x`: expected an array without a mask",
        ),
    ],
)
def test_errors_name_the_argument(argument, value, error, match):
    x = np.ones(2)
    given = {"rule": "adamw", "params": {"x": x}, "grads": {"x": x + 1}}
    given["state"] = fusestep.numpy.State()
    with pytest.raises(error, match=match):
        fusestep.numpy.step(**{**given, argument: value})
    assert x.tolist() == [1.0] * 2 and not given["state"]


@pytest.mark.parametrize("copier", [pickle.dumps, copy.deepcopy, copy.copy], ids=str)
def test_a_copy_waits_for_the_step_that_another_thread_makes(copier):
    params, state = arrays(1), fusestep.numpy.State()
    run("adam", params, state, range(2))
    copied = threading.Event()

    def work():
        copier(state)
        copied.set()

    thread = threading.Thread(target=work)
    # A step holds it from the first array that it writes to the last.
    with state._lock:
        thread.start()
        assert not copied.wait(0.3)
    thread.join()
    assert copied.is_set()


def test_a_pickle_holds_nothing_that_a_step_writes_while_it_is_written():
    params, state = arrays(1), fusestep.numpy.State()
    run("adam", params, state, range(2))
    made, args, kept, _, items = state.__reduce_ex__(4)
    before = copy.deepcopy(dict(state))
    run("adam", params, state, range(2, 4))
    other = made(*args)
    other.update(items)
    other.__setstate__(kept)
    for name, own in before.items():
        for key, value in own.items():
            assert np.array_equal(other[name][key], value), (name, key)


@pytest.mark.parametrize("copier", [lambda s: s, copy.deepcopy, fusestep.numpy.State], ids=str)
@pytest.mark.parametrize("others", [("adamw", "schedule_free"), ("sgd", "adam"), ("lion", "lamb")])
def test_a_state_goes_on_with_the_rule_that_made_it(copier, others):
    params, state = arrays(0), fusestep.numpy.State()
    run(others[0], params, state, range(2))
    state = copier(state)
    before, kept = copy.deepcopy(params), copy.deepcopy(dict(state))
    with pytest.raises(ValueError, match="of `a`: expected .* use another State"):
        fusestep.numpy.step(others[1], params, arrays(100), state)
    assert same(params, before) and state["a"].keys() == kept["a"].keys()
    run(others[0], params, state, range(2, 4))
    del state["b"]
    fusestep.numpy.step(others[1], {"b": params["b"]}, {"b": params["b"] + 1}, state)


def test_a_rule_is_told_by_a_pickle_and_by_what_arrays_lack():
    params, state = arrays(0), fusestep.numpy.State()
    run("lars", params, state, range(2))
    with pytest.raises(ValueError, match="state of `a`: expected that of sgd, found that of lars"):
        run("sgd", params, pickle.loads(pickle.dumps(state)), range(1))
    steps = fusestep.numpy.State(a={"step": np.array(3.0)})
    with pytest.raises(ValueError, match="moment1 of `a`.*because adam has stepped 3.0 times"):
        run("adam", params, steps, range(1))


def test_threads_that_share_a_state_wait_for_each_other():
    params, state = {"x": np.ones(200_000)}, fusestep.numpy.State()
    grads, failed = {"x": np.ones(200_000)}, []

    def work():
        try:
            for _ in range(20):
                fusestep.numpy.step("adamw", params, grads, state)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed and state["x"]["step"] == 80
    alone, other = {"x": np.ones(200_000)}, fusestep.numpy.State()
    for _ in range(80):
        fusestep.numpy.step("adamw", alone, grads, other)
    assert np.array_equal(params["x"], alone["x"])


PART = {
    "no count": ("adam", {"moment1": 1, "moment2": 1}, "step of `w`: expected a count"),
    "moments at step 0": ("adam", {"moment1": 1, "moment2": 1, "step": 0.0}, "expected zeros"),
    "a broken count": ("adam", {"moment1": 1, "moment2": 1, "step": 2.5}, "whole number, found 2.5"),
    "PyTorch's names": ("adam", {"exp_avg": 1, "exp_avg_sq": 1, "step": 3.0}, "found exp_avg, exp"),
    "no momentum": ("rmsprop", {"moment2": 1, "step": 3.0}, "velocity of `w`: expected an array"),
    "no velocity": ("sgd", {"step": 3.0}, "velocity of `w`: expected an array"),
    "a count alone": ("lars", {"step": 3.0}, "velocity of `w`: expected an array"),
}


@pytest.mark.parametrize("part", PART)
def test_state_in_part_is_refused(part):
    rule, own, match = PART[part]
    own = {
        key: np.array(value) if key == "step" else np.full(3, value, np.float32)
        for key, value in own.items()
    }
    state, w = fusestep.numpy.State({"w": dict(own)}), np.ones(3, np.float32)
    settings = {"momentum": 0.9} if rule in ("rmsprop", "sgd") else {}
    with pytest.raises(ValueError, match=match):
        fusestep.numpy.step(rule, {"w": w}, {"w": np.ones(3, np.float32)}, state, **settings)
    assert (w == 1).all() and state["w"].keys() == own.keys()
    assert all(np.array_equal(state["w"][key], value) for key, value in own.items())


@pytest.mark.parametrize("name", ["lr", "beta1", "eps", "weight_decay", "clip_norm"])
def test_truth_values_are_no_numbers(name):
    arrays = {"w": np.ones(3, np.float32)}
    with pytest.raises(TypeError, match=name):
        fusestep.numpy.step("adam", arrays, arrays, fusestep.numpy.State(), **{name: True})


def test_sums_of_adagrad_may_start_anywhere():
    state = fusestep.numpy.State({"w": {"sum": np.full(3, 4.0, np.float32)}})
    w = np.ones(3, np.float32)
    grads = {"w": np.zeros(3, np.float32)}
    fusestep.numpy.step("adagrad", {"w": w}, grads, state)
    assert (state["w"]["sum"] == 4).all()


@pytest.mark.parametrize("rule", ["adamw", "sgd", "lion"])
def test_a_step_does_not_read_all_of_the_state(rule, monkeypatch):
    state, w = fusestep.numpy.State(), np.ones(1000, np.float32)
    settings = {"momentum": 0.9} if rule == "sgd" else {}
    read, any_of = [], np.any
    for _ in range(3):
        fusestep.numpy.step(rule, {"w": w}, {"w": w + 1}, state, **settings)
        monkeypatch.setattr(np, "any", lambda array: read.append(np.size(array)) or any_of(array))
    assert sum(read) < 10
