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
    Union,
)

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusestep import _fusestep
from fusestep._plans import Kept, Plans
from fusestep.torch._device import CUDA, CudaLibrary, device_of, steps_on
from fusestep.torch._graphs import Asked, Rates, Scale, refuse_recording
from fusestep.torch._options import CLIP_NORM, refuse_counted, refuse_on_device, told
from fusestep.torch._sharded import Shares, is_sharded, local_gradients, local_of, local_state
from fusestep.torch._tensors import (
    BESIDE,
    NARROW,
    Library,
    empty_like,
    order_of,
    refuse_parameter,
)

if TYPE_CHECKING:
    from fusestep.torch._optimizer import Fused


# A sum of squares and a count of elements that are not finite, by parameter.
Squares = List[Tuple[float, int]]

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
    strides: Optional[Tuple[int, ...]] = None
    # Whether a parameter of 16 bits has gradients in float32.
    wide: bool = False


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


def trains(optimizer: Fused, member: Member) -> bool:
    """Whether a step may update a parameter."""
    tensor = member.tensor
    # A lazy module's has no shape and no gradient before its first forward pass.
    learns = not is_lazy(local_of(tensor)) and (tensor.requires_grad or tensor.grad is not None)
    # One that was frozen between micro-steps has its sum to be updated from.
    return learns or tensor in optimizer._micro.sums


