"""One step on NumPy's arrays, in place, with gradients of any library that speaks DLPack.

.. code-block:: python

    state = fusestep.numpy.State()
    for batch in data:
        grads = jax.grad(loss)(params, batch)
        fusestep.numpy.step("adamw", params, grads, state, lr=1e-3)

Parameters are NumPy arrays, or arrays of another library that DLPack says may be written: JAX's may
not, so a program that uses JAX keeps its parameters in NumPy arrays, which JAX takes as they are.
Gradients are read where they lie, JAX's too.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from fusestep import _fusestep
from fusestep._report import Report

__all__ = ["RULES", "State", "step"]

_ADAM = {
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
}

RULES: Dict[str, Dict[str, Any]] = {
    "adam": _ADAM,
    "adamw": {**_ADAM, "weight_decay": 0.01},
    "sgd": {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "nesterov": False,
        "weight_decay": 0.0,
        "maximize": False,
    },
    "adagrad": {
        "lr": 1e-2,
        "lr_decay": 0.0,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "maximize": False,
    },
    "rmsprop": {
        "lr": 1e-2,
        "alpha": 0.99,
        "eps": 1e-8,
        "momentum": 0.0,
        "centered": False,
        "weight_decay": 0.0,
        "maximize": False,
    },
    "lion": {"lr": 1e-4, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "maximize": False},
    "lars": {
        "lr": 0.1,
        "momentum": 0.9,
        "trust_coefficient": 1e-3,
        "eps": 0.0,
        "weight_decay": 5e-4,
        "trust_ratio": True,
    },
    "lamb": {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-6,
        "weight_decay": 0.01,
        "trust_ratio": True,
    },
    "schedule_free": {
        "lr": 2.5e-3,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "warmup_steps": 0,
    },
}
"""The rules and their settings, with the values they have where none is given."""

# Starting more takes longer than any step.
_MOST_THREADS = 256

_KEYS = {
    "moment1": "moment1",
    "moment2": "moment2",
    "max_moment2": "max_moment2",
    "velocity": "velocity",
    "sum": "sum",
    "base": "base",
    "master": "master",
}


class _Parameter:
    """A parameter by name, with the arrays of the step at hand."""

    __slots__ = ("array", "grad")

    def __init__(self) -> None:
        self.array: Any = None
        self.grad: Any = None


class _Described(NamedTuple):
    """A parameter as the extension module reads it."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    group: int
    trains: bool


class _Library:
    """What the extension module asks this one."""

    # Arrays have no handles: `describe` tells where they lie.
    file = None

    @staticmethod
    def describe(thing: Any) -> Tuple[int, str, Tuple[int, ...], bool]:
        """Address, dtype, shape, and whether elements lie in order."""
        array: Any = thing.array if isinstance(thing, _Parameter) else thing
        in_order = bool(array.flags.c_contiguous and array.flags.aligned)
        return int(array.ctypes.data), str(array.dtype), array.shape, in_order

    @staticmethod
    def refuse(name: str, parameter: _Parameter, gradient: Any) -> None:
        """Raises for a gradient that does not fit its parameter."""
        if gradient.dtype != parameter.array.dtype:
            raise TypeError(
                f"gradient of `{name}`: expected {parameter.array.dtype}, found {gradient.dtype}"
            )
        if gradient.shape != parameter.array.shape:
            raise ValueError(
                f"gradient of `{name}`: expected shape {parameter.array.shape}, "
                f"found {gradient.shape}"
            )


