"""Steps that `torch.cuda.graph` records, and numbers that steps on a device read there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from fusestep.torch._device import CUDA, device_of, is_recording
from fusestep.torch._options import ACCUMULATE, CLIP_NORM
from fusestep.torch._sharded import local_of

if TYPE_CHECKING:
    from fusestep.torch._optimizer import Fused


class Asked(NamedTuple):
    """Wishes for a step on a device, as the extension module reads them."""

    # Whether a step like this one may be recorded later.
    keeps_tables: bool
    # Addresses: of the factor that gradients are to be divided by, for plans that take a norm, and
    # for others of a control block that says so, and whether the step is skipped.
    scale: Optional[int] = None
    control: Optional[int] = None


_OUTSIDE = "run it outside of `torch.cuda.graph`, and record forward and backward alone"


def refuse_recording(optimizer: Fused, index: Optional[int]) -> None:
    """Raises while PyTorch records a step that replays could not repeat with the right numbers."""
    if index is None or not is_recording():
        return
    found = None
    if any(not group.get("capturable", True) for group in optimizer.param_groups):
        found = "a group with `capturable=False`; make the optimizer with `capturable=True`"
    elif optimizer._options[ACCUMULATE] != 1:
        found = f"`{ACCUMULATE}`, whose micro-steps the host counts; {_OUTSIDE}"
    elif optimizer._backward is not None:
        found = f"`fuse_backward`, whose updates the host counts; {_OUTSIDE}"
    elif "schedule" in optimizer._options["texts"]:
        found = (
            "`schedule`, whose factor the host derives; give `lr` as a tensor on the device, into "
            "which PyTorch's schedulers write, or " + _OUTSIDE
        )
    elif optimizer._is_sharded and _takes_sums(optimizer):
        found = f"DTensors and norms of them, which processes add up in host memory; {_OUTSIDE}"
    if found is not None:
        raise RuntimeError(
            f"step: expected one whose numbers follow from what {CUDA}:{index} counts while "
            f"`torch.cuda.graph` records it, found {found}"
        )


def _takes_sums(optimizer: Fused) -> bool:
    """Whether steps take sums over whole parameters."""
    norms = optimizer._options[CLIP_NORM], optimizer._options["loss_scale"]
    return optimizer._is_layerwise or any(setting is not None for setting in norms)


def refuse_capturable(group: Dict[str, Any]) -> None:
    """Raises for a group whose steps are to be recorded, and that has parameters elsewhere."""
    if not group.get("capturable"):
        return
    for tensor in group["params"]:
        if tensor.requires_grad and device_of(local_of(tensor)) is None:
            raise ValueError(
                "expected capturable=False, or parameters on a CUDA device, whose graphs record "
                f"steps, found True and a tensor on {tensor.device}"
            )


class Rates:
    """Learning rates that are tensors on a device, where a step reads them at every replay."""

    def __init__(self) -> None:
        # By tensor and device: the tensor, its value when it was first seen, and an f64 of it.
        self._known: Dict[Tuple[int, int], Tuple[Tensor, float, Tensor]] = {}

    @torch.no_grad()
    def settings(self, optimizer: Fused, group: Dict[str, Any], index: int) -> Dict[str, Any]:
        """The settings of a group for a plan on this device, with the address of its rate there if
        that is a tensor."""
        lr = group["lr"]
        if not isinstance(lr, Tensor) or device_of(lr) is None:
            return optimizer._settings(group)
        if "schedule" in optimizer._options["texts"]:
            raise ValueError(
                "schedule: expected rates that the host has, found `lr` in a tensor on "
                f"{lr.device}; write into the tensor, as PyTorch's schedulers do, or leave one out"
            )
        known = self._known.get((id(lr), index))
        if known is None or known[0] is not lr:
            if is_recording():
                raise RuntimeError(
                    "lr: expected a tensor that a step has read before one is recorded, found a "
                    "new one; run one step outside of `torch.cuda.graph`"
                )
            is_wide = lr.dtype == torch.float64 and device_of(lr) == index
            device = f"{CUDA}:{index}"
            wide = lr if is_wide else torch.empty((), dtype=torch.float64, device=device)
            # Waits once; later steps leave it to the device.
            known = self._known[id(lr), index] = lr, float(lr), wide
        wide = known[2]
        if wide is not lr:
            # In the order of the stream, and a part of the graph that is recorded.
            wide.copy_(lr.detach().reshape(()))
        settings = optimizer._settings({**group, "lr": known[1]})
        return {**settings, "rate": wide.data_ptr()}


def rate_now(group: Dict[str, Any]) -> Optional[float]:
    """The learning rate of a group, if the device has it; waits for it."""
    lr = group.get("lr")
    return float(lr) if isinstance(lr, Tensor) and device_of(lr) is not None else None


class Scale:
    """What a `GradScaler` leaves to a step on a device: to divide by its scale, and to be skipped.

    No number of it comes to the host before the step is enqueued.
    """

    # Places in a control block: 8 words of 8 bytes, of which half the fifth says to skip.
    _FACTOR, _FOUND, _WORDS = 0, 8, 8

    def __init__(self, index: int) -> None:
        if is_recording():
            # Its memory would be the graph's, and steps outside of that write it, too.
            raise RuntimeError(
                "step: expected one with a `GradScaler` before one is recorded, found none; run one "
                "outside of `torch.cuda.graph`"
            )
        device = f"{CUDA}:{index}"
        self._number = torch.empty((), dtype=torch.float64, device=device)
        self._control = torch.zeros(self._WORDS, dtype=torch.float64, device=device)

    @torch.no_grad()
    def of(self, scale: Optional[Tensor], found: Tensor) -> Tuple[int, int]:
        """Addresses of the scale and of a control block for these tensors."""
        if scale is None:
            self._number.fill_(1.0)
        else:
            self._number.copy_(scale.detach().reshape(()))
        self._control[self._FACTOR].copy_(self._number.reciprocal())
        flags = self._control.view(torch.int32)
        flags[self._FOUND].copy_(found.detach().reshape(()) != 0)
        return self._number.data_ptr(), self._control.data_ptr()
