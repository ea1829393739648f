"""The seam without PyTorch: steps over memory of ``ctypes``."""

import ctypes
import math
import subprocess
import sys
import unittest

import fusestep
from fusestep import _fusestep

ADAM = {
    "rule": "adam",
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "decoupled": True,
    "amsgrad": False,
    "maximize": False,
}
OPTIONS = {
    "settings": {},
    "loss_scale_at": None,
    "counts": True,
}
KEYS = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}


class Array:
    """A float64 tensor of one dimension, as much of one as the seam asks for."""

    def __init__(self, values, in_order=True):
        self.memory = (ctypes.c_double * len(values))(*values)
        self.grad = None
        self.in_order = in_order

    def values(self):
        return list(self.memory)


class Scalar(Array):
    """A tensor of no dimension."""


class Refused(Exception):
    """What the library below raises."""


class Library:
    file = None

    @staticmethod
    def describe(array):
        shape = () if isinstance(array, Scalar) else (len(array.memory),)
        return ctypes.addressof(array.memory), "float64", shape, array.in_order

    @staticmethod
    def refuse(name, parameter, gradient):
        if len(gradient.memory) != len(parameter.memory):
            raise Refused(name)


class Described:
    def __init__(self, name, length, group=0, dtype="float64", trains=True):
        self.name, self.dtype, self.shape = name, dtype, (length,)
        self.group, self.trains = group, trains


