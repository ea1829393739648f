"""The step inside of ``backward``: parameters are updated as soon as their gradients are there."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Dict, List, Optional, Set

import torch
from torch import Tensor

from fusestep._checks import positive
from fusestep._report import Report
from fusestep.torch._optimizer import Fused
from fusestep.torch._planned import Member, Planned, members_of

# Of the model's bytes a bucket has this share: two of them are a tenth.
_BUCKETS = 20


class _Bucket:
    """Parameters that are updated together once all of them have their gradient."""

    def __init__(self, members: List[Member]) -> None:
        self.members = members
        self.tensors = [member.tensor for member in members]
        self.ready: Set[int] = set()
        self.planned: Optional[Planned] = None


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
        # Of the step at hand: who got a gradient, in order, who was updated, and what was done.
        self._seen: Dict[int, Tensor] = {}
        self._updated: Set[int] = set()
        self._reports: List[Report] = []
        self._handles: List[Any] = []
        # PyTorch never collects a tensor that its own hook refers to.
        accumulated = weakref.WeakMethod(self._accumulated)

        def hook(tensor: Tensor) -> None:
            method = accumulated()
            if method is not None:
                method(tensor)

        self._hook = hook
        self._cut()
        if not self._order:
            raise ValueError(
                "model: expected parameters that the optimizer updates, found none of them"
            )
        self._peak_bytes = self._bytes = 0

    @property
    def peak_gradient_bytes(self) -> int:
        """Most bytes of gradients that waited for their bucket at one time, since the start."""
        return self._peak_bytes

    def remove(self) -> None:
        """Takes the hooks away: from now on ``step`` updates everything, as without."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
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
        trains = [tensor.requires_grad for tensor in self._known]
        if self._plans_made != self._optimizer._plans_made or trains != self._trains:
            self._cut()

    def _cut(self) -> None:
        """Cuts parameters into buckets, in the order in which gradients became ready last."""
        members = {id(m.tensor): m for m in members_of(self._optimizer.param_groups)}
        self._known = [p for p in reversed(list(self._model.parameters())) if id(p) in members]
        self._trains = [tensor.requires_grad for tensor in self._known]
        training = {id(p): p for p, trains in zip(self._known, self._trains) if trains}
        for key in training.keys() - self._hooked.keys():
            register: Any = training[key].register_post_accumulate_grad_hook
            self._handles.append(register(self._hook))
            self._hooked[key] = training[key]
        still = [tensor for tensor in self._order if id(tensor) in training]
        self._order = [training.pop(id(tensor)) for tensor in still]
        self._order += training.values()
        ordered = [members[id(tensor)] for tensor in self._order]
        sizes = [member.tensor.numel() * member.tensor.element_size() for member in ordered]
        cap = sum(sizes) / _BUCKETS
        if self._bucket_mib is not None:
            cap = self._bucket_mib * 2**20
        cut: List[List[Member]] = []
        filled = 0
        for member, size in zip(ordered, sizes):
            if not cut or filled + size > cap:
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
        if optimizer is None:
            return
        if key in self._updated:
            raise RuntimeError(
                "fuse_backward: expected `optimizer.step()` between two backward passes, found a "
                "second gradient of a parameter that the first pass has updated"
            )
        if not self._seen:
            self._follow()
        bucket = self._bucket_of.get(key)
        if bucket is None or key in bucket.ready:
            return
        optimizer._refuse_step()
        self._seen[key] = tensor
        bucket.ready.add(key)
        self._bytes += _bytes_of(tensor)
        self._peak_bytes = max(self._peak_bytes, self._bytes)
        if len(bucket.ready) == len(bucket.tensors):
            self._update(bucket)

    def _update(self, bucket: _Bucket) -> None:
        for _ in range(2):
            if bucket.planned is None:
                bucket.planned = Planned(self._optimizer, bucket.members)
            report = bucket.planned.run([bucket.tensors], None)
            if report is not None:
                break
            bucket.planned = None
        if report is None:
            raise RuntimeError("expected tensors that stay what they are during a step")
        self._reports.append(report)
        for tensor in bucket.tensors:
            self._bytes -= _bytes_of(tensor)
            tensor.grad = None
            self._updated.add(id(tensor))
        bucket.ready.clear()

    def _finish(self, rest: Report) -> Report:
        """Ends a step, of which ``rest`` was left for the end; what all of it has done."""
        whole = dataclasses.replace(
            rest,
            launches=rest.launches + sum(report.launches for report in self._reports),
            elements=rest.elements + sum(report.elements for report in self._reports),
            copied_gradients=rest.copied_gradients
            + sum(report.copied_gradients for report in self._reports),
            without_gradient=rest.without_gradient - len(self._updated),
        )
        for bucket in self._bucket_of.values():
            bucket.ready.clear()
        order = list(self._seen.values())
        if len(order) == len(self._order) and any(a is not b for a, b in zip(order, self._order)):
            # The next step's buckets follow the order in which gradients came.
            self._order = order
            self._plans_made = -1
        self._seen, self._updated, self._reports, self._bytes = {}, set(), [], 0
        self._follow()
        return whole


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

    Raises ``TypeError`` for an optimizer of another kind and ``ValueError`` for ``clip_norm``,
    ``loss_scale``, ``accumulate`` and ``update_norms``, which need all gradients at once. During a
    step ``backward`` raises ``RuntimeError``, ``TypeError`` or ``ValueError`` for a gradient that
    no kernel takes; buckets that were updated before that stay updated.
    """
    if not isinstance(optimizer, Fused):
        raise TypeError(
            f"optimizer: expected one of fusestep.torch, found {type(optimizer).__name__}"
        )
    options = optimizer._options
    for name in ("clip_norm", "loss_scale", "update_norms"):
        if options[name]:
            raise ValueError(
                f"{name}: expected none, because it needs all gradients at once, "
                f"found {options[name]!r}"
            )
    if options["accumulate"] != 1:
        raise ValueError(
            "accumulate: expected 1, because gradients are freed during backward, "
            f"found {options['accumulate']}"
        )
    bucket_mib = positive("bucket_mib", bucket_mib)
    if optimizer._backward is not None:
        raise ValueError("optimizer: expected one that is not fused yet; call `remove()` first")
    # Buckets step one after the other, each with a plan that counts.
    optimizer.state
    fused = FusedBackward(model, optimizer, bucket_mib)
    optimizer._backward = fused
    return fused


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
