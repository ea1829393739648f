"""Parameters that are DTensors: FSDP2, tensor parallel and both, on processes over gloo."""

import uuid

import pytest
from processes import run_all
from sharded_program import CHECKS, main

ALONE = [name for name in CHECKS if name not in ("saves", "resumes")]


def run(names, folder, world, target=main):
    """Runs checks on so many processes."""
    session = uuid.uuid4().hex
    each = [(names, folder, rank, world, session) for rank in range(world)]
    processes = run_all(target, each, folder)
    told = [path.read_text() for path in sorted(folder.glob("rank*.txt"))]
    assert not told, "\n".join(told)
    assert all(process.exitcode == 0 for process in processes)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_steps_of_parts_are_those_of_whole_tensors(world, tmp_path):
    run(ALONE, tmp_path, world)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 4)])
def test_a_checkpoint_goes_on_with_another_number_of_processes(before, after, tmp_path):
    run(["saves"], tmp_path, before)
    run(["resumes"], tmp_path, after)