class Owner:
    """Keeps state as PyTorch's optimizers do."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.state = {}

    def _make_state(self, index):
        array = self.arrays[index]
        zeros = [0.0] * len(array.memory)
        self.state[array] = {
            "step": Scalar([0.0]),
            "exp_avg": Array(zeros),
            "exp_avg_sq": Array(zeros),
        }
        return self.state[array], True


def session(arrays, rules=(ADAM,), **options):
    described = [Described(f"p{i}", len(array.memory)) for i, array in enumerate(arrays)]
    settings = {**OPTIONS, "settings": {name: [str(value)] for name, value in options.items()}}
    return _fusestep.Session(arrays, described, list(rules), settings, KEYS, Library)


def reference(values, grads, steps, rule):
    """AdamW, element by element (Loshchilov & Hutter 2019, Algorithm 2)."""
    out = []
    for p, g in zip(values, grads):
        m = v = 0.0
        for t in range(1, steps + 1):
            p -= rule["lr"] * rule["weight_decay"] * p
            m = rule["beta1"] * m + (1 - rule["beta1"]) * g
            v = rule["beta2"] * v + (1 - rule["beta2"]) * g * g
            denominator = math.sqrt(v / (1 - rule["beta2"] ** t)) + rule["eps"]
            p -= rule["lr"] * (m / (1 - rule["beta1"] ** t)) / denominator
        out.append(p)
    return out


class Bare(unittest.TestCase):
    def setUp(self):
        self.arrays = [Array([1.0, -2.0, 3.0]), Array([0.5] * 1000)]
        self.grads = [[0.1, 0.2, -0.3], [0.01] * 1000]
        self.starts = [array.values() for array in self.arrays]
        for array, grad in zip(self.arrays, self.grads):
            array.grad = Array(grad)

    def test_no_library_is_imported_that_is_not_asked_for(self):
        program = "import sys, fusestep; print('torch' in sys.modules, 'numpy' in sys.modules)"
        out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual(out.stdout.split(), ["False", "False"], out.stderr)
        self.assertRegex(fusestep.__version__, r"^\d+\.\d+\.\d+")

    def test_steps_are_those_of_the_equation(self):
        owner, planned = Owner(self.arrays), session(self.arrays)
        for _ in range(5):
            self.assertEqual(list(planned.step([self.arrays], [ADAM], owner, None, 2)), [0, 1])
        for array, start, grad in zip(self.arrays, self.starts, self.grads):
            expected = reference(start, grad, 5, ADAM)
            for found, wanted in zip(array.values(), expected):
                self.assertAlmostEqual(found, wanted, delta=1e-12)
            self.assertEqual(owner.state[array]["step"].values(), [5.0])

    def test_a_gradient_that_is_missing_leaves_its_parameter(self):
        owner, planned = Owner(self.arrays), session(self.arrays)
        self.arrays[0].grad = None
        self.assertEqual(planned.step([self.arrays], [ADAM], owner, None, 1), [1])
        self.assertEqual(self.arrays[0].values(), self.starts[0])
        self.assertNotEqual(self.arrays[1].values(), self.starts[1])
        self.assertEqual(planned.report()["without_gradient"], 1)

    def test_what_is_written_is_told_once_and_only_if_it_is(self):
        for threads in (1, 2, 3):
            owner, planned = Owner(self.arrays), session(self.arrays)
            lists, told = [self.arrays[:1], self.arrays[1:]], []
            planned.step(lists, [ADAM], owner, None, threads, False, told.append)
            self.assertEqual([list(map(id, one)) for one in told], [list(map(id, self.arrays))])
            self.arrays[0].grad, told = None, []
            planned.step(lists, [ADAM], owner, None, threads, False, told.append)
            self.assertEqual([list(map(id, one)) for one in told], [[id(self.arrays[1])]])
            self.setUp()

    def test_a_step_that_is_skipped_or_refused_tells_nothing(self):
        told = []
        for options, grad, raised in (
            ({"loss_scale": 2.0}, [math.inf] * 1000, None),
            ({}, [1.0] * 999, Refused),
        ):
            owner, planned = Owner(self.arrays), session(self.arrays, **options)
            self.arrays[1].grad = Array(grad)
            try:
                planned.step([self.arrays], [ADAM], owner, None, 2, False, told.append)
            except Refused:
                self.assertIs(raised, Refused)
            self.assertEqual(told, [])
            self.assertEqual([array.values() for array in self.arrays], self.starts)

    def test_what_telling_raises_is_raised(self):
        def refuse(_):
            raise KeyError("told")

        for threads in (1, 2):
            owner, planned = Owner(self.arrays), session(self.arrays)
            with self.assertRaisesRegex(KeyError, "told"):
                planned.step([self.arrays], [ADAM], owner, None, threads, False, refuse)
            self.assertTrue(planned.has_updated())
            self.assertEqual(owner.state[self.arrays[0]]["step"].values(), [1.0])
            self.arrays[0].grad = Array([1.0])
            with self.assertRaises(Refused):
                planned.step([self.arrays], [ADAM], owner, None, threads, False, refuse)
            self.assertFalse(planned.has_updated())
            self.setUp()

    def test_gradients_of_every_class_are_found(self):
        class Computed(Array):
            @property
            def grad(self):
                return self.other

            @grad.setter
            def grad(self, value):
                self.other = value

        class Asked(Array):
            def __getattribute__(self, name):
                return super().__getattribute__("other" if name == "grad" else name)

        for kinds in ((Array, Computed, Asked), (Computed, Asked, Array), (Asked, Array, Computed)):
            arrays = [kind([1.0, 2.0]) for kind in kinds]
            for array in arrays:
                array.other = Array([0.1, 0.2])
                array.grad = array.other
            self.assertEqual(list(session(arrays).step([arrays], [ADAM], Owner(arrays), None, 1)),
                             [0, 1, 2])
            self.assertEqual(arrays[1].values(), arrays[0].values())
            self.assertEqual(arrays[2].values(), arrays[0].values())
            self.assertNotEqual(arrays[0].values(), [1.0, 2.0])

    def test_a_wrong_gradient_changes_nothing(self):
        owner, planned = Owner(self.arrays), session(self.arrays)
        self.arrays[1].grad = Array([1.0] * 999)
        with self.assertRaises(Refused):
            planned.step([self.arrays], [ADAM], owner, None, 1)
        self.assertEqual([array.values() for array in self.arrays], self.starts)

    def test_memory_that_overlaps_is_refused(self):
        owner, planned = Owner(self.arrays), session(self.arrays)
        self.arrays[0].grad = self.arrays[0]
        with self.assertRaisesRegex(RuntimeError, "`p0` and `p0`.*overlap"):
            planned.step([self.arrays], [ADAM], owner, None, 1)
        self.assertEqual([array.values() for array in self.arrays], self.starts)

    def test_parameters_that_were_not_planned_for_need_another_plan(self):
        owner, planned = Owner(self.arrays), session(self.arrays)
        self.assertIsNone(planned.step([self.arrays[::-1]], [ADAM], owner, None, 1))
        other = {**ADAM, "rule": "lion", "beta2": 0.99}
        self.assertIsNone(planned.step([self.arrays], [other], owner, None, 1))
        self.assertEqual([array.values() for array in self.arrays], self.starts)

    def test_settings_are_checked(self):
        _fusestep.check(ADAM)
        for name, value in (("lr", math.nan), ("beta1", 1.5), ("rule", "adadelta")):
            with self.assertRaises(ValueError):
                _fusestep.check({**ADAM, name: value})
        with self.assertRaisesRegex(ValueError, "`eps`"):
            _fusestep.check({key: value for key, value in ADAM.items() if key != "eps"})

    def test_a_plan_is_text(self):
        text = session(self.arrays, clip_norm=1.0).plan()
        self.assertIn("2 parameters", text)
        self.assertIn("norm", text)


if __name__ == "__main__":
    unittest.main()
