"""What a tensor has to be, and what is raised for one that is not."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple, Union

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from fusestep.torch._sharded import is_sharded

NARROW = (torch.float16, torch.bfloat16)
# What a 16-bit parameter has beside it: a copy, or the bits that it lacks.
BESIDE = ("master", "remainder")
# The types of devices that steps run on.
DEVICES = ("cpu", "cuda")
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# State in int8: elements that share a unit, and elements from which on a parameter has it.
GROUP = 32
LEAST_INT8 = 4096
# What the name of a tensor of units ends in, behind the name of the codes.
UNITS = "_units"


def is_units(name: str) -> bool:
    """Whether this is the name of the units of another tensor of state, which is in codes."""
    return name.endswith(UNITS)


def shape_of(parameter: Tensor, name: str) -> Tuple[int, ...]:
    """The shape of a tensor of state: the parameter's, or that of its units."""
    if is_units(name):
        return (-(-parameter.numel() // GROUP),)
    return tuple(parameter.shape)


class Library:
    """What the extension module asks PyTorch."""

    Tensor: Any = torch.Tensor
    # Its libraries have the C interface by which tensors are looked at.
    file: str = torch._C.__file__
    # The property of gradients, the classes that do not override it, and how many modes may.
    gradient: Any = torch.Tensor.grad
    plain: Any = [torch.Tensor, torch.nn.Parameter]
    modes: Any = staticmethod(torch._C._len_torch_function_stack)

    @staticmethod
    def probes() -> List[Tensor]:
        """A few tensors of which both ways to look at tensors have to say the same."""
        kinds = ((2, 3), torch.float32), ((1,), torch.float64)
        return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in kinds]

    @staticmethod
    def parameters() -> List[Tensor]:
        """Parameters with and without a gradient."""
        # Inference tensors have no versions to be counted.
        with torch.inference_mode(False):
            both = [torch.nn.Parameter(torch.empty(2, device="cpu")) for _ in range(2)]
            both[0].grad = torch.empty(2, device="cpu")
            return [*both, torch.empty(1, device="cpu")]

    @staticmethod
    def describe(tensor: Tensor) -> Tuple[int, str, Tuple[int, ...], Union[bool, Tuple[int, ...]]]:
        """Address, dtype, shape and strides; ``False`` for values with the sign turned."""
        if tensor.device.type != "cpu":
            raise ValueError(f"a tensor on {tensor.device}")
        return Library.described(tensor)

    @staticmethod
    def described(
        tensor: Tensor,
    ) -> Tuple[int, str, Tuple[int, ...], Union[bool, Tuple[int, ...]]]:
        """What :meth:`describe` says of a tensor on whatever device."""
        if tensor.layout != torch.strided:
            raise ValueError(f"a {tensor.layout} tensor")
        shape = tuple(tensor.shape)
        order = False if tensor.is_neg() else tuple(tensor.stride())
        return tensor.data_ptr(), str(tensor.dtype), shape, order

    @staticmethod
    def in_order_of(parameter: Tensor, tensor: Tensor) -> Tensor:
        """A copy whose elements lie in the parameter's order."""
        return in_order_of(parameter, tensor, tensor.dtype)

    @staticmethod
    def widened(parameter: Tensor, tensor: Tensor) -> Tensor:
        """A copy in float32 whose elements lie in the parameter's order."""
        return in_order_of(parameter, tensor, torch.float32)

    @staticmethod
    def reorder(parameter: Tensor, tensor: Tensor) -> None:
        """Brings state to the parameter's order, with its values."""
        tensor.data = in_order_of(parameter, tensor, tensor.dtype)

    @staticmethod
    def refuse(name: str, parameter: Tensor, gradient: Tensor) -> None:
        """Raises what PyTorch would for a gradient that no kernel takes."""
        refuse_wrapper(f"gradient of `{name}`", gradient)
        refuse_kind(f"gradient of `{name}`", gradient)
        if gradient.device != parameter.device:
            raise RuntimeError(
                f"gradient of `{name}`: expected a tensor on {parameter.device}, where the "
                f"parameter is, found one on {gradient.device}"
            )
        if gradient.dtype != parameter.dtype and not is_wide(parameter, gradient.dtype):
            also = " or torch.float32" if parameter.dtype in NARROW else ""
            raise TypeError(
                f"gradient of `{name}`: expected {parameter.dtype}{also}, found {gradient.dtype}"
            )
        if gradient.shape != parameter.shape:
            raise ValueError(
                f"gradient of `{name}`: expected shape {tuple(parameter.shape)}, "
                f"found {tuple(gradient.shape)}"
            )
        refuse_without_memory(f"gradient of `{name}`", gradient)


@torch.no_grad()
def in_order_of(parameter: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of the tensor in this dtype, whose elements lie in the parameter's order."""
    return empty_like(parameter, dtype).copy_(tensor.detach())


def empty_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the parameter's shape and order, with any values."""
    if is_sharded(parameter):
        return torch.empty_like(parameter.detach(), dtype=dtype)
    # Not on the default device, which is the user's for other tensors.
    return torch.empty_strided(
        parameter.shape, parameter.stride(), dtype=dtype, device=parameter.device
    )


def kept_beside(parameter: Tensor, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a value that is loaded, as state of this name beside the parameter."""
    if not is_lazy(parameter) and not is_units(name):
        return in_order_of(parameter, value, dtype)
    device = "cpu" if is_lazy(parameter) else parameter.device
    plain = torch.contiguous_format
    return value.detach().to(device=device, dtype=dtype, copy=True, memory_format=plain)


def order_of(tensor: Tensor) -> Optional[Tuple[int, ...]]:
    """The strides of a tensor whose last index is not the fastest; ``None`` for others."""
    return None if tensor.is_contiguous() else tuple(tensor.stride())


def _refuse_order(name: str, tensor: Tensor) -> None:
    """Raises unless each element has a place of its own and none lies idle between them."""
    extents = sorted(
        (stride, extent) for extent, stride in zip(tensor.shape, tensor.stride()) if extent != 1
    )
    dense = 1
    for stride, extent in extents:
        if stride != dense:
            shared = stride < dense
            raise ValueError(
                f"parameter `{name}`: expected elements that lie densely, in any order of the "
                f"dimensions, found strides {tuple(tensor.stride())} of shape "
                f"{tuple(tensor.shape)}, at which elements "
                f"{'share memory' if shared else 'have gaps between them'}; use "
                "`parameter.data = parameter.data.clone()`"
            )
        dense *= extent


def is_wide(parameter: Tensor, dtype: Optional[torch.dtype]) -> bool:
    """Whether a gradient of this dtype is wider than its parameter of 16 bits."""
    return parameter.dtype in NARROW and dtype == torch.float32


def has_wide_gradient(parameter: Tensor) -> bool:
    """Whether the gradients of a parameter of 16 bits are in float32: the one that it has, or those
    that autograd writes to it, by ``grad_dtype``."""
    if parameter.dtype not in NARROW:
        return False
    gradient = parameter.grad
    if gradient is not None:
        return is_wide(parameter, gradient.dtype)
    return is_wide(parameter, gradient_dtype(parameter))


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which autograd writes the gradient of a parameter."""
    # PyTorch has the attribute from 2.10 on; `None` lets autograd write any.
    found: Optional[torch.dtype] = getattr(parameter, "grad_dtype", None)
    return parameter.dtype if found is None else found


def refuse_kind(what: str, tensor: Tensor) -> None:
    """Raises unless the tensor is dense, on a device that steps run on, and of a dtype that kernels
    have."""
    if tensor.layout != torch.strided:
        raise RuntimeError(
            f"{what}: expected a dense tensor, found {tensor.layout}; "
            "fusestep does not support sparse gradients"
        )
    if tensor.device.type not in DEVICES:
        raise RuntimeError(
            f"{what}: expected a tensor on the cpu or a CUDA device, found one on {tensor.device}"
        )
    if tensor.dtype not in FLOATING:
        raise TypeError(
            f"{what}: expected float32, float64, float16 or bfloat16, found {tensor.dtype}"
        )


def refuse_wrapper(what: str, tensor: Tensor) -> None:
    """Raises for a tensor that has others in place of memory, and says what works instead."""
    kind = type(tensor)
    if kind in (Tensor, torch.nn.Parameter) or not hasattr(tensor, "__torch_dispatch__"):
        return
    bases = {base.__name__ for base in kind.__mro__}
    if "DTensor" in bases:
        raise ValueError(
            f"{what}: expected a tensor with memory of its own, found a DTensor, as of FSDP2 "
            "(`fully_shard`) and tensor parallel; an optimizer alone, without `DataParallel`, "
            "steps parameters that are DTensors with gradients that are"
        )
    if "FakeTensor" in bases:
        raise ValueError(
            f"{what}: expected a tensor with memory, found a FakeTensor, which has no values; make "
            "parameters and step outside of `FakeTensorMode`"
        )
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and has_no_storage(tensor):
        raise ValueError(
            f"{what}: expected a tensor with memory of its own, found a {kind.__name__}, which "
            "wraps others; give the optimizer the tensors in it"
        )


def has_no_storage(tensor: Tensor) -> bool:
    try:
        return tensor.numel() > 0 and tensor.data_ptr() == 0
    except RuntimeError:
        # PyTorch refuses the address of what has none.
        return True


def refuse_without_memory(what: str, tensor: Tensor) -> None:
    """Raises for a tensor whose values are nowhere."""
    refuse_wrapper(what, tensor)
    if has_no_storage(tensor):
        raise ValueError(f"{what}: expected a tensor with memory, found one without memory")


def refuse_parameter(name: str, tensor: Tensor) -> None:
    """Raises unless a step can update the tensor in place."""
    if is_lazy(tensor):
        raise ValueError(
            f"parameter `{name}`: expected one with a shape, found a lazy module's before its "
            "first forward pass; run one"
        )
    refuse_wrapper(f"parameter `{name}`", tensor)
    refuse_kind(f"parameter `{name}`", tensor)
    if tensor.numel():
        _refuse_order(name, tensor)
    if tensor.is_neg():
        raise ValueError(
            f"parameter `{name}`: expected a tensor of its own values, found a negated view; use "
            "`.resolve_neg()`"
        )
    refuse_without_memory(f"parameter `{name}`", tensor)
    beside = tensor.data_ptr() % tensor.element_size()
    if beside:
        raise ValueError(
            f"parameter `{name}`: expected an address that is a multiple of "
            f"{tensor.element_size()} bytes, found one that is {beside} beside it; use `.clone()`"
        )