class State(Dict[str, Dict[str, Any]]):
    """What a rule keeps beside each parameter: arrays by parameter and by name, and their steps.

    It is a plain ``dict`` otherwise: save its arrays as you like, and give it them back. Pickles and
    copies are made without the plan, which the next step makes anew.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._forget()

    def _forget(self) -> None:
        self._session: Optional[_fusestep.Session] = None
        self._planned_for: Any = None
        self._parameters: Dict[str, _Parameter] = {}
        self._own: Dict[_Parameter, Dict[str, Any]] = {}

    def __getstate__(self) -> Dict[str, Any]:
        return {}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self._forget()

    def __deepcopy__(self, memo: Dict[int, Any]) -> State:
        arrays = {
            name: {key: np.copy(value) for key, value in own.items()} for name, own in self.items()
        }
        return State(arrays)

    def plan(self) -> str:
        """The plan of the last step, as text; empty before the first."""
        return "" if self._session is None else self._session.plan()


class _Owner:
    """State as the extension module looks for it."""

    def __init__(self, state: State, rule: Dict[str, Any], names: List[str]) -> None:
        self.state: Dict[_Parameter, Dict[str, Any]] = state._own
        self._kept, self._rule, self._names = state, rule, names
        self._made: List[Tuple[str, List[str]]] = []
        for name in names:
            parameter = state._parameters[name]
            own = state.get(name)
            if own is None:
                self.state.pop(parameter, None)
            else:
                self._refuse_read_only(name, own)
                self.state[parameter] = own

    def _refuse_read_only(self, name: str, own: Dict[str, Any]) -> None:
        for key in (*_lists(self._rule), "step"):
            array = own.get(key)
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise ValueError(
                    f"{key} of `{name}`: expected an array that may be written, found a read-only "
                    "one; use `.copy()`"
                )

    def _make_state(self, index: int) -> Tuple[Dict[str, Any], bool]:
        name = self._names[index]
        parameter = self._kept._parameters[name]
        own = self._kept.setdefault(name, {})
        self.state[parameter] = own
        missing = [key for key in _lists(self._rule) if own.get(key) is None]
        made = missing + [key for key in ("step",) if key not in own]
        dtype = parameter.array.dtype
        for key in missing:
            own[key] = np.zeros(parameter.array.shape, np.float32 if dtype == np.float16 else dtype)
        own.setdefault("step", np.zeros((), np.float64))
        self._made.append((name, made))
        return own, True

    def take_back(self) -> None:
        for name, made in self._made:
            for key in made:
                self._kept[name].pop(key, None)
            if not self._kept[name]:
                del self._kept[name]
                self.state.pop(self._kept._parameters[name], None)
        self._made = []


def step(
    rule: str,
    params: Mapping[str, Any],
    grads: Mapping[str, Any],
    state: State,
    *,
    clip_norm: Optional[float] = None,
    threads: Optional[int] = None,
    **settings: Any,
) -> Report:
    """Updates arrays in place by one step of a rule.

    ``rule`` is one of :data:`RULES` and ``settings`` are its settings. ``params`` has the arrays by
    name, float32, float64 or float16, C-contiguous and writable; ``grads`` has arrays of the same
    dtype and shape under these names; a parameter without one, or with ``None``, stays as it is and
    does not count the step. ``state`` is filled in at the first step and handed in again after that.
    ``clip_norm`` scales gradients down whose norm, of all together, is larger. ``threads`` is how
    many work on it, 1 to 256, by default as many as the process may use; it changes no bit.

    Raises ``TypeError`` or ``ValueError`` that names the array, what was expected and what was
    found, and ``RuntimeError`` for arrays that overlap; nothing has changed then.
    """
    if not isinstance(state, State):
        raise TypeError(f"state: expected fusestep.numpy.State, found {type(state).__name__}")
    own_rule = _rule(rule, settings)
    own_threads = _threads(threads)
    unknown = sorted(set(grads) - set(params))
    if unknown:
        raise ValueError(f"grads: expected names of `params`, found {', '.join(unknown)}")
    names, copied = list(params), 0
    arrays = {name: _writable(name, params[name]) for name in names}
    views: Dict[str, Any] = {}
    for name in names:
        gradient = grads.get(name)
        if gradient is not None:
            view = _view(f"gradient of `{name}`", gradient)
            views[name] = np.require(view, requirements=["C", "A"])
            copied += views[name] is not view
    for name in names:
        parameter = state._parameters.setdefault(name, _Parameter())
        parameter.array, parameter.grad = arrays[name], views.get(name)
    parameters = [state._parameters[name] for name in names]
    try:
        return _run(own_rule, names, parameters, state, clip_norm, own_threads, copied)
    finally:
        # What was given is not kept alive by the state.
        for parameter in parameters:
            parameter.array = parameter.grad = None


def _run(
    rule: Dict[str, Any],
    names: List[str],
    parameters: List[_Parameter],
    state: State,
    clip_norm: Optional[float],
    threads: int,
    copied: int,
) -> Report:
    described = [
        _Described(name, str(parameter.array.dtype), parameter.array.shape, 0, True)
        for name, parameter in zip(names, parameters)
    ]
    planned_for = (described, clip_norm)
    if state._planned_for != planned_for:
        state._session = None
    owner = _Owner(state, rule, names)
    updated = None
    try:
        for _ in range(2):
            if state._session is None:
                options = {
                    "clip_norm": clip_norm,
                    "loss_scale": None,
                    "master_weights": False,
                    "update_norms": False,
                    "state_16": False,
                    "counts": True,
                }
                state._session = _fusestep.Session(
                    parameters, described, [rule], options, _KEYS, _Library
                )
                state._planned_for = planned_for
            session = state._session
            updated = session.step([parameters], [rule], owner, None, threads)
            if updated is not None:
                break
            owner.take_back()
            state._session = None
    except BaseException:
        owner.take_back()
        raise
    if updated is None:
        raise RuntimeError("expected arrays that stay what they are during a step")
    report = session.report() or {}
    if report["skipped"]:
        owner.take_back()
    return Report(**{**report, "copied_gradients": copied})


def _rule(name: str, settings: Dict[str, Any]) -> Dict[str, Any]:
    if name not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, found {name}")
    unknown = sorted(set(settings) - set(RULES[name]))
    if unknown:
        raise TypeError(
            f"{name}: expected settings out of {', '.join(RULES[name])}, found {', '.join(unknown)}"
        )
    rule = {**RULES[name], **settings, "rule": "adam" if name == "adamw" else name}
    if name in ("adam", "adamw"):
        rule["decoupled"] = name == "adamw"
    _fusestep.check(rule)
    return rule


def _threads(threads: Optional[int]) -> int:
    """How many threads work on a step."""
    if threads is None:
        return min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    if isinstance(threads, (bool, np.bool_)) or not isinstance(threads, (int, np.integer)):
        raise TypeError(f"threads: expected a whole number, found {type(threads).__name__}")
    if not 1 <= threads <= _MOST_THREADS:
        raise ValueError(f"threads: expected 1 to {_MOST_THREADS}, found {threads}")
    return int(threads)


def _lists(rule: Dict[str, Any]) -> List[str]:
    """The arrays that a rule keeps beside a parameter."""
    name = rule["rule"]
    if name == "adam":
        return ["moment1", "moment2"] + (["max_moment2"] if rule["amsgrad"] else [])
    if name == "rmsprop":
        centered = ["moment1"] if rule["centered"] else []
        return ["moment2"] + centered + (["velocity"] if rule["momentum"] > 0 else [])
    if name == "sgd":
        return ["velocity"] if rule["momentum"] != 0 else []
    return {
        "adagrad": ["sum"],
        "lion": ["moment1"],
        "lars": ["velocity"],
        "lamb": ["moment1", "moment2"],
        "schedule_free": ["moment2", "base"],
    }[name]


def _view(what: str, array: Any) -> Any:
    """The array as NumPy's, of the same memory."""
    if not isinstance(array, np.ndarray):
        if not hasattr(array, "__dlpack__"):
            raise TypeError(
                f"{what}: expected an array of NumPy or one that speaks DLPack, "
                f"found {type(array).__name__}"
            )
        try:
            array = np.from_dlpack(array)
        except (BufferError, RuntimeError) as error:
            raise TypeError(f"{what}: expected an array on the CPU, found {error}") from error
    if array.dtype not in (np.float32, np.float64, np.float16) or not array.dtype.isnative:
        raise TypeError(
            f"{what}: expected float32, float64 or float16 of this machine's byte order, "
            f"found {array.dtype.str}"
        )
    return array


def _writable(name: str, array: Any) -> Any:
    view = _view(f"parameter `{name}`", array)
    flags = view.flags
    if not (flags.c_contiguous and flags.aligned and flags.writeable):
        found = "strides" if not flags.c_contiguous else "a read-only or unaligned one"
        raise ValueError(
            f"parameter `{name}`: expected a C-contiguous, aligned array that may be written, "
            f"found {found}"
        )
    return view
