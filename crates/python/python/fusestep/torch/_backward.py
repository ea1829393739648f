"""The step inside of ``backward``: parameters are updated as soon as their gradients are there."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Dict, List, NamedTuple, Optional, Set

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusestep import _fusestep
from fusestep._checks import positive
from fusestep._report import Report
from fusestep.torch._device import device_of
from fusestep.torch._optimizer import Fused
from fusestep.torch._options import ACCUMULATE, CLIP_NORM, refuse_counted
from fusestep.torch._planned import Member, Planned, members_of
from fusestep.torch._taken import Taken, refuse_graph, refuse_wrapped, second_pass
from fusestep.torch._tensors import gradient_dtype

_TAKEN = (
    "expected `optimizer.step()` next, because `fuse_backward` has applied and freed it in "
    "`backward` (two backward passes, clipping and a `GradScaler` need `remove()` first; hooks of "
    "`Tensor.register_hook` change it before)"
)
_ANEW = (
    "to go on from what `backward` has updated, call `remove()` of what `fuse_backward` gave and "
    "`fuse_backward` anew"
)

# Of the model's bytes a bucket has this share: two of them are a tenth.
_BUCKETS = 20


class _Bucket:
    """Parameters that are updated together once all of them have their gradient."""

    def __init__(self, members: List[Member]) -> None:
        self.members = members
        self.tensors = [member.tensor for member in members]
        self.ready: Set[int] = set()
        self.planned: Optional[Planned] = None


class _Used(NamedTuple):
    """The settings of a group, with which a parameter has been updated."""

    name: str
    settings: Dict[str, Any]

    def refuse_other(self, now: Dict[str, Any]) -> None:
        """Raises for others."""
        if self.settings == now:
            return
        names = sorted(self.settings.keys() | now.keys())
        changed = [name for name in names if self.settings.get(name) != now.get(name)]
        before = ", ".join(f"{name}={self.settings.get(name)}" for name in changed)
        found = ", ".join(f"{name}={now.get(name)}" for name in changed)
        raise RuntimeError(
            f"parameter `{self.name}`: expected {before}, with which `fuse_backward` has updated "
            f"it in `backward`, found {found}; change settings behind `step` or before `backward`"
        )


class _Updated(NamedTuple):
    """A parameter that ``backward`` has updated, as ``step`` is to find it."""

    member: Member
    taken: Taken
    version: int
    address: int


class FusedBackward:
    """What :func:`fuse_backward` has set up; :meth:`remove` undoes it."""

    def __init__(self, model: torch.nn.Module, optimizer: Fused, bucket_mib: Optional[float]):
        # The optimizer keeps this; see `Planned`.
        self._fused_with = weakref.ref(optimizer)
        self._model = model
        self._bucket_mib = bucket_mib
        # Those of the model that the optimizer has, which of them train, and those in the order in
        # which their gradients come.
        self._known: List[Tensor] = []
        self._trains: List[bool] = []
        self._order: List[Tensor] = []
        self._hooked: Dict[int, Tensor] = {}
        self._plans_made = -1
        self._bucket_of: Dict[int, _Bucket] = {}
        # Whether others may average gradients for all that is known.
        self._may_be_wrapped = True
        # Of the step at hand: who got a gradient, in order, who was updated, samples of their
        # values, and what was done.
        self._seen: Dict[int, Tensor] = {}
        self._updated: Dict[int, _Updated] = {}
        self._samples: List[int] = []
        self._used: Dict[int, _Used] = {}
        self._reports: List[Report] = []
        self._handles: List[Any] = []
        # What stands in for gradients that are gone.
        self._taken: Dict[int, Taken] = {}
        # PyTorch never collects a tensor that its own hook refers to.
        accumulated = weakref.WeakMethod(self._accumulated)

        def hook(tensor: Tensor) -> None:
            method = accumulated()
            if method is not None:
                method(tensor)

        self._hook = hook
        self._cut()
        if not self._known:
            raise ValueError(
                "model: expected parameters that the optimizer updates, found none of them"
            )
        self._peak_bytes = self._bytes = 0

    @property
    def peak_gradient_bytes(self) -> int:
        """Most bytes of gradients that waited for their bucket at one time, since the start."""
        return self._peak_bytes

    def remove(self) -> None:
        """Takes the hooks away: from now on ``step`` updates everything, as without. What
        ``backward`` has updated before stays so."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for one in self._updated.values():
            if one.member.tensor.grad is one.taken:
                one.member.tensor.grad = None
        self._updated = {}
        optimizer = self._fused_with()
        if optimizer is not None and optimizer._backward is self:
            optimizer._backward = None

    @property
    def _optimizer(self) -> Fused:
        optimizer = self._fused_with()
        assert optimizer is not None, "only `_accumulated` is called without it"
        return optimizer

    def _follow(self) -> None:
        """Cuts anew if groups have changed, or a parameter was frozen or trains again."""
        trains = [_trains(tensor) for tensor in self._known]
        if self._plans_made != self._optimizer._plans_made or trains != self._trains:
            self._cut()

    def _cut(self) -> None:
        """Cuts parameters into buckets, in the order in which gradients became ready last."""
        members = {id(m.tensor): m for m in members_of(self._optimizer.param_groups)}
        parameters = reversed(list(self._model.parameters()))
        known: List[Tensor] = [tensor for tensor in parameters if id(tensor) in members]
        if {id(tensor) for tensor in known} != {id(tensor) for tensor in self._known}:
            self._may_be_wrapped = True
        self._known = known
        self._trains = [_trains(tensor) for tensor in self._known]
        training = {id(p): p for p, trains in zip(self._known, self._trains) if trains}
        for key in training.keys() - self._hooked.keys():
            register: Any = training[key].register_post_accumulate_grad_hook
            self._handles.append(register(self._hook))
            self._hooked[key] = training[key]
        still = [tensor for tensor in self._order if id(tensor) in training]
        self._order = [training.pop(id(tensor)) for tensor in still]
        self._order += training.values()
        ordered = [members[id(tensor)] for tensor in self._order]
        sizes = [_bytes_of(member.tensor) for member in ordered]
        cap = sum(sizes) / _BUCKETS
        if self._bucket_mib is not None:
            cap = self._bucket_mib * 2**20
        cut: List[List[Member]] = []
        filled = 0
        for member, size in zip(ordered, sizes):
            # A bucket has one plan, which is of one device.
            others = not cut or device_of(cut[-1][0].tensor) != device_of(member.tensor)
            if others or filled + size > cap:
                cut.append([])
                filled = 0
            cut[-1].append(member)
            filled += size
        buckets = [_Bucket(members) for members in cut]
        self._bucket_of = {id(t): bucket for bucket in buckets for t in bucket.tensors}
        self._plans_made = self._optimizer._plans_made

    @torch.no_grad()
    def _accumulated(self, tensor: Tensor) -> None:
        """Called by autograd when a gradient has been added to a parameter's."""
        optimizer, key = self._fused_with(), id(tensor)
        if optimizer is None or tensor.grad is None:
            return
        if key in self._updated:
            raise second_pass(self._updated[key].member.name, _ANEW)
        if not self._seen:
            self._follow()
        bucket = self._bucket_of.get(key)
        if bucket is None:
            return
        if tensor.grad.requires_grad:
            refuse_graph(self._name(bucket, tensor), tensor.grad)
        if key in bucket.ready:
            return
        if self._may_be_wrapped:
            refuse_wrapped("fuse_backward", self._model, self._known)
            self._may_be_wrapped = False
        optimizer._refuse_step()
        self._seen[key] = tensor
        bucket.ready.add(key)
        self._bytes += _bytes_of(tensor)
        self._peak_bytes = max(self._peak_bytes, self._bytes)
        if len(bucket.ready) == len(bucket.tensors):
            self._update(bucket)

    @staticmethod
    def _name(bucket: _Bucket, tensor: Tensor) -> str:
        return next(member.name for member in bucket.members if member.tensor is tensor)

    def _update(self, bucket: _Bucket) -> None:
        settings = self._settings({member.group for member in bucket.members})
        for group in self._used.keys() & settings.keys():
            self._used[group].refuse_other(settings[group])
        given = [member for member in bucket.members if member.tensor.grad is not None]
        for _ in range(2):
            if bucket.planned is None:
                bucket.planned = Planned(self._optimizer, bucket.members)
            report = bucket.planned.run([bucket.tensors], None)
            if report is not None:
                break
            bucket.planned = None
        if not isinstance(report, dict):
            raise RuntimeError("expected tensors that stay what they are during a step")
        self._reports.append(Report(**report))
        for member in given:
            tensor = member.tensor
            taken = tensor.grad = self._taken_of(member)
            self._used.setdefault(member.group, _Used(member.name, settings[member.group]))
            self._updated[id(tensor)] = _Updated(
                member, taken, tensor._version, tensor.data_ptr()
            )
        self._samples += _samples([member.tensor for member in given])
        self._bytes -= sum(map(_bytes_of, bucket.tensors))
        bucket.ready.clear()

    def _settings(self, groups: Set[int]) -> Dict[int, Dict[str, Any]]:
        """The settings of these groups, of which there may be one for each parameter."""
        optimizer = self._optimizer
        return {index: optimizer._settings(optimizer.param_groups[index]) for index in groups}

    def _taken_of(self, member: Member) -> Taken:
        """What stands in for the gradient that is gone."""
        like = member.tensor
        taken = self._taken.get(id(like))
        if taken is None or (taken.shape, taken.dtype) != (like.shape, gradient_dtype(like)):
            taken = Taken(like, f"gradient of `{member.name}`: {_TAKEN}")
            self._taken[id(like)] = taken
        return taken

    def _begin(self) -> None:
        """Before ``step`` updates the rest: raises for what has been changed behind ``backward``
        of parameters that it has updated, and nothing has changed then."""
        members = {id(m.tensor): m for m in members_of(self._optimizer.param_groups)}
        groups = {members[key].group for key in self._updated if key in members}
        settings, compared = self._settings(groups), set()
        updated = list(self._updated.values())
        for one in updated:
            tensor, name = one.member.tensor, one.member.name
            now = members.get(id(tensor))
            if tensor.grad is not one.taken:
                found = "it dropped" if tensor.grad is None else "another gradient"
                raise RuntimeError(f"gradient of `{name}`: {_TAKEN}, found {found}; {_ANEW}")
            if now is None:
                raise RuntimeError(
                    f"parameter `{name}`: expected it in its group until `step`, because "
                    f"`fuse_backward` has updated it in `backward`, found it in none; {_ANEW}"
                )
            if (one.member.group, now.group) not in compared:
                self._used[one.member.group]._replace(name=name).refuse_other(settings[now.group])
                compared.add((one.member.group, now.group))
            if tensor._version != one.version or tensor.data_ptr() != one.address:
                raise _written(name)
        for one, before, sample in zip(
            updated, self._samples, _samples([one.member.tensor for one in updated])
        ):
            if sample != before:
                raise _written(one.member.name)
        for one in updated:
            one.member.tensor.grad = None

    def _restore(self) -> None:
        """Behind a step that was refused."""
        for one in self._updated.values():
            one.member.tensor.grad = one.taken

    def _finish(self, rest: Report) -> Report:
        """Ends a step, of which ``rest`` was left for the end; what all of it has done."""
        parts = [report.seconds for report in [rest, *self._reports] if report.seconds is not None]
        whole = dataclasses.replace(
            rest,
            step=max(report.step for report in [rest, *self._reports]),
            seconds={key: sum(part[key] for part in parts) for key in parts[0]} if parts else None,
            launches=rest.launches + sum(report.launches for report in self._reports),
            elements=rest.elements + sum(report.elements for report in self._reports),
            copied_gradients=rest.copied_gradients
            + sum(report.copied_gradients for report in self._reports),
            without_gradient=rest.without_gradient - len(self._updated),
        )
        for bucket in self._bucket_of.values():
            bucket.ready.clear()
        order = list(self._seen.values())
        # What waited for the step is freed like the others: the next pass begins anew for all.
        for tensor in order:
            tensor.grad = None
        if len(order) == len(self._order) and any(a is not b for a, b in zip(order, self._order)):
            # The next step's buckets follow the order in which gradients came.
            self._order = order
            self._plans_made = -1
        self._seen, self._updated, self._reports, self._bytes = {}, {}, [], 0
        self._samples, self._used = [], {}
        self._follow()
        return whole


