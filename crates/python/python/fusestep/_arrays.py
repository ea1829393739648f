"""What arrays have to be for a step on them, and what is raised for those that are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def refuse_unnamed(what: str, arrays: Any) -> None:
    """Raises unless these are arrays by name."""
    if not isinstance(arrays, Mapping):
        raise TypeError(f"{what}: expected a mapping of names, found {type(arrays).__name__}")
    for name in arrays:
        if not isinstance(name, str):
            raise TypeError(f"{what}: expected names of type str, found {name!r}")


def refuse_masked(what: str, array: Any) -> None:
    """Raises for an array with a mask, under which a step would write."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{what}: expected an array without a mask, found {type(array).__name__}; use `.data`"
        )


def view_of(what: str, array: Any) -> Any:
    """The array as NumPy's, of the same memory."""
    refuse_masked(what, array)
    if not isinstance(array, np.ndarray):
        if not hasattr(array, "__dlpack__"):
            raise TypeError(
                f"{what}: expected an array of NumPy or one that speaks DLPack, "
                f"found {type(array).__name__}"
            )
        try:
            array = np.from_dlpack(array)
        except Exception as error:
            raise TypeError(
                f"{what}: expected an array on the CPU that NumPy takes by DLPack, found {error}"
            ) from error
    if array.dtype not in (np.float32, np.float64, np.float16) or not array.dtype.isnative:
        raise TypeError(
            f"{what}: expected float32, float64 or float16 of this machine's byte order, "
            f"found {array.dtype.str}"
        )
    return array


def writable(name: str, array: Any) -> Any:
    """A parameter as an array that a step may update."""
    view = view_of(f"parameter `{name}`", array)
    flags = view.flags
    if not (flags.c_contiguous and flags.aligned and flags.writeable):
        found = "strides" if not flags.c_contiguous else "a read-only or unaligned one"
        raise ValueError(
            f"parameter `{name}`: expected a C-contiguous, aligned array that may be written, "
            f"found {found}"
        )
    return view
