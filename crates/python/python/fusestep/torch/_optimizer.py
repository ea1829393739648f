"""The part that all optimizers share: a planned step in place of PyTorch's loop."""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    List,
    Literal,
    Optional,
    Tuple,
    Union,
)

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fusestep import _fusestep
from fusestep._plans import Plans
from fusestep._report import Report
from fusestep.torch._device import CUDA, device_of, steps_on
from fusestep.torch._graphs import rate_now, refuse_capturable, refuse_recording
from fusestep.torch._loading import indexes, loadable
from fusestep.torch._micro import MicroSteps
from fusestep.torch._mixed import Mixed, planned_of
from fusestep.torch._options import (
    ACCUMULATE,
    CLIP_NORM,
    OPTIONS,
    checked,
    described,
    refuse_bools,
    refuse_on_device,
    scale_loaded,
    taken,
)
from fusestep.torch._planned import Enqueued, Planned, members_of
from fusestep.torch._precision import expanded, is_silent, refuse_half, tell_memory
from fusestep.torch._retyped import as_float32
from fusestep.torch._sharded import is_sharded, local_of, refuse_partial
from fusestep.torch._state import State, Store
from fusestep.torch._tensors import (
    BESIDE,
    DEVICES,
    LEAST_INT8,
    NARROW,
    UNITS,
    empty_like,
    is_units,
    kept_beside,
    refuse_kind,
    refuse_wrapper,
    shape_of,
)
from fusestep.torch._watched import unless_watched

if TYPE_CHECKING:
    from fusestep.torch._backward import FusedBackward
    from fusestep.torch._ranks import DataParallel


