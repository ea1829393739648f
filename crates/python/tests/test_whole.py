"""Parameters of which each process has a part: `DataParallel(zero=3)`."""

import pytest
from test_ranks import run, same_models

CAP = {"bucket_mib": 0.005}
FORMS = {
    "plain": {},
    "no reentrant checkpoint": {"ways": "checkpoint"},
    "reentrant checkpoint": {"ways": "reentrant"},
    "modules of other kinds": {"ways": "others"},
    "streams": {"comm_streams": 2},
    "clipped micro-steps": {"settings": {"clip_norm": 0.1, "accumulate": 2}},
    "bf16": {"dtype": "bfloat16", "settings": {"master_weights": True}},
    "loss scale": {"settings": {"loss_scale": 4.0, "clip_norm": 1.0}},
}


@pytest.mark.parametrize("form", FORMS)
def test_bits_are_those_of_whole_parameters(form, tmp_path):
    expected = run("layers", tmp_path / "whole", **FORMS[form])
    ranks = run("layers", tmp_path / "parts", zero=3, **CAP, **FORMS[form])
    assert same_models(*ranks), "both ranks"
    assert same_models(expected[0], ranks[0])


def test_three_ranks_have_parts_of_other_lengths(tmp_path):
    expected = run("layers", tmp_path / "whole", world=3)
    ranks = run("layers", tmp_path / "parts", world=3, zero=3, **CAP)
    assert same_models(expected[0], ranks[2])


def test_one_rank_has_all(tmp_path):
    expected, found = (run("layers", tmp_path / str(z), world=1, zero=z) for z in (0, 3))
    assert same_models(expected[0], found[0])


def test_lanes_have_the_bits_of_any_number_of_ranks(tmp_path):
    expected = run("lanes_of_layers", tmp_path / "whole", lanes=5)
    for world in (2, 3):
        ranks = run("lanes_of_layers", tmp_path / str(world), world=world, zero=3, lanes=5, **CAP)
        assert same_models(expected[0], ranks[0]) and same_models(ranks[0], ranks[-1])


def test_parameters_are_read_and_written_within_whole(tmp_path):
    one, two = run("whole", tmp_path)
    assert same_models(one, two)


def test_checkpoints_go_on_at_other_stages(tmp_path):
    expected = run("layers", tmp_path / "whole", steps=6)
    folder = str(tmp_path / "folder")
    for first, options in ((0, {"zero": 3}), (2, {"zero": 1}), (4, {"zero": 3, **CAP})):
        out = tmp_path / str(first)
        ranks = run("saved", out, folder=folder, first=first, **options)
    assert same_models(expected[0], ranks[0]) and same_models(*ranks)
