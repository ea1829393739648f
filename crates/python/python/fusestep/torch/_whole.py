"""Parameters of which each rank has a part: whole while a module computes, freed behind it."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from fusestep.torch._freed import Memory
from fusestep.torch._planned import Member

# Modules of PyTorch whose forward reads parameters of modules within, past their own forward.
UNITS = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class _Hook:
    """A hook of one module, which copies of the module leave behind."""

    def __init__(self, module: torch.nn.Module, call: Callable[[], None]) -> None:
        self._module, self._call = module, call

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if module is self._module:
            self._call()

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _ignored(*_: Any) -> None:
    """What a copy of a module has in place of a hook."""


def _no_hook() -> Callable[..., None]:
    return _ignored


class _Saved(NamedTuple):
    """What autograd has saved of a parameter: where it lies in the parameter's memory."""

    param: int
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    offset: int


class WholeParameters:
    """Parameters at ZeRO stage 3, in memory for as long as something reads them.

    ::

        forward of a module   its own parameters come before it, and are freed behind it
        backward              what was saved of one comes where autograd asks for it,
                              and is freed once the parameter has its gradient

    All ranks call the same modules in the same order, since each coming is a call of all. A
    parameter that is read elsewhere is refused by name. Modules of the types ``units`` read those
    of modules within, which come with their own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        members: Sequence[Member],
        ranks: Any,
        memory: Any,
        units: Tuple[type, ...],
    ) -> None:
        self._ranks, self._memory = ranks, memory
        self._members = members
        # What has no elements needs no memory.
        self._own = {
            index: Memory(member.tensor, member.name)
            for index, member in enumerate(members)
            if member.tensor.numel()
        }
        # How many ask for each parameter to stay.
        self._users = dict.fromkeys(self._own, 0)
        self._by_storage: Dict[int, int] = {}
        # Modules whose forward is under way, and hooks that the outermost has set.
        self._depth = 0
        self._hooks: Any = None
        self._is_closed = False
        self._handles = self._hook(model, (*UNITS, *units))

    def _hook(self, model: torch.nn.Module, units: Tuple[type, ...]) -> List[Any]:
        index_of = {id(own.tensor): index for index, own in self._own.items()}
        handles = []
        for module in model.modules():
            read = module.parameters(recurse=isinstance(module, units))
            own = [index_of[id(p)] for p in read if id(p) in index_of]
            if own or module is model:
                before = _Hook(module, partial(self._before, own))
                behind = _Hook(module, partial(self._behind, own))
                handles += [
                    module.register_forward_pre_hook(before, prepend=True),
                    module.register_forward_hook(behind, always_call=True),
                ]
        return handles

    def _before(self, own: List[int]) -> None:
        if self._depth == 0 and not _is_in_backward():
            hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            hooks.__enter__()
            self._hooks = hooks
        self._depth += 1
        self._keep(own)

    def _behind(self, own: List[int]) -> None:
        self._depth -= 1
        self._leave(own)
        if self._depth == 0 and self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None

    def _keep(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._users[index] += 1
        self._bring(indices)

    def _leave(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._users[index] -= 1
        # Within a backward pass, a module computes anew what autograd is about to read.
        if not _is_in_backward():
            self._free(indices)

    @torch.no_grad()
    def _bring(self, indices: Sequence[int]) -> None:
        """Makes parameters whole, by one call of all ranks for those that are not."""
        wanted = [index for index in indices if self._own[index].whole is None]
        if not wanted:
            return
        brought = [self._own[index].new() for index in wanted]
        self._memory.gather(self._ranks, wanted, brought)
        for index, whole in zip(wanted, brought):
            self._own[index].put(whole)
            self._by_storage[_storage_of(whole)] = index

    def _free(self, indices: Sequence[int]) -> None:
        for index in indices:
            own = self._own[index]
            if own.whole is None or self._users[index] or self._is_closed:
                continue
            # What somebody has written is not lost: a step refuses it, or ranks take it over.
            if not own.is_written():
                self._by_storage.pop(_storage_of(own.whole), None)
                own.free()

    def _pack(self, tensor: Tensor) -> Any:
        index = self._by_storage.get(_storage_of(tensor))
        if index is None or tensor.dtype != self._own[index].tensor.dtype or tensor.is_neg():
            # What is a view in another form keeps the memory.
            return tensor
        return _Saved(index, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            unsaved: Tensor = saved
            return unsaved
        self._bring([saved.param])
        whole = self._own[saved.param].whole
        assert whole is not None
        return whole.as_strided(saved.shape, saved.strides, saved.offset)

    def keep_all(self) -> None:
        """Keeps all parameters whole for good."""
        for index in self._own:
            self._users[index] += 1

    def end_pass(self) -> None:
        """Frees what a backward pass has read without a gradient to come."""
        self._free(list(self._own))

    def has_gradient(self, index: int) -> None:
        """Frees a parameter whose gradient is there: nothing of the backward pass reads it."""
        if index in self._own:
            self._free([index])

    @torch.no_grad()
    def refresh(self) -> None:
        """Brings anew what stays whole, since ranks have other values, and frees the rest."""
        for own in self._own.values():
            own.settle()
        self._free(list(self._own))
        stay = [index for index, own in self._own.items() if own.whole is not None]
        brought = [self._own[index].new() for index in stay]
        if stay:
            self._memory.gather(self._ranks, stay, brought)
        for index, values in zip(stay, brought):
            # In place: whoever has a view of it has the new values.
            whole = self._own[index].whole
            assert whole is not None
            whole.copy_(values)
            self._by_storage[_storage_of(whole)] = index
            self._own[index].settle()

    def write(self) -> None:
        """Gives ranks the values of all parameters, each of which has to be whole."""
        for index, own in self._own.items():
            if own.whole is None:
                raise RuntimeError(
                    f"parameter `{own.name}`: expected whole values, found a part of them on each "
                    "rank; write them and call `follow_parameters()` within `with "
                    "parallel.whole():`"
                )
            if own.is_moved():
                self._by_storage.pop(_storage_of(own.whole), None)
                own.put(own.tensor.detach().clone(memory_format=torch.contiguous_format))
            self._memory.write(self._ranks, index, own.whole)

    def moved(self) -> List[Member]:
        """Parameters to which others have given another memory."""
        return [self._members[index] for index, own in self._own.items() if own.is_moved()]

    @contextmanager
    def all(self) -> Iterator[None]:
        """All parameters, whole until the end."""
        everything = list(self._own)
        self._keep(everything)
        try:
            yield
        finally:
            self._leave(everything)

    def close(self) -> None:
        """Leaves parameters as they are, and modules alone."""
        self._is_closed = True
        for handle in self._handles:
            handle.remove()
        self._handles = []


def checked_units(units: Sequence[type]) -> Tuple[type, ...]:
    """Types of modules, as a tuple."""
    for unit in units:
        if not isinstance(unit, type) or not issubclass(unit, torch.nn.Module):
            raise TypeError(f"units: expected types of modules, found {unit!r}")
    return tuple(units)


def _storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's memory; 0 for one that has none of its own."""
    if tensor.layout != torch.strided:
        return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _is_in_backward() -> bool:
    current: int = torch._C._current_graph_task_id()
    return current != -1
