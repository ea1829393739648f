"""PyTorch's optimizers on CPU tensors, in one pass over memory.

Change ``torch.optim.AdamW`` to ``fusestep.torch.AdamW`` and nothing else: parameter groups,
closures, hooks, schedulers, pickling and state dicts are PyTorch's own, because the classes derive
from PyTorch's. A step updates tensors in place where PyTorch keeps them, all of them in one
hand-over to the threads, without the interpreter's lock, and with the same bits on any number of
threads (``torch.set_num_threads``).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from fusestep import _fusestep

__all__ = [
    "Adagrad", "Adam", "AdamW", "Lamb", "Lars", "Lion", "RMSprop", "Report", "SGD",
    "ScheduleFreeAdamW",
]

_NARROW = (torch.float16, torch.bfloat16)
_FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_OPTIONS = ("clip_norm", "loss_scale", "accumulate", "master_weights", "update_norms", "state_dtype")


@dataclasses.dataclass(frozen=True)
class Report:
    """What the last step did."""

    launches: int
    """Launches of the plan."""
    elements: int
    """Elements updated; 0 if the step was skipped."""
    without_gradient: int
    """Parameters that had no gradient and stayed as they were."""
    copied_gradients: int
    """Gradients that had to be copied, because their elements did not lie in order."""
    grad_norm: Optional[float]
    """Norm of all gradients, the loss scale taken out; ``None`` unless the step clips or scales."""
    update_norm: Optional[float]
    """Norm of what the step changed; ``None`` without ``update_norms``."""
    non_finite: int
    """Gradient elements that are infinite or NaN; counted where the step clips or scales."""
    skipped: bool
    """Whether the step was skipped because of them: nothing was written."""


class _Described(NamedTuple):
    """A parameter as the extension module reads it."""

    name: str
    dtype: str
    shape: Tuple[int, ...]
    group: int
    trains: bool


class _Library:
    """What the extension module asks PyTorch."""

    Tensor = torch._C.TensorBase

    @staticmethod
    def describe(tensor: Tensor) -> Tuple[int, str, Tuple[int, ...], bool]:
        """Address, dtype, shape, and whether elements lie in order; for PyTorch before 2.10."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ValueError(f"a {tensor.layout} tensor on {tensor.device}")
        shape = tuple(tensor.shape)
        return tensor.data_ptr(), str(tensor.dtype), shape, tensor.is_contiguous()

    @staticmethod
    def refuse(name: str, parameter: Tensor, gradient: Tensor) -> None:
        """Raises what PyTorch would for a gradient that no kernel takes."""
        _refuse_kind(f"gradient of `{name}`", gradient)
        if gradient.dtype != parameter.dtype:
            raise TypeError(
                f"gradient of `{name}`: expected {parameter.dtype}, found {gradient.dtype}"
            )
        if gradient.shape != parameter.shape:
            raise ValueError(
                f"gradient of `{name}`: expected shape {tuple(parameter.shape)}, "
                f"found {tuple(gradient.shape)}"
            )


