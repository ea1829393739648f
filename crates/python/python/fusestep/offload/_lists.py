"""What the extension module asks of tensors in lists, and the threads of a call over them."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from fusestep import _fusestep
from fusestep._checks import is_whole
from fusestep.offload._settings import Settings
from fusestep.torch._planned import increment_version
from fusestep.torch._tensors import Library, refuse_without_memory, refuse_wrapper

# Name, number of the step, parameter, gradient, copy, state, and room for what was before.
Entry = Tuple[
    str,
    int,
    Tensor,
    Tensor,
    Optional[Tensor],
    Tuple[Tensor, ...],
    Optional[Tuple[Tensor, ...]],
]
# Settings of Adam, and the parameters that have them.
Call = Tuple[Settings, List[Entry]]


class ListLibrary(Library):
    """What the extension module asks PyTorch about tensors in lists."""

    @staticmethod
    def refuse_list(what: str, tensor: Any) -> None:
        """Raises for what is no dense tensor on the CPU."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what}: expected a tensor, found {type(tensor).__name__}")
        refuse_wrapper(what, tensor)
        if tensor.layout != torch.strided:
            raise RuntimeError(f"{what}: expected a dense tensor, found {tensor.layout}")
        if tensor.device.type != "cpu":
            raise RuntimeError(
                f"{what}: expected a tensor on the cpu, found one on {tensor.device}; copy it to "
                "the host, or leave the copies to `fusestep.offload.Offload`"
            )
        refuse_without_memory(what, tensor)


_LISTS: List[_fusestep.Lists] = []


def lists() -> _fusestep.Lists:
    """The access to tensors in lists, which is made at the first call."""
    if not _LISTS:
        _LISTS.append(_fusestep.Lists(ListLibrary))
    return _LISTS[0]


def workers(cores: Any) -> Union[int, List[int]]:
    """The threads of a call: so many, or one on each of these CPUs; PyTorch's number for ``None``.

    Raises ``TypeError`` and ``ValueError`` that name ``cores``.
    """
    if cores is None:
        return torch.get_num_threads()
    expected = "cores: expected a number of threads from 1 on, or numbers of CPUs, "
    if is_whole(cores):
        if cores < 1:
            raise ValueError(f"{expected}found {cores}")
        return int(cores)
    if isinstance(cores, (str, bytes, bool)):
        raise TypeError(f"{expected}found {cores!r}")
    try:
        numbers = sorted(set(cores))
    except TypeError:
        raise TypeError(f"{expected}found {cores!r}") from None
    for number in numbers:
        if not is_whole(number) or number < 0:
            raise ValueError(f"{expected}found {number!r} among them")
    return numbers


def run(calls: Sequence[Call], at: Union[int, List[int]], factor: float = 1.0) -> None:
    """Applies one step to all entries; everything is checked before anything is written."""
    lists().step(calls, at, factor)
    # As PyTorch's own steps do, so that a backward pass through an old value is refused. Writes to
    # a tensor of inference are not counted.
    written = [entry[2] for _, entries in calls for entry in entries]
    written += [entry[4] for _, entries in calls for entry in entries if entry[4] is not None]
    try:
        increment_version(written)
    except RuntimeError:
        # Some versions of PyTorch refuse tensors of inference. One that was counted before may be
        # counted again.
        increment_version([tensor for tensor in written if not tensor.is_inference()])


def square_sum(
    gradients: Sequence[Optional[Tensor]], at: Union[int, List[int]]
) -> Tuple[float, int]:
    """The sum of squares over all gradients, and how many elements are not finite."""
    return lists().square_sum(list(gradients), at)
