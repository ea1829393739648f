"""CUDA devices of PyTorch, as far as steps ask for them.

Addresses, dtypes, shapes and streams are all that steps on a device need. Tests put tensors in
place of PyTorch's that have these four and lie in memory of an emulated driver.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from fusestep.torch._tensors import Library

CUDA = "cuda"


class Stream(NamedTuple):
    """A stream of PyTorch's, as the extension module reads it."""

    handle: int
    # Whether it lives as long as the process, which those of other libraries may not.
    stays: bool
    # Whether PyTorch records what is enqueued on it, as a graph.
    records: bool


def current_stream(index: int) -> Stream:
    """The stream that PyTorch works on now, on the device of this number."""
    stream = torch.cuda.current_stream(index)
    # PyTorch numbers its own streams oddly, the default one 0, and others by their address.
    number = int(stream.stream_id)
    records = is_recording()
    return Stream(int(stream.cuda_stream), number == 0 or number % 2 == 1, records)


def is_recording() -> bool:
    """Whether PyTorch records a graph of what it enqueues now."""
    return bool(torch.cuda.is_current_stream_capturing())


class Lending:
    """Bytes of a device, by the interface through which libraries lend each other memory."""

    def __init__(self, address: int, len_bytes: int, owner: Any) -> None:
        # PyTorch keeps this object as long as a tensor in the memory.
        self.owner = owner
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": (len_bytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


class CudaLibrary(Library):
    """What the extension module asks PyTorch about tensors on one CUDA device."""

    # The type of the device in PyTorch's C interface.
    kind = CUDA
    # A property of tensors, which an object of another class cannot have as its attribute.
    gradient: Any = property(lambda self: torch.Tensor.grad)

    def __init__(self, index: int) -> None:
        self.device = index

    def __str__(self) -> str:
        return f"{CUDA}:{self.device}"

    @property
    def kind_index(self) -> Optional[int]:
        """The number of the device among those of its type."""
        return self.device

    def view(self, like: Tensor, address: int, owner: Any) -> Tensor:
        """A tensor like another one, in memory of this device that ``owner`` keeps."""
        memory = Lending(address, like.numel() * like.element_size(), owner)
        whole = torch.as_tensor(memory, device=str(self))
        if whole.data_ptr() != address:
            raise RuntimeError(
                f"{self}: expected a tensor at address {address:#x}, in memory of ranks, found a "
                f"copy at {whole.data_ptr():#x}; keep the model on the cpu, or train in one process"
            )
        return whole.view(like.dtype).view(like.shape)

    def stream(self) -> Stream:
        """The stream that PyTorch works on now."""
        return current_stream(self.device)

    def probes(self) -> List[Tensor]:  # type: ignore[override]
        """A few tensors of which both ways to look at tensors have to say the same."""
        return [torch.empty_like(probe, device=str(self)) for probe in Library.probes()]

    def describe(  # type: ignore[override]
        self, tensor: Tensor
    ) -> Tuple[int, str, Tuple[int, ...], Union[bool, Tuple[int, ...]]]:
        """Address, dtype, shape and strides; ``False`` for values with the sign turned."""
        if tensor.device != torch.device(CUDA, self.device):
            raise ValueError(f"a tensor on {tensor.device}")
        return Library.described(tensor)

    describe_on_host = staticmethod(Library.describe)


def device_of(tensor: Tensor) -> Optional[int]:
    """The number of the CUDA device that a tensor lies on; ``None`` for one in host memory."""
    device = tensor.device
    return int(device.index or 0) if device.type == CUDA else None


def steps_on(what: str, index: int) -> Any:
    """The extension module that steps on CUDA devices, imported with their first tensor.

    Raises ``RuntimeError`` where it cannot be loaded.
    """
    try:
        from fusestep import _cuda
    except ImportError as error:
        raise RuntimeError(
            f"{what}: expected a tensor on the cpu, because steps on CUDA devices take the "
            f"extension module `fusestep._cuda`, which does not load ({error}), found one on "
            f"{CUDA}:{index}; use a wheel that has the module and a machine with the driver's "
            "libcuda.so.1, or keep the parameters on the cpu"
        ) from error
    return _cuda
