"""Writes the stub of `fusestep.torch` from the signatures that its classes have.

`python stub.py` writes `python/fusestep/torch/__init__.pyi` anew; `test_signatures.py` compares.
"""

import inspect
import pathlib
import re

import fusestep.torch
from fusestep.torch._optimizer import Fused

STUB = pathlib.Path(__file__).resolve().parents[1] / "python/fusestep/torch/__init__.pyi"

HEAD = '''"""PyTorch's optimizers on CPU and CUDA tensors, in one pass over memory.

Written by `crates/python/tests/stub.py`.
"""

from typing import Any, Literal, Optional, Sequence, Tuple, Union

import torch
from torch.optim.optimizer import ParamsT

from fusestep._report import Report as Report
from fusestep.torch import _own, _pytorch, _ranks
from fusestep.torch._backward import FusedBackward as FusedBackward
from fusestep.torch._backward import fuse_backward as fuse_backward

__all__ = [
'''


def optimizers():
    """The classes of optimizers by name, and the module of each."""
    for name in fusestep.torch.__all__:
        kind = getattr(fusestep.torch, name)
        if isinstance(kind, type) and issubclass(kind, Fused):
            yield name, kind, "_own" if hasattr(fusestep.torch._own, name) else "_pytorch"


def annotation(parameter):
    """A type as the stub spells it."""
    given = parameter.annotation
    if parameter.name == "params":
        return "ParamsT"
    if not isinstance(given, str):
        given = given.__name__ if isinstance(given, type) else str(given)
    given = given.replace("Betas", "Tuple[float, float]")
    return re.sub(r"(?<![.\w])Tensor\b", "torch.Tensor", given)


def constructor(kind):
    """The lines of a class's constructor."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())
    lines = ["    def __init__(", "        self,"]
    starred = False
    for parameter in parameters[1:]:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            lines.append("        *,")
            starred = True
        default = ""
        if parameter.default is not inspect.Parameter.empty:
            default = f" = {parameter.default!r}"
        line = f"        {parameter.name}: {annotation(parameter)}{default},"
        if len(line) > 100:
            before, inner = line.split("[", 1)
            line = f"{before}[\n            {inner.replace('] = None,', '')}\n        ] = None,"
        lines.append(line)
    return "\n".join([*lines, "    ) -> None: ..."])


def text():
    """The whole stub."""
    names = "".join(f'    "{name}",\n' for name in fusestep.torch.__all__)
    classes = [
        f"class {name}({module}.{name}):\n{constructor(kind)}\n"
        for name, kind, module in [
            *optimizers(),
            ("DataParallel", fusestep.torch.DataParallel, "_ranks"),
        ]
    ]
    return HEAD + names + "]\n\n" + "\n".join(classes)


if __name__ == "__main__":
    STUB.write_text(text())
