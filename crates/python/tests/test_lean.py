"""An extension with AdamW and Lion alone: both step, and other rules are refused by name."""

import unittest

from fusestep import _fusestep
from test_bare import ADAM, OPTIONS, Array, Described, Library, Owner

LION = {
    "rule": "lion",
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "weight_decay": 0.0,
    "maximize": False,
}
OTHERS = ["sgd", "adagrad", "rmsprop", "schedule_free", "lars", "lamb", "adamax", "nadam"]


class OwnerOfLion(Owner):
    def _make_state(self, index):
        array = self.arrays[index]
        self.state[array] = {"exp_avg": Array([0.0] * len(array.memory))}
        return self.state[array], True


@unittest.skipIf("sgd" in _fusestep.rules(), "this build has all rules")
class Lean(unittest.TestCase):
    def test_two_rules_are_there(self):
        self.assertEqual(sorted(_fusestep.rules()), ["adam", "lion"])
        for rule in (ADAM, LION):
            _fusestep.check(rule)

    def test_both_step(self):
        adam = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
        lion = {"moment1": "exp_avg"}
        for rule, keys, owner in ((ADAM, adam, Owner), (LION, lion, OwnerOfLion)):
            arrays = [Array([1.0, -2.0])]
            arrays[0].grad = Array([0.5, -0.5])
            options = {**OPTIONS, "counts": rule is ADAM}
            steps = _fusestep.Session(
                arrays, [Described("p", 2)], [rule], options, keys, Library
            )
            self.assertEqual(list(steps.step([arrays], [rule], owner(arrays), None, 2)), [0])
            # The first step of both goes by the rate against the gradient's sign.
            decay = 1 - rule["lr"] * rule["weight_decay"]
            expected = [1.0 * decay - 0.1, -2.0 * decay + 0.1]
            for value, wanted in zip(arrays[0].values(), expected):
                self.assertAlmostEqual(value, wanted, places=6)

    def test_other_rules_are_refused_with_their_feature(self):
        for name in OTHERS:
            with self.assertRaises(ValueError) as refused:
                _fusestep.check({"rule": name})
            feature = name.replace("_", "-")
            self.assertEqual(
                str(refused.exception),
                f"rule: expected adam or lion, found {name}; this build is without cargo's "
                f"feature `{feature}`, which adds it",
            )
        with self.assertRaisesRegex(ValueError, "feature `nadam`"):
            _fusestep.momentum_product(0.9, 0.004, 3)

    def test_a_name_of_no_rule_has_no_feature(self):
        with self.assertRaises(ValueError) as refused:
            _fusestep.check({"rule": "adamm"})
        self.assertEqual(str(refused.exception), "rule: expected adam or lion, found adamm")


if __name__ == "__main__":
    unittest.main()
