"""The file goes round, refuses what it is not, and knows the model it was measured with."""

import json
from dataclasses import replace

import pytest

from paceline.config import SpecConfig, parse
from paceline.errors import ConfigError
from paceline.policy import Profile
from paceline.tuned import Tuned, check_profile, default_file, dtype_label, load_tuned, save_tuned

PROFILE = Profile(
    {1: 0.01, 17: 0.02},
    {"lookup": (1e-5, 1e-6)},
    {"lookup": {"": ((3.0,), (4.0,)), "2": ((1.0,), (1.0,))}},
    model="m",
    dtype="bfloat16",
    threads=1,
)


def tuned(config: SpecConfig | None = None) -> Tuned:
    return Tuned(config or parse("lookup"), PROFILE, {"torch": "x"}, ["said"], {"candidates": [1]})


@pytest.mark.parametrize("name", ["none", "lookup", "self-int4", "model:a@int4", "lookup+model:a+self-int4"])
def test_round_trip(tmp_path, name):
    made = tuned(parse(name, policy=None if name == "none" else "cost_model"))
    save_tuned(tmp_path / "t.json", made)
    assert load_tuned(tmp_path / "t.json") == made
    assert [one.name for one in tmp_path.iterdir()] == ["t.json"]


def test_what_is_no_such_file(tmp_path):
    file = tmp_path / "t.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tuned(file)
    whole = tuned().as_dict()
    cases = (
        ("{", "not valid JSON"),
        ("[" * 1000, "not valid JSON"),
        ("9" * 5000, "not valid JSON"),
        ("[]", "is not a file"),
        (json.dumps({**whole, "kind": "other"}), "is not a file"),
        (json.dumps({**whole, "version": 99}), "another version"),
        (json.dumps({**whole, "config": 3}), "incomplete"),
        (json.dumps({**whole, "config": {"method": "magic"}}), "method has a wrong value"),
        (json.dumps({**whole, "profile": {**PROFILE.to_dict(), "pass_seconds": {"1": -1}}}), "pass_seconds"),
        *(
            (json.dumps({**whole, "profile": {**PROFILE.to_dict(), key: value}}), told)
            for key, value, told in (
                ("pass_seconds", {"x": 1.0}, "pass_seconds"),
                ("pass_seconds", [1], "pass_seconds"),
                ("draft_seconds", {"lookup": [1.0]}, "draft_seconds"),
                ("acceptance", {"lookup": {"": [[3.0], [2.0]]}}, "acceptance.*none of them fewer"),
                ("acceptance", {"lookup": {"x": [[1.0], [2.0]]}}, "acceptance"),
                ("confidence", {"lookup": {"accepted": [[1.0], [2.0]]}}, "confidence.*accepted and deeper"),
                ("sizes", {"eagle": [[1.0]]}, "sizes"),
                ("threads", 1.5, "threads"),
                ("version", 1, "another version"),
                ("more", 2, "unknown key 'more'"),
            )
        ),
    )
    for text, told in cases:
        file.write_text(text)
        with pytest.raises(ConfigError, match=told):
            load_tuned(file)


def test_a_profile_belongs_to_its_model():
    assert check_profile(PROFILE, "m", "bfloat16", 1) == []
    assert check_profile(Profile(), "any", "float32", 8) == []
    with pytest.raises(ConfigError, match=r"another model.*m there, other here"):
        check_profile(PROFILE, "other", "bfloat16", 1)
    with pytest.raises(ConfigError, match=r"another dtype.*bfloat16 there, float32 here"):
        check_profile(PROFILE, "m", "float32", 1)
    (warning,) = check_profile(PROFILE, "m", "bfloat16", 2)
    assert "measured with 1 thread and this run has 2" in warning
    assert check_profile(replace(PROFILE, threads=0), "m", "bfloat16", 2) == []


def test_dtypes_are_told_apart_by_device():
    assert dtype_label("torch.bfloat16", "cpu") == "bfloat16"
    assert dtype_label("torch.bfloat16", "cuda:1") == "bfloat16 on cuda"


def test_default_names():
    assert str(default_file("/a/b/model-1/")) == "paceline-model-1.json"
    assert str(default_file("org/name")) == "paceline-name.json"
