"""Memory that ranks have parameters in: the CPU's, which they share, or a CUDA device each."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from fusestep import _fusestep
from fusestep.torch._device import CudaLibrary, device_of, steps_on
from fusestep.torch._planned import Member
from fusestep.torch._tensors import NARROW

NCCL = "nccl"


class OnHost:
    """Ranks that meet in memory of the CPU."""

    # Whether ranks copy gradients while the backward pass goes on.
    copies_later = False

    def join(self, *arguments: Any) -> _fusestep.Ranks:
        """One of the ranks, which waits for the others."""
        return _fusestep.Ranks(*arguments)

    def view(self, like: Tensor, address: int, owner: Any) -> Tensor:
        """A tensor in the memory of ranks, which it keeps."""
        memory = (ctypes.c_char * (like.numel() * like.element_size())).from_address(address)
        # PyTorch keeps the buffer, and the buffer what it lies in.
        setattr(memory, "owner", owner)
        return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)

    def given(self, ranks: Any, gradient: Tensor) -> Tensor:
        """A gradient as ranks take it, from whose memory they copy it."""
        return gradient.contiguous().resolve_neg()


    def write(self, ranks: Any, index: int, tensor: Tensor) -> None:
        """Gives ranks the values of a whole parameter, of which each keeps its part."""
        given = tensor.detach().contiguous()
        ranks.write(index, _place_of(given))

    def gather(self, ranks: Any, indices: List[int], tensors: List[Tensor]) -> None:
        """Fills tensors with whole parameters. All ranks ask for the same."""
        ranks.gather(indices, [_place_of(tensor) for tensor in tensors])


class OnDevices(OnHost):
    """Ranks with a CUDA device each, whose memory NCCL moves."""

    copies_later = True

    def __init__(self, index: int, name: str) -> None:
        self._library = CudaLibrary(index)
        self._module = steps_on(f"parameter `{name}`", index)

    def join(self, *arguments: Any) -> _fusestep.Ranks:
        params, rules, options, threads = arguments
        options = {**options, "nccl_library": nccl_of_wheels()}
        ranks: _fusestep.Ranks = self._module.Ranks(params, rules, options, threads, self._library)
        return ranks

    def view(self, like: Tensor, address: int, owner: Any) -> Tensor:
        return self._library.view(like, address, owner)

    def given(self, ranks: Any, gradient: Tensor) -> Tensor:
        if ranks.adds_in_f32 and gradient.dtype in NARROW:
            gradient = gradient.float()
        return super().given(ranks, gradient)


    def write(self, ranks: Any, index: int, tensor: Tensor) -> None:
        given = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        super().write(ranks, index, given.copy_(tensor.detach()))

    def gather(self, ranks: Any, indices: List[int], tensors: List[Tensor]) -> None:
        # By the host: ranks bring them there.
        brought = [torch.empty(t.shape, dtype=t.dtype, device="cpu") for t in tensors]
        super().gather(ranks, indices, brought)
        for tensor, values in zip(tensors, brought):
            tensor.copy_(values)


def _place_of(tensor: Tensor) -> Tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def memory_of(members: List[Member], engine: Optional[str]) -> OnHost:
    """The memory that parameters lie in, which has to be that of the engine.

    Raises ``ValueError`` for parameters on several devices, or on another one than the engine's.
    """
    first = members[0]
    index = device_of(first.tensor)
    for member in members:
        if device_of(member.tensor) != index:
            raise ValueError(
                f"parameter `{member.name}`: expected a tensor on {first.tensor.device}, where "
                f"`{first.name}` is, because a rank has one device, found one on "
                f"{member.tensor.device}; move the whole model to one"
            )
    if index is None:
        if engine == NCCL:
            raise ValueError(
                f'engine: expected "processes" or "mpi" for parameters on the cpu, found "{NCCL}"'
                f", whose ranks have a CUDA device each; leave it out, or move the model to one"
            )
        return OnHost()
    if engine not in (None, NCCL):
        raise ValueError(
            f'engine: expected "{NCCL}" for parameters on {first.tensor.device}, found "{engine}"'
            ", whose ranks meet in memory of the cpu; leave it out, or move the model to the cpu"
        )
    return OnDevices(index, first.name)


def nccl_of_wheels() -> Optional[str]:
    """The file of the NCCL that PyTorch's wheels for CUDA bring along; ``None`` without it, for
    which the system is asked."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for folder in (found and found.submodule_search_locations) or ():
        file = os.path.join(folder, "lib", "libnccl.so.2")
        if os.path.isfile(file):
            return file
    return None
