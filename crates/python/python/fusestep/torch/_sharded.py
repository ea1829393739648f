"""DTensors: parameters of which each process has a part, as FSDP2 and tensor parallel make them."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process has a part."""
    # Not by `isinstance`: the class is in a module that takes long to import.
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter:
        return False
    return any(base.__name__ == "DTensor" for base in kind.__mro__)


def local_of(tensor: Tensor) -> Tensor:
    """The part that this process has of a DTensor; other tensors are whole."""
    if not is_sharded(tensor):
        return tensor
    own: Any = tensor
    local = own._local_tensor
    # What a collective is still to write, as of a gradient that was redistributed.
    waited: Tensor = local.wait() if type(local).__name__ == "AsyncCollectiveTensor" else local
    return waited


def refuse_partial(what: str, tensor: Tensor) -> None:
    """Raises for a DTensor whose processes have terms of a sum in place of parts."""
    own: Any = tensor
    if any(placement.is_partial() for placement in own.placements):
        raise ValueError(
            f"{what}: expected placements that shard or replicate it, found "
            f"{tuple(own.placements)}; use `redistribute` before the optimizer is made"
        )


def placed_as(name: str, parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the parameter's placements; a call of all processes where they differ."""
    if not is_sharded(parameter):
        return gradient
    own, given = _Placed(parameter), _Placed(gradient)
    if given.mesh is None or given.mesh != own.mesh:
        found = f"a {type(gradient).__name__}" if given.mesh is None else f"one on {given.mesh}"
        raise ValueError(
            f"gradient of `{name}`: expected a DTensor on the parameter's {own.mesh}, found {found}"
        )
    if given.placements != own.placements:
        moved: Any = gradient
        placed: Tensor = moved.redistribute(own.mesh, own.placements)
        return placed
    return gradient


class _Placed:
    """Where the parts of a DTensor are; nowhere for another tensor."""

    def __init__(self, tensor: Any) -> None:
        sharded = is_sharded(tensor)
        self.mesh = tensor.device_mesh if sharded else None
        self.placements = tuple(tensor.placements) if sharded else ()


class Shares:
    """Sums over whole parameters, from those of the parts that processes have.

    Sums of parts are gathered over the groups of the mesh that shard a parameter, and added in the
    order of ranks in float64, so that all processes have the same bits. What is replicated is
    counted once. The calls are the same on all processes, whichever parts they have.

    Sums are in host memory, of parts on a device too. A group that gathers from there is given them
    as they are; one that does not, as those of NCCL, has them on ``device``.
    """

    def __init__(self, tensors: Sequence[Tensor], device: Optional[str] = None) -> None:
        self._device = device
        # Rows of parameters by mesh and by the dimensions of the mesh that shard them.
        self._rows: Dict[Tuple[Any, Tuple[int, ...]], List[int]] = {}
        for row, tensor in enumerate(tensors):
            if not is_sharded(tensor):
                continue
            placed = _Placed(tensor)
            dims = tuple(
                dim
                for dim, placement in enumerate(placed.placements)
                if not placement.is_replicate()
            )
            mesh: Any = placed.mesh
            if dims and mesh.get_coordinate() is not None:
                self._rows.setdefault((mesh, dims), []).append(row)

    def __call__(self, sums: bytearray, width: int) -> None:
        """Puts sums over whole parameters in place of those over parts: ``width`` float64 each."""
        values = torch.frombuffer(sums, dtype=torch.float64).view(-1, width)
        for (mesh, dims), rows in self._rows.items():
            own = values[rows]
            for dim in reversed(dims):
                own = _sum_over(own, mesh.get_group(dim), self._device or mesh.device_type)
            values[rows] = own


def _sum_over(own: Tensor, group: Any, device: str) -> Tensor:
    """The sum over a group's processes, in the order of their ranks; both in host memory."""
    distributed = torch.distributed
    sent = own.contiguous()
    if not _gathers_from_host(group):
        sent = sent.to(device)
    parts = [torch.empty_like(sent) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, sent, group=group)
    total = parts[0].cpu()
    for part in parts[1:]:
        total = total + part.cpu()
    return total


def _gathers_from_host(group: Any) -> bool:
    """Whether a group has a backend for tensors in host memory."""
    # As in "cpu:gloo,cuda:nccl".
    backends = torch.distributed.get_backend_config(group).split(",")
    return any(pair.split(":")[0] == "cpu" for pair in backends)


def local_state(state: Dict[str, Any]) -> Dict[str, Any]:
    """The state of a parameter, with this process's parts of its tensors."""
    return {
        key: local_of(value) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }


def local_gradients(
    members: Sequence[Any], given: Optional[List[Optional[Tensor]]]
) -> List[Optional[Tensor]]:
    """This process's parts of gradients: those given, or the parameters' own."""
    gradients: List[Optional[Tensor]] = []
    for index, (tensor, _, name) in enumerate(members):
        gradient = tensor.grad if given is None else given[index]
        if gradient is not None:
            gradient = local_of(placed_as(name, tensor, gradient))
        gradients.append(gradient)
    return gradients
