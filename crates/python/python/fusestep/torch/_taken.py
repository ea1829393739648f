"""What stands in ``.grad`` once ``backward`` has handed a gradient on."""

from __future__ import annotations

import gc
from typing import Any, Callable, Iterator, List, Optional, Sequence, Set

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusestep.torch._options import CLIP_NORM
from fusestep.torch._tensors import gradient_dtype

_CHECKPOINT = (
    "a weight that is used in and out of a reentrant checkpoint gets two gradients in one "
    "`backward`: `use_reentrant=False` adds them first"
)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Taken, *args: Any, **kwargs: Any) -> Any:
        raise self._refused(name)

    return refuse


class Taken(Tensor):
    """A gradient that is gone: it has a shape and a dtype, and whoever uses it is refused."""

    _fusestep_why: str

    @staticmethod
    def __new__(cls, like: Tensor, why: str) -> Taken:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Taken = make(cls, like.shape, dtype=gradient_dtype(like), device=like.device)
        made._fusestep_why = why
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # What PyTorch refuses in other words, or not at all.
    numpy: Any = _refusing("numpy")
    tolist: Any = _refusing("tolist")
    untyped_storage: Any = _refusing("untyped_storage")
    share_memory_: Any = _refusing("share_memory_")

    @property
    def data(self) -> Tensor:
        raise self._refused("data")

    # PyTorch's would put another tensor's values in without a call of an operator.
    @data.setter
    def data(self, _: Tensor) -> None:
        raise self._refused("data = ...")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Optional[Any] = None
    ) -> Any:
        taken = next(_taken_of([*args, *(kwargs or {}).values()]))
        raise taken._refused(getattr(func, "_opname", str(func)))

    def _refused(self, found: str) -> RuntimeError:
        return RuntimeError(f"{self._fusestep_why}, found `{found}` of it; {_CHECKPOINT}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Taken({tuple(self.shape)}, {self.dtype})"


def _taken_of(arguments: Sequence[Any]) -> Iterator[Taken]:
    for argument in arguments:
        if isinstance(argument, Taken):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _taken_of(argument)


# What has the memory of a tensor and counts no version of it.
_PAST_VERSIONS = frozenset(
    {"data", "untyped_storage", "storage", "_typed_storage", "share_memory_", "__dlpack__"}
)
# What PyTorch has for its own class alone, and reads.
_READS = frozenset({"numpy", "__array__", "tolist", "__format__", "__deepcopy__"})


class Lent(Tensor):
    """A gradient that ranks average where it lies. A write to it, or to a view of it, is counted by
    its version. What would get past that is refused."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Optional[Any] = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if getattr(func, "__self__", None) is torch.Tensor.data:
            name = "data"
        if name in _PAST_VERSIONS:
            raise _unnoticed(name)
        with torch._C.DisableTorchFunctionSubclass():
            if name in _READS:
                out = func(_plain(args[0]), *args[1:], **(kwargs or {}))
                if hasattr(out, "setflags"):
                    out.setflags(write=False)
                return out
            if name == "__iter__":
                return iter(_views_lent(args[0].unbind(0), {_memory_of(args[0])}))
            out = func(*args, **(kwargs or {}))
            if isinstance(out, (Tensor, list, tuple)):
                lent = [argument for argument in args if isinstance(argument, Lent)]
                return _views_lent(out, {_memory_of(tensor) for tensor in lent})
            return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Optional[Any] = None
    ) -> Any:
        name = getattr(func, "_opname", str(func))
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            raise RuntimeError(
                "gradient: expected a loss scale that ranks take out, found `GradScaler.unscale_` "
                "while ranks average it; use the optimizer's `loss_scale=\"dynamic\"`"
            )
        if getattr(func, "namespace", "") not in ("aten", "prims"):
            # Those of `torch.distributed` do not even say that they write.
            raise _unnoticed(name)
        given = kwargs or {}
        with torch._C._DisableTorchDispatch():
            out = func(*args, **given)
        written: List[Tensor] = []
        for at, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[at] if at < len(args) else given.get(argument.name)
                values = value if isinstance(value, (list, tuple)) else [value]
                written += [tensor for tensor in values if isinstance(tensor, Lent)]
        increment_version(written)
        return out


def _unnoticed(name: str) -> RuntimeError:
    return RuntimeError(
        f"gradient: expected use by PyTorch's own operators, whose writes are noticed while ranks "
        f"average it, found `{name}` of it; read it by `.clone()`, and clip by the optimizer's "
        f"`{CLIP_NORM}=`"
    )


def _plain(tensor: Any) -> Tensor:
    """A tensor of PyTorch's own class with the same memory and version."""
    with torch._C._DisableTorchDispatch():
        plain: Tensor = tensor.detach()
    return plain


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _views_lent(out: Any, memory: Set[int]) -> Any:
    """The result, in which tensors of this memory are lent, too."""
    if type(out) in (list, tuple):
        return type(out)(_views_lent(one, memory) for one in out)
    if type(out) is Tensor and _memory_of(out) in memory - {0}:
        return out.as_subclass(Lent)
    return out


def refuse_graph(name: str, gradient: Tensor) -> None:
    """Raises for a gradient that is to be differentiated itself, and would be gone then."""
    if gradient.requires_grad:
        raise RuntimeError(
            f"gradient of `{name}`: expected one without a graph, because it is handed on during "
            "`backward`, found `create_graph=True`; use `torch.autograd.grad(..., "
            "create_graph=True)` for a penalty and one `backward` for the sum"
        )


def second_pass(name: str, instead: str) -> RuntimeError:
    """What is raised for a gradient that comes to one that has been handed on."""
    return RuntimeError(
        f"gradient of `{name}`: expected `optimizer.step()` between two backward passes, found a "
        f"second gradient; {instead}; {_CHECKPOINT}"
    )


def refuse_wrapped(who: str, model: torch.nn.Module, tensors: Sequence[Tensor]) -> None:
    """Raises if PyTorch's DistributedDataParallel averages the gradients of one of these."""
    distributed = torch.distributed
    if not distributed.is_available():
        return
    wrapper = torch.nn.parallel.DistributedDataParallel
    own = {id(tensor) for tensor in tensors}

    def wraps(module: Any) -> bool:
        # Not by `isinstance`, which asks objects of any kind for their class.
        is_one = issubclass(type(module), wrapper)
        return is_one and any(id(tensor) in own for tensor in module.parameters())

    wrapped = any(wraps(module) for module in model.modules())
    # A parent of the model may be the one, which only the interpreter knows of.
    if wrapped or (distributed.is_initialized() and any(map(wraps, gc.get_objects()))):
        raise RuntimeError(
            f"{who}: expected a model whose gradients nobody else averages, found one in "
            "PyTorch's DistributedDataParallel, which does so behind the update; "
            "`fusestep.torch.DataParallel` averages over ranks in its place"
        )
