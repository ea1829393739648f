"""Parameters that have no memory at the moment: whoever reads one is refused."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Dict, Iterable, Iterator, Optional, Sequence

import torch
from torch import Tensor

# What a tensor says of itself without its values.
_PROPERTIES = frozenset(
    "_backward_hooks _base _grad _post_accumulate_grad_hooks _version device dtype grad grad_dtype "
    "grad_fn is_cpu is_cuda is_leaf is_meta is_nested is_quantized is_sparse itemsize layout name "
    "names nbytes ndim output_nr requires_grad retains_grad shape".split()
)
_METHODS = frozenset(
    "__hash__ dim element_size is_complex is_contiguous is_floating_point is_inference is_neg "
    "is_signed nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ "
    "retain_grad size storage_offset stride untyped_storage".split()
)


class _Freed:
    """A parameter's class while its values are with the ranks alone."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = func.__self__.__name__
            allowed = name in _PROPERTIES
        else:
            allowed = name in _METHODS
        if allowed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        freed = next(_freed_in([*args, *(kwargs or {}).values()]))
        raise RuntimeError(
            f"parameter `{freed._fusestep_name}`: expected it read in the forward pass of its "
            f"module or within `with parallel.whole():`, as it has no memory elsewhere at zero=3, found "
            f"`{name}`; name the type of a module that reads parameters of others in "
            "`DataParallel(units=[...])`"
        )


def _freed_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _Freed):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _freed_in(value)


@lru_cache(maxsize=None)
def _class_of(kind: type) -> type:
    return type(f"Freed{kind.__name__}", (_Freed, kind), {})


@lru_cache(maxsize=None)
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), float("nan"), dtype=dtype, device=device)


class Memory:
    """Memory of one parameter, which comes and goes."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor, self.name = tensor, name
        self._class = type(tensor)
        # Written once: a tensor's own dictionary is there under either class.
        tensor._fusestep_name = name  # type: ignore[attr-defined]
        self._like = tensor.shape, tensor.dtype, tensor.device
        # The tensor in the memory; `None` while there is none.
        self.whole: Optional[Tensor] = None
        self.put(tensor.detach().clone(memory_format=torch.contiguous_format))

    def new(self) -> Tensor:
        """A tensor like the parameter, with any values."""
        shape, dtype, device = self._like
        return torch.empty(shape, dtype=dtype, device=device)

    def put(self, whole: Tensor) -> None:
        """Gives the parameter this memory."""
        self.tensor.__class__ = self._class
        self.tensor.data = whole
        self.whole = whole
        self.settle()

    def free(self) -> None:
        """Takes the parameter's memory. Who reads past its class finds NaN."""
        shape, dtype, device = self._like
        self.whole = None
        self.tensor.data = _nothing(dtype, device).expand(shape)
        self.tensor.__class__ = _class_of(self._class)

    def settle(self) -> None:
        """Takes the parameter's values for those of the ranks."""
        self._version = self.tensor._version

    def is_written(self) -> bool:
        """Whether others have written the parameter, or moved it."""
        return self.whole is not None and (
            self.is_moved() or self.tensor._version != self._version
        )

    def is_moved(self) -> bool:
        """Whether others have given the parameter another memory."""
        whole = self.whole
        return whole is not None and self.tensor.data_ptr() != whole.data_ptr()