def _trains(tensor: Tensor) -> bool:
    # A lazy parameter has no shape yet.
    return tensor.requires_grad and not is_lazy(tensor)


def _written(name: str) -> RuntimeError:
    return RuntimeError(
        f"parameter `{name}`: expected the values that `backward` has left there, found it written "
        f"or moved before `step`; write it behind `step` or before `backward`; {_ANEW}"
    )


def _samples(tensors: List[Tensor]) -> List[int]:
    """Of each parameter what a write through ``.data`` would change, which counts no version.

    Of one on a device nothing: a look would wait for the device.
    """
    places = [
        (tensor.data_ptr(), _bytes_of(tensor)) if device_of(tensor) is None else (0, 0)
        for tensor in tensors
    ]
    return _fusestep.samples(places)


def fuse_backward(
    model: torch.nn.Module, optimizer: Any, *, bucket_mib: Optional[float] = None
) -> FusedBackward:
    """Has ``loss.backward()`` update parameters as soon as their gradients are there.

    The parameters of ``model`` are cut into buckets of ``bucket_mib`` MiB, or of a twentieth of the
    model, in the order in which gradients become ready, from the second step on the order seen. Once
    a bucket's last gradient has been accumulated its parameters are updated and its gradients are
    freed, so that gradients never need more than a tenth of the model's memory, or the largest
    parameter's. ``optimizer.step()`` updates what is left, calls hooks and ends the step: every
    ``backward`` is followed by one. Bits are as without.

    Raises ``TypeError`` for an optimizer of another kind and ``ValueError`` for clipping, a loss
    scale, several micro-steps and ``update_norms``, which need all gradients at once. During a
    step ``backward`` raises ``RuntimeError``, ``TypeError`` or ``ValueError`` for a gradient that
    no kernel takes; buckets that were updated before that stay updated.
    """
    if not isinstance(optimizer, Fused):
        raise TypeError(
            f"optimizer: expected one of fusestep.torch, found {type(optimizer).__name__}"
        )
    options = optimizer._options
    for name in (CLIP_NORM, "loss_scale", "update_norms"):
        if options[name]:
            raise ValueError(
                f"{name}: expected none, because it needs all gradients at once, "
                f"found {options[name]!r}"
            )
    if options[ACCUMULATE] != 1:
        raise ValueError(
            f"{ACCUMULATE}: expected 1, because gradients are freed during backward, "
            f"found {options[ACCUMULATE]}"
        )
    why = "one for `step` alone, because parts of a step do not know the count of the whole"
    refuse_counted(type(optimizer).__name__, options, why)
    bucket_mib = positive("bucket_mib", bucket_mib)
    if optimizer._ranks is not None:
        raise ValueError("optimizer: expected one of its own, found one of `DataParallel`")
    if optimizer._backward is not None:
        raise ValueError("optimizer: expected one that is not fused yet; call `remove()` first")
    # Buckets step one after the other, each with a plan that counts.
    optimizer.state
    if optimizer._is_sharded:
        raise ValueError(
            "optimizer: expected parameters whose gradients autograd brings, found DTensors, whose "
            "gradients processes reduce behind it; leave `fuse_backward` out"
        )
    fused = FusedBackward(model, optimizer, bucket_mib)
    refuse_wrapped("fuse_backward", model, fused._known)
    optimizer._backward = fused
    return fused


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
