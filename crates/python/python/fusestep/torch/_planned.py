"""A step that is planned once over some of an optimizer's parameters and run many times."""

from __future__ import annotations

import weakref
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusestep import _fusestep
from fusestep._plans import Kept, Plans
from fusestep.torch._options import refuse_counted, told
from fusestep.torch._tensors import NARROW, Library, refuse_parameter

if TYPE_CHECKING:
    from fusestep.torch._optimizer import Fused


increment_version: Callable[[List[Tensor]], Any]
try:
    # What the public one calls, without a frame of Python's in which a Ctrl-C would be raised
    # before the versions of what has been written are counted.
    increment_version = torch._C._increment_version
    increment_version([])
except (AttributeError, TypeError):
    increment_version = torch.autograd.graph.increment_version


class Member(NamedTuple):
    """A parameter of an optimizer."""

    tensor: Tensor
    group: int
    name: str


class Described(NamedTuple):
    """A parameter as the extension module reads it."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    group: int
    trains: bool


def members_of(groups: Sequence[Dict[str, Any]]) -> List[Member]:
    """All parameters, in the order of the groups, each with a name of its own."""
    members: List[Member] = []
    names = set()
    for index, group in enumerate(groups):
        given = group.get("param_names")
        for at, tensor in enumerate(group["params"]):
            name = given[at] if given else f"{index}.{at}"
            if name in names:
                name = f"{index}.{at}.{name}"
            names.add(name)
            members.append(Member(tensor, index, name))
    return members


class Planned:
    """A plan over tensors that PyTorch keeps.

    Where a tensor lies is asked for anew at every step, state that nobody else has seen (`Store`)
    excepted, so an address that is reused cannot fool it; shape, dtype and settings are compared
    with those that were planned for.
    """

    def __init__(self, optimizer: Fused, members: List[Member]) -> None:
        # Not kept: the optimizer keeps its plan, and a cycle's memory, that of its state, is free
        # only when Python next looks for cycles.
        self._planned_for = weakref.ref(optimizer)
        self.members = members
        self.tensors = [member.tensor for member in members]
        sums = optimizer._micro.sums
        described = []
        for tensor, group, name in members:
            # A lazy module's has no shape and no gradient before its first forward pass.
            lazy = is_lazy(tensor)
            trains = not lazy and (tensor.requires_grad or tensor.grad is not None)
            # One that was frozen between micro-steps has its sum to be updated from.
            trains = trains or tensor in sums
            shape = () if lazy else tensor.shape
            described.append((name, tensor.dtype, shape, group, trains))
        self._of_inference = any(
            not is_lazy(tensor) and tensor.is_inference() for tensor in self.tensors
        )
        # One thread at a time asks a session; the store's own lock is taken before it.
        self._lock = optimizer._plans.lock
        self._key = tuple(described), len(optimizer.param_groups)
        # The plan, and the settings that it has.
        self.session, self._seen = self._kept() or (self._new_session(described), None)
        self._is_in_use = True
        # What the step at hand has added to the optimizer's state.
        self._made: List[Tuple[Tensor, List[str]]] = []
        self._versions: Dict[int, int] = {}
        # Where parameters with masters lay; what is kept here nobody else gets the address of.
        self._places: Dict[int, Tensor] = {}

    def _kept(self) -> Optional[Kept]:
        """The plan that was made for parameters like these, if it is kept."""
        with self._lock:
            kept = self._optimizer._plans.take(self._key)
            if kept is not None:
                kept[0].bind(self.tensors)
            return kept

    def _new_session(self, parameters: Sequence[Tuple[Any, ...]]) -> _fusestep.Session:
        described = []
        for (name, dtype, shape, group, trains), tensor in zip(parameters, self.tensors):
            if trains:
                refuse_parameter(name, tensor)
            described.append(Described(name, str(dtype), shape, group, trains))
        optimizer = self._optimizer
        if not optimizer._counts:
            why = "a rule with a count of steps in its state, or `DataParallel`, whose ranks count"
            refuse_counted(type(optimizer).__name__, optimizer._options, why)
        options = dict(told(optimizer._options), counts=optimizer._counts)
        keys = dict(optimizer._keys, master="master")
        return _fusestep.Session(self.tensors, described, self._rules(), options, keys, Library)

    def give_back(self, plans: Plans) -> None:
        """Has the plan kept for parameters like these; this steps no more."""
        with self._lock:
            if self._is_in_use:
                self._is_in_use = False
                plans.give_back(self._key, (self.session, self._seen), len(self.tensors))

    def fits(self, lists: List[List[Tensor]]) -> bool:
        """Whether these are the parameters of each group that it was made for."""
        with self._lock:
            return self.session.fits(lists)

    @property
    def is_orphan(self) -> bool:
        """Whether its optimizer is gone; one that has taken over what that had plans anew."""
        return self._planned_for() is None

    @property
    def _optimizer(self) -> Fused:
        optimizer = self._planned_for()
        assert optimizer is not None, "whoever runs a plan keeps its optimizer"
        return optimizer

    @property
    def state(self) -> Any:
        """The optimizer's state, where the extension module looks for it."""
        optimizer = self._optimizer
        store = optimizer._store
        return optimizer.state if store is None or "state" in optimizer.__dict__ else store.state

    def plan(self) -> str:
        with self._lock:
            return self.session.plan()

    def update_norms(self) -> Optional[List[Tuple[str, float]]]:
        with self._lock:
            return self.session.update_norms()

    def loss_scale(self) -> Optional[Tuple[float, int, int]]:
        with self._lock:
            return self.session.loss_scale()

    def write_steps(self) -> None:
        with self._lock:
            self.session.write_steps()

    def run(
        self, lists: List[List[Tensor]], gradients: Optional[List[Optional[Tensor]]]
    ) -> Optional[Dict[str, Any]]:
        """Updates the tensors of ``lists``, those planned for, from ``gradients`` or their own.

        Returns what a `Report` has, or ``None`` if the plan is no longer theirs; nothing has
        changed then, nor where this raises.
        """
        if self._of_inference and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "expected parameters that are no inference tensors outside of "
                "`torch.inference_mode()`, found some that are; use `.clone()`"
            )
        optimizer = self._optimizer
        masters = optimizer._options["master_weights"]
        if masters:
            self._follow()
        self._made = []
        store = optimizer._kept_state()[1]
        try:
            if store is None:
                updated = self.ask(lists, gradients, False)
            else:
                updated = store.step(self, lists, gradients)
        except BaseException:
            with self._lock:
                taken = self.session.has_updated()
            if not taken:
                self._take_back()
            raise
        if updated is None:
            self._take_back()
            return None
        with self._lock:
            report = self.session.report()
        assert report is not None, "a step was taken"
        if report["skipped"]:
            self._take_back()
        if masters:
            versions = enumerate(tensor._version for tensors in lists for tensor in tensors)
            self._versions = dict(versions)
        return report

    def ask(
        self, lists: List[List[Tensor]], gradients: Optional[List[Optional[Tensor]]], private: bool
    ) -> Optional[Sequence[int]]:
        """Has the session step, told whether the state is private."""
        with self._lock:
            groups = self._optimizer.param_groups
            seen, rules = self._seen, None
            if seen is None or not seen.holds(groups):
                # None until a step has taken the settings that are read after this look.
                seen, self._seen = _fusestep.Snapshot(groups), None
                rules = self._rules()
            threads = torch.get_num_threads()
            updated = self.session.step(
                lists, rules, self, gradients, threads, private, increment_version
            )
            if updated is not None:
                self._seen = seen
            return updated

    def _rules(self) -> List[Dict[str, Any]]:
        return [self._optimizer._settings(group) for group in self._optimizer.param_groups]

    def _make_state(self, index: int) -> Tuple[Dict[str, Any], bool]:
        """Fills in what is missing of a parameter's state; whether its rule had none of it."""
        optimizer, (tensor, group_index, _) = self._optimizer, self.members[index]
        group = optimizer.param_groups[group_index]
        made = [] if tensor in self.state else [""]
        # Before anything is made, so that a Ctrl-C in between leaves nothing behind.
        self._made.append((tensor, made))
        state = self.state[tensor]
        names = optimizer._state_names(group)
        missing = [name for name in names if state.get(name) is None]
        if optimizer._counts:
            _refuse_part(self.members[index].name, state, names, missing)
        if optimizer._counts and not isinstance(state.get("step"), Tensor):
            count = float(state.get("step", optimizer._first_count(group)))
            wide = torch.get_default_dtype() == torch.float64
            made += [] if "step" in state else ["step"]
            dtype = torch.float64 if wide else torch.float32
            state["step"] = torch.tensor(count, dtype=dtype, device="cpu")
        made += missing
        for name in missing:
            state[name] = optimizer._first_value(tensor, name, group)
        if optimizer._options["master_weights"] and tensor.dtype in NARROW:
            if state.get("master") is None:
                made.append("master")
                state["master"] = tensor.detach().to(torch.float32)
        return state, len(missing) == len(names)

    def _take_back(self) -> None:
        """Removes state that was made for a step that has not happened."""
        state = self.state
        for tensor, names in self._made:
            for name in names:
                if name and tensor in state:
                    state[tensor].pop(name, None)
            if "" in names and not state.get(tensor):
                state.pop(tensor, None)
        self._made = []

    @torch.no_grad()
    def _follow(self) -> None:
        """Lets masters take over values that were written to their parameters between steps."""
        for index, tensor in enumerate(self.tensors):
            place = self._places.get(index)
            # An assignment to `.data` is no new version.
            moved = place is None or place.data_ptr() != tensor.data_ptr()
            if moved:
                self._places[index] = tensor.detach()
            if tensor not in self.state:
                continue
            if tensor.dtype not in NARROW:
                # It is wide for now, and nobody keeps a master beside it.
                self.state[tensor].pop("master", None)
                continue
            if not moved and self._versions.get(index) == tensor._version:
                continue
            master = self.state[tensor].get("master")
            if master is not None:
                stays = master.to(tensor.dtype) == tensor
                master.copy_(torch.where(stays, master, tensor.detach().to(torch.float32)))


def _refuse_part(name: str, state: Dict[str, Any], names: List[str], missing: List[str]) -> None:
    """Raises for some of a parameter's state without the rest: zeros would not stand in for it."""
    works = "give it its whole state, or drop that: `optimizer.state.pop(parameter)`"
    if "step" not in state:
        found = ", ".join(key for key in names if key not in missing)
        if found:
            raise ValueError(
                f"step of `{name}`: expected a count of steps beside {found}, found none; {works}"
            )
        return
    # A maximum that is switched on later is that from there on.
    lost = [key for key in missing if key != "max_exp_avg_sq"]
    if lost and float(state["step"]) != 0:
        raise ValueError(
            f"{lost[0]} of `{name}`: expected a tensor, because it has stepped "
            f"{int(state['step'])} times, found none; {works}"
        )
