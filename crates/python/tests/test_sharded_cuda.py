"""DTensors whose parts are on CUDA devices: bits of those on the CPU (`cargo xtask python --cuda`).
"""

import os

import pytest

if not os.environ.get("FUSESTEP_EMULATOR_DEVICES"):
    pytest.skip("run by `cargo xtask python --cuda`", allow_module_level=True)

from sharded_cuda_program import CHECKS, main
from test_sharded import run


@pytest.mark.parametrize("world", [1, 2])
def test_parts_on_devices_have_the_bits_of_those_on_the_cpu(world, tmp_path):
    run(list(CHECKS), tmp_path, world, target=main)