def _refuse_kind(what: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise RuntimeError(
            f"{what}: expected a dense tensor, found {tensor.layout}; "
            "fusestep does not support sparse gradients"
        )
    if tensor.device.type != "cpu":
        raise RuntimeError(f"{what}: expected a tensor on the cpu, found one on {tensor.device}")
    if tensor.dtype not in _FLOATING:
        raise TypeError(
            f"{what}: expected float32, float64, float16 or bfloat16, found {tensor.dtype}"
        )


def _refuse_parameter(name: str, tensor: Tensor) -> None:
    _refuse_kind(f"parameter `{name}`", tensor)
    if not tensor.is_contiguous():
        raise ValueError(
            f"parameter `{name}`: expected a contiguous tensor, found strides "
            f"{tuple(tensor.stride())} of shape {tuple(tensor.shape)}; use `.contiguous()`"
        )


class _Fused(Optimizer):
    """The step; a subclass names its rule, its state and its settings."""

    _rule = ""
    # Roles of the kernels' lists and their names in PyTorch's state.
    _keys: Dict[str, str] = {}
    _counts = True

    def __init__(self, params: Any, *args: Any, **settings: Any) -> None:
        options = {name: settings.pop(name, None) for name in _OPTIONS}
        self._options = _checked(options)
        self._forget()
        super().__init__(params, *args, **settings)
        for group in self.param_groups:
            self._check_group(group)

    def _forget(self) -> None:
        """Drops what can be made again: the plan of a step."""
        self._session: Optional[_fusestep.Session] = None
        self._flat: List[Tensor] = []
        self._group_of: List[int] = []
        self._versions: Dict[int, int] = {}
        self._sums: Dict[int, Tensor] = {}
        self._micro_steps = 0
        self._report: Optional[Report] = None

    def _check_group(self, group: Dict[str, Any]) -> None:
        for flag in ("capturable", "differentiable"):
            if group.get(flag):
                raise ValueError(
                    f"{flag}: expected False, because steps run on the CPU and in place, found True"
                )
        for tensor in group["params"]:
            if tensor.is_complex() or tensor.layout != torch.strided:
                _refuse_kind("parameter", tensor)
        self._settings(group)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a parameter group, as PyTorch does."""
        super().add_param_group(param_group)
        self._session = None

    def __getstate__(self) -> Dict[str, Any]:
        state = dict(super().__getstate__())
        state["_options"] = self._saved_options()
        return state

    def __setstate__(self, state: Dict[str, Any]) -> None:
        if "_options" not in self.__dict__ and "_options" not in state:
            state = {**state, "_options": _checked(dict.fromkeys(_OPTIONS))}
        self._forget()
        super().__setstate__(state)

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Loads a state dict of ours or of PyTorch's optimizer of this name.

        PyTorch casts state to the dtype of its parameter; state that we keep in float32 beside a
        16-bit parameter keeps the values saved.
        """
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        own = [tensor for group in self.param_groups for tensor in group["params"]]
        names = set(self._keys.values())
        for index, tensor in zip(saved, own):
            values = state_dict["state"].get(index, {})
            for name in names.intersection(values):
                if values[name] is None:
                    continue
                dtype = self._state_dtype(tensor, name)
                self.state[tensor][name] = values[name].detach().to(
                    device="cpu", dtype=dtype, copy=True, memory_format=torch.contiguous_format
                )
        self._session = None
        self._sums, self._micro_steps = {}, 0

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient, in place.

        Raises ``RuntimeError``, ``TypeError`` or ``ValueError`` that names the tensor, what was
        expected and what was found; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        accumulate = self._options["accumulate"]
        if accumulate > 1:
            gradients = self._add_gradients(accumulate)
            if gradients is not None:
                self._update(gradients)
                self._sums, self._micro_steps = {}, 0
        else:
            self._update(None)
        return loss

    def plan(self) -> str:
        """The plan of a step, as text: what runs in it, in how many launches, and why."""
        return self._planned().plan()

    def report(self) -> Optional[Report]:
        """What the last step did; ``None`` before the first."""
        return self._report

    def update_norms(self) -> Optional[Dict[str, float]]:
        """How far each parameter moved in the last step, ‖new − old‖; ``None`` unless asked for."""
        norms = self._planned().update_norms()
        return None if norms is None else dict(norms)

    def loss_scale(self) -> float:
        """The factor to multiply the next loss with before ``backward``; 1 without one."""
        scale = self._planned().loss_scale()
        return 1.0 if scale is None else scale[0]

    def _update(self, gradients: Optional[List[Optional[Tensor]]]) -> None:
        flat = [tensor for group in self.param_groups for tensor in group["params"]]
        updated = None
        for _ in range(2):
            session = self._planned()
            if self._options["master_weights"]:
                self._follow()
            rules = [self._settings(group) for group in self.param_groups]
            threads = torch.get_num_threads()
            updated = session.step(flat, rules, self, gradients, threads)
            if updated is not None:
                break
            self._options["loss_scale"] = self._saved_options()["loss_scale"]
            self._session = None
        if updated is None:
            raise RuntimeError("expected tensors that stay what they are during a step")
        report = session.report()
        self._report = None if report is None else Report(**report)
        if updated:
            touched = flat if len(updated) == len(flat) else [flat[index] for index in updated]
            increment_version(touched)
        if self._options["master_weights"]:
            self._versions = {i: flat[i]._version for i in range(len(flat))}

    def _saved_options(self) -> Dict[str, Any]:
        options = dict(self._options)
        scale = None if self._session is None else self._session.loss_scale()
        if scale is not None and not isinstance(options["loss_scale"], float):
            options["loss_scale"] = scale
        return options

    def _planned(self) -> _fusestep.Session:
        """The plan, made if there is none."""
        if self._session is not None:
            return self._session
        flat, described, group_of = [], [], []
        names = set()
        for index, group in enumerate(self.param_groups):
            given = group.get("param_names")
            for at, tensor in enumerate(group["params"]):
                name = given[at] if given else f"{index}.{at}"
                if name in names:
                    name = f"{index}.{at}.{name}"
                names.add(name)
                trains = tensor.requires_grad or tensor.grad is not None
                if trains:
                    _refuse_parameter(name, tensor)
                dtype, shape = str(tensor.dtype), tuple(tensor.shape)
                described.append(_Described(name, dtype, shape, index, trains))
                flat.append(tensor)
                group_of.append(index)
        options = dict(self._options, counts=self._counts)
        options["state_16"] = options.pop("state_dtype") == torch.bfloat16
        rules = [self._settings(group) for group in self.param_groups]
        keys = dict(self._keys, master="master")
        self._session = _fusestep.Session(flat, described, rules, options, keys, _Library)
        self._flat, self._group_of = flat, group_of
        return self._session

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        """The rule of a group and its settings, as the extension module reads them."""
        raise NotImplementedError

    def _state_names(self, group: Dict[str, Any]) -> List[str]:
        """The tensors that a parameter of a group has beside it."""
        return list(self._keys.values())

    def _state_dtype(self, tensor: Tensor, name: str) -> torch.dtype:
        if tensor.dtype not in _NARROW or name == "master":
            return torch.float32 if name == "master" else tensor.dtype
        if self._options["state_dtype"] == torch.bfloat16 and tensor.dtype == torch.bfloat16:
            return torch.bfloat16
        return torch.float32

    def _first_value(self, tensor: Tensor, name: str, group: Dict[str, Any]) -> Tensor:
        return torch.zeros(tensor.shape, dtype=self._state_dtype(tensor, name))

    def _make_state(self, index: int) -> Dict[str, Any]:
        """Fills in what is missing of a parameter's state."""
        tensor, group = self._flat[index], self.param_groups[self._group_of[index]]
        state = self.state[tensor]
        if self._counts and "step" not in state:
            wide = torch.get_default_dtype() == torch.float64
            state["step"] = torch.zeros((), dtype=torch.float64 if wide else torch.float32)
        elif self._counts and not isinstance(state["step"], Tensor):
            state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32)
        for name in self._state_names(group):
            if state.get(name) is None:
                state[name] = self._first_value(tensor, name, group)
        if self._options["master_weights"] and tensor.dtype in _NARROW:
            if state.get("master") is None:
                state["master"] = tensor.detach().to(torch.float32)
        return state

    def _follow(self) -> None:
        """Lets masters take over values that were written to their parameters between steps."""
        for index, tensor in enumerate(self._flat):
            master = self.state.get(tensor, {}).get("master")
            if master is None or self._versions.get(index) == tensor._version:
                continue
            stays = master.to(tensor.dtype) == tensor
            master.copy_(torch.where(stays, master, tensor.detach().to(torch.float32)))

    def _add_gradients(self, accumulate: int) -> Optional[List[Optional[Tensor]]]:
        """Adds a micro-step's gradients; the means once there are enough of them."""
        flat = [tensor for group in self.param_groups for tensor in group["params"]]
        for index, tensor in enumerate(flat):
            gradient = tensor.grad
            if gradient is None:
                continue
            _Library.refuse(str(index), tensor, gradient)
            wide = torch.float32 if gradient.dtype in _NARROW else gradient.dtype
            if index in self._sums:
                self._sums[index].add_(gradient)
            else:
                self._sums[index] = gradient.detach().to(wide, copy=True).contiguous()
        self._micro_steps += 1
        if self._micro_steps < accumulate:
            return None
        means: List[Optional[Tensor]] = [None] * len(flat)
        for index, total in self._sums.items():
            means[index] = total.div_(float(accumulate)).to(flat[index].dtype)
        return means