class Enqueued(NamedTuple):
    """A step on a device whose outcome nobody has asked for."""

    planned: Planned

    def told(self) -> Dict[str, Any]:
        """What a `Report` has; waits for the outcome."""
        return self.planned.told()


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
        # What is stepped: of a DTensor this process's part, whose state is found by that.
        self.tensors = [local_of(member.tensor) for member in members]
        self._is_sharded = any(is_sharded(member.tensor) for member in members)
        self._local_state: Dict[Tensor, Dict[str, Any]] = {}
        described = []
        # The number of the CUDA device of all that train; none in host memory.
        self._device: Optional[int] = None
        for member, tensor in zip(members, self.tensors):
            is_updated = trains(optimizer, member)
            self._device = device_of(tensor) if is_updated else self._device
            shape = () if is_lazy(tensor) else tensor.shape
            order = order_of(tensor) if is_updated else None
            wide = is_updated and optimizer._micro.has_wide(member.tensor)
            own = member.name, tensor.dtype, shape, member.group, is_updated, order, wide
            described.append(own)
        self._of_inference = any(
            not is_lazy(tensor) and tensor.is_inference() for tensor in self.tensors
        )
        # One thread at a time asks a session; the store's own lock is taken before it.
        self._lock = optimizer._plans.lock
        of_all = self._device, len(optimizer.param_groups), self._is_sharded
        self._key = tuple(described), of_all
        self.share = self._shares(described)
        self._rates = Rates()
        # What a `GradScaler` leaves to steps, once there is one.
        self._scale: Optional[Scale] = None
        # The plan, and the settings that it has.
        self.session, self._seen = self._kept() or (self._new_session(described), None)
        self._is_in_use = True
        # What the step at hand has added to the optimizer's state.
        self._made: List[Tuple[Tensor, List[str]]] = []
        self._versions: Dict[int, Tuple[int, int]] = {}
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
        for (name, dtype, *rest), tensor in zip(parameters, self.tensors):
            own = Described(name, str(dtype), *rest)
            if own.trains:
                refuse_parameter(name, tensor)
            described.append(own)
        optimizer = self._optimizer
        if not optimizer._counts:
            why = "a rule with a count of steps in its state, or `DataParallel`, whose ranks count"
            refuse_counted(type(optimizer).__name__, optimizer._options, why)
        options = dict(told(optimizer._options), counts=optimizer._counts)
        keys = optimizer._all_keys()
        arguments = self.tensors, described, self._rules(), options, keys
        if self._device is None:
            return _fusestep.Session(*arguments, Library)
        name = f"{CUDA}:{self._device}"
        refuse_on_device(optimizer._options, name)
        found: _fusestep.Session = steps_on("parameters", self._device).Session(
            *arguments, CudaLibrary(self._device)
        )
        return found

    def _shares(self, described: Sequence[Tuple[Any, ...]]) -> Optional[Shares]:
        """How sums over parts become those over whole parameters, for the extension module."""
        if not self._is_sharded:
            return None
        trains = Described._fields.index("trains")
        trained = [m.tensor for m, own in zip(self.members, described) if own[trains]]
        return Shares(trained, None if self._device is None else f"{CUDA}:{self._device}")

    def give_back(self, plans: Plans) -> None:
        """Has the plan kept for parameters like these; this steps no more."""
        with self._lock:
            if self._is_in_use and not self.is_recorded:
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
    def _whole_state(self) -> Any:
        """The optimizer's state, by the parameters of its groups."""
        return self._optimizer.state if self._is_sharded else self.state

    @property
    def state(self) -> Any:
        """The optimizer's state, where the extension module looks for it."""
        if self._is_sharded:
            return self._local_state
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

    def squares(
        self, lists: List[List[Tensor]], gradients: Optional[List[Optional[Tensor]]]
    ) -> Optional[Squares]:
        """Sums of squares over gradients that :meth:`looks` has looked at, by parameter that trains;
        ``None`` if the plan is no longer theirs."""
        with self._lock:
            threads = torch.get_num_threads()
            return self.session.squares(lists, self, gradients, threads, self._asked())

    def run(
        self,
        lists: List[List[Tensor]],
        gradients: Optional[List[Optional[Tensor]]],
        whole: Optional[Squares] = None,
    ) -> Union[Dict[str, Any], Enqueued, None]:
        """Updates the tensors of ``lists``, those planned for, from ``gradients`` or their own.

        With ``whole``, the squares of all gradients of which these are a part, it decides by those.
        Returns what a `Report` has, or who has it once a device has decided; ``None`` if the plan
        is no longer theirs. Nothing has changed then, nor where this raises.
        """
        self._refuse_inference()
        optimizer = self._optimizer
        refuse_recording(optimizer, self._device)
        if optimizer._times:
            with self._lock:
                self.session.time_steps()
        if self._is_sharded:
            gradients = self._localize(gradients)
        masters = optimizer._options["master_weights"] or optimizer._options.get("remainder")
        if masters:
            self._follow()
        self._made = []
        store = optimizer._kept_state()[1]
        try:
            if store is None or whole is not None:
                updated = self.ask(lists, gradients, False, whole)
            else:
                updated = store.step(self, lists, gradients)
        except BaseException:
            with self._lock:
                taken = self.session.has_updated()
            if not taken:
                self.take_back()
            raise
        if updated is None:
            self.take_back()
            return None
        if masters:
            self._versions = dict(enumerate(map(_version_of, self.members)))
        with self._lock:
            if self.session.is_enqueued():
                return Enqueued(self)
        report = self.told()
        if report["skipped"]:
            self.take_back()
        return report

    def told(self) -> Dict[str, Any]:
        """What a `Report` has of the last step."""
        with self._lock:
            report = self.session.report()
        assert report is not None, "a step was taken"
        return report

    @property
    def is_recorded(self) -> bool:
        """Whether a step was recorded, whose replays take steps by themselves."""
        return self._device is not None and self.session.is_recorded()

    def _refuse_inference(self) -> None:
        if self._of_inference and not torch.is_inference_mode_enabled():
            raise RuntimeError(
                "expected parameters that are no inference tensors outside of "
                "`torch.inference_mode()`, found some that are; use `.clone()`"
            )

    def looks(
        self, lists: List[List[Tensor]], gradients: Optional[List[Optional[Tensor]]]
    ) -> bool:
        """Looks at the tensors of a step as :meth:`run` does, and makes the state that is missing.

        ``False`` if the plan is no longer theirs; :meth:`take_back` removes what was made.
        """
        self._refuse_inference()
        self._made = []
        if self._is_sharded:
            gradients = self._localize(gradients)
        with self._lock:
            return self.session.looks(lists, self._rules(), self, gradients)

    def ask(
        self,
        lists: List[List[Tensor]],
        gradients: Optional[List[Optional[Tensor]]],
        private: bool,
        whole: Optional[Squares] = None,
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
            tell, asked = increment_version, self._asked()
            updated = self.session.step(
                lists, rules, self, gradients, threads, private, tell, asked, whole
            )
            if updated is not None:
                self._seen = seen
            if updated is not None and self._is_sharded:
                # The parts are counted already.
                written = (self.members[index].tensor for index in updated)
                increment_version([tensor for tensor in written if is_sharded(tensor)])
            return updated

    def _localize(self, given: Optional[List[Optional[Tensor]]]) -> List[Optional[Tensor]]:
        """Finds the parts of state and gradients that this process has; returns gradients."""
        state = self._optimizer.state
        own = ((state.get(m.tensor), local) for m, local in zip(self.members, self.tensors))
        self._local_state = {local: local_state(found) for found, local in own if found}
        return local_gradients(self.members, given)

    def _asked(self) -> Optional[Asked]:
        """What a step on a device is to heed, besides settings."""
        if self._device is None:
            return None
        optimizer = self._optimizer
        groups = optimizer.param_groups
        keeps_tables = any(group.get("capturable") or _has_rate(group) for group in groups)
        # `GradScaler` leaves them for the time of a step.
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            return Asked(keeps_tables)
        if self._scale is None:
            self._scale = Scale(self._device)
        scale, control = self._scale.of(getattr(optimizer, "grad_scale", None), found)
        if optimizer._options[CLIP_NORM] is not None:
            # A plan that takes norms sees for itself what is not finite.
            return Asked(keeps_tables, scale=scale)
        return Asked(keeps_tables, control=control)

    def _rules(self) -> List[Dict[str, Any]]:
        optimizer, index = self._optimizer, self._device
        if index is None or self._is_sharded and optimizer._is_layerwise:
            # With sums that the host has, it has the rates, too.
            return [optimizer._settings(group) for group in optimizer.param_groups]
        return [self._rates.settings(optimizer, group, index) for group in optimizer.param_groups]

    def _make_state(self, index: int) -> Tuple[Dict[str, Any], bool]:
        """Fills in what is missing of a parameter's state; whether its rule had none of it."""
        optimizer, (tensor, group_index, _) = self._optimizer, self.members[index]
        group = optimizer.param_groups[group_index]
        states = self._whole_state
        made = [] if tensor in states else [""]
        # Before anything is made, so that a Ctrl-C in between leaves nothing behind.
        self._made.append((tensor, made))
        state = states[tensor]
        names = optimizer._own_names(tensor, group)
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
        beside = optimizer._beside(tensor)
        if beside is not None and state.get(beside) is None:
            made.append(beside)
            # A remainder of 0 is that of the parameter as it is.
            first = empty_like(tensor, optimizer._state_dtype(tensor, beside))
            state[beside] = first.copy_(tensor.detach()) if beside == "master" else first.zero_()
        if self._is_sharded:
            state = self._local_state[self.tensors[index]] = local_state(state)
        return state, len(missing) == len(names)

    def take_back(self) -> None:
        """Removes state that was made for a step that has not happened."""
        state = self._whole_state
        for tensor, names in self._made:
            for name in names:
                if name and tensor in state:
                    state[tensor].pop(name, None)
            if "" in names and not state.get(tensor):
                state.pop(tensor, None)
        self._made = []

    @torch.no_grad()
    def _follow(self) -> None:
        """Lets masters take over values that were written to their parameters between steps, and
        remainders begin anew."""
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
                for name in BESIDE:
                    self._whole_state[self.members[index].tensor].pop(name, None)
                continue
            if not moved and self._versions.get(index) == _version_of(self.members[index]):
                continue
            remainder = self.state[tensor].get("remainder")
            if remainder is not None and place is not None:
                # Which elements were written nobody knows; what is loaded before a step fits.
                remainder.zero_()
            master = self.state[tensor].get("master")
            if master is not None:
                stays = master.to(tensor.dtype) == tensor
                master.copy_(torch.where(stays, master, tensor.detach().to(torch.float32)))


def _has_rate(group: Dict[str, Any]) -> bool:
    """Whether a device has the learning rate of a group."""
    lr = group["lr"]
    return isinstance(lr, Tensor) and device_of(lr) is not None


def _version_of(member: Member) -> Tuple[int, int]:
    """How often a parameter was written, as a DTensor and by its part."""
    return member.tensor._version, local_of(member.tensor)._version


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
