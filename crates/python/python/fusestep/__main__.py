"""``python -m fusestep``: what this installation has."""

from __future__ import annotations

import importlib
import platform
import sys
from typing import List

from fusestep import __version__, _fusestep


def _version_of(name: str, face: str) -> str:
    """The version of a library and the module that takes it; why there is none."""
    try:
        found = importlib.import_module(name).__version__
    except Exception as error:
        return f"none ({type(error).__name__}: {error}); {face} needs it"
    try:
        importlib.import_module(face)
    except Exception as error:
        return f"{found}; {face} does not load ({type(error).__name__}: {error})"
    return f"{found}, for {face}"


def _threads() -> str:
    torch = sys.modules.get("torch")
    return f", {torch.get_num_threads()} threads of PyTorch's" if torch is not None else ""


def _cuda() -> str:
    """Whether CUDA tensors can be stepped; why not."""
    try:
        importlib.import_module("fusestep._cuda")
    except ImportError as error:
        return f"no CUDA ({error})"
    return "CUDA, by fusestep._cuda"


def lines() -> List[str]:
    """The report, a line for each fact."""
    torch = _version_of("torch", "fusestep.torch")
    return [
        f"fusestep {__version__}",
        f"python   {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"torch    {torch}",
        f"numpy    {_version_of('numpy', 'fusestep.numpy')}",
        f"devices  cpu{_threads()}; {_cuda()}",
        f"engines  {', '.join(_fusestep.engines)}",
        f"rules    {', '.join(sorted(_fusestep.rules()))}",
    ]


if __name__ == "__main__":
    print("\n".join(lines()))
