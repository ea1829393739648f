"""Signatures and docstrings of the optimizers, drawn from PyTorch's classes and the settings table.

``help``, editors and type checkers know every argument: at run time by these, before it by the stub
``__init__.pyi``, which ``crates/python/tests/stub.py`` writes from the same signatures.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, Dict, FrozenSet, List

from fusestep.torch._optimizer import Fused
from fusestep.torch._options import OPTIONS, OPTIONS_OF_RANKS, TABLE, described
from fusestep.torch._precision import CHOICES, PRECISION, SAYS
from fusestep.torch._ranks import DataParallel

# What arguments of rules are, by their names in all classes.
_SAYS = {
    "params": "Parameters, pairs of names and parameters, or groups as dicts.",
    "lr": "Learning rate; a tensor is read at every step.",
    "betas": "Decay rates of the mean of gradients and of that of their squares.",
    "eps": "What is added to a denominator.",
    "weight_decay": "Weight decay.",
    "amsgrad": "Whether the largest mean of squares so far divides.",
    "maximize": "Whether steps go up.",
    "momentum": "Decay rate of the momentum.",
    "dampening": "What the momentum leaves of a gradient: 1 minus it.",
    "nesterov": "Whether the step looks ahead by the momentum.",
    "alpha": "Decay rate of the mean of squares.",
    "centered": "Whether the mean of gradients is taken off before squares divide.",
    "lr_decay": "Decay of the learning rate over steps.",
    "initial_accumulator_value": "What sums begin with.",
    "momentum_decay": "Decay of the momentum over steps.",
    "decoupled_weight_decay": "Whether decay is taken from the parameter, not from its gradient.",
    "trust_coefficient": "Share of the ratio of norms that is the rate.",
    "trust_ratio": "Whether the ratio of norms scales the rate.",
    "warmup_steps": "Steps over which the rate rises.",
    "foreach": "Without effect: every step is one launch for each dtype.",
    "fused": "Without effect, as ``foreach``.",
    "capturable": "True for steps on a CUDA device that `torch.cuda.graph` records.",
    "differentiable": "False: steps run in place.",
}

# What a newer PyTorch's class has besides.
_PYTORCHS = "As PyTorch's."

# Types of settings whose values are more than their rows say.
_MORE_TYPES = {
    "master_weights": "bool, ",
    "state_dtype": "torch.dtype, ",
    "loss_scale": "float, ",
    "reduce_dtype": "torch.dtype, ",
}


def _quoted(name: str) -> str:
    return f'"{name}"'


def type_of(row: Dict[str, Any]) -> str:
    """The type of a setting's argument, as a stub spells it."""
    if row["is_switch"]:
        own = "bool"
    elif row["choices"]:
        own = f"Literal[{', '.join(map(_quoted, row['choices']))}]"
    elif row["range"].startswith("a whole number"):
        own = "int"
    elif row["range"].startswith("a finite number"):
        own = "float"
    else:
        own = "Union[str, Sequence[str]]" if row["is_list"] else "str"
    more = _MORE_TYPES.get(row["name"])
    return f"Optional[Union[{more}{own}]]" if more else f"Optional[{own}]"


def _keyword(name: str, of_type: str) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=of_type)


def _settings(names: FrozenSet[str]) -> List[inspect.Parameter]:
    """Arguments of these settings, in the order of the table."""
    return [_keyword(name, type_of(TABLE[name])) for name in TABLE if name in names]


def _options() -> List[inspect.Parameter]:
    """Arguments of every class of an optimizer."""
    choices = f"Optional[Literal[{', '.join(map(_quoted, CHOICES))}]]"
    return [_keyword(PRECISION, choices), *_settings(OPTIONS)]


def _own(kind: type) -> List[inspect.Parameter]:
    """Arguments of a class's rule, with ``self``: PyTorch's, or those that it names itself."""
    source: Any = kind.__dict__.get("__init__")
    named = source is not None and "lr" in inspect.signature(source).parameters
    if not named:
        bases = (base for base in kind.__mro__ if base.__module__.startswith("torch.optim"))
        source = next(bases).__dict__["__init__"]
    return _named(source)


def _named(source: Any) -> List[inspect.Parameter]:
    """Arguments of a function that it names."""
    parameters = inspect.signature(source).parameters.values()
    return [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]


def _signed(kind: Any) -> Callable[..., None]:
    """The constructor of a class, a function of its own."""
    own = kind.__dict__.get("__init__")
    if own is not None:
        made: Callable[..., None] = own
        return made

    @functools.wraps(kind.__init__)
    def __init__(self: Any, *args: Any, **settings: Any) -> None:
        super(kind, self).__init__(*args, **settings)

    return __init__


def _documented(kind: type, own: List[inspect.Parameter]) -> str:
    """The docstring of a class with its arguments."""
    lines = []
    for parameter in own[1:]:
        default = ""
        if parameter.default is not inspect.Parameter.empty:
            default = f" {parameter.default!r} by default."
        says = _SAYS.get(parameter.name, _PYTORCHS)
        lines.append(f"    * ``{parameter.name}``: {says}{default}\n")
    head = (kind.__doc__ or "").rstrip()
    more = f"    * ``{PRECISION}``: {SAYS}\n"
    return f"{head}\n\n    Arguments:\n\n{''.join(lines)}{more}{described(OPTIONS)}"


def sign(kind: Any) -> None:
    """Gives a class its exact signature, and an optimizer's its docstring."""
    if kind is DataParallel:
        source: Any = kind.__dict__["__init__"]
        more = [*_settings(OPTIONS_OF_RANKS), _keyword("bucket_mib", "Optional[float]")]
        source.__signature__ = inspect.Signature([*_named(source), *more], return_annotation=None)
    if not isinstance(kind, type) or not issubclass(kind, Fused):
        return
    own = _own(kind)
    init: Any = _signed(kind)
    init.__signature__ = inspect.Signature([*own, *_options()], return_annotation=None)
    setattr(kind, "__init__", init)
    kind.__doc__ = _documented(kind, own)
