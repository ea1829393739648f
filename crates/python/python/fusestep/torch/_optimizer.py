"""The part that all optimizers share: a planned step in place of PyTorch's loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fusestep import _fusestep
from fusestep._report import Report
from fusestep.torch._micro import MicroSteps
from fusestep.torch._options import checked, scale_loaded
from fusestep.torch._planned import Planned, members_of
from fusestep.torch._state import State, Store
from fusestep.torch._tensors import NARROW, refuse_kind

if TYPE_CHECKING:
    from fusestep.torch._backward import FusedBackward
    from fusestep.torch._ranks import DataParallel


class Fused(Optimizer):
    """The step; a subclass names its rule, its state and its settings.

    The arguments below are those of every class of this module, besides the ones that PyTorch's
    class of the same name has.

    * ``clip_norm`` scales gradients down whose norm, of all together, is larger.
    * ``loss_scale``, a number or ``"dynamic"``, is taken out of the gradients, and a step with one
      that is not finite is skipped.
    * ``accumulate=k`` updates at every k-th step from the mean of the gradients of k steps.
    * ``master_weights`` keeps a float32 copy of 16-bit parameters, which is what is updated.
    * ``update_norms`` measures how far parameters move.
    * ``state_dtype=torch.bfloat16`` keeps the state of bfloat16 parameters in 16 bits.
    """

    # Roles of the kernels' lists and their names in PyTorch's state.
    _keys: Dict[str, str] = {}
    # Whether PyTorch counts the steps of each parameter.
    _counts = True

    def __init__(
        self,
        params: Any,
        *args: Any,
        clip_norm: Optional[float] = None,
        loss_scale: Union[float, str, None] = None,
        accumulate: int = 1,
        master_weights: bool = False,
        update_norms: bool = False,
        state_dtype: Optional[torch.dtype] = None,
        **settings: Any,
    ) -> None:
        self._options = checked(
            {
                "clip_norm": clip_norm,
                "loss_scale": loss_scale,
                "accumulate": accumulate,
                "master_weights": master_weights,
                "update_norms": update_norms,
                "state_dtype": state_dtype,
            }
        )
        self._forget()
        super().__init__(params, *args, **settings)
        self._store: Optional[Store] = Store(self.__dict__.pop("state"))

    if not TYPE_CHECKING:

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
        return False

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
        self._whole: Optional[Planned] = None
        self._micro = MicroSteps()
        self._report: Optional[Report] = None
        # Set by `fuse_backward`; a copy has none.
        self._backward: Optional[FusedBackward] = getattr(self, "_backward", None)
        # Set by `DataParallel`, which has the state then.
        self._ranks: Optional[DataParallel] = getattr(self, "_ranks", None)

    def _drop_plans(self) -> None:
        """Has the next step planned anew."""
        self._options = self._saved_options()
        store = self._kept_state()[1]
        if store is not None:
            store.settle()
        self._whole = None
        self._plans_made += 1

    def _check_group(self, group: Dict[str, Any]) -> None:
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                raise ValueError(
                    f"{flag}: expected False, because steps run on the CPU and in place, found True"
                )
        for tensor in group["params"]:
            if tensor.is_complex() or tensor.layout != torch.strided:
                refuse_kind("parameter", tensor)
        _fusestep.check(self._settings(group))

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a parameter group, as PyTorch does."""
        self._refuse_ranks("add_param_group", "all groups before `DataParallel` is made")
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise
        self._drop_plans()

    def __getstate__(self) -> Dict[str, Any]:
        has_state = "`save` of `DataParallel`, whose ranks have the state"
        self._refuse_ranks("deepcopy` or `pickle", has_state)
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

    def state_dict(self) -> Dict[str, Any]:
        """PyTorch's state dict; a loss scale that moves is one more entry, ``loss_scale``."""
        self._refuse_ranks("state_dict", "`save` of `DataParallel`, whose ranks have the state")
        saved: Dict[str, Any] = super().state_dict()
        scale = self._saved_options()["loss_scale"]
        if isinstance(scale, tuple):
            saved["loss_scale"] = scale
        return saved

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads a state dict of ours or of PyTorch's optimizer of this name.

        PyTorch casts state to the dtype of its parameter; state that is kept in float32 beside a
        16-bit parameter keeps the values saved. A loss scale that moves goes into an optimizer that
        has one; other optimizers refuse it, and a state dict without one leaves the scale as it is.

        Raises ``ValueError`` for state that does not fit its parameter; nothing has changed then.
        """
        self._refuse_ranks("load_state_dict", "`resume` of `DataParallel`")
        loaded: List[Dict[str, Any]] = []
        # Behind the hooks that change what is loaded, before those that change what was.
        handles = [
            self.register_load_state_dict_pre_hook(
                lambda _, given: loaded.append(self._loadable(given))
            ),
            self.register_load_state_dict_post_hook(
                lambda _: self._keep_values(loaded[0]), prepend=True
            ),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _loadable(self, state_dict: Dict[str, Any]) -> Dict[str, Any]:
        """The state dict; raises where a step could not go on with its state."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        tensors = {*self._keys.values(), "master", "trained"}
        for index, (tensor, _, name) in zip(saved, members_of(self.param_groups)):
            values = state_dict["state"].get(index, {})
            if not isinstance(values, dict):
                raise ValueError(f"state of `{name}`: expected a dict, found {_kind(values)}")
            for key, value in values.items():
                expected = None
                if key == "step" and self._counts:
                    expected = None if _is_count(value) else "a number or a tensor of one element"
                elif key in tensors and value is not None:
                    fits = isinstance(value, Tensor) and value.layout == torch.strided
                    # A lazy parameter has no shape yet.
                    given = value.shape if fits else ()
                    shape = given if is_lazy(tensor) else tensor.shape
                    if not fits or value.is_complex() or given != shape:
                        expected = f"a dense, real tensor of shape {tuple(shape)}"
                if expected is not None:
                    found = _kind(value)
                    raise ValueError(f"{key} of `{name}`: expected {expected}, found {found}")
        if "loss_scale" in state_dict:
            scale_loaded(self._options["loss_scale"], state_dict["loss_scale"])
        return state_dict

    def _keep_values(self, state_dict: Dict[str, Any]) -> None:
        """Puts the values saved, in the dtype that they are kept in, where PyTorch's cast is."""
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [tensor for group in self.param_groups for tensor in group["params"]]
        names = {*self._keys.values(), "master"}
        for index, tensor in zip(saved, own):
            values = state_dict["state"].get(index, {})
            for name in names.intersection(values):
                if values[name] is not None:
                    self.state[tensor][name] = values[name].detach().to(
                        device="cpu",
                        dtype=self._state_dtype(tensor, name),
                        copy=True,
                        memory_format=torch.contiguous_format,
                    )
            step = self.state[tensor].get("step") if values else None
            if self._counts and isinstance(step, Tensor):
                # PyTorch counts in tensors of any dtype and of shape (1,), too.
                dtype = torch.float64 if step.dtype == torch.float64 else torch.float32
                self.state[tensor]["step"] = step.reshape(()).to(dtype)
        self._forget()
        if "loss_scale" in state_dict:
            own = self._options["loss_scale"]
            self._options["loss_scale"] = scale_loaded(own, state_dict["loss_scale"])

    @torch.no_grad()
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
        if self._ranks is not None:
            self._ranks._step()
            return loss
        if self._options["accumulate"] == 1:
            self._update(None)
            return loss
        members = members_of(self.param_groups)
        if self._micro.count + 1 < self._options["accumulate"]:
            self._micro.add(members)
        else:
            self._update(self._micro.means(members))
            self._micro.clear()
        return loss

    def plan(self) -> str:
        """The plan of a step, as text: what runs in it, in how many launches, and why."""
        if self._ranks is not None:
            return self._ranks._ranks.plan()
        return self._planned().plan()

    def report(self) -> Optional[Report]:
        """What the last step did; ``None`` before the first."""
        return self._report

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

    def _refuse_step(self) -> None:
        """Raises where a step makes no sense now."""

    def _flat(self) -> List[Tensor]:
        return [tensor for group in self.param_groups for tensor in group["params"]]

    def _update(self, gradients: Optional[List[Optional[Tensor]]]) -> None:
        lists: List[List[Tensor]] = [_list_of(group["params"]) for group in self.param_groups]
        sizes = [len(tensors) for tensors in lists]
        if self._whole is not None and self._whole.sizes != sizes:
            self._drop_plans()
        # A plan that does not fit is made anew once.
        for _ in range(2):
            report = self._planned().run(lists, gradients)
            if report is not None:
                self._report = report
                if self._backward is not None:
                    self._report = self._backward._finish(report)
                return
            self._drop_plans()
        raise RuntimeError("expected tensors that stay what they are during a step")

    def _saved_options(self) -> Dict[str, Any]:
        options = dict(self._options)
        scale = None if self._whole is None else self._whole.loss_scale()
        if scale is not None and not isinstance(options["loss_scale"], float):
            options["loss_scale"] = scale
        return options

    def _planned(self) -> Planned:
        """The plan over all parameters, made if there is none."""
        if self._whole is not None and self._whole.is_orphan:
            self._drop_plans()
        if self._whole is None:
            self._whole = Planned(self, members_of(self.param_groups))
        return self._whole

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        """The rule of a group and its settings, as the extension module reads them."""
        raise NotImplementedError

    def _state_names(self, group: Dict[str, Any]) -> List[str]:
        """The tensors that a parameter of a group has beside it."""
        return list(self._keys.values())

    def _state_dtype(self, tensor: Tensor, name: str) -> torch.dtype:
        if name == "master":
            return torch.float32
        if tensor.dtype not in NARROW:
            return tensor.dtype
        if self._options["state_dtype"] == torch.bfloat16 and tensor.dtype == torch.bfloat16:
            return torch.bfloat16
        return torch.float32

    def _first_value(self, tensor: Tensor, name: str, group: Dict[str, Any]) -> Tensor:
        # Not on the default device, which is the user's for other tensors.
        return torch.zeros(
            tensor.shape, dtype=self._state_dtype(tensor, name), device=tensor.device
        )


def _list_of(tensors: Iterable[Tensor]) -> List[Tensor]:
    return tensors if isinstance(tensors, list) else list(tensors)


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float))


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"one of {value.dtype}, {value.layout}, shape {tuple(value.shape)}"
