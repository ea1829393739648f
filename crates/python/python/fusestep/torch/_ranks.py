"""Many processes with one model: gradients are averaged over them, and all of them step alike."""

from __future__ import annotations

import ctypes
import os
from functools import partial
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusestep import _fusestep
from fusestep._checks import positive
from fusestep._report import Report
from fusestep.torch._optimizer import Fused
from fusestep.torch._planned import Described, Member, members_of
from fusestep.torch._tensors import Library, refuse_parameter

Folder = Union[str, "os.PathLike[str]"]


class DataParallel(torch.nn.Module):
    """A model that is trained by many processes, each with a part of every batch.

    Start the processes with ``torchrun``; all of them are on one machine and share its memory, or
    come by ``mpirun`` with a wheel that was built with its feature ``mpi``. The model takes the
    parameters of rank 0 and has them in memory of ours from then on, where steps update them in
    place. ``loss.backward()`` writes gradients there too, where they are averaged over ranks,
    bucket by bucket, while it goes on; ``optimizer.step()`` updates on every rank alike and takes
    the gradients: ``.grad`` is ``None`` behind it.

    * ``zero`` is what ranks share out: 1 optimizer state, 2 gradients too. It changes no bit.
    * ``bucket_mib`` is the most MiB of gradients in one call, 25 by default. It changes no bit.
    * ``comm_streams`` is how many threads reduce during ``backward``; with 0 the step reduces and
      updates a bucket in one pass. It changes no bit.
    * ``engine`` is ``"processes"`` or ``"mpi"``, by default what the launcher's variables say.
    * ``timeout`` is how many seconds a rank waits for the others.

    Options of the optimizer mean what they mean in one process: norms and loss scales are those of
    all ranks. Buffers, such as running means, stay each rank's own.

    Raises ``ValueError`` and ``TypeError`` for what cannot be trained so, and ``RuntimeError`` if
    processes do not come, or differ in model, rule or settings, naming what differs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        zero: int = 0,
        bucket_mib: Optional[float] = None,
        comm_streams: int = 2,
        engine: Optional[str] = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__()
        _check(optimizer, zero, bucket_mib, comm_streams, timeout)
        self.module = model
        self._optimizer: Fused = optimizer
        self._zero = zero
        self._members = _trained(model, optimizer)
        self._tensors = [member.tensor for member in self._members]
        self._index = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        described = [
            Described(name, str(tensor.dtype), tuple(tensor.shape), group, True)
            for tensor, group, name in self._members
        ]
        options = dict(optimizer._options)
        options["state_16"] = options.pop("state_dtype") == torch.bfloat16
        options.update(
            zero=zero, bucket_mib=bucket_mib, streams=comm_streams, engine=engine, timeout=timeout
        )
        threads = torch.get_num_threads()
        self._ranks = _fusestep.Ranks(described, self._rules(), options, threads)
        places = self._ranks.places()
        # What has no elements has no memory either.
        full = [index for index, tensor in enumerate(self._tensors) if tensor.numel()]
        self._full = [self._tensors[index] for index in full]
        self._values = [self._view(index, places[index][0]) for index in full]
        self._gradients: Dict[int, Tensor] = {}
        for index in full:
            address = places[index][1]
            if address is not None:
                self._gradients[index] = self._view(index, address)
        # The version of what was given in a view, `None` for a copy.
        self._given: Dict[int, Optional[int]] = {}
        self._versions: List[int] = []
        self._norms: Optional[List[Tuple[str, float]]] = None
        self._handles: List[Any] = []
        self.follow_parameters()
        for index, tensor in enumerate(self._tensors):
            hooked: Any = tensor
            self._handles.append(hooked.register_post_accumulate_grad_hook(self._accumulated))
            if index in self._gradients:
                self._handles.append(hooked.register_hook(partial(self._arriving, index)))
        optimizer._ranks = self
        # Ranks have it; Adagrad has made some already.
        optimizer.state.clear()

    @property
    def rank(self) -> int:
        """This process among all."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._ranks.world_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Trains on from what was written to the parameters outside of a step, or from where they
        have been moved: rank 0's values go to all. All ranks call it. A model that another
        ``DataParallel`` is to train is left by :meth:`close` instead."""
        for tensor, value in zip(self._full, self._values):
            if (tensor.dtype, tensor.shape) != (value.dtype, value.shape):
                name = self._members[self._index[id(tensor)]].name
                raise ValueError(
                    f"parameter `{name}`: expected {value.dtype} of shape {tuple(value.shape)}, "
                    f"found {tensor.dtype} of {tuple(tensor.shape)}; make another DataParallel"
                )
        self._ranks.touch()
        for tensor, value in zip(self._full, self._values):
            if tensor.data_ptr() != value.data_ptr():
                value.copy_(tensor)
                tensor.data = value
        self._ranks.begin()
        self._parameters_changed()

    def flush(self) -> None:
        """Updates from fewer micro-steps than ``accumulate``, at an epoch's end. All ranks call
        it."""
        self._refuse_written_gradients()
        self._refuse_written_parameters()
        self._take(self._ranks.flush(self._rules()))

    def save(self, folder: Folder, steps: int, *, wait: bool = True) -> None:
        """Saves parameters, the optimizer's state and that ``steps`` steps were done.

        With ``wait=False`` it is written behind the steps that follow; what goes wrong then is the
        next call's error, and :meth:`finish_saves` waits. The checkpoint before stays until this
        one is complete. All ranks call it.
        """
        self._refuse_written_parameters()
        self._ranks.save(os.fspath(folder), steps)
        if wait:
            self._ranks.finish_saves()

    def finish_saves(self) -> None:
        """Waits until the checkpoint under way is complete on all ranks."""
        self._ranks.finish_saves()

    def resume(self, folder: Folder) -> int:
        """Goes on from the folder's checkpoint, of however many ranks; returns how many steps had
        been done, 0 if there is none. All ranks call it."""
        steps = self._ranks.resume(os.fspath(folder))
        if steps is None:
            return 0
        self._parameters_changed()
        return steps

    def close(self) -> None:
        """Leaves the other ranks, once a checkpoint under way is complete. Parameters stay where and
        as they are, for another ``DataParallel`` too; a later step raises ``RuntimeError``."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._ranks.close()

    def _rules(self) -> List[Dict[str, Any]]:
        return [self._optimizer._settings(group) for group in self._optimizer.param_groups]

    def _view(self, index: int, address: int) -> Tensor:
        """A tensor in the rank's memory, which it keeps."""
        like = self._tensors[index]
        memory = (ctypes.c_char * (like.numel() * like.element_size())).from_address(address)
        # PyTorch keeps the buffer, and the buffer what it lies in.
        setattr(memory, "owner", self._ranks)
        return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)

    @torch.no_grad()
    def _arriving(self, index: int, gradient: Tensor) -> Optional[Tensor]:
        """Called by autograd with a gradient on its way to ``.grad``, which it writes to memory of
        its own where the gradient is a view of something, such as a sum's. It goes to the memory of
        the ranks at once instead. What does not fit goes on as it is, to :meth:`_accumulated`."""
        view = self._gradients[index]
        if index in self._given or self._tensors[index].grad is not None:
            return None
        dense = gradient.layout == torch.strided and gradient.device == view.device
        if not dense or (gradient.dtype, gradient.shape) != (view.dtype, view.shape):
            return None
        self._fill(index, gradient)
        # Autograd takes over what nobody else refers to.
        return view.detach()

    def _fill(self, index: int, gradient: Tensor) -> None:
        """Copies a gradient into its view."""
        if gradient.is_contiguous() and not gradient.is_neg() and gradient.data_ptr():
            # Past the caches: what moves between ranks is not read again soon.
            len_bytes = gradient.numel() * gradient.element_size()
            self._ranks.copy(index, (gradient.data_ptr(), len_bytes))
        else:
            self._gradients[index].copy_(gradient)

    @torch.no_grad()
    def _accumulated(self, tensor: Tensor) -> None:
        """Called by autograd when a parameter has its gradient."""
        index, gradient = self._index[id(tensor)], tensor.grad
        name = self._members[index].name
        if gradient is None:
            return
        if index in self._given:
            raise RuntimeError(
                f"gradient of `{name}`: expected `optimizer.step()` between two backward passes, "
                "found a second gradient; the optimizer's `accumulate=` adds those of several, and "
                "`close()` ends a DataParallel whose model another one trains"
            )
        Library.refuse(name, tensor, gradient)
        view = self._gradients.get(index)
        if view is None:
            self._given[index] = None
            dense = gradient.contiguous().resolve_neg()
            self._ranks.push(index, (dense.data_ptr(), dense.numel() * dense.element_size()))
            if self._zero == 2:
                tensor.grad = None
            return
        if gradient.data_ptr() != view.data_ptr():
            self._fill(index, gradient)
            tensor.grad = view
        self._given[index] = view._version
        self._ranks.given(index)

    def _refuse_written_gradients(self) -> None:
        """Autograd adds to a gradient before its hook can refuse that, and others write to it
        freely; what ranks have averaged meanwhile is neither the one nor the other."""
        for index, version in self._given.items():
            if version is not None and self._gradients[index]._version != version:
                raise RuntimeError(
                    f"gradient of `{self._members[index].name}`: expected what `backward` has left "
                    "there, found it written while ranks average it; parameters are those of the "
                    "last step: go on from a checkpoint, with the optimizer's `clip_norm=` or "
                    "`accumulate=` if that was meant"
                )

    def _refuse_written_parameters(self) -> None:
        """Ranks would go on from different values, or train memory that the model has left."""
        for tensor, value in zip(self._full, self._values):
            if tensor.data_ptr() != value.data_ptr():
                raise RuntimeError(
                    f"parameter `{self._members[self._index[id(tensor)]].name}`: expected the "
                    "memory of the ranks, found it moved to other memory since; call "
                    "`follow_parameters()` on all ranks after that, or `close()` if another "
                    "DataParallel trains the model now"
                )
        for member, version in zip(self._members, self._versions):
            if member.tensor._version != version:
                raise RuntimeError(
                    f"parameter `{member.name}`: expected the values of the last step, found it "
                    "written since; call `follow_parameters()` on all ranks after that"
                )

    def _step(self) -> None:
        """The optimizer's step."""
        self._refuse_written_gradients()
        self._refuse_written_parameters()
        self._take(self._ranks.step(self._rules()))

    def _take(self, told: Dict[str, Any]) -> None:
        """Takes over what a step has done."""
        for tensor in self._tensors:
            tensor.grad = None
        self._given = {}
        report = told["report"]
        if report is None:
            return
        self._optimizer._report = Report(**report)
        self._norms = told["update_norms"]
        if not report["skipped"]:
            self._parameters_changed()

    def _parameters_changed(self) -> None:
        """Tells autograd that the ranks have written parameters."""
        increment_version(self._full)
        self._versions = [tensor._version for tensor in self._tensors]


