"""Sums of gradients over the micro-steps of one update."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Set

import torch
from torch import Tensor

from fusestep.torch._planned import Member
from fusestep.torch._sharded import local_of, placed_as
from fusestep.torch._tensors import NARROW, Library, has_wide_gradient, in_order_of, is_wide


class MicroSteps:
    """Gradients of micro-steps, added up since the last update.

    Sums are found by the tensor that they are of, which they keep, so groups may change between
    micro-steps. Positions stand for tensors in what is saved, where copies of them are others.
    """

    def __init__(self) -> None:
        self.sums: Dict[Tensor, Tensor] = {}
        # Parameters of 16 bits of which a gradient was in float32: their sums are not rounded.
        self._wide: Set[Tensor] = set()
        self.count = 0

    def has_wide(self, tensor: Tensor) -> bool:
        """Whether a parameter of 16 bits is updated from gradients in float32."""
        return tensor in self._wide or has_wide_gradient(tensor)

    def by_position(self, tensors: Sequence[Tensor]) -> Dict[int, Tensor]:
        """The sums as they are saved."""
        own = {tensor: index for index, tensor in reversed(list(enumerate(tensors)))}
        return {own[tensor]: total for tensor, total in self.sums.items() if tensor in own}

    def restore(self, tensors: Sequence[Tensor], sums: Dict[int, Tensor], count: int) -> None:
        """Takes over what :meth:`by_position` has given."""
        self.sums = {tensors[index]: total for index, total in sums.items()}
        self.count = count

    def clear(self) -> None:
        """Starts the next update."""
        self.sums.clear()
        self._wide.clear()
        self.count = 0

    def add(self, members: Sequence[Member]) -> None:
        """Adds the gradients of a micro-step, of which nothing is added if one does not fit."""
        for tensor, gradient in self._gradients(members, last=False).items():
            total = self.sums.get(tensor)
            if total is None or (total.is_inference() and not torch.is_inference_mode_enabled()):
                self.sums[tensor] = self._sum_with(tensor, gradient)
            else:
                total.add_(gradient)
        self.count += 1

    def whole(self, members: Sequence[Member], divides: bool) -> List[Optional[Tensor]]:
        """The gradients of all micro-steps and of one more, the last: their means, or their sums
        unless this ``divides``.

        Sums stay as they are, so that a step that is refused can be tried again.
        """
        gradients = self._gradients(members, last=True)
        whole: Dict[Tensor, Tensor] = {}
        for tensor in (member.tensor for member in members):
            if tensor not in whole and (tensor in gradients or tensor in self.sums):
                total = self._sum_with(tensor, gradients.get(tensor))
                total = total.div_(float(self.count + 1)) if divides else total
                whole[tensor] = total if self.has_wide(tensor) else total.to(tensor.dtype)
        return [whole.get(member.tensor) for member in members]

    def _sum_with(self, tensor: Tensor, gradient: Optional[Tensor]) -> Tensor:
        """A sum of its own memory."""
        total = self.sums.get(tensor)
        if gradient is None:
            assert total is not None
            return total.clone()
        if total is not None:
            return total.clone().add_(gradient)
        return in_order_of(tensor, gradient, _wide(gradient.dtype))

    def _gradients(self, members: Sequence[Member], last: bool) -> Dict[Tensor, Tensor]:
        """The gradients of a micro-step; raises unless all of them fit parameters and sums."""
        gradients: Dict[Tensor, Tensor] = {}
        for tensor, _, name in members:
            gradient, total = tensor.grad, self.sums.get(tensor)
            if gradient is not None:
                gradient = placed_as(name, tensor, gradient)
                Library.refuse(name, local_of(tensor), local_of(gradient))
                gradients[tensor] = gradient
                if is_wide(tensor, gradient.dtype):
                    self._wide.add(tensor)
            if total is not None and (last or gradient is not None):
                _refuse_sum(name, tensor, total)
        return gradients


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in NARROW else dtype


def _refuse_sum(name: str, tensor: Tensor, total: Tensor) -> None:
    """Raises for a parameter that is not what its gradients were added up for."""
    what_works = (
        "change it behind an update, or drop what was added with "
        "`optimizer.load_state_dict(optimizer.state_dict())`"
    )
    if _wide(tensor.dtype) != total.dtype:
        raise TypeError(
            f"parameter `{name}`: expected {total.dtype}, in which its gradients were added in the "
            f"micro-steps before, found {tensor.dtype}; {what_works}"
        )
    if tensor.shape != total.shape:
        raise ValueError(
            f"parameter `{name}`: expected shape {tuple(total.shape)}, that of its gradients in "
            f"the micro-steps before, found {tuple(tensor.shape)}; {what_works}"
        )