class Fused(Optimizer):
    """The step; a subclass names its rule, its state and its settings.

    The arguments below are those of every class of this module, besides the ones that PyTorch's
    class of the same name has: settings of the step, by their names in every face. ``None`` is the
    default. ``master_weights=True`` is ``"f32"``, and ``state_dtype`` takes dtypes of PyTorch;
    masters are of 16-bit parameters, state in 16 bits and rounding at random of bfloat16 ones.
    ``schedule`` multiplies the rates that groups have, those of PyTorch's schedulers too.
    """

    # Roles of the kernels' lists and their names in PyTorch's state.
    _keys: Dict[str, str] = {}
    # Settings that PyTorch's class fills in where a group that is loaded has none.
    _fills_in: FrozenSet[str] = frozenset()
    # Whether PyTorch counts the steps of each parameter.
    _counts = True
    # Whether parts of steps are measured.
    _times = False
    # Whether parameters are DTensors.
    _is_sharded = False
    # Whether the rule takes norms of parameters.
    _is_layerwise = False

    def __init__(
        self,
        params: Any,
        *args: Any,
        **settings: Any,
    ) -> None:
        silent = is_silent(settings)
        choice = expanded(settings)
        self._options = checked(taken(type(self).__name__, settings, OPTIONS))
        self._options.update(precision=choice, is_silent=silent)
        self._forget()
        super().__init__(params, *args, **settings)
        self._store: Optional[Store] = Store(self.__dict__.pop("state"))

    if not TYPE_CHECKING:
        # PyTorch asks for it when it makes an optimizer of a class for the first time.
        profile_hook_step = staticmethod(unless_watched)

        def __getattr__(self, name: str) -> Any:
            # The state is found here until somebody has asked for it.
            store = self.__dict__.get("_store")
            if name != "state" or store is None:
                kind = type(self).__name__
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            self.state = store.show()
            return self.state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # `GradScaler` asks before a step. It is to take its scale out itself, as for PyTorch's
        # optimizers that loop.
        if self._backward is not None:
            raise RuntimeError(
                "fuse_backward: expected steps without `GradScaler`, found one by it; `backward` "
                "has updated parameters with the scale still in the gradients"
            )
        if self._ranks is not None:
            raise RuntimeError(
                "DataParallel: expected steps without `GradScaler`, which takes the scale out of "
                "gradients that ranks average, found one by it; use the optimizer's "
                "`loss_scale=\"dynamic\"`"
            )
        # On devices the step takes the scale and what is not finite from there, and the host waits
        # for neither.
        devices = [device_of(local_of(tensor)) for tensor in self._flat() if tensor.requires_grad]
        own = self._options
        return (
            None not in devices
            and bool(devices)
            # Plans of several devices decide on the host.
            and (len(set(devices)) == 1 or own[CLIP_NORM] is None)
            and own["loss_scale"] is None
            and own[ACCUMULATE] == 1
            and not self._is_sharded
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _: bool) -> None:
        """PyTorch's classes set it."""

    def _kept_state(self) -> Tuple[State, Optional[Store]]:
        """The state without a look of anybody's, and its store while it is private."""
        if "state" in self.__dict__ or self._store is None:
            return self.state, None
        return self._store.state, self._store if self._store.private else None

    def _forget(self) -> None:
        """Drops what belongs to one run: plan, report, sums of micro-steps."""
        self._plans_made: int = getattr(self, "_plans_made", 0) + 1
        # Plans of steps that were recorded: graphs of PyTorch's go on from their memory.
        self._recorded: List[Union[Planned, Mixed]] = getattr(self, "_recorded", [])
        self._keep_recorded(getattr(self, "_whole", None))
        self._whole: Union[Planned, Mixed, None] = None
        # Those that are not in use.
        self._plans = Plans()
        self._micro = MicroSteps()
        # What the last step did, as long as nobody has asked for more.
        self._report: Union[Report, Dict[str, Any], Enqueued, None] = None
        # Set by `fuse_backward`; a copy has none.
        self._backward: Optional[FusedBackward] = getattr(self, "_backward", None)
        # Set by `DataParallel`, which has the state then.
        self._ranks: Optional[DataParallel] = getattr(self, "_ranks", None)

    def _keep_recorded(self, whole: Union[Planned, Mixed, None]) -> None:
        """Keeps a plan whose steps were recorded for as long as the optimizer."""
        if whole is not None and whole.is_recorded:
            self._recorded.append(whole)

    def _put_plan_away(self) -> None:
        """Has the next step look for a plan; the one in use is kept for parameters like these."""
        whole = self._whole
        self._drop_plan()
        # A loss scale that moves is in the plan, and goes on in another.
        if whole is not None and self._options["loss_scale_at"] is None:
            whole.give_back(self._plans)

    def _drop_plan(self) -> None:
        """Has the next step look for a plan other than the one in use."""
        if not isinstance(self._options["loss_scale"], (float, type(None))):
            self._options = self._saved_options()
        store = self._kept_state()[1]
        if store is not None:
            store.settle()
        self._keep_recorded(self._whole)
        self._whole = None
        self._plans_made += 1

    def _check_group(self, group: Dict[str, Any]) -> None:
        if group.get("differentiable"):
            raise ValueError(
                "differentiable: expected False, because steps run in place, found True"
            )
        refuse_capturable(group)
        for tensor in group["params"]:
            if tensor.is_complex() or tensor.layout != torch.strided:
                refuse_kind("parameter", tensor)
            if is_sharded(tensor):
                self._take_sharded(tensor)
            local = local_of(tensor)
            if tensor.requires_grad:
                refuse_wrapper("parameter", local)
                self._check_precision(tensor, group)
                self._check_device(local)
        refuse_bools(group)
        _fusestep.check(self._settings(group))

    def _check_device(self, tensor: Tensor) -> None:
        """Raises for a parameter where no step can run; loads what steps there take."""
        if tensor.device.type not in DEVICES:
            refuse_kind("parameter", tensor)
        index = device_of(tensor)
        if index is not None:
            steps_on("parameter", index)
            refuse_on_device(self._options, f"{CUDA}:{index}")

    def _check_precision(self, tensor: Tensor, group: Dict[str, Any]) -> None:
        """Raises for a precision that this parameter cannot have; tells of more memory."""
        if self._is_coded(tensor) and not tensor.is_contiguous():
            raise ValueError(
                "state_dtype: expected f32 or bf16 for parameters whose elements lie in another "
                f"order than that of their indexes, found int8 and strides {tensor.stride()}; "
                "units are those of 32 elements in a row"
            )
        if tensor.dtype in NARROW:
            refuse_half(self._options.get("precision"), tensor)
            if self._options.get("is_silent"):
                tell_memory(type(self).__name__, len(self._state_names(group)))

    def _take_sharded(self, tensor: Tensor) -> None:
        """Has steps look for this process's parts; raises for what they cannot do with these."""
        refuse_partial("parameter", tensor)
        if self._options["update_norms"]:
            raise ValueError(
                "update_norms: expected none with DTensors, of whose changes each process knows "
                "those of its part, found it; leave it out"
            )
        if self._options["state_dtype"] == torch.uint8:
            raise ValueError(
                "state_dtype: expected f32 or bf16 with DTensors, whose parts may end within a "
                "group of 32 elements, found int8"
            )
        self._is_sharded = True

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a parameter group, as PyTorch does."""
        self._refuse_ranks("add_param_group", "all groups before `DataParallel` is made")
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise
        self._put_plan_away()

    def __getstate__(self) -> Dict[str, Any]:
        has_state = "`save` of `DataParallel`, whose ranks have the state"
        self._refuse_ranks("deepcopy` or `pickle", has_state)
        self._refuse_pending("deepcopy` or `pickle")
        state = dict(super().__getstate__())
        state["_options"] = self._saved_options()
        # By position, so that parameters of a copy find theirs.
        state["_sums"] = self._micro.by_position(self._flat())
        state["_micro_steps"] = self._micro.count
        return state

    def __setstate__(self, state: Dict[str, Any]) -> None:
        if "_options" in self.__dict__:
            self._options = self._saved_options()
        elif "_options" not in state:
            state = {**state, "_options": checked({})}
        self._forget()
        state = dict(state)
        sums, micro_steps = state.pop("_sums", {}), state.pop("_micro_steps", 0)
        super().__setstate__(state)
        self._micro.restore(self._flat(), sums, micro_steps)
        self._store = None
        self._is_sharded = any(is_sharded(tensor) for tensor in self._flat())

    def state_dict(
        self, *, state_dtype: Union[torch.dtype, Literal["f32"], None] = None
    ) -> Dict[str, Any]:
        """PyTorch's state dict; a loss scale that moves is one more entry, ``loss_scale``.

        State is as it is kept, or with ``state_dtype=torch.float32`` in float32, as PyTorch's
        optimizer of this name has it: codes of int8 as what they read as, without units.
        """
        self._refuse_ranks("state_dict", "`save` of `DataParallel`, whose ranks have the state")
        self._refuse_pending("state_dict")
        # It waits for the last step's outcome, which counts may follow.
        scale = self._saved_options()["loss_scale_at"]
        saved: Dict[str, Any] = super().state_dict()
        if scale is not None:
            saved["loss_scale"] = scale
        return saved if state_dtype is None else as_float32(self, saved, state_dtype)

    def load_state_dict(
        self, state_dict: Dict[str, Any], *, any_state_dtype: bool = False
    ) -> None:
        """Loads a state dict of ours or of PyTorch's optimizer of this name.

        PyTorch casts state to the dtype of its parameter; state that is kept in float32 beside a
        16-bit parameter keeps the values saved. A loss scale that moves goes into an optimizer that
        has one; other optimizers refuse it, and a state dict without one leaves the scale as it is.

        With ``any_state_dtype=True`` state in float32 goes into an optimizer that keeps int8,
        rounded to the nearest code, and state in int8 into one that keeps another type.

        Raises ``ValueError`` for state or settings of another rule, for some of a rule's state
        without the rest, and for state that does not fit its parameter; nothing has changed then.
        """
        self._refuse_ranks("load_state_dict", "`resume` of `DataParallel`")
        self._refuse_pending("load_state_dict")
        loaded: List[Dict[str, Any]] = []

        def look(_: Any, given: Dict[str, Any]) -> Dict[str, Any]:
            loaded.append(loadable(self, given, any_state_dtype=any_state_dtype))
            return loaded[0]

        # Behind the hooks that change what is loaded, before those that change what was.
        handles = [
            self.register_load_state_dict_pre_hook(look),
            self.register_load_state_dict_post_hook(
                lambda _: self._keep_values(loaded[0]), prepend=True
            ),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _converted(self, state_dict: Dict[str, Any]) -> Dict[str, Any]:
        """A state dict of another package's class for this rule, as one of ours."""
        return state_dict

    def _keep_values(self, state_dict: Dict[str, Any]) -> None:
        """Puts the values saved, in the dtype that they are kept in, where PyTorch's cast is."""
        saved = indexes(state_dict)
        own = self._flat()
        names = {*self._all_keys().values()}
        for index, tensor in zip(saved, own):
            values = state_dict["state"].get(index, {})
            for name in names.intersection(values):
                if values[name] is not None:
                    dtype = self._state_dtype(tensor, name)
                    self.state[tensor][name] = kept_beside(tensor, name, values[name], dtype)
            step = self.state[tensor].get("step") if values else None
            if self._counts and isinstance(step, Tensor):
                # PyTorch counts in tensors of any dtype and of shape (1,), too.
                dtype = torch.float64 if step.dtype == torch.float64 else torch.float32
                # PyTorch shares them with the state dict, and so with the optimizer it is of.
                # Those of its fused steps lie on the device.
                own_step = step.reshape(()).to(device="cpu", dtype=dtype, copy=True)
                self.state[tensor]["step"] = own_step
        self._forget()
        if "loss_scale" in state_dict:
            own = self._options["loss_scale"]
            self._options["loss_scale_at"] = scale_loaded(own, state_dict["loss_scale"])

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Updates every parameter that has a gradient, in place.

        Raises ``RuntimeError``, ``TypeError`` or ``ValueError`` that names the tensor, what was
        expected and what was found; nothing has changed then.
        """
        self._refuse_step()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        of_one = self._ranks is None and self._backward is None
        if of_one and self._options[ACCUMULATE] == 1:
            self._report = self._update(None)
        else:
            self._step_of_many()
        return loss

    @torch.no_grad()
    def _step_of_many(self) -> None:
        """A step of many ranks, of many micro-steps, or of what `fuse_backward` has left."""
        if self._ranks is not None:
            self._ranks._step()
            return
        if self._backward is not None:
            self._report = self._update_rest(self._backward)
            return
        members = members_of(self.param_groups)
        for member in members[:1]:
            refuse_recording(self, device_of(local_of(member.tensor)))
        if self._micro.count + 1 < self._options[ACCUMULATE]:
            self._micro.add(members)
        else:
            whole = self._micro.whole(members, divides=not self._options["sums"])
            self._report = self._update(whole)
            self._micro.clear()

    def plan(self) -> str:
        """The plan of a step, as text: what runs in it, in how many launches, and why."""
        if self._ranks is not None:
            return self._ranks._ranks.plan()
        return self._planned().plan()

    def report(self) -> Optional[Report]:
        """What the last step did; ``None`` before the first. Of steps that were recorded, what the
        last replay did."""
        if isinstance(self._whole, Planned) and self._whole.is_recorded:
            self._report = self._whole.told()
        if isinstance(self._report, Enqueued):
            self._report = self._report.told()
        if isinstance(self._report, dict):
            rate = rate_now(self.param_groups[0])
            self._report = Report(**{**self._report, **({} if rate is None else {"lr": rate})})
        return self._report

    def time_steps(self) -> None:
        """Measures the parts of every step from here on, for ``report().seconds``."""
        self._times = True

    def update_norms(self) -> Optional[Dict[str, float]]:
        """How far each parameter moved in the last step, ‖new − old‖; ``None`` unless asked for."""
        if self._ranks is not None:
            norms = self._ranks._norms
        else:
            norms = self._planned().update_norms()
        return None if norms is None else dict(norms)

    def loss_scale(self) -> float:
        """The factor to multiply the next loss with before ``backward``; 1 without one."""
        if self._ranks is not None:
            return self._ranks._ranks.loss_scale()
        scale = self._planned().loss_scale()
        return 1.0 if scale is None else scale[0]

    def _refuse_ranks(self, found: str, expected: str) -> None:
        if getattr(self, "_ranks", None) is not None:
            raise RuntimeError(f"expected {expected}, found `{found}` of its optimizer")

    def _refuse_pending(self, found: str) -> None:
        """Raises while `fuse_backward` has updated some parameters and `step` not the others."""
        backward = getattr(self, "_backward", None)
        if backward is not None and backward._updated:
            raise RuntimeError(
                f"expected `optimizer.step()` behind `backward`, in which `fuse_backward` has "
                f"updated parameters, found `{found}` of the optimizer; call it behind `step`"
            )

    def _refuse_step(self) -> None:
        """Raises where a step makes no sense now."""

    def _flat(self) -> List[Tensor]:
        return [tensor for group in self.param_groups for tensor in group["params"]]

    def _update(
        self, gradients: Optional[List[Optional[Tensor]]]
    ) -> Union[Dict[str, Any], Enqueued]:
        """Updates from these gradients or the parameters' own; returns what a `Report` has, or who
        will have it."""
        lists: List[List[Tensor]] = [_list_of(group["params"]) for group in self.param_groups]
        if self._is_sharded:
            lists = [[local_of(tensor) for tensor in tensors] for tensors in lists]
        if self._whole is not None and not self._whole.fits(lists):
            self._put_plan_away()
        # The plan in use, then the one kept for these parameters, then a new one.
        for put_away in (self._put_plan_away, self._drop_plan, self._drop_plan):
            report = self._planned().run(lists, gradients)
            if report is not None:
                return report
            put_away()
        raise RuntimeError("expected tensors that stay what they are during a step")

    def _update_rest(self, backward: FusedBackward) -> Report:
        """Ends a step of which `fuse_backward` has updated parameters before."""
        backward._begin()
        try:
            report = self._update(None)
        except BaseException:
            backward._restore()
            raise
        assert isinstance(report, dict), "no norm is taken, so no step is skipped"
        return backward._finish(Report(**report))

    def _saved_options(self) -> Dict[str, Any]:
        options = dict(self._options)
        scale = None if self._whole is None else self._whole.loss_scale()
        if scale is not None and not isinstance(options["loss_scale"], float):
            options["loss_scale_at"] = scale
        return options

    def _planned(self) -> Union[Planned, Mixed]:
        """The plan over all parameters, made if there is none; one for each device of several."""
        if self._whole is not None and self._whole.is_orphan:
            self._put_plan_away()
        if self._whole is None:
            self._whole = planned_of(self, members_of(self.param_groups))
        return self._whole

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        """The rule of a group and its settings, as the extension module reads them."""
        raise NotImplementedError

    def _state_names(self, group: Dict[str, Any]) -> List[str]:
        """The tensors that a parameter of a group has beside it."""
        return list(self._keys.values())

    def _all_keys(self) -> Dict[str, str]:
        """Roles of all lists that kernels may have, and their names in the state."""
        units = {role + UNITS: name + UNITS for role, name in self._keys.items()}
        return {**self._keys, **units, **{name: name for name in BESIDE}}

    def _own_names(self, tensor: Tensor, group: Dict[str, Any]) -> List[str]:
        """The tensors that this parameter of a group has beside it."""
        names = self._state_names(group)
        return names + [name + UNITS for name in names] if self._is_coded(tensor) else names

    def _is_coded(self, tensor: Tensor) -> bool:
        """Whether the state of a parameter is in int8: codes, and a unit for each 32 of them."""
        is_asked = self._options["state_dtype"] == torch.uint8
        if not is_asked or is_lazy(tensor) or tensor.numel() < LEAST_INT8:
            return False
        return not any(part in self._name_of(tensor) for part in self._options["keep_f32"])

    def _name_of(self, tensor: Tensor) -> str:
        """The name of a parameter, where names are asked about."""
        names = (member.name for member in members_of(self.param_groups) if member.tensor is tensor)
        return next(names, "")

    def _state_dtype(self, tensor: Tensor, name: str) -> torch.dtype:
        if name == "master" or is_units(name):
            return torch.float32
        if name == "remainder":
            is_byte = self._options.get("remainder8") and self._is_coded(tensor)
            return torch.int8 if is_byte else torch.int16
        if self._is_coded(tensor):
            return torch.uint8
        if tensor.dtype not in NARROW:
            return tensor.dtype
        if self._options["state_dtype"] == torch.bfloat16 and tensor.dtype == torch.bfloat16:
            return torch.bfloat16
        return torch.float32

    def _beside(self, tensor: Tensor) -> Optional[str]:
        """The name of the copy or the bits that a 16-bit parameter has beside it, if any."""
        if self._options["master_weights"] and tensor.dtype in NARROW:
            return "master"
        has_remainder = self._options.get("remainder") and tensor.dtype == torch.bfloat16
        return "remainder" if has_remainder else None

    def _first_count(self, group: Dict[str, Any]) -> float:
        """How many steps a parameter without state has taken."""
        return 0.0

    def _first_value(self, tensor: Tensor, name: str, group: Dict[str, Any]) -> Tensor:
        if is_units(name):
            return torch.zeros(shape_of(tensor, name), dtype=torch.float32, device=tensor.device)
        return empty_like(tensor, self._state_dtype(tensor, name)).zero_()


Fused.__doc__ = f"{Fused.__doc__}\n{described(OPTIONS)}"


def _list_of(tensors: Iterable[Tensor]) -> List[Tensor]:
    return tensors if isinstance(tensors, list) else list(tensors)
