"""Parameters of a model whose optimizer is on the host, in buckets that travel together."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Dict, List, Optional, Sequence

import torch
from torch import Tensor

from fusestep.offload._transfers import Transfers
from fusestep.torch._taken import Taken
from fusestep.torch._tensors import NARROW


class Member:
    """A parameter on the device, and what stands for it on the host."""

    def __init__(
        self, name: str, param: Tensor, group: Dict[str, Any], transfers: Transfers
    ) -> None:
        self.name = name
        self.param = param
        self.group = group
        self.master = torch.nn.Parameter(transfers.room(param, torch.float32))
        # What goes up: of 16 bits, or the master itself.
        is_narrow = param.dtype in NARROW
        self.copy: Optional[Tensor] = transfers.room(param, param.dtype) if is_narrow else None
        self.grad: Optional[Tensor] = None
        # Whether the gradient of the step at hand has come, and what stands in its place.
        self.is_here = False
        self.taken: Optional[Taken] = None
        # The version of the parameter that the master stands for.
        self.version = -1
        self.master.detach().copy_(param.detach())

    def take_written(self) -> None:
        """Has the master follow what the program has written to the parameter by itself.

        A parameter that is its master rounded leaves the master as it is, with all its bits.
        """
        if self.param._version == self.version:
            return
        found = self.param.detach().to(device="cpu")
        own = self.master.detach()
        rounded = own if self.copy is None else own.to(self.copy.dtype)
        differs = found != rounded
        own.copy_(torch.where(differs, found.to(torch.float32), own))
        self.version = self.param._version

    def take(self, grad: Tensor, transfers: Transfers) -> None:
        """Sends a gradient down, and leaves in its place what refuses to be used."""
        if self.grad is None or self.grad.dtype != grad.dtype:
            self.grad = transfers.room(self.param, grad.dtype)
        transfers.down(grad.detach(), self.grad)
        self.is_here = True
        if self.taken is None or (self.taken.shape, self.taken.dtype) != (grad.shape, grad.dtype):
            self.taken = Taken(
                grad,
                f"gradient of `{self.name}`: expected `step` before it is used, because `Offload` "
                "has sent it to the host; clip by `max_norm=`, and put all backward passes of a "
                "step but the last into `with offload.no_sync():`",
            )
        self.param.grad = self.taken

    def forget(self) -> None:
        """Expects the gradient of another step."""
        self.is_here = False
        if self.taken is not None and self.param.grad is self.taken:
            self.param.grad = None


class Bucket:
    """Parameters whose gradients come down one after another, and which are stepped together."""

    def __init__(self, members: List[Member]) -> None:
        self.members = members
        # Gradients that have not come yet in the step at hand.
        self.missing = len(members)
        # The step under way or done, and the mark behind its copies up.
        self.work: Optional[Future[None]] = None
        self.sent: Any = None
        # Whether a step of the gradients at hand has been handed over.
        self.is_handed_over = False

    def begin(self) -> None:
        """Expects the gradients of another step."""
        self.missing = len(self.members)
        self.is_handed_over = False
        for member in self.members:
            member.forget()


def cut(members: Sequence[Member], bucket_bytes: float) -> List[Bucket]:
    """Buckets in the order in which backward passes find gradients: from the last parameter on."""
    buckets: List[Bucket] = []
    own: List[Member] = []
    held = 0.0
    for member in reversed(members):
        len_bytes = member.param.numel() * member.param.element_size()
        if own and held + len_bytes > bucket_bytes:
            buckets.append(Bucket(own))
            own, held = [], 0.0
        own.append(member)
        held += len_bytes
    if own:
        buckets.append(Bucket(own))
    return buckets
