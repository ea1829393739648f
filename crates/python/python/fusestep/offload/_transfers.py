"""Copies between host and device: on streams of their own for a GPU, at once where the device is
the CPU itself."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Transfers(Protocol):
    """What `Offload` asks of a device.

    Gradients go down to the host and parameters up to the device, each in the order of the calls.
    A mark stands for all copies of its direction until then.
    """

    def room(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Host memory of a tensor's shape and order, which the device can reach."""

    def down(self, source: Tensor, to: Tensor) -> None:
        """Begins to copy a gradient, which is as the work enqueued so far leaves it."""

    def mark_down(self) -> Any:
        """A mark behind all gradients so far."""

    def wait(self, mark: Any) -> None:
        """Blocks the calling thread until what a mark stands for is done."""

    def fence(self) -> Any:
        """A mark behind all work that the device has been given so far."""

    def up(self, source: Tensor, to: Tensor, behind: Any) -> None:
        """Begins to copy new values into a parameter, behind a fence."""

    def mark_up(self) -> Any:
        """A mark behind all parameters so far."""

    def join(self, mark: Any) -> None:
        """Has the device's work to come wait for a mark."""


class HostTransfers:
    """The CPU as the device: every copy is done when its call returns."""

    def room(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="cpu")

    def down(self, source: Tensor, to: Tensor) -> None:
        to.copy_(source)

    def mark_down(self) -> None:
        return None

    def wait(self, mark: Any) -> None:
        return None

    def fence(self) -> None:
        return None

    def up(self, source: Tensor, to: Tensor, behind: Any) -> None:
        to.copy_(source)

    def mark_up(self) -> None:
        return None

    def join(self, mark: Any) -> None:
        return None


class CudaTransfers:
    """A GPU: pinned host memory, and a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self._device = device
        self._down = cuda.Stream(device)
        self._up = cuda.Stream(device)

    def room(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(
            like.shape, like.stride(), dtype=dtype, device="cpu", pin_memory=True
        )

    def down(self, source: Tensor, to: Tensor) -> None:
        # The stream that has the gradient: inside a hook of autograd, the one that it was added
        # up on.
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            to.copy_(source, non_blocking=True)
        # The gradient is dropped now; its memory is not given to others before it is copied.
        source.record_stream(self._down)

    def mark_down(self) -> torch.cuda.Event:
        return self._marked(self._down)

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def fence(self) -> torch.cuda.Event:
        return self._marked(torch.cuda.current_stream(self._device))

    def up(self, source: Tensor, to: Tensor, behind: torch.cuda.Event) -> None:
        # Forward and backward passes that read the old values come first.
        self._up.wait_event(behind)
        with torch.cuda.stream(self._up):
            to.copy_(source, non_blocking=True)

    def mark_up(self) -> torch.cuda.Event:
        return self._marked(self._up)

    def join(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def _marked(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        cuda: Any = torch.cuda
        with cuda.device(self._device):
            event: torch.cuda.Event = cuda.Event()
            event.record(stream)
        return event


def transfers_of(device: torch.device) -> Transfers:
    """The copies of a device."""
    return CudaTransfers(device) if device.type == "cuda" else HostTransfers()