def _checked(options: Dict[str, Any]) -> Dict[str, Any]:
    norm, scale = options["clip_norm"], options["loss_scale"]
    if norm is not None:
        norm = float(norm)
        if not 0.0 < norm < float("inf"):
            raise ValueError(f"clip_norm: expected a finite value above 0, found {norm}")
    if scale is not None and scale != "dynamic" and not isinstance(scale, tuple):
        scale = float(scale)
    accumulate = 1 if options["accumulate"] is None else options["accumulate"]
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate: expected a whole number from 1 on, found {accumulate!r}")
    if options["state_dtype"] not in (None, torch.float32, torch.bfloat16):
        raise ValueError(
            f"state_dtype: expected torch.float32 or torch.bfloat16, found {options['state_dtype']}"
        )
    return dict(
        options,
        clip_norm=norm,
        loss_scale=scale,
        accumulate=accumulate,
        master_weights=bool(options["master_weights"]),
        update_norms=bool(options["update_norms"]),
    )


class _Adam(_Fused):
    _keys = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "max_moment2": "max_exp_avg_sq"}

    def _state_names(self, group: Dict[str, Any]) -> List[str]:
        names = ["exp_avg", "exp_avg_sq"]
        return names + ["max_exp_avg_sq"] if group["amsgrad"] else names

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        beta1, beta2 = group["betas"]
        return {
            "rule": "adam",
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "decoupled": bool(group["decoupled_weight_decay"]),
            "amsgrad": bool(group["amsgrad"]),
            "maximize": bool(group["maximize"]),
        }


