"""The file goes round, refuses what it is not, and knows the model it was measured with."""

import json
from dataclasses import replace

import pytest
import torch

from paceline.config import SpecConfig, parse
from paceline.errors import ConfigError
from paceline.policy import Profile
from paceline.tuned import SIGN, Tuned, check_profile, default_file, load_tuned, made_for, save_tuned
from tests.helpers import loaded

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
    assert (tmp_path / "t.json").read_text().startswith(SIGN)
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
        ("[]", "is not a file of the kind paceline-tune"),
        (json.dumps({**whole, "kind": "other"}), "is not a file of the kind paceline-tune"),
        (json.dumps({**whole, "version": 99}), "another version"),
        (json.dumps({**whole, "config": 3}), "config in .* has a wrong value"),
        (json.dumps({**whole, "config": {"method": "magic"}}), "method has a wrong value"),
        (json.dumps({**whole, "profile": {**PROFILE.to_dict(), "pass_seconds": {"1": -1}}}), "pass_seconds"),
        *(
            (json.dumps({**whole, "profile": {**PROFILE.to_dict(), key: value}}), told)
            for key, value, told in (
                ("pass_seconds", {"x": 1.0}, "pass_seconds"),
                ("draft_seconds", {"lookup": [1.0]}, "draft_seconds"),
                ("acceptance", {"lookup": {"": [[3.0], [2.0]]}}, "acceptance.*none of them fewer"),
                ("confidence", {"lookup": {"accepted": [[1.0], [2.0]]}}, "confidence.*accepted and deeper"),
                ("version", 1, "another version"),
                ("more", 2, "unknown key 'more'"),
            )
        ),
    )
    for text, told in cases:
        file.write_text(text)
        with pytest.raises(ConfigError, match=told):
            load_tuned(file)


def test_a_profile_belongs_to_its_model(monkeypatch):
    made = loaded("llama")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    mine = Profile(model=made.name, dtype="float32", threads=2)
    assert made_for(made) == (made.name, "float32", 2)
    assert (
        check_profile(mine, made)
        == check_profile(Profile(), made)
        == check_profile(replace(mine, threads=0), made)
        == []
    )
    with pytest.raises(ConfigError, match=rf"another model.*m there, {made.name} here"):
        check_profile(replace(mine, model="m"), made)
    with pytest.raises(ConfigError, match=r"another dtype.*bfloat16 on cuda there, float32 here"):
        check_profile(replace(mine, dtype="bfloat16 on cuda"), made)
    (warning,) = check_profile(replace(mine, threads=1), made)
    assert "measured with 1 threads and this run has 2" in warning


def test_default_names():
    assert str(default_file("/a/b/model-1/")) == "paceline-model-1.json"
    assert str(default_file("org/name")) == "paceline-name.json"