class _Span(NamedTuple):
    start: int
    end: int
    name: str


def _trained(model: torch.nn.Module, optimizer: Fused) -> List[Member]:
    """The parameters that the optimizer trains, by the model's names and in its order."""
    groups = {id(m.tensor): m for m in members_of(optimizer.param_groups)}
    members = []
    spans = []
    for name, tensor in model.named_parameters():
        member = groups.pop(id(tensor), None)
        if member is None or not tensor.requires_grad:
            continue
        refuse_parameter(name, tensor)
        start = tensor.data_ptr()
        if tensor.numel():
            spans.append(_Span(start, start + tensor.numel() * tensor.element_size(), name))
        members.append(Member(tensor, member.group, name))
    if groups:
        name = next(iter(groups.values())).name
        raise ValueError(
            f"optimizer: expected parameters of the model, found others, such as `{name}`"
        )
    if not members:
        raise ValueError("model: expected parameters that the optimizer trains, found none")
    spans.sort()
    for before, after in zip(spans, spans[1:]):
        if after.start < before.end:
            raise RuntimeError(
                f"`{before.name}` and `{after.name}`: expected parameters that do not overlap in "
                "memory, found some that do; use `.clone()`"
            )
    return members


def _refuse_state(optimizer: Fused) -> None:
    """Raises for an optimizer that has stepped, since ranks begin without its state."""
    for own in optimizer.state.values():
        # Adagrad has its sums before the first step.
        steps = float(own.get("step", 0.0)) if optimizer._counts else float(bool(own))
        if steps or any(torch.is_tensor(value) and value.any() for value in own.values()):
            raise ValueError(
                "optimizer: expected one before its first step, found state; resume from a "
                "checkpoint"
            )
    if optimizer._micro.count:
        raise ValueError(
            "optimizer: expected one before its first step, found sums of "
            f"{optimizer._micro.count} micro-steps; make `DataParallel` before or behind them"
        )


def _check(
    optimizer: Any, zero: int, bucket_mib: Optional[float], comm_streams: int, timeout: float
) -> None:
    if not isinstance(optimizer, Fused):
        raise TypeError(
            f"optimizer: expected one of fusestep.torch, found {type(optimizer).__name__}"
        )
    if optimizer._backward is not None or optimizer._ranks is not None:
        raise ValueError(
            "optimizer: expected one of its own, found one of `fuse_backward` or `DataParallel`"
        )
    if "train_mode" in optimizer.defaults:
        raise ValueError(
            "optimizer: expected a rule without averages of its own, found ScheduleFreeAdamW"
        )
    if any(group.get("initial_accumulator_value") for group in optimizer.param_groups):
        raise ValueError("initial_accumulator_value: expected 0 with DataParallel, found another")
    _refuse_state(optimizer)
    if zero not in (0, 1, 2):
        raise ValueError(f"zero: expected 0, 1 or 2, found {zero!r}")
    positive("bucket_mib", bucket_mib)
    if not isinstance(comm_streams, int) or not 0 <= comm_streams <= 8:
        raise ValueError(f"comm_streams: expected 0 to 8, found {comm_streams!r}")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout: expected a finite number above 0, found {timeout!r}")
