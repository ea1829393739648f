"""What a tensor has to be, and what is raised for one that is not."""

from __future__ import annotations

from typing import Any, List, Tuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

NARROW = (torch.float16, torch.bfloat16)
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


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
    def describe(tensor: Tensor) -> Tuple[int, str, Tuple[int, ...], bool]:
        """Address, dtype, shape, and whether elements lie in order."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ValueError(f"a {tensor.layout} tensor on {tensor.device}")
        shape = tuple(tensor.shape)
        in_order = tensor.is_contiguous() and not tensor.is_neg()
        return tensor.data_ptr(), str(tensor.dtype), shape, in_order

    @staticmethod
    def refuse(name: str, parameter: Tensor, gradient: Tensor) -> None:
        """Raises what PyTorch would for a gradient that no kernel takes."""
        refuse_wrapper(f"gradient of `{name}`", gradient)
        refuse_kind(f"gradient of `{name}`", gradient)
        if gradient.dtype != parameter.dtype:
            raise TypeError(
                f"gradient of `{name}`: expected {parameter.dtype}, found {gradient.dtype}"
            )
        if gradient.shape != parameter.shape:
            raise ValueError(
                f"gradient of `{name}`: expected shape {tuple(parameter.shape)}, "
                f"found {tuple(gradient.shape)}"
            )
        refuse_without_memory(f"gradient of `{name}`", gradient)


def refuse_kind(what: str, tensor: Tensor) -> None:
    """Raises unless the tensor is dense, on the CPU, and of a dtype that kernels have."""
    if tensor.layout != torch.strided:
        raise RuntimeError(
            f"{what}: expected a dense tensor, found {tensor.layout}; "
            "fusestep does not support sparse gradients"
        )
    if tensor.device.type != "cpu":
        raise RuntimeError(f"{what}: expected a tensor on the cpu, found one on {tensor.device}")
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
            "(`fully_shard`) and tensor parallel; the optimizer steps local parts: make it of "
            "`parameter.to_local().detach()`, and before each step set their `.grad` to "
            "`parameter.grad.to_local()`. Norms are those of the parts then; a model that fits one "
            "process trains by `fusestep.torch.DataParallel`"
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
    if not tensor.is_contiguous():
        raise ValueError(
            f"parameter `{name}`: expected a contiguous tensor, found strides "
            f"{tuple(tensor.stride())} of shape {tuple(tensor.shape)}; use `.contiguous()`"
        )
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
