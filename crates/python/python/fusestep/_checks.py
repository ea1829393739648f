"""What arguments have to be, and what is raised for those that are not."""

from __future__ import annotations

from typing import Any, Optional


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; Python's ``True`` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive(name: str, value: Any) -> Optional[float]:
    """The value of an argument that is a finite number above 0, or none."""
    if value is None:
        return None
    try:
        number = float("nan") if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not 0.0 < number < float("inf"):
        kind = ValueError if number == number or isinstance(value, float) else TypeError
        raise kind(f"{name}: expected a finite value above 0, found {value!r}")
    return number
