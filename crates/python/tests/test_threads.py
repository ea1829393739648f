"""Whose threads steps run on."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from support import bits, give_gradients, parameters, same_bits

import fusestep.torch

BEGIN = """
import os, torch, fusestep.torch
from support import give_gradients, parameters

def threads():
    tasks = os.listdir("/proc/self/task")
    return sorted(open(f"/proc/self/task/{task}/comm").read().strip() for task in tasks)

def stepped(steps):
    params = parameters(shapes=[(600_000,), (7,)])
    optimizer = fusestep.torch.AdamW(params)
    for step in steps:
        give_gradients(params, step)
        optimizer.step()
    return params, optimizer

def same(ours, expected):
    # Without PyTorch's own kernels, whose threads a child does not have.
    return all(a.detach().numpy().tobytes() == b.detach().numpy().tobytes()
               for a, b in zip(ours, expected, strict=True))

torch.set_num_threads(3)
"""


def printed(program):
    """What a process of its own prints, or its error."""
    ran = subprocess.run(
        [sys.executable, "-c", BEGIN + program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=os.path.dirname(__file__),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    return ran.stdout + ran.stderr


@pytest.mark.skipif(
    "OpenMP" not in torch.__config__.parallel_info() or sys.platform != "linux",
    reason="PyTorch's threads are no OpenMP library's",
)
def test_a_step_runs_on_pytorchs_threads():
    found = printed("""
torch.ones(3_000_000).add_(1)
before = threads()
stepped(range(3))
assert threads() == before, (before, threads())
assert not any(name.startswith("fusestep") for name in before), before
print("as many,", len(before) >= 3)
""")
    assert found == "as many, True\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_process_that_is_forked_off_has_threads_of_its_own():
    # What it takes over, it goes on with, and so does the parent, with the same bits.
    found = printed("""
expected, _ = stepped(range(4))
params, optimizer = stepped(range(3))
give_gradients(params, 3)
child = os.fork()
optimizer.step()
assert any(name.startswith("fusestep") for name in threads()) == (child == 0), threads()
assert same(params, expected)
if child:
    print("ended with", os.waitpid(child, 0)[1])
""")
    assert found == "ended with 0\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
def test_a_child_whose_parent_never_stepped_has_threads_of_its_own():
    found = printed("""
torch.ones(3_000_000).add_(1)
param = torch.nn.Parameter(torch.ones(600_000))
param.grad = torch.ones(600_000)
child = os.fork()
if child == 0:
    import signal
    signal.alarm(30)
    # A rule without state, which PyTorch's own kernels would fill.
    fusestep.torch.SGD([param], lr=0.1).step()
    assert any(name.startswith("fusestep") for name in threads()), threads()
else:
    print("ended with", os.waitpid(child, 0)[1])
""")
    assert found == "ended with 0\n"


def test_threads_of_python_that_step_at_once_change_no_bit():
    def run(out):
        params = parameters(shapes=[(200_000,), (30, 40)])
        optimizer = fusestep.torch.AdamW(params)
        for step in range(8):
            give_gradients(params, step)
            optimizer.step()
        out.append(bits(params))

    alone, together = [], []
    run(alone)
    threads = [threading.Thread(target=run, args=(together,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == 3 and all(same_bits(alone[0], one) for one in together)
