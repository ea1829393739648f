"""What `help`, editors and type checkers know of the constructors, and `python -m fusestep`."""

import inspect
import json
import pathlib
import pydoc
import re
import subprocess
import sys

import pytest
import stub
import torch

import fusestep
import fusestep.torch
from fusestep.torch._options import OPTIONS, OPTIONS_OF_RANKS

NAMES = [name for name, _, _ in stub.optimizers()]

RIGHT = """
import torch
import fusestep.torch as f

params = [torch.nn.Parameter(torch.ones(3))]
f.AdamW(params, lr=1e-3, betas=(0.9, 0.95), clip_norm=1.0, schedule="constant")
f.AdamW([("a", params[0])], 1e-3, (0.9, 0.99), 1e-8, 0.1, master_weights=True)
f.SGD([{"params": params, "lr": 0.1}], lr=0.1, momentum=0.9, loss_scale="dynamic")
f.Lamb(params, trust_ratio=False, state_dtype=torch.bfloat16, loss_scale=8.0).plan().upper()
lion = f.Lion(params, lr=torch.tensor(0.1))
f.DataParallel(torch.nn.Linear(2, 2), lion, zero=1, bucket_mib=2.0, distributed=["w"]).rank
"""

# Each is one error of the type that is named.
WRONG = [
    ('f.AdamW(params, learning_rate=1e-3)', "call-arg"),
    ('f.AdamW(params, lr="fast")', "arg-type"),
    ('f.AdamW(params, betas=0.9)', "arg-type"),
    ('f.SGD(params, lr=0.1, betas=(0.9, 0.99))', "call-arg"),
    ('f.Lion(params, amsgrad=True)', "call-arg"),
    ('f.AdamW(params, clip_norm="1")', "arg-type"),
    ('f.AdamW(params, master_weights="half")', "arg-type"),
    ('f.AdamW(params, rounding="up")', "arg-type"),
    ('f.AdamW(params, zero=1)', "call-arg"),
    ('f.Lars()', "call-arg"),
    ('f.DataParallel(torch.nn.Linear(2, 2), lion, clip_norm=1.0)', "call-arg"),
    ('f.DataParallel(torch.nn.Linear(2, 2), lion, zero="1")', "arg-type"),
]


def test_the_stub_is_that_of_the_signatures():
    assert stub.STUB.read_text() == stub.text(), "write it by `python stub.py`"


def test_a_strict_checker_takes_right_calls_and_refuses_each_wrong_one(tmp_path):
    ignored = "".join(f"{call}  # type: ignore[{kind}]\n" for call, kind in WRONG)
    for name, text in (("right", RIGHT), ("wrong", RIGHT + ignored)):
        (tmp_path / f"{name}.py").write_text(text)
    # An ignored line without an error is an error.
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "right.py", "wrong.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr


# Names that pyright has for errors of these types.
OF_PYRIGHT = {"call-arg": "reportCallIssue", "arg-type": "reportArgumentType"}


def test_pyright_takes_right_calls_and_refuses_each_wrong_one(tmp_path):
    pytest.importorskip("pyright", reason="pip install 'pyright[nodejs]'")
    ignored = "".join(
        f"{call}  # pyright: ignore[{OF_PYRIGHT[kind]}]\n" for call, kind in WRONG
    )
    for name, text in (("right", RIGHT), ("wrong", RIGHT + ignored)):
        (tmp_path / f"{name}.py").write_text(text)
    folder = pathlib.Path(fusestep.__file__).parents[1]
    settings = {
        "typeCheckingMode": "strict",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "extraPaths": [str(folder)],
        # PyTorch's own, which its types do not say in full.
        "reportUnknownMemberType": "none",
        "reportUnknownVariableType": "none",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    found = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("name", NAMES)
def test_help_names_every_argument_and_its_default(name):
    kind = getattr(fusestep.torch, name)
    signature = inspect.signature(kind)
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    assert OPTIONS <= signature.parameters.keys()
    told = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    assert re.search(r"lr: '?(float|Union)", told)
    for argument in signature.parameters:
        assert f"``{argument}``: " in kind.__doc__, argument
    theirs = getattr(torch.optim, name, None)
    if theirs is not None:
        expected = inspect.signature(theirs).parameters
        for argument, own in expected.items():
            assert signature.parameters[argument].default == own.default, argument


@pytest.mark.parametrize("name", NAMES)
def test_a_constructor_takes_what_its_signature_says(name):
    kind = getattr(fusestep.torch, name)
    signature = inspect.signature(kind)
    parameters = list(signature.parameters.values())[1:]
    given = {p.name: p.default for p in parameters}
    optimizer = kind([torch.nn.Parameter(torch.ones(3))], **given)
    again = kind([torch.nn.Parameter(torch.ones(3))])
    assert optimizer.defaults == again.defaults


def test_ranks_name_every_setting_of_theirs():
    parameters = inspect.signature(fusestep.torch.DataParallel).parameters
    assert OPTIONS_OF_RANKS <= parameters.keys() and not OPTIONS & parameters.keys()
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def test_a_class_derived_from_ours_has_the_signature_of_its_own_constructor():
    class Mine(fusestep.torch.AdamW):
        def __init__(self, params, power):
            super().__init__(params, lr=10.0**power)

    assert list(inspect.signature(Mine).parameters) == ["params", "power"]
    assert Mine([torch.nn.Parameter(torch.ones(3))], -2).defaults["lr"] == 1e-2


def test_the_package_run_as_a_program_says_what_it_has():
    found = subprocess.run(
        [sys.executable, "-m", "fusestep"], capture_output=True, text=True, check=True
    )
    lines = dict(line.split(maxsplit=1) for line in found.stdout.splitlines())
    assert lines["fusestep"] == fusestep.__version__
    assert lines["torch"].startswith(torch.__version__) and lines["devices"].startswith("cpu")
    assert {"adam", "lamb"} <= set(lines["rules"].split(", "))
    assert "processes" in lines["engines"]
