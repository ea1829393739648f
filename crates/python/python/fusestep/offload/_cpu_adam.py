"""Adam and AdamW in place of DeepSpeed's ``DeepSpeedCPUAdam``."""

from __future__ import annotations

from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from fusestep._checks import is_whole
from fusestep.offload._lists import Call, Entry, run, workers
from fusestep.offload._loading import Loaded, loadable
from fusestep.offload._settings import check, settings_of

if TYPE_CHECKING:
    from fusestep.offload._model import Offload

FLOATING = (torch.float32, torch.bfloat16, torch.float16)
# Attributes that PyTorch's state of an optimizer has no place for.
_OWN = ("adam_w_mode", "fp32_optimizer_states", "keep_for_rollback", "cores")
# The lists of a parameter's state.
_RUNNING = itemgetter("exp_avg", "exp_avg_sq")
_LARGEST = itemgetter("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class _Kept(NamedTuple):
    """A sub-group as it was before its last step."""

    step: int
    # Parameter, then its state.
    tensors: Tuple[Tensor, ...]


class CPUAdam(torch.optim.Optimizer):
    """Adam and AdamW on tensors in host memory, for engines that bring them there.

    Arguments, methods and state are those of DeepSpeed's ``DeepSpeedCPUAdam``. Nothing is planned
    or bound to an address: parameters whose ``data`` and ``grad`` are others before every call cost
    nothing more. The bits are those of :class:`fusestep.torch.AdamW`, on any number of threads.

    Parameters are float32, bfloat16 or float16, and so are gradients, each as it comes. Without
    ``fp32_optimizer_states`` the state has the parameter's dtype. ``bias_correction`` and
    ``amsgrad`` act. ``adamw_mode=False`` adds weight decay to the gradient, as Adam does.

    :meth:`step_subgroup` keeps what :meth:`rollback_subgroup` gives back: parameter and moments, 12
    bytes an element in float32, from the first call for a sub-group on. They are written along with
    the step, which takes two to three times as long then. ``keep_for_rollback``
    is the number of steps that are kept for each sub-group; 0 keeps nothing.

    ``cores`` is a number of threads, or a set of CPUs that steps run on, one thread on each; without
    it ``torch.get_num_threads()``.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        *,
        keep_for_rollback: int = 1,
        cores: Any = None,
    ) -> None:
        if not isinstance(fp32_optimizer_states, bool):
            raise TypeError(
                f"fp32_optimizer_states: expected True or False, found {fp32_optimizer_states!r}"
            )
        if not is_whole(keep_for_rollback) or keep_for_rollback < 0:
            raise ValueError(
                "keep_for_rollback: expected a number of steps from 0 on, found "
                f"{keep_for_rollback!r}"
            )
        workers(cores)
        self.adam_w_mode = adamw_mode
        self.fp32_optimizer_states = fp32_optimizer_states
        self.keep_for_rollback = keep_for_rollback
        self.cores = cores
        # What steps in place of this class, with gradients of its own.
        self._offload: Optional[Offload] = None
        # The steps of each sub-group that can be taken back, the newest last.
        self._kept: Dict[int, List[_Kept]] = {}
        # Names of the parameters in errors, group by group.
        self._names: List[List[str]] = []
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "amsgrad": amsgrad,
        }
        check(defaults, adamw_mode)
        super().__init__(model_params, defaults)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group, whose settings and dtypes are looked at first."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check(group, self.adam_w_mode)
            for at, tensor in enumerate(group["params"]):
                if tensor.dtype not in FLOATING:
                    name = f"{len(self.param_groups) - 1}.{at}"
                    raise TypeError(
                        f"parameter `{name}`: expected float32, bfloat16 or float16, found "
                        f"{tensor.dtype}"
                    )
        except BaseException:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> Dict[str, Any]:
        own = {name: self.__dict__[name] for name in _OWN}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy begins with none; a state dict that is loaded comes by here, too.
        self.__dict__.setdefault("_kept", {})
        self.__dict__.setdefault("_names", [])
        self.__dict__.setdefault("_offload", None)
        for group in self.param_groups:
            group.setdefault("amsgrad", False)
            group.setdefault("bias_correction", True)

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates every parameter that has a gradient, in place.

        Raises ``RuntimeError``, ``TypeError`` or ``ValueError`` that names the tensor, what was
        expected and what was found; nothing has changed then.
        """
        loss = _loss_of(closure)
        if self._offload is not None:
            stepped = self._offload._step()
            return stepped if closure is None else loss
        calls: List[Call] = []
        states: List[Dict[str, Any]] = []
        begun: List[Tuple[Tensor, Dict[str, Any]]] = []
        for index, group in enumerate(self.param_groups):
            entries = self._entries(index, group, states, begun)
            if entries:
                calls.append((settings_of(group, self.adam_w_mode), entries))
        run(calls, workers(self.cores))
        for state in states:
            state["step"] += 1
        self.state.update(begun)
        return loss

    def _entries(
        self,
        index: int,
        group: Dict[str, Any],
        states: List[Dict[str, Any]],
        begun: List[Tuple[Tensor, Dict[str, Any]]],
    ) -> List[Entry]:
        """Entries of a group's parameters that have gradients. Their state goes to `states`, and
        what had none to `begun`, too.

        Models have hundreds of small tensors, so a pass of the loop is a tenth of a small step.
        """
        amsgrad = group["amsgrad"]
        lists = _LARGEST if amsgrad else _RUNNING
        params = group["params"]
        if len(self._names) <= index or len(self._names[index]) < len(params):
            named = enumerate(self.param_groups)
            self._names = [[f"{i}.{at}" for at in range(len(g["params"]))] for i, g in named]
        known = self.state
        entries: List[Entry] = []
        for name, param in zip(self._names[index], params):
            grad = param.grad
            if grad is None:
                continue
            state = known.get(param)
            if not state:
                state = self._first(param, amsgrad)
                begun.append((param, state))
            try:
                own = lists(state)
            except KeyError:
                own = _lists_of(name, state, amsgrad)
            states.append(state)
            entries.append((name, state["step"] + 1, param, grad, None, own, None))
        return entries

    def step_subgroup(
        self, subgroup_id: int, closure: Optional[Callable[[], Any]] = None
    ) -> Any:
        """Updates the one parameter that has a gradient, with the state of a sub-group.

        The parameter is that which the engine has put into the groups for this call, of any address
        and length; the state belongs to the number. Raises as :meth:`step`.
        """
        loss = _loss_of(closure)
        name, param, group = self._of_subgroup("step_subgroup", subgroup_id, has_gradient=True)
        amsgrad = group["amsgrad"]
        subgroups: Dict[Any, Any] = self.state
        state = subgroups.get(subgroup_id) or self._first(param, amsgrad)
        entry = _entry(name, param, param.grad, state, amsgrad)
        kept = self._kept.get(subgroup_id, [])
        room = None
        if self.keep_for_rollback:
            # The oldest step makes room for this one. Nothing is written before all is checked.
            is_full = len(kept) == self.keep_for_rollback
            room = _room(kept[0] if is_full else None, (param, *entry[5]))
            entry = (*entry[:6], room)
        run([(settings_of(group, self.adam_w_mode), [entry])], workers(self.cores))
        if room is not None:
            newest = [*kept, _Kept(state["step"], room)]
            self._kept[subgroup_id] = newest[-self.keep_for_rollback :]
        state["step"] += 1
        subgroups[subgroup_id] = state
        return loss

    @torch.no_grad()
    def rollback_subgroup(
        self, subgroup_id: int, closure: Optional[Callable[[], Any]] = None
    ) -> Any:
        """Takes the last :meth:`step_subgroup` of a sub-group back: parameter and state have the
        bits from before.

        What was kept is put into the one parameter that the groups have for this call. As many
        steps can be taken back as ``keep_for_rollback`` says; raises ``RuntimeError`` if none is
        left.
        """
        loss = _loss_of(closure)
        subgroups: Dict[Any, Any] = self.state
        if not subgroups.get(subgroup_id):
            raise RuntimeError(
                f"rollback_subgroup: expected a sub-group that was stepped, found {subgroup_id!r} "
                "without state"
            )
        kept = self._kept.get(subgroup_id)
        if not kept:
            raise RuntimeError(
                f"rollback_subgroup: expected a step of sub-group {subgroup_id} that is kept, found "
                f"none left at keep_for_rollback={self.keep_for_rollback}"
            )
        _, param, _ = self._of_subgroup("rollback_subgroup", subgroup_id, has_gradient=False)
        values, *before = kept[-1].tensors
        if (param.shape, param.dtype) != (values.shape, values.dtype):
            raise ValueError(
                f"rollback_subgroup: expected the parameter of sub-group {subgroup_id}, "
                f"{values.dtype} of shape {tuple(values.shape)}, found {param.dtype} of shape "
                f"{tuple(param.shape)}"
            )
        state = subgroups[subgroup_id]
        param.copy_(values)
        for own, value in zip(_lists_of("rollback_subgroup", state, len(before) > 2), before):
            own.copy_(value)
        state["step"] = kept.pop().step
        return loss

    def forget_rollbacks(self) -> None:
        """Gives back the memory of what :meth:`step_subgroup` has kept; no step can be taken back
        then until its sub-group is stepped again."""
        self._kept.clear()

    def state_dict(self) -> Dict[str, Any]:
        """PyTorch's state dict; the state of sub-groups is one more entry, ``subgroups``."""
        own: Any = self.state
        subgroups = {key: dict(own[key]) for key in own if not isinstance(key, Tensor)}
        if not subgroups:
            return super().state_dict()
        # PyTorch would give them the numbers of parameters.
        self.state = defaultdict(dict, {k: v for k, v in own.items() if isinstance(k, Tensor)})
        try:
            saved: Dict[str, Any] = super().state_dict()
        finally:
            self.state = own
        saved["subgroups"] = subgroups
        return saved

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads a state dict of this class, of DeepSpeed's, or of PyTorch's Adam and AdamW.

        State keeps the dtype that this optimizer has for it; PyTorch alone would cast it to the
        parameter's. Raises ``ValueError`` for state that does not fit; nothing has changed then.
        """
        loaded: List[Loaded] = []

        def look(_: Any, given: Dict[str, Any]) -> Dict[str, Any]:
            loaded.append(loadable(self, given))
            return loaded[0].plain

        handle = self.register_load_state_dict_pre_hook(look)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        self.state.update(loaded[0].state)
        self._kept = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, as PyTorch does; those of `Offload`, if it has this optimizer."""
        if self._offload is not None:
            self._offload.zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    def _begun(
        self, name: str, param: Tensor, grad: Any, group: Dict[str, Any]
    ) -> Tuple[Dict[str, Any], Entry]:
        """The state of a parameter, which is its own when the step is done, and its entry."""
        amsgrad = group["amsgrad"]
        state = self.state.get(param) or self._first(param, amsgrad)
        return state, _entry(name, param, grad, state, amsgrad)

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return torch.float32 if self.fp32_optimizer_states else param.dtype

    def _first(self, param: Tensor, amsgrad: bool) -> Dict[str, Any]:
        """The state of a parameter that has taken no step."""
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]
        dtype = self._state_dtype(param)
        state: Dict[str, Any] = {"step": 0}
        for name in names:
            state[name] = torch.zeros_like(param.detach(), dtype=dtype, device="cpu")
        return state

    def _of_subgroup(
        self, method: str, subgroup_id: int, has_gradient: bool
    ) -> Tuple[str, Tensor, Dict[str, Any]]:
        """Name and group of the one parameter that a call is for."""
        if isinstance(subgroup_id, (bool, Tensor)) or not isinstance(subgroup_id, int):
            raise TypeError(f"{method}: expected the number of a sub-group, found {subgroup_id!r}")
        found: List[Tuple[str, Tensor, Dict[str, Any]]] = []
        without: List[Tuple[str, Tensor, Dict[str, Any]]] = []
        for index, group in enumerate(self.param_groups):
            for at, param in enumerate(group["params"]):
                named = f"{index}.{at}", param, group
                (without if param.grad is None else found).append(named)
        # One that is alone need not have a gradient to be taken back.
        if not found and not has_gradient:
            found = without
        if len(found) != 1:
            names = ", ".join(f"`{name}`" for name, _, _ in found) or "none"
            raise ValueError(
                f"{method}: expected one parameter with a gradient, that of sub-group "
                f"{subgroup_id}, found {names}; give `step` parameters that have state of their own"
            )
        return found[0]


