"""Profiles and their files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from soapstone.cost.profile import (
    Launched,
    Measured,
    OpKey,
    Profile,
    Updated,
    document_of,
    mean_of,
    op_key,
    profile_from,
    read_profile,
    write_profile,
)
from soapstone.errors import CostError

KEY = OpKey("linear", "{}", "f32", 0)
TIME = Measured(((4, 8), (2, 8), None), ((4, 2),), 1.5e-5, 0.02, 128.0, 224)
PROFILE = Profile("cpu", {"torch": "2.13"}, {KEY: (TIME,)}, (Updated(256, 1e-5, 0.1),))
ON_A_GPU = Profile("h200", {}, {KEY: (replace(TIME, launched=Launched(1e-5, 2e-5)),)})


@pytest.mark.parametrize("profile", [PROFILE, ON_A_GPU], ids=["cpu", "gpu"])
def test_a_profile_survives_its_document(profile: Profile) -> None:
    assert profile_from(json.loads(json.dumps(document_of(profile))), "here") == profile


@pytest.mark.parametrize("profile", [PROFILE, ON_A_GPU], ids=["cpu", "gpu"])
def test_a_profile_survives_its_file(profile: Profile, tmp_path: Path) -> None:
    write_profile(profile, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize("more", [[1e-5], [1e-5, 2e-5, 3e-5], [-1.0, 1.0], [math.nan, 1.0], ["1", 1.0]])
def test_a_row_with_other_launching_times_is_damaged(more: list[object]) -> None:
    document = document_of(PROFILE)
    document["operators"][0]["times"][0].extend(more)
    with pytest.raises(CostError, match="damaged"):
        profile_from(document, "here.json")


def test_attributes_tell_operators_apart() -> None:
    """1, 1.0 and True are equal in Python and not the same attribute."""
    keys = {op_key("add", (("alpha", value),), "f32", 0) for value in (1, 1.0, True, None, (1, 2), math.inf)}
    assert len(keys) == 6


def test_a_row_of_numbers_means_one_thing() -> None:
    """Shapes of other ranks with the same lengths, and operands not read, stay apart."""
    rows = [
        Measured(operands, outputs, 1.0, 0.0, 0.0, 0).shape
        for operands, outputs in (
            (((2, 3),), ((4,),)),
            (((2,),), ((3, 4),)),
            (((2,), (3,)), ((4,),)),
            ((None, (2, 3)), ((4,),)),
            (((2, 3), None), ((4,),)),
            (((), (2, 3)), ((4,),)),
        )
    ]
    assert len(set(rows)) == len(rows)


def test_merging_takes_the_newer_time() -> None:
    newer = Measured(TIME.operands, TIME.outputs, 9e-5, 0.0, 128.0, 224)
    merged = PROFILE.merged(Profile("cpu", {"torch": "2.13"}, {KEY: (newer,)}))
    assert merged.times[KEY] == (newer,)
    assert merged.updates == PROFILE.updates


def test_the_mean_of_ranks_has_all_that_any_has_measured() -> None:
    """A shape that one of them had no time for is its only rank's; launching counts where it was seen."""
    slow = replace(TIME, seconds=2.5e-5, spread=0.04, launched=Launched(3e-5, 4e-5))
    alone = replace(TIME, outputs=((9, 9),))
    first = replace(ON_A_GPU, updates=(Updated(256, 1e-5, 0.1), Updated(512, 2e-5, 0.1)))
    other = Profile("h200", {}, {KEY: (slow, alone)}, (Updated(256, 3e-5, 0.3),))
    mean = mean_of([first, other])
    both, only = mean.times[KEY]
    assert (both.shape, both.seconds, both.spread) == (TIME.shape, pytest.approx(2e-5), pytest.approx(0.03))
    assert both.launched == Launched(pytest.approx(2e-5), pytest.approx(3e-5))
    assert only == alone
    assert [(u.size_bytes, u.seconds, u.spread) for u in mean.updates] == [
        (256, pytest.approx(2e-5), pytest.approx(0.2)),
        (512, 2e-5, 0.1),
    ]


def test_the_mean_of_one_rank_is_its_own() -> None:
    assert mean_of([ON_A_GPU]) == ON_A_GPU


def test_a_part_keeps_all_of_an_operator() -> None:
    other = OpKey("relu", "{}", "f32", 0)
    both = Profile("cpu", {}, {KEY: (TIME,), other: (TIME,)})
    assert set(both.of([OpKey("linear", '{"x": 1}', "f32", 2)]).times) == {KEY}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"format": "soapstone-plan"}, "no Soapstone profile"),
        ({"version": 99}, "has version 99"),
        ({"operators": [{"op": "linear"}]}, "is damaged"),
        ({"operators": 7}, "is damaged"),
        ({"updates": [[256, -1.0, 0.0]]}, "is damaged"),
        ({"updates": [[256, 1e12, 0.0]]}, "is damaged"),
        ({"software": {"torch": 2}}, "is damaged"),
    ],
)
def test_a_damaged_document_is_refused(change: dict[str, object], told: str) -> None:
    with pytest.raises(CostError, match=told):
        profile_from({**document_of(PROFILE), **change}, "here.json")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": NaN}', "\x00"])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(CostError, match=r"p\.json"):
        read_profile(tmp_path / "p.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="no such profile"):
        read_profile(tmp_path / "none.json")
