"""State dicts with state in another type than the optimizer keeps: codes as floats, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from fusestep import _fusestep
from fusestep.torch._planned import Member, members_of
from fusestep.torch._sharded import is_sharded
from fusestep.torch._tensors import (
    FLOATING,
    GROUP,
    NARROW,
    UNITS,
    Library,
    empty_like,
    refuse_without_memory,
    shape_of,
)

if TYPE_CHECKING:
    from fusestep.torch._optimizer import Fused

# Roles whose values have either sign; all others' are never negative.
_SIGNED = ("moment1", "velocity")


class _Lent(Library):
    @staticmethod
    def refuse_list(what: str, tensor: Any) -> None:
        """Raises for what has no memory."""
        refuse_without_memory(what, tensor)


_CODES: List[_fusestep.Codes] = []


def _codes() -> _fusestep.Codes:
    if not _CODES:
        _CODES.append(_fusestep.Codes(_Lent))
    return _CODES[0]


def as_float32(optimizer: Fused, saved: Dict[str, Any], asked: Any) -> Dict[str, Any]:
    """A state dict of the optimizer with all state of fewer bits in float32."""
    if asked not in (torch.float32, "f32"):
        raise ValueError(
            "state_dtype: expected torch.float32, or None for state as the optimizer keeps it, "
            f"found {asked!r}"
        )
    state = dict(saved["state"])
    indexes = [index for group in saved["param_groups"] for index in group["params"]]
    for index, member in zip(indexes, members_of(optimizer.param_groups)):
        if index in state:
            state[index] = _wide(optimizer, member, state[index])
    return {**saved, "state": state}


def _wide(optimizer: Fused, member: Member, own: Mapping[str, Any]) -> Dict[str, Any]:
    found = dict(own)
    for role, key in optimizer._keys.items():
        value = own.get(key)
        if value is not None and value.dtype == torch.uint8:
            found[key] = _decoded(role, key, member, value, found.pop(key + UNITS))
        elif value is not None and value.dtype in NARROW:
            found[key] = value.to(torch.float32)
    remainder = own.get("remainder")
    if remainder is not None and remainder.dtype == torch.int8:
        found["remainder"] = _widened(remainder)
    return found


def as_kept(
    optimizer: Fused, given: Dict[str, Any], saved: Sequence[Any], members: Sequence[Member]
) -> Dict[str, Any]:
    """A state dict with state in the types that the optimizer keeps. What cannot be read as it
    should be stays, and is refused by those who look for it.

    Raises ``ValueError`` that names the tensor whose values have no codes.
    """
    state = dict(given["state"])
    for index, member in zip(saved, members):
        if isinstance(state.get(index), Mapping):
            state[index] = _kept(optimizer, member, state[index])
    return {**given, "state": state}


def _kept(optimizer: Fused, member: Member, own: Mapping[str, Any]) -> Dict[str, Any]:
    found = dict(own)
    for role, key in optimizer._keys.items():
        value: Any = own.get(key)
        units: Any = own.get(key + UNITS)
        if not _is_whole(member, key, value):
            continue
        keeps_codes = optimizer._state_dtype(member.tensor, key) == torch.uint8
        if keeps_codes and value.dtype in FLOATING:
            found[key], found[key + UNITS] = _encoded(role, key, member, value)
        elif not keeps_codes and value.dtype == torch.uint8:
            if not _is_whole(member, key + UNITS, units) or units.dtype != torch.float32:
                raise ValueError(
                    f"{key + UNITS} of `{member.name}`: expected a float32 tensor of shape "
                    f"{shape_of(member.tensor, key + UNITS)} beside codes, found {_kind_of(units)}"
                )
            found[key] = _decoded(role, key, member, value, found.pop(key + UNITS))
    remainder = own.get("remainder")
    if optimizer._options.get("remainder") and isinstance(remainder, Tensor):
        kept = optimizer._state_dtype(member.tensor, "remainder")
        found["remainder"] = _remainder_as(kept, member, remainder)
    return found


def _kind_of(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "none" if value is None else type(value).__name__
    return f"one of {value.dtype}, shape {tuple(value.shape)}"


def _is_whole(member: Member, key: str, value: Any) -> bool:
    """Whether a value has an element in memory for each that this list of the parameter has."""
    if not isinstance(value, Tensor) or is_sharded(value) or is_sharded(member.tensor):
        return False
    if value.layout != torch.strided or value.device.type == "meta":
        return False
    return tuple(value.shape) == shape_of(member.tensor, key)


def _plain(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A value in host memory, whose last index is the fastest."""
    return value.detach().to(device="cpu", dtype=dtype).contiguous()


def _decoded(role: str, key: str, member: Member, codes: Tensor, units: Tensor) -> Tensor:
    """What codes read as, in the order of the parameter's elements."""
    plain = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    codes, units = _plain(codes, torch.uint8), _plain(units, torch.float32)
    _codes().decode(role, f"{key} of {member.name}", codes, units, plain)
    return empty_like(member.tensor, torch.float32).copy_(plain)


def _encoded(role: str, key: str, member: Member, value: Tensor) -> Tuple[Tensor, Tensor]:
    """Codes and units of values, rounded to nearest."""
    values = _plain(value, torch.float32)
    wrong, expected = ~torch.isfinite(values), "finite values"
    if role not in _SIGNED:
        wrong, expected = wrong | (values < 0), "finite values of at least 0"
    if bool(wrong.any()):
        at = int(wrong.flatten().nonzero()[0])
        raise ValueError(
            f"{key} of `{member.name}`: expected {expected}, because {GROUP} elements in int8 "
            f"share a unit, found {values.flatten()[at].item()} at element {at}"
        )
    codes = torch.zeros(values.shape, dtype=torch.uint8, device="cpu")
    units = torch.zeros(shape_of(member.tensor, key + UNITS), dtype=torch.float32, device="cpu")
    # State begins with zeros, and a root of 0 has the code 1.
    if bool(values.any()):
        _codes().encode(role, f"{key} of {member.name}", values, codes, units)
    return codes, units


def _widened(remainder: Tensor) -> Tensor:
    """A remainder of 8 bits as one of 16, which is the same value."""
    return remainder.to(torch.int16) << 8


def _remainder_as(kept: torch.dtype, member: Member, remainder: Tensor) -> Tensor:
    """A remainder of the length that the optimizer keeps."""
    if (remainder.dtype, kept) == (torch.int8, torch.int16):
        return _widened(remainder)
    if (remainder.dtype, kept) != (torch.int16, torch.int8):
        return remainder
    if bool((remainder & 255).any()):
        raise ValueError(
            f"remainder of `{member.name}`: expected 8 bits, or 16 of which the lower 8 are 0, "
            "found one of torch.int16 with others; make the optimizer with "
            "`master_weights='remainder'`"
        )
    return (remainder >> 8).to(torch.int8)
