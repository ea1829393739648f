"""A model on a device whose optimizer, with all its state, is on the host."""

from __future__ import annotations

import contextlib
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from fusestep._checks import positive
from fusestep.offload._cpu_adam import CPUAdam
from fusestep.offload._lists import Call, run, square_sum, workers
from fusestep.offload._members import Bucket, Member, cut
from fusestep.offload._scale import Scale
from fusestep.offload._settings import NUMBERS, SWITCHES, Settings, settings_of
from fusestep.offload._step import Stepped, clip_factor
from fusestep.offload._taken import loadable, members_of, refuse_strangers
from fusestep.offload._transfers import transfers_of
from fusestep.torch._planned import increment_version
from fusestep.torch._taken import refuse_graph


class Offload:
    """Keeps masters and state of a model's optimizer on the host.

    Make the optimizer with the model's parameters as ever, then ``Offload(model, optimizer)``. The
    optimizer has float32 masters in host memory from then on, in the same groups, so schedulers
    work as they did. Gradients are copied to the host as backward finds them and are gone from the
    device then; whoever uses one behind it is refused. :class:`CPUAdam` steps a bucket of ``bucket_mib`` MiB as soon as it is there, while
    backward goes on; any other optimizer of PyTorch's kind steps behind backward. New parameters,
    rounded to the model's dtype, are on their way back when :meth:`step` returns, and the next
    forward pass waits for them. On a GPU memory is pinned and copies are made on streams of their
    own; a model on the CPU goes the same way without them.

    ``max_norm`` clips the norm of all gradients, and ``loss_scale``, a power of two or
    ``"dynamic"``, divides it out again: multiply the loss with :meth:`loss_scale`. Both need all
    gradients before the first parameter changes, so a step waits for backward. A step whose
    gradients are not finite is left out then.

    The bits are those of a step without it, on masters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_norm: Optional[float] = None,
        loss_scale: Any = None,
        bucket_mib: float = 16.0,
    ) -> None:
        bucket_bytes = positive("bucket_mib", bucket_mib)
        assert bucket_bytes is not None
        self._max_norm = positive("max_norm", max_norm)
        self._scale = Scale(loss_scale)
        self.optimizer = optimizer
        found = members_of(model, optimizer)
        self._transfers = transfers_of(found[0].param.device)
        self._members = [
            Member(one.name, one.param, one.group, self._transfers) for one in found
        ]
        self._buckets = cut(self._members, bucket_bytes * 2**20)
        # Whether buckets are stepped as they come.
        self._is_early = (
            isinstance(optimizer, CPUAdam) and self._max_norm is None and loss_scale is None
        )
        self._checks_finite = self._max_norm is not None or loss_scale is not None
        self._holds = False
        self._is_inside = False
        # Whether parameters are on their way that nobody has waited for.
        self._is_sent = False
        # Settings with which buckets of the step at hand were stepped, by the place of their group.
        self._used: Dict[int, Settings] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="fusestep-offload")
        for one, member in zip(found, self._members):
            one.group["params"][one.at] = member.master
            member.version = member.param._version
        self._handles = self._hook(model)

    def _hook(self, model: torch.nn.Module) -> List[Any]:
        """Has the model and the optimizer tell what they do."""
        handles: List[Any] = []
        # PyTorch never collects a tensor that its own hook refers to.
        itself = weakref.ref(self)
        for index, bucket in enumerate(self._buckets):
            for at, member in enumerate(bucket.members):

                def arrived(_: Tensor, index: int = index, at: int = at) -> None:
                    own = itself()
                    if own is not None:
                        own._arrived(own._buckets[index], at)

                param: Any = member.param
                handles.append(param.register_post_accumulate_grad_hook(arrived))
        own: Any = model
        handles.append(own.register_forward_pre_hook(lambda *_: self.wait()))
        for module in own.modules():
            # Parts may be called by themselves. A compiled model waits before all of it.
            if module is not own:
                handles.append(module.register_forward_pre_hook(self._before_part))
        handles.append(own.register_state_dict_pre_hook(lambda *_: self.wait()))
        handles.append(own.register_load_state_dict_post_hook(lambda *_: self._written()))
        if isinstance(self.optimizer, CPUAdam):
            self.optimizer._offload = self
        else:
            handles.append(self.optimizer.register_step_pre_hook(self._refuse_step))
            # An attribute of the object, as there is no hook.
            self.optimizer.__dict__["zero_grad"] = self.zero_grad
        return handles

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Ends a step: what backward has not handed over is stepped, and parameters go back.

        Returns a :class:`Stepped`, or the loss of ``closure``. With :class:`CPUAdam` the
        optimizer's own ``step`` does the same. Errors of work behind it are raised by
        :meth:`wait`, and so by the next forward pass.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if isinstance(self.optimizer, CPUAdam):
            # By way of the optimizer, whose hooks and schedulers are told.
            stepped: Stepped = self.optimizer.step()
        else:
            stepped = self._step()
        return stepped if closure is None else loss

    @torch.no_grad()
    def _step(self) -> Stepped:
        refuse_strangers(self.optimizer, self._members)
        self._refuse_changed()
        for bucket in self._buckets:
            for member in bucket.members:
                self._heed(bucket, member)
        stepped = self._conclude()
        if not stepped.skipped:
            if isinstance(self.optimizer, CPUAdam):
                for bucket in self._buckets:
                    self._hand_over(bucket, stepped.factor)
            else:
                self._step_other(stepped.factor)
            self._send()
        for bucket in self._buckets:
            bucket.begin()
        self._used = {}
        return stepped

    def _heed(self, bucket: Bucket, member: Member) -> None:
        """Takes a gradient that the program has put in itself, or that only micro-steps have."""
        grad = member.param.grad
        if member.is_here and grad is not member.taken:
            if bucket.is_handed_over:
                found = "none" if grad is None else "another"
                raise RuntimeError(
                    f"gradient of `{member.name}`: expected the one that backward has stepped with, "
                    f"found {found}; `max_norm=` has steps wait until `step`"
                )
            member.is_here = False
        if not member.is_here and grad is not None:
            self._take(bucket, member)

    def _conclude(self) -> Stepped:
        """What the gradients of a step say together."""
        if not self._checks_finite:
            return Stepped(None, 1.0, skipped=False)
        mark = self._transfers.mark_down()
        self._transfers.wait(mark)
        gradients = [member.grad if member.is_here else None for member in self._members]
        total, others = square_sum(gradients, self._at())
        scale = self._scale.value
        norm = math.nan if others else math.sqrt(total) / scale
        is_finite = math.isfinite(norm)
        self._scale.after(is_finite)
        factor = 1.0 if self._max_norm is None else clip_factor(norm, self._max_norm)
        return Stepped(norm, factor / scale, skipped=not is_finite)

    def _at(self) -> Any:
        return workers(getattr(self.optimizer, "cores", None))

    def _arrived(self, bucket: Bucket, at: int) -> None:
        """Takes a gradient that backward has finished."""
        if self._holds:
            return
        member = bucket.members[at]
        with torch.no_grad():
            self._take(bucket, member)
            bucket.missing -= 1
            if bucket.missing == 0 and self._is_early:
                self._hand_over(bucket, 1.0)

    def _take(self, bucket: Bucket, member: Member) -> None:
        """Sends a gradient down and drops it from the device."""
        grad = member.param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"gradient of `{member.name}`: expected a dense tensor, found {grad.layout}"
            )
        refuse_graph(member.name, grad)
        # The host's memory is that of the step before.
        self._settle(bucket)
        member.take_written()
        member.take(grad, self._transfers)

    def _hand_over(self, bucket: Bucket, factor: float) -> None:
        """Has the worker step what has come of a bucket, behind its copies."""
        here = [member for member in bucket.members if member.is_here]
        if bucket.is_handed_over or not here:
            return
        bucket.is_handed_over = True
        optimizer = self.optimizer
        assert isinstance(optimizer, CPUAdam)
        calls, states = self._calls(optimizer, here)
        mark, at, sent = self._transfers.mark_down(), self._at(), bucket.sent

        def work() -> None:
            self._transfers.wait(mark)
            if sent is not None:
                self._transfers.wait(sent)
            run(calls, at, factor)
            for member, state in zip(here, states):
                state["step"] += 1
                optimizer.state[member.master] = state

        bucket.work = self._worker.submit(work)

    def _calls(
        self, optimizer: CPUAdam, here: Sequence[Member]
    ) -> Tuple[List[Call], List[Dict[str, Any]]]:
        """The entries of a step by their settings, and the state of each member in its order."""
        states: List[Dict[str, Any]] = []
        calls: Dict[int, Call] = {}
        for member in here:
            place = id(member.group)
            if place not in calls:
                settings = settings_of(member.group, optimizer.adam_w_mode)
                calls[place] = (settings, [])
                self._used[place] = settings
            state, entry = optimizer._begun(member.name, member.master, member.grad, member.group)
            states.append(state)
            calls[place][1].append((*entry[:4], member.copy, *entry[5:]))
        return list(calls.values()), states

    def _step_other(self, factor: float) -> None:
        """Steps an optimizer that knows nothing of buckets."""
        self._transfers.wait(self._transfers.mark_down())
        for bucket in self._buckets:
            self._settle(bucket)
            if bucket.sent is not None:
                self._transfers.wait(bucket.sent)
        for member in self._members:
            grad = member.grad if member.is_here else None
            if grad is not None:
                # A copy, as optimizers may keep or change gradients.
                grad = grad.to(torch.float32, copy=True)
                if factor != 1.0:
                    grad.mul_(factor)
            member.master.grad = grad
        self._is_inside = True
        try:
            self.optimizer.step()
        finally:
            self._is_inside = False
            for member in self._members:
                member.master.grad = None
        for member in self._members:
            if member.copy is not None and member.is_here:
                member.copy.copy_(member.master.detach())

    def _send(self) -> None:
        """Has the worker send new parameters up, behind what the device has to do with the old."""
        fence = self._transfers.fence()
        self._is_sent = True
        for bucket in self._buckets:
            here = [member for member in bucket.members if member.is_here]
            if not here:
                continue
            before = bucket.work

            def work(
                bucket: Bucket = bucket, here: List[Member] = here, before: Any = before
            ) -> None:
                if before is not None:
                    before.result()
                for member in here:
                    source = member.master.detach() if member.copy is None else member.copy
                    # Writes to `data` are not counted; they are below.
                    self._transfers.up(source, member.param.data, fence)
                bucket.sent = self._transfers.mark_up()

            bucket.work = self._worker.submit(work)
            # As PyTorch's own steps do, so that a backward pass through an old value is refused.
            increment_version([member.param for member in here])
            for member in here:
                member.version = member.param._version

    def wait(self) -> None:
        """Waits until parameters are those of the last step, for all work that comes.

        Forward passes of the model and its ``state_dict`` do so by themselves; call it before other
        reads of parameters.
        """
        for bucket in self._buckets:
            self._settle(bucket)
            if bucket.sent is not None:
                self._transfers.join(bucket.sent)
        self._is_sent = False

    def _before_part(self, *_: Any) -> None:
        if self._is_sent and not torch.compiler.is_compiling():
            self.wait()

    def _settle(self, bucket: Bucket) -> None:
        """Waits for the host's work on a bucket; raises what it has raised."""
        if bucket.work is not None and not bucket.is_handed_over:
            bucket.work.result()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves gradients on the device, where the next backward pass adds to them.

        Around all backward passes of a step but the last.
        """
        before, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the step at hand.

        Raises ``RuntimeError`` if backward has stepped some of them already.
        """
        if any(bucket.is_handed_over for bucket in self._buckets):
            raise RuntimeError(
                "zero_grad: expected `step` first, because backward has stepped parameters, found "
                "none; `max_norm=` has steps wait until `step`"
            )
        for bucket in self._buckets:
            bucket.begin()
        for member in self._members:
            member.param.grad = None
            if not set_to_none:
                member.param.grad = torch.zeros_like(member.param)

    def loss_scale(self) -> float:
        """The factor to multiply the next loss with before ``backward``; 1 without one."""
        return self._scale.value

    def state_dict(self) -> Dict[str, Any]:
        """The optimizer's state dict, the masters of 16-bit parameters by name, the loss scale.

        The model's own state dict has its parameters.
        """
        self._refuse_pending("state_dict")
        self.wait()
        narrow = [member for member in self._members if member.copy is not None]
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": {member.name: member.master.detach() for member in narrow},
            "loss_scale": self._scale.saved(),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Goes on from a state dict, before or behind the model's.

        Raises ``ValueError`` for masters of other parameters; nothing has changed then.
        """
        self._refuse_pending("load_state_dict")
        self.wait()
        masters = loadable(state_dict, self._members)
        before = self._scale.saved()
        self._scale.load(state_dict.get("loss_scale", before))
        try:
            self.optimizer.load_state_dict(state_dict["optimizer"])
        except BaseException:
            self._scale.load(before)
            raise
        for member, master in masters:
            member.master.detach().copy_(master)
            assert member.copy is not None
            member.copy.copy_(master)
            member.param.detach().copy_(member.copy)
            member.version = member.param._version

    def remove(self) -> None:
        """Takes the hooks away and gives the model's parameters back to the optimizer, whose state
        stays on the host."""
        self.wait()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if isinstance(self.optimizer, CPUAdam):
            self.optimizer._offload = None
        else:
            self.optimizer.__dict__.pop("zero_grad", None)
        own = {id(member.master): member for member in self._members}
        for group in self.optimizer.param_groups:
            for at, tensor in enumerate(group["params"]):
                member = own.get(id(tensor))
                if member is not None:
                    group["params"][at] = member.param
                    if tensor in self.optimizer.state:
                        self.optimizer.state[member.param] = self.optimizer.state.pop(tensor)
        self._worker.shutdown()

    @torch.no_grad()
    def _written(self) -> None:
        """Has masters follow parameters that were loaded into the model."""
        self._refuse_pending("load_state_dict")
        for member in self._members:
            member.take_written()

    def _refuse_pending(self, found: str) -> None:
        if any(bucket.is_handed_over for bucket in self._buckets):
            raise RuntimeError(
                f"{found}: expected `step` first, because backward has stepped parameters, found "
                "none"
            )

    def _refuse_changed(self) -> None:
        """Raises if settings are others than those that backward has stepped with."""
        if not isinstance(self.optimizer, CPUAdam):
            return
        for index, group in enumerate(self.optimizer.param_groups):
            used = self._used.get(id(group))
            now = settings_of(group, self.optimizer.adam_w_mode)
            if used is None or used == now:
                continue
            before = dict(zip(NUMBERS + SWITCHES, used[0] + used[1]))
            found = dict(zip(NUMBERS + SWITCHES, now[0] + now[1]))
            name = next(name for name in before if before[name] != found[name])
            raise RuntimeError(
                f"{name} of group {index}: expected {before[name]}, with which backward has "
                f"stepped parameters, found {found[name]}; change settings behind `step` or before "
                "`backward`"
            )

    def _refuse_step(self, *_: Any) -> None:
        if not self._is_inside:
            raise RuntimeError(
                "expected `step` of `Offload`, which has the gradients, found `step` of its "
                "optimizer"
            )
