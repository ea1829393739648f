"""A step over parameters of several devices: one plan for each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, Union

from torch import Tensor
from torch.nn.parameter import is_lazy

from fusestep._plans import Plans
from fusestep.torch._device import CUDA, device_of, is_recording
from fusestep.torch._options import CLIP_NORM, refuse_between_devices
from fusestep.torch._planned import Enqueued, Member, Planned, Squares, trains
from fusestep.torch._sharded import local_of

if TYPE_CHECKING:
    from fusestep.torch._optimizer import Fused

Gradients = Optional[List[Optional[Tensor]]]

# A device's plan, and the tensors and gradients of a step there.
Call = Tuple[Planned, List[List[Tensor]], Gradients]


def planned_of(optimizer: Fused, members: List[Member]) -> Union[Planned, Mixed]:
    """The plan over an optimizer's parameters, or one for each device that they train on."""
    places = [_place_of(optimizer, member) for member in members]
    devices = sorted({place for place in places if place is not None}, key=_order)
    if len(devices) < 2:
        return Planned(optimizer, members)
    return Mixed(optimizer, members, places, devices)


_HOST = "cpu"


def _place_of(optimizer: Fused, member: Member) -> Optional[str]:
    """The device of a parameter that trains; ``None`` for others, which no step looks at."""
    local = local_of(member.tensor)
    if is_lazy(local) or not trains(optimizer, member):
        return None
    index = device_of(local)
    return _HOST if index is None else f"{CUDA}:{index}"


def _order(place: str) -> Tuple[bool, str]:
    return place != _HOST, place


class Mixed:
    """What `Planned` is for parameters of one device, for those of several.

    Tensors of all devices are looked at before those of the first are updated, so a tensor that
    does not fit leaves all of them as they were. With a norm each device sums up its gradients, the
    host adds the sums in the order of parameters, and all plans decide by that: as one plan would.
    """

    def __init__(
        self,
        optimizer: Fused,
        members: List[Member],
        places: Sequence[Optional[str]],
        devices: Sequence[str],
    ) -> None:
        refuse_between_devices(optimizer._options, devices, optimizer._is_sharded)
        # Several plans count steps of one state.
        optimizer.state
        self._count = len(members)
        self._devices = devices
        # Positions of each device's parameters; the first has those that do not train, too.
        self._positions: List[List[int]] = [
            [at for at, place in enumerate(places) if (place or devices[0]) == device]
            for device in devices
        ]
        # Those of them that train, in the order of each plan.
        self._trains = [
            [at for at, place in enumerate(places) if place == device] for device in devices
        ]
        own = optimizer._options
        self._takes_norm = own[CLIP_NORM] is not None or own["loss_scale"] is not None
        self._parts = [
            Planned(optimizer, [members[at] for at in positions]) for positions in self._positions
        ]

    @property
    def is_orphan(self) -> bool:
        """Whether its optimizer is gone."""
        return self._parts[0].is_orphan

    def give_back(self, plans: Plans) -> None:
        """Has the plans kept for parameters like these; this steps no more."""
        for part in self._parts:
            part.give_back(plans)

    def plan(self) -> str:
        """The plans as text."""
        texts = zip(self._devices, self._parts)
        return "\n".join(f"{device}\n{part.plan()}" for device, part in texts)

    @property
    def is_recorded(self) -> bool:
        """False, since no step on several devices is recorded."""
        return False

    def update_norms(self) -> Optional[List[Tuple[str, float]]]:
        """None, since no norm is taken over several devices."""
        return None

    def loss_scale(self) -> Optional[Tuple[float, int, int]]:
        """The loss scale, which is the same in all plans, and its counts of steps."""
        return self._parts[0].loss_scale()

    def fits(self, lists: List[List[Tensor]]) -> bool:
        """Whether these are the parameters of each group that it was made for."""
        if sum(map(len, lists)) != self._count:
            return False
        return all(part.fits(own) for part, own in zip(self._parts, self._split(lists)))

    def _split(self, lists: List[List[Tensor]]) -> List[List[List[Tensor]]]:
        """The lists of each device's parameters."""
        flat = [(group, tensor) for group, tensors in enumerate(lists) for tensor in tensors]
        parts = []
        for positions in self._positions:
            own: List[List[Tensor]] = [[] for _ in lists]
            for at in positions:
                group, tensor = flat[at]
                own[group].append(tensor)
            parts.append(own)
        return parts

    def run(self, lists: List[List[Tensor]], gradients: Gradients) -> Optional[Dict[str, Any]]:
        """Updates the tensors of ``lists``, as `Planned.run`."""
        if is_recording():
            raise RuntimeError(
                "step: expected parameters of one device while `torch.cuda.graph` records it, "
                f"found them on {' and '.join(self._devices)}; make an optimizer for each device"
            )
        given: List[Gradients] = [
            None if gradients is None else [gradients[at] for at in positions]
            for positions in self._positions
        ]
        calls = list(zip(self._parts, self._split(lists), given))
        try:
            fits = all(part.looks(own, grads) for part, own, grads in calls)
        except BaseException:
            self._take_back()
            raise
        if not fits:
            self._take_back()
            return None
        # What a skipped step has made is taken back once all parts have heard of it.
        made = [part._made for part in self._parts]
        whole = self._squares(calls) if self._takes_norm and _has_any(calls) else None
        reports = []
        for part, own, grads in calls:
            report = part.run(own, grads, whole)
            if isinstance(report, Enqueued):
                report = report.told()
            if report is None:
                raise RuntimeError("expected tensors that stay what they are during a step")
            reports.append(report)
        if any(report["skipped"] for report in reports):
            for part, own_made in zip(self._parts, made):
                part._made = own_made
            self._take_back()
        return _sum_of(reports)

    def _squares(self, calls: List[Call]) -> Squares:
        """The sums over all gradients, in the order of the optimizer's parameters: that of a plan
        for parameters of one device, whose bits the norm has so."""
        by_position: Dict[int, Tuple[float, int]] = {}
        for (part, own, grads), trains in zip(calls, self._trains):
            squares = part.squares(own, grads)
            if squares is None:
                raise RuntimeError("expected tensors that stay what they are during a step")
            by_position.update(zip(trains, squares))
        return [by_position[at] for at in sorted(by_position)]

    def _take_back(self) -> None:
        for part in self._parts:
            part.take_back()


def _has_any(calls: List[Call]) -> bool:
    """Whether any parameter has a gradient."""
    for _, lists, given in calls:
        own = (tensor.grad for tensors in lists for tensor in tensors)
        if any(grad is not None for grad in (own if given is None else given)):
            return True
    return False


_ADDED = ("launches", "elements", "without_gradient", "copied_gradients", "tensors_skipped")


def _sum_of(reports: List[Dict[str, Any]]) -> Dict[str, Any]:
    """What the steps on all devices did together."""
    whole = dict(reports[0])
    for name in _ADDED:
        total = sum(report.get(name, 0) for report in reports)
        if total or name in whole:
            whole[name] = total
    whole["step"] = max(report["step"] for report in reports)
    seconds: Dict[str, float] = {}
    for report in reports:
        for name, value in (report.get("seconds") or {}).items():
            seconds[name] = seconds.get(name, 0.0) + value
    if seconds:
        whole["seconds"] = seconds
    return whole
