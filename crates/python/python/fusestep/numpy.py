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
import threading
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np

from fusestep import _fusestep
from fusestep._arrays import refuse_masked, refuse_unnamed, view_of, writable
from fusestep._checks import positive
from fusestep._fusestep import state_lists
from fusestep._plans import Plans
from fusestep._report import Report

__all__ = ["RULES", "State", "step"]

# Of Adam a setting says how decay enters; here two names do.
_DECOUPLED = "decoupled"


def _named() -> Dict[str, Dict[str, Any]]:
    named: Dict[str, Dict[str, Any]] = {}
    for name, settings in _fusestep.rules().items():
        if name == "adam":
            own = {key: value for key, value in settings.items() if key != _DECOUPLED}
            named["adam"], named["adamw"] = {**own, "weight_decay": 0.0}, own
        else:
            named[name] = settings
    return named


RULES: Dict[str, Dict[str, Any]] = _named()
"""The rules and their settings, with the values they have where none is given."""

# Starting more takes longer than any step.
_MOST_THREADS = 256

# Every array that a rule may keep, in the order in which errors name them.
_KEYS = {
    key: key
    for key in ("moment1", "moment2", "max_moment2", "velocity", "max_grad", "sum", "base", "master")
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
    # Whether a parameter in float16 has its gradient in float32.
    wide: bool


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
        if gradient.dtype != parameter.array.dtype and not _is_wide(parameter):
            also = " or float32" if parameter.array.dtype == np.float16 else ""
            raise TypeError(
                f"gradient of `{name}`: expected {parameter.array.dtype}{also}, "
                f"found {gradient.dtype}"
            )
        if gradient.shape != parameter.array.shape:
            raise ValueError(
                f"gradient of `{name}`: expected shape {parameter.array.shape}, "
                f"found {gradient.shape}"
            )

    @staticmethod
    def widened(parameter: _Parameter, gradient: Any) -> Any:
        """A copy in float32."""
        return gradient.astype(np.float32)


def _is_wide(parameter: _Parameter) -> bool:
    """Whether a parameter in float16 has its gradient in float32."""
    gradient = parameter.grad
    return parameter.array.dtype == np.float16 and getattr(gradient, "dtype", None) == np.float32


class State(Dict[str, Dict[str, Any]]):
    """What a rule keeps beside each parameter: arrays by parameter and by name, and their steps.

    It is a plain ``dict`` otherwise: save its arrays as you like, and give it them back. Pickles and
    copies are made without the plan, which the next step makes anew. It goes on with the rule that
    made it, and threads that use it at once wait for each other.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._forget()

    def _forget(self) -> None:
        self._session: Optional[_fusestep.Session] = None
        self._planned_for: Any = None
        self._plans = Plans()
        self._parameters: Dict[str, _Parameter] = {}
        self._own: Dict[_Parameter, Dict[str, Any]] = {}
        self._made_by: Dict[str, str] = {}
        self._lock = threading.RLock()

    def __getstate__(self) -> Dict[str, Any]:
        with self._lock:
            return {"made_by": dict(self._made_by)}

    def __reduce_ex__(self, protocol: Any) -> Tuple[Any, ...]:
        # Pickled when the lock is no longer held, so nothing of it may be what a step writes to.
        copied = self.__deepcopy__({})
        return type(self), (), copied.__getstate__(), None, iter(copied.items())

    def __copy__(self) -> State:
        with self._lock:
            copied = State(self)
            copied._made_by.update(self._made_by)
        return copied

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self._forget()
        self._made_by.update(state.get("made_by", {}))

    def __deepcopy__(self, memo: Dict[int, Any]) -> State:
        with self._lock:
            arrays = {
                name: {key: np.copy(value) for key, value in own.items()}
                for name, own in self.items()
            }
            copied = State(arrays)
            copied._made_by.update(self._made_by)
        return copied

    def _take_plan(self, planned_for: Any, parameters: List[_Parameter]) -> None:
        """Puts the plan in use away and looks for one that was made for these parameters."""
        if self._session is not None:
            count = len(self._planned_for[0])
            self._plans.give_back(self._planned_for, (self._session, None), count)
        self._session = None
        kept = self._plans.take(planned_for)
        if kept is not None:
            kept[0].bind(parameters)
            self._session, self._planned_for = kept[0], planned_for

    def plan(self) -> str:
        """The plan of the last step, as text; empty before the first."""
        with self._lock:
            return "" if self._session is None else self._session.plan()


class _Owner:
    """State as the extension module looks for it."""

    def __init__(self, state: State, rule: Dict[str, Any], names: List[str]) -> None:
        self.state: Dict[_Parameter, Dict[str, Any]] = state._own
        self._kept, self._rule, self._names = state, rule, names
        # The arrays that the rule keeps beside a parameter.
        self._lists = state_lists(rule)
        self._made: List[Tuple[str, List[str]]] = []
        for name in names:
            parameter = state._parameters[name]
            if name not in state:
                self.state.pop(parameter, None)
                state._made_by.pop(name, None)
            else:
                self._refuse(name, state[name])
                self.state[parameter] = state[name]

    def _refuse(self, name: str, own: Any) -> None:
        """Raises unless the rule can go on with what a parameter has beside it."""
        if not isinstance(own, dict):
            raise TypeError(f"state of `{name}`: expected a dict, found {type(own).__name__}")
        rule, lists = self._rule["rule"], self._lists
        made_by = self._kept._made_by.get(name, rule)
        others = sorted(key for key in _KEYS.keys() - _ALL_LISTS[rule] if own.get(key) is not None)
        if made_by != rule or others:
            found = f"that of {made_by}" if made_by != rule else ", ".join(others)
            raise ValueError(
                f"state of `{name}`: expected that of {rule}, found {found}; use another State"
            )
        for key in (*lists, "step"):
            array = own.get(key)
            refuse_masked(f"{key} of `{name}`", array)
            if key in lists and not isinstance(array, (np.ndarray, type(None))):
                kind = type(array).__name__
                raise TypeError(f"{key} of `{name}`: expected an array of NumPy, found {kind}")
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise ValueError(
                    f"{key} of `{name}`: expected an array that may be written, found a read-only "
                    "one; use `.copy()`"
                )
        self._refuse_part(name, own)

    def _refuse_part(self, name: str, own: Dict[str, Any]) -> None:
        """Raises for some of a parameter's state without the rest: zeros would not stand in."""
        rule, step = self._rule["rule"], own.get("step")
        unknown = sorted(str(key) for key in own.keys() - _KEYS.keys() - {"step"})
        present = [key for key in _KEYS if own.get(key) is not None]
        if unknown:
            raise ValueError(
                f"state of `{name}`: expected that of {rule}, found {', '.join(unknown)}; its "
                f"arrays are {', '.join(sorted(_ALL_LISTS[rule])) or 'none'}, and `step`"
            )
        if step is None and present not in ([], ["sum"]):
            raise ValueError(
                f"step of `{name}`: expected a count of steps beside {', '.join(present)}, found "
                "none; use another State"
            )
        count = np.asarray(0.0 if step is None else step)
        if count.size == 1 and count.dtype.kind == "f" and not float(count).is_integer():
            raise ValueError(f"step of `{name}`: expected a whole number, found {step}")
        if not np.any(count):
            # Sums of adagrad may start where their owner likes.
            values = [key for key in present if key != "sum" and np.any(own[key])]
            if values:
                raise ValueError(
                    f"{values[0]} of `{name}`: expected zeros, because `step` is 0, found other "
                    "values; use another State"
                )
            return
        # A maximum that is switched on later is that from there on.
        for key in self._lists:
            if own.get(key) is None and key != "max_moment2":
                raise ValueError(
                    f"{key} of `{name}`: expected an array, because {rule} has stepped {step} "
                    "times, found none; use another State"
                )

    def _make_state(self, index: int) -> Tuple[Dict[str, Any], bool]:
        name = self._names[index]
        parameter = self._kept._parameters[name]
        own = self._kept.setdefault(name, {})
        self.state[parameter] = own
        missing = [key for key in self._lists if own.get(key) is None]
        made = missing + [key for key in ("step",) if key not in own]
        dtype = parameter.array.dtype
        for key in missing:
            own[key] = np.zeros(parameter.array.shape, np.float32 if dtype == np.float16 else dtype)
        own.setdefault("step", np.zeros((), np.float64))
        self._kept._made_by[name] = self._rule["rule"]
        self._made.append((name, made))
        return own, True

    def take_back(self) -> None:
        for name, made in self._made:
            for key in made:
                self._kept[name].pop(key, None)
            if not self._kept[name]:
                del self._kept[name]
                del self._kept._made_by[name]
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
    shape and dtype under these names, or in float32 of float16 parameters, which are taken as they
    are; a parameter without one, or with ``None``, stays as it is and does not count the step. ``state`` is filled in at the first step and handed in again after that.
    ``clip_norm`` scales gradients down whose norm, of all together, is larger. ``threads`` is how
    many work on it, 1 to 256, by default as many as the process may use; it changes no bit.

    Raises ``TypeError`` or ``ValueError`` that names the array, what was expected and what was
    found, and ``RuntimeError`` for arrays that overlap; nothing has changed then.
    """
    if not isinstance(state, State):
        raise TypeError(f"state: expected fusestep.numpy.State, found {type(state).__name__}")
    own_rule = _rule(rule, settings)
    own_threads, norm = _threads(threads), positive("clip_norm", clip_norm)
    refuse_unnamed("params", params)
    refuse_unnamed("grads", grads)
    unknown = sorted(set(grads) - set(params))
    if unknown:
        raise ValueError(f"grads: expected names of `params`, found {', '.join(unknown)}")
    names, copied = list(params), 0
    arrays = {name: writable(name, params[name]) for name in names}
    views: Dict[str, Any] = {}
    for name in names:
        gradient = grads.get(name)
        if gradient is not None:
            view = view_of(f"gradient of `{name}`", gradient)
            views[name] = np.require(view, requirements=["C", "A"])
            copied += views[name] is not view
    with state._lock:
        for name in names:
            parameter = state._parameters.setdefault(name, _Parameter())
            parameter.array, parameter.grad = arrays[name], views.get(name)
        parameters = [state._parameters[name] for name in names]
        try:
            return _run(own_rule, names, parameters, state, norm, own_threads, copied)
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
        _Described(
            name, str(parameter.array.dtype), parameter.array.shape, 0, True, _is_wide(parameter)
        )
        for name, parameter in zip(names, parameters)
    ]
    planned_for = tuple(described), clip_norm
    if state._planned_for != planned_for:
        state._take_plan(planned_for, parameters)
    owner = _Owner(state, rule, names)
    updated = None
    try:
        for _ in range(2):
            if state._session is None:
                options = {
                    "settings": {} if clip_norm is None else {"clip_norm": [repr(clip_norm)]},
                    "loss_scale_at": None,
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
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(f"rule: expected one of {', '.join(RULES)}, found {name!r}")
    unknown = sorted(set(settings) - set(RULES[name]))
    if unknown:
        raise TypeError(
            f"{name}: expected settings out of {', '.join(RULES[name])}, found {', '.join(unknown)}"
        )
    rule = {**RULES[name], **settings, "rule": "adam" if name == "adamw" else name}
    if name in ("adam", "adamw"):
        rule[_DECOUPLED] = name == "adamw"
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


def _with_all(settings: Dict[str, Any]) -> Dict[str, Any]:
    """Settings with which a rule keeps every array that it ever keeps."""
    on = {name: True for name, value in settings.items() if isinstance(value, bool)}
    return {**settings, **on, **({"momentum": 0.5} if "momentum" in settings else {})}


_ALL_LISTS = {
    rule: set(state_lists({**_with_all(settings), "rule": rule}))
    for rule, settings in _fusestep.rules().items()
}