class Adam(_Adam, torch.optim.Adam):
    """``torch.optim.Adam`` with its arguments, and those of every class here."""


class AdamW(_Adam, torch.optim.AdamW):
    """``torch.optim.AdamW`` with its arguments, and those of every class here.

    ``clip_norm`` scales gradients down whose norm, of all together, is larger. ``loss_scale``, a
    number or ``"dynamic"``, is taken out of the gradients, and steps with one that is not finite
    are skipped. ``accumulate=k`` updates at every k-th step from the mean of the gradients.
    ``master_weights`` keeps a float32 copy of 16-bit parameters, ``state_dtype=torch.bfloat16`` the
    state of bfloat16 parameters in 16 bits. ``update_norms`` measures how far parameters move.
    """


class SGD(_Fused, torch.optim.SGD):
    """``torch.optim.SGD`` with its arguments, and those of :class:`AdamW` from ``clip_norm`` on."""

    _keys = {"velocity": "momentum_buffer"}
    _counts = False

    def _state_names(self, group: Dict[str, Any]) -> List[str]:
        return ["momentum_buffer"] if group["momentum"] != 0 else []

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        return {
            "rule": "sgd",
            "lr": float(group["lr"]),
            "momentum": float(group["momentum"]),
            "dampening": float(group["dampening"]),
            "nesterov": bool(group["nesterov"]),
            "weight_decay": float(group["weight_decay"]),
            "maximize": bool(group["maximize"]),
        }


