"""Many processes with one model: gradients are averaged over them, and all of them step alike."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Sequence
from typing import Tuple, Union

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusestep._checks import is_whole
from fusestep._report import Report
from fusestep.torch._joining import check, joined, trained, with_wide
from fusestep.torch._optimizer import Fused
from fusestep.torch._options import ACCUMULATE, OPTIONS_OF_RANKS, REDUCE_DTYPE, described
from fusestep.torch._planned import Described, members_of
from fusestep.torch._rank_memory import NCCL, memory_of
from fusestep.torch._taken import Lent, Taken, refuse_graph, refuse_wrapped, second_pass
from fusestep.torch._tensors import Library, is_wide
from fusestep.torch._unchanged import (
    AGAIN,
    INSTEAD,
    TAKEN,
    refuse_other_rules,
    refuse_others,
    refuse_written_gradients,
    refuse_written_parameters,
)
from fusestep.torch._whole import WholeParameters, checked_units

Folder = Union[str, "os.PathLike[str]"]


class _Given(NamedTuple):
    """A gradient that ranks have, as ``step`` is to find it in ``.grad``."""

    gradient: Tensor
    # Of PyTorch's own class where that counts the same, since it is quicker to ask.
    counts: Tensor
    version: int


class DataParallel(torch.nn.Module):
    """A model that is trained by many processes, each with a part of every batch.

    Start the processes with ``torchrun``; all of them are on one machine and share its memory, or
    come by ``mpirun`` with a wheel that was built with its feature ``mpi``. Parameters may lie on a
    CUDA device, another one in each process: NCCL moves gradients then. The model takes the
    parameters of rank 0 and has them in memory of ours from then on, where steps update them in
    place. ``loss.backward()`` writes gradients there too, where they are averaged over ranks,
    bucket by bucket, while it goes on; ``optimizer.step()`` updates on every rank alike and takes
    the gradients: ``.grad`` is ``None`` behind it.

    * ``bucket_mib`` is another name of ``bucket_cap_mib``.
    * ``engine`` is ``"processes"`` or ``"mpi"``, by default what the launcher's variables say, or
      ``"nccl"``, the default for parameters on CUDA devices.
    * ``timeout`` is how many seconds a rank waits for the others.
    * ``figures`` is a file that ``fusestep check`` has written, or ``"kept"`` for the one that it
      keeps for this user, if there is one. Buckets that are not given are chosen from it: those of
      rank 0 on all ranks.

    * ``units`` are types of modules that read parameters of modules within, at ``zero=3``.

    The other arguments are settings of the step, which follow. Memory, buckets and streams change
    no bit, except that shard groups add gradients in another order. Two threads reduce during
    ``backward`` where ranks leave cores free, unless another number or another way is asked for;
    with none the step reduces and updates a bucket in one pass. At ``zero=3`` parameters are whole
    while a module computes with them, and within :meth:`whole`.
    Ranks that average parameters have parameters of their own in between: :meth:`average` makes
    them equal, and :meth:`set_loss` tells the loss that an adaptive interval follows. With updates
    in backward rates are those of the first gradient, and gradients are gone behind ``backward``.
    With ``lanes`` parameters have the same bits at any number of ranks, if each gives the gradients
    of the micro-batches that :meth:`micro_batches` names.

    Settings of the optimizer mean what they mean in one process: norms and loss scales are those of
    all ranks. Buffers, such as running means, stay each rank's own.

    Raises ``ValueError`` and ``TypeError`` for what cannot be trained so, and ``RuntimeError`` if
    processes do not come, or differ in model, rule or settings, naming what differs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        *,
        engine: Optional[str] = None,
        timeout: float = 60.0,
        figures: Optional[str] = None,
        units: Sequence[type] = (),
        **settings: Any,
    ) -> None:
        super().__init__()
        check(optimizer, timeout)
        kinds = checked_units(units)
        options = dict(
            joined(optimizer, settings), engine=engine, timeout=timeout, figures=figures
        )
        self.module = model
        self._optimizer: Fused = optimizer
        self._members = trained(model, optimizer)
        options = with_wide(options, self._members)
        self._memory = memory_of(self._members, engine)
        if engine == NCCL:
            # Ranks of devices find each other by what has started them.
            options["engine"] = None
        self._tensors = [member.tensor for member in self._members]
        refuse_wrapped("DataParallel", model, self._tensors)
        own = {id(tensor) for tensor in self._tensors}
        everybody = members_of(optimizer.param_groups)
        self._everybody = [id(member.tensor) for member in everybody]
        self._frozen = [member for member in everybody if id(member.tensor) not in own]
        self._index = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        params = [
            Described(name, str(tensor.dtype), tuple(tensor.shape), group, True)
            for tensor, group, name in self._members
        ]
        threads = torch.get_num_threads()
        self._ranks = self._memory.join(params, self._rules(), options, threads)
        self._whole: Optional[WholeParameters] = None
        if self._ranks.shares_parameters:
            self._whole = WholeParameters(model, self._members, self._ranks, self._memory, kinds)
            if self._ranks.has_lanes:
                # Ranks differ in their micro-batches: they meet behind an update alone.
                self._whole.keep_all()
        # What has no elements has no memory either.
        self._full: List[Tensor] = []
        self._values: List[Tensor] = []
        self._gradients: Dict[int, Tensor] = {}
        for index, (param, gradient) in enumerate(self._ranks.places()):
            if self._tensors[index].numel() and param is not None:
                self._full.append(self._tensors[index])
                self._values.append(self._view(index, param))
            if self._tensors[index].numel() and gradient is not None:
                self._gradients[index] = self._view(index, gradient)
        # What stands in `.grad` for a view, and for a gradient that is gone.
        self._lent = {index: v.as_subclass(Lent) for index, v in self._gradients.items()}
        self._taken: Dict[int, Taken] = {}
        self._in_backward = self._ranks.is_in_backward
        # Whether gradients are gone once they are given.
        self._takes = self._in_backward or options["settings"].get("zero") in (["2"], ["3"])
        if self._takes:
            for index, member in enumerate(self._members):
                why = f"gradient of `{member.name}`: {TAKEN}"
                self._taken[index] = Taken(member.tensor, why)
        self._given: Dict[int, _Given] = {}
        # What ranks may still read until the step.
        self._lends: List[Tensor] = []
        # Rules with which the step at hand updates while gradients come.
        self._used: Optional[List[Dict[str, Any]]] = None
        self._versions: List[int] = []
        self._norms: Optional[List[Tuple[str, float]]] = None
        # Steps of the optimizer, and updates among them.
        self._steps = self._updates = 0
        self._handles: List[Any] = []
        self._nodes: List[Any] = []
        self.follow_parameters()
        for index, tensor in enumerate(self._tensors):
            hooked: Any = tensor
            self._handles.append(hooked.register_post_accumulate_grad_hook(self._accumulated))
            if index in self._gradients:
                # Of the node that adds to `.grad`: a hook of the tensor is called by
                # `torch.autograd.grad` too. A node that nobody keeps is made anew.
                node: Any = torch.autograd.graph.get_gradient_edge(tensor).node
                self._nodes.append(node)
                self._handles.append(node.register_prehook(partial(self._arriving, index)))
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

    @property
    def micro_batch(self) -> Optional[int]:
        """The number, within the update's global batch, of the micro-batch whose gradients this
        rank gives next. ``None`` without ``lanes``, and on a rank that has no micro-batch of this
        update, which calls ``optimizer.step()`` without a gradient."""
        return self._ranks.micro_batch()

    def micro_batches(self, count: Optional[int] = None) -> Iterator[Optional[int]]:
        """The values of :attr:`micro_batch` until the next update, for a loop that calls
        ``optimizer.step()`` in every turn. Ranks may differ in their number. ``count`` is one for
        :meth:`set_micro_batches`.

        Raises ``RuntimeError`` without ``lanes``, and for a turn without ``optimizer.step()``.
        """
        self._refuse_without_lanes("micro_batches")
        if count is not None:
            self.set_micro_batches(count)
        return self._until_update()

    def set_micro_batches(self, count: int) -> None:
        """Says that the next update is of so many micro-batches only, the first ones of its global
        batch, such as those left over at an epoch's end. All ranks say so, before the first
        gradient.

        Raises ``RuntimeError`` without ``lanes``, and ``ValueError`` for a number that the global
        batch has not and behind a gradient.
        """
        self._refuse_without_lanes("set_micro_batches")
        if not is_whole(count) or not 1 <= count < 2**64:
            raise ValueError(
                "micro-batches of the update: expected a whole number from 1 on, found "
                f"{count!r}"
            )
        self._ranks.set_micro_batches(count)

    def set_weight(self, weight: float) -> None:
        """Weighs this rank's micro-batch under way by the number of its samples, if micro-batches
        of an update differ in length, before ``backward``. All ranks weigh, or none; the weight of
        a rank without a micro-batch counts for nothing.

        Raises ``RuntimeError`` without ``lanes``, and ``ValueError`` for a number that is not above
        0 and behind a gradient.
        """
        self._refuse_without_lanes("set_weight")
        self._ranks.set_weight(float(weight))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def follow_parameters(self) -> None:
        """Trains on from what was written to the parameters outside of a step, or from where they
        have been moved: rank 0's values go to all, or each rank has its own if ``initial`` says so.
        All ranks call it. A model that another ``DataParallel`` is to train is left by
        :meth:`close` instead."""
        for tensor, value in zip(self._full, self._values):
            if (tensor.dtype, tensor.shape) != (value.dtype, value.shape):
                name = self._members[self._index[id(tensor)]].name
                raise ValueError(
                    f"parameter `{name}`: expected {value.dtype} of shape {tuple(value.shape)}, "
                    f"found {tensor.dtype} of {tuple(tensor.shape)}; make another DataParallel"
                )
        self._ranks.touch()
        if self._whole is not None:
            self._whole.write()
        for tensor, value in zip(self._full, self._values):
            if tensor.data_ptr() != value.data_ptr():
                value.copy_(tensor)
                tensor.data = value
        self._ranks.begin()
        self._parameters_changed()

    def whole(self) -> ContextManager[None]:
        """Whole parameters within ``with parallel.whole():``, at any stage; all ranks enter and
        leave it. At ``zero=3`` a parameter has memory here and in the forward of its module alone:
        state dicts are written within, and so are parameters, before `follow_parameters()`."""
        return nullcontext() if self._whole is None else self._whole.all()

    def flush(self) -> None:
        """Updates from fewer micro-steps than were asked for, at an epoch's end. All ranks call
        it.

        Raises ``RuntimeError`` for ranks with ``lanes``: they do not wait for what may not come.
        """
        if self._ranks.has_lanes and self.world_size > 1:
            raise RuntimeError(
                "flush: expected `set_micro_batches(n)` on all ranks before the first gradient of "
                "an update with `lanes`, since a rank that has all of its micro-batches does not "
                "wait, found `flush` behind them"
            )
        refuse_others(self)
        refuse_written_gradients(self)
        refuse_written_parameters(self)
        self._refuse_under_way("flush")
        self._take(self._ranks.flush(self._rules()))

    def set_loss(self, loss: Union[float, Tensor]) -> None:
        """Tells this rank's loss of the step under way, which an adaptive interval between averages
        follows: before ``step``, without the loss scale. A step without one is followed by an
        average."""
        self._ranks.set_loss(float(loss))

    def average(self) -> None:
        """Averages parameters over all ranks now, such as behind the last step of ranks that
        average them. All ranks call it."""
        if not self._ranks.averages:
            raise RuntimeError(
                "expected ranks that average parameters, found ones that reduce gradients, whose "
                "parameters are equal"
            )
        self._refuse_under_way("average")
        refuse_written_parameters(self)
        self._ranks.average()
        self._parameters_changed()

    def save(self, folder: Folder, steps: int, *, wait: bool = True) -> None:
        """Saves parameters, the optimizer's state and that ``steps`` steps were done.

        With ``wait=False`` it is written behind the steps that follow; what goes wrong then is the
        next call's error, and :meth:`finish_saves` waits. The checkpoint before stays until this
        one is complete. All ranks call it.
        """
        if not is_whole(steps) or steps < 0:
            raise ValueError(f"steps: expected a whole number from 0 on, found {steps!r}")
        self._refuse_under_way("save")
        refuse_written_parameters(self)
        self._ranks.save(os.fspath(folder), steps)
        if wait:
            self._ranks.finish_saves()

    def finish_saves(self) -> None:
        """Waits until the checkpoint under way is complete on all ranks."""
        self._ranks.finish_saves()

    def resume(self, folder: Folder, *, any_settings: bool = False) -> int:
        """Goes on from the folder's checkpoint, of however many ranks; returns how many steps had
        been done, 0 if there is none. All ranks call it.

        A checkpoint of other settings, such as other betas, raises ``RuntimeError``. With
        ``any_settings`` it is loaded, and the optimizer's settings count."""
        self._refuse_under_way("resume")
        steps = self._ranks.resume(os.fspath(folder), any_settings)
        if steps is None:
            return 0
        self._parameters_changed()
        return steps

    def close(self) -> None:
        """Leaves the other ranks, once a checkpoint under way is complete. Parameters stay where and
        as they are, for another ``DataParallel`` too; a later step raises ``RuntimeError``."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []
        if self._whole is not None:
            self._whole.close()
        for index, taken in self._taken.items():
            if self._tensors[index].grad is taken:
                self._tensors[index].grad = None
        self._ranks.close()
        self._given, self._lends = {}, []

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "expected a copy or pickle of the model, `.module`, found one of its DataParallel, "
            "which is one of many ranks"
        )

    def _refuse_without_lanes(self, name: str) -> None:
        if not self._ranks.has_lanes:
            raise RuntimeError(
                f"{name}: expected a DataParallel with `lanes`, found one whose ranks all make "
                f"`{ACCUMULATE}` micro-steps"
            )

    def _until_update(self) -> Iterator[Optional[int]]:
        updates = self._updates
        while self._updates == updates:
            steps = self._steps
            yield self.micro_batch
            if self._steps == steps:
                raise RuntimeError(
                    "micro_batches: expected `optimizer.step()` in every turn of the loop, found "
                    "a turn without"
                )

    def _rules(self) -> List[Dict[str, Any]]:
        return [self._optimizer._settings(group) for group in self._optimizer.param_groups]

    def _view(self, index: int, address: int) -> Tensor:
        """A tensor in the rank's memory, which it keeps."""
        return self._memory.view(self._tensors[index], address, self._ranks)

    @torch.no_grad()
    def _arriving(self, index: int, gradients: Tuple[Tensor, ...]) -> Optional[Tuple[Tensor]]:
        """Called by autograd with a gradient on its way to ``.grad``, which it writes to memory of
        its own where the gradient is a view of something, such as a sum's. It goes to the memory of
        the ranks at once instead. What does not fit goes on as it is, to :meth:`_accumulated`."""
        view, gradient = self._gradients[index], gradients[0]
        if index in self._given or self._tensors[index].grad is not None:
            return None
        if gradient is None or gradient.requires_grad:
            return None
        dense = gradient.layout == torch.strided and gradient.device == view.device
        if not dense or (gradient.dtype, gradient.shape) != (view.dtype, view.shape):
            return None
        self._fill(index, gradient)
        # Autograd takes over what nobody else refers to.
        return (view.detach(),)

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
            raise second_pass(name, INSTEAD)
        refuse_graph(name, gradient)
        Library.refuse(name, tensor, gradient)
        self._refuse_wide(name, tensor, gradient)
        view = self._gradients.get(index)
        if view is None:
            dense = self._memory.given(self._ranks, gradient)
            if self._in_backward:
                self._promise(index)
            place = dense.data_ptr(), dense.numel() * dense.element_size()
            if self._memory.copies_later and not self._takes:
                self._ranks.lend(index, place)
                self._lends.append(dense)
            else:
                self._ranks.push(index, place)
            counts = self._taken[index] if self._takes else gradient
            tensor.grad = counts if self._takes else counts.as_subclass(Lent)
            self._given[index] = _Given(tensor.grad, counts, counts._version)
            if self._whole is not None:
                self._whole.has_gradient(index)
            return
        if gradient.data_ptr() != view.data_ptr():
            self._fill(index, gradient)
        tensor.grad = self._lent[index]
        self._given[index] = _Given(self._lent[index], view, view._version)
        self._ranks.given(index)

    def _refuse_wide(self, name: str, tensor: Tensor, gradient: Tensor) -> None:
        """Raises for a gradient in float32 where the ranks would have to round it."""
        if is_wide(tensor, gradient.dtype) and not self._ranks.adds_in_f32:
            raise TypeError(
                f"gradient of `{name}`: expected {tensor.dtype}, in which these ranks add up "
                f"gradients, found {gradient.dtype}; make `DataParallel` with "
                f"{REDUCE_DTYPE}=torch.float32"
            )

    def _promise(self, index: int) -> None:
        """Before a gradient whose bucket may be updated at once: gives the rules of the moment with
        the first one, and tells autograd that the parameter is written from here on."""
        if self._used is None:
            self._used = self._rules()
            self._ranks.take(self._used)
        tensor = self._tensors[index]
        increment_version([tensor])
        self._versions[index] = tensor._version

    def _refuse_under_way(self, found: str) -> None:
        if self._given:
            raise RuntimeError(
                f"expected `optimizer.step()` behind `backward`, found `{found}`; call it behind "
                f"`step`, or {AGAIN}"
            )

    def _step(self) -> None:
        """The optimizer's step."""
        refuse_others(self)
        refuse_written_gradients(self)
        refuse_written_parameters(self)
        refuse_other_rules(self)
        if self._optimizer._times:
            self._ranks.time_steps()
        self._take(self._ranks.step(self._rules()))

    def _take(self, told: Dict[str, Any]) -> None:
        """Takes over what a step has done."""
        for tensor in self._tensors:
            tensor.grad = None
        self._given, self._used, self._lends = {}, None, []
        self._steps += 1
        if self._whole is not None:
            self._whole.end_pass()
        report = told["report"]
        if report is None:
            return
        self._updates += 1
        self._optimizer._report = Report(**report)
        self._norms = told["update_norms"]
        if told["averaged"] or not report["skipped"]:
            self._parameters_changed()

    def _parameters_changed(self) -> None:
        """Tells autograd that the ranks have written parameters."""
        increment_version([tensor for tensor in self._tensors if tensor.numel()])
        if self._whole is not None:
            self._whole.refresh()
        self._versions = [tensor._version for tensor in self._tensors]


DataParallel.__doc__ = f"{DataParallel.__doc__}\n{described(OPTIONS_OF_RANKS)}"