def _loss_of(closure: Optional[Callable[[], Any]]) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _lists_of(name: str, state: Dict[str, Any], amsgrad: bool) -> Tuple[Tensor, ...]:
    """The tensors of a parameter's state."""
    try:
        if amsgrad:
            return state["exp_avg"], state["exp_avg_sq"], state["max_exp_avg_sq"]
        return state["exp_avg"], state["exp_avg_sq"]
    except KeyError as missing:
        found = ", ".join(f"`{key}`" for key in state)
        raise ValueError(f"state of `{name}`: expected {missing.args[0]!r}, found {found}") from None


def _entry(
    name: str, param: Tensor, grad: Any, state: Dict[str, Any], amsgrad: bool
) -> Entry:
    return name, state["step"] + 1, param, grad, None, _lists_of(name, state, amsgrad), None


def _room(kept: Optional[_Kept], tensors: Tuple[Tensor, ...]) -> Tuple[Tensor, ...]:
    """Room for copies of tensors: that of the last step, if it fits."""
    if kept is not None and len(kept.tensors) == len(tensors):
        pairs = zip(kept.tensors, tensors)
        if all(
            (room.dtype, room.shape, room.stride()) == (own.dtype, own.shape, own.stride())
            for room, own in pairs
        ):
            return kept.tensors
    return tuple(torch.empty_like(own.detach()) for own in tensors)