class Adagrad(_Fused, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` with its arguments, and those of :class:`AdamW` from ``clip_norm``
    on."""

    _keys = {"sum": "sum"}

    def __init__(self, params: Any, *args: Any, **settings: Any) -> None:
        super().__init__(params, *args, **settings)
        for group in self.param_groups:
            for tensor in group["params"]:
                # PyTorch makes the sums at once, in the dtype of the parameter.
                own = self.state.get(tensor)
                if own is not None and "sum" in own:
                    own["sum"] = own["sum"].to(self._state_dtype(tensor, "sum"))

    def _first_value(self, tensor: Tensor, name: str, group: Dict[str, Any]) -> Tensor:
        first = group["initial_accumulator_value"]
        return torch.full(tensor.shape, first, dtype=self._state_dtype(tensor, name))

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        return {
            "rule": "adagrad",
            "lr": float(group["lr"]),
            "lr_decay": float(group["lr_decay"]),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "maximize": bool(group["maximize"]),
        }


class RMSprop(_Fused, torch.optim.RMSprop):
    """``torch.optim.RMSprop`` with its arguments, and those of :class:`AdamW` from ``clip_norm``
    on."""

    _keys = {"moment2": "square_avg", "moment1": "grad_avg", "velocity": "momentum_buffer"}

    def _state_names(self, group: Dict[str, Any]) -> List[str]:
        names = ["square_avg"]
        names += ["momentum_buffer"] if group["momentum"] > 0 else []
        return names + ["grad_avg"] if group["centered"] else names

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        return {
            "rule": "rmsprop",
            "lr": float(group["lr"]),
            "alpha": float(group["alpha"]),
            "eps": float(group["eps"]),
            "momentum": float(group["momentum"]),
            "centered": bool(group["centered"]),
            "weight_decay": float(group["weight_decay"]),
            "maximize": bool(group["maximize"]),
        }


class _Own(_Fused):
    """A rule that PyTorch does not have."""

    _defaults: Dict[str, Any] = {}
    _flags: Tuple[str, ...] = ()

    def __init__(self, params: Any, lr: float, **settings: Any) -> None:
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        options = {name: settings.pop(name) for name in _OPTIONS if name in settings}
        super().__init__(params, {"lr": lr, **settings}, **options)

    def _settings(self, group: Dict[str, Any]) -> Dict[str, Any]:
        own = {key: value for key, value in group.items() if key in self.defaults}
        betas = own.pop("betas", None)
        settings = {
            key: bool(value) if isinstance(value, bool) else
            int(value) if key == "warmup_steps" else float(value)
            for key, value in own.items()
        }
        if betas is not None:
            settings["beta1"], settings["beta2"] = (float(beta) for beta in betas)
        return {"rule": self._rule, **settings}


class Lion(_Own):
    """Lion: the sign of a moving mean (Chen et al. 2023); and the arguments of :class:`AdamW` from
    ``clip_norm`` on."""

    _rule = "lion"
    _keys = {"moment1": "exp_avg"}
    _counts = False

    def __init__(
        self, params: Any, lr: Union[float, Tensor] = 1e-4,
        betas: Tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0,
        *, maximize: bool = False, **options: Any,
    ) -> None:
        super().__init__(
            params, lr, betas=betas, weight_decay=weight_decay, maximize=maximize, **options
        )


class Lars(_Own):
    """LARS: momentum with a rate for each parameter (You et al. 2017).

    Parameters of groups with ``weight_decay=0`` take the plain rate unless ``scale_excluded``.
    """

    _rule = "lars"
    _keys = {"velocity": "momentum_buffer"}
    _counts = False

    def __init__(
        self, params: Any, lr: Union[float, Tensor] = 0.1, momentum: float = 0.9,
        weight_decay: float = 5e-4, trust_coefficient: float = 1e-3, eps: float = 0.0,
        *, scale_excluded: bool = False, **options: Any,
    ) -> None:
        super().__init__(
            params, lr, momentum=momentum, weight_decay=weight_decay,
            trust_coefficient=trust_coefficient, eps=eps, scale_excluded=scale_excluded, **options,
        )


class Lamb(_Own):
    """LAMB: Adam with a rate for each parameter (You et al. 2020).

    Parameters of groups with ``weight_decay=0`` take the plain rate unless ``scale_excluded``.
    """

    _rule = "lamb"
    _keys = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}

    def __init__(
        self, params: Any, lr: Union[float, Tensor] = 1e-3,
        betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01,
        *, scale_excluded: bool = False, **options: Any,
    ) -> None:
        super().__init__(
            params, lr, betas=betas, eps=eps, weight_decay=weight_decay,
            scale_excluded=scale_excluded, **options,
        )


class ScheduleFreeAdamW(_Own):
    """Schedule-Free AdamW: an average of the iterates in place of a schedule (Defazio et al. 2024).

    Call :meth:`eval` before evaluating or saving the model and :meth:`train` before going on.
    """

    _rule = "schedule_free"
    _keys = {"moment2": "exp_avg_sq", "base": "z"}

    def __init__(
        self, params: Any, lr: Union[float, Tensor] = 2.5e-3,
        betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        warmup_steps: int = 0, **options: Any,
    ) -> None:
        super().__init__(
            params, lr, betas=betas, eps=eps, weight_decay=weight_decay,
            warmup_steps=warmup_steps, **options,
        )
        for group in self.param_groups:
            group["train_mode"] = True

    @torch.no_grad()
    def _interpolate(self, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == train_mode:
                continue
            beta1 = float(group["betas"][0])
            for tensor in group["params"]:
                state = self.state.get(tensor, {})
                if "z" not in state or float(state["step"]) == 0:
                    continue
                # The parameter is y; x, the average, is y·1/β₁ + z·(1 − 1/β₁).
                wide = torch.promote_types(tensor.dtype, torch.float32)
                if not train_mode:
                    state["trained"] = tensor.detach().clone()
                    average = tensor.to(wide).lerp(state["z"].to(wide), 1 - 1 / beta1)
                    tensor.copy_(average)
                else:
                    tensor.copy_(state.pop("trained"))
            group["train_mode"] = train_mode

    def eval(self) -> None:
        """Puts the averages in place of the parameters."""
        self._interpolate(False)

    def train(self) -> None:
        """Puts the parameters back, with the bits they had."""
        self._interpolate(True)

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """As :meth:`AdamW.step`; ``RuntimeError`` while the averages are in place."""
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("expected `optimizer.train()` before `step`, found `eval()`")
        return super().step(closure)
