"""Values from outside are checked in one place, and files are read and written with care."""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest
from pydantic import Field

from paceline.errors import ConfigError
from paceline.schema import Integer, Many, Text, brief, checked, checked_call, validate
from paceline.system import files


@checked
class _Inner:
    lr: Annotated[float, Field(gt=0)] = 1.0
    kind: Literal["a", "b"] = "a"
    stop: Text | Many[Text] = ()
    layers: Many[int] = ()


@checked
class _Outer:
    name: Text
    inner: _Inner = field(default_factory=_Inner)
    maybe: _Inner | None = None
    mix: Mapping[str, Annotated[float, Field(gt=0)]] = field(default_factory=dict)


def test_what_is_right_is_taken():
    assert _Inner(lr=3, layers=[1, 2]) == _Inner(lr=3.0, layers=(1, 2))
    given = {"name": "x", "inner": {"lr": 2, "layers": [1]}, "maybe": {"stop": ["a"]}, "mix": {"gsm8k": 2}}
    assert validate(_Outer, given, "the run") == _Outer(
        "x", _Inner(2.0, layers=(1,)), _Inner(stop=("a",)), {"gsm8k": 2.0}
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": 0}, {"lr": float("nan")}, {"lr": float("inf")}, {"lr": True}, {"lr": "1"}, {"kind": "c"}, {"stop": 5},
        {"stop": "\ud800"}, {"stop": ["a", 3]}, {"layers": [1.0]}, {"layers": "1"}, {"layers": [True]}, {"lrr": 1},
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(wrong: dict[str, object]):
    (key,) = wrong
    with pytest.raises(ConfigError, match=rf"the run.*{key}"):
        validate(_Outer, {"name": "x", "inner": wrong}, "the run")
    if key != "lrr":
        with pytest.raises(ConfigError, match=rf"_Inner\.{key}"):
            _Inner(**wrong)


def test_unknown_and_missing_keys_are_told_with_what_was_meant():
    with pytest.raises(ConfigError, match=r"unknown key 'inner.kinds'.*did you mean 'kind'"):
        validate(_Outer, {"name": "x", "inner": {"kinds": "a"}}, "the run")
    with pytest.raises(ConfigError, match="there is no 'name'"):
        validate(_Outer, {}, "the run")


@pytest.mark.parametrize(
    "text", ["[" * 1000 + "]" * 1000, "1" * 5000, '"\\ud800"', '{"a": 1,}', "", "nul"], ids=lambda text: text[:8]
)
def test_bad_json_is_one_error(text: str):
    with pytest.raises(ConfigError, match="the suite is not valid JSON"):
        files.parse_json(text, "the suite")


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo")
    return folder / "fifo"


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: Path("/dev/zero"), _fifo, lambda folder: folder, lambda folder: folder / "none",
        lambda folder: "zero\0byte",
    ],
    ids=["device", "fifo", "folder", "missing", "name"],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_at_once(make: Callable[[Path], Path], tmp_path: Path):
    with pytest.raises(ConfigError):
        files.read_text(make(tmp_path))


def test_too_large_or_not_text_is_refused(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"12345")
    with pytest.raises(ConfigError, match="too large"):
        files.read_text(tmp_path / "a", max_bytes=4)
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        files.read_text(tmp_path / "a")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "a.json"
    files.write_text(place, "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        files.write_text(place, "new")
    assert place.read_text() == "old"
    assert list(tmp_path.iterdir()) == [place]


def test_only_its_own_file_is_replaced_and_a_symlink_stays(tmp_path: Path):
    place, link = tmp_path / "a.json", tmp_path / "link"
    files.check_out(place, "theirs")
    files.write_text(place, '{"kind": "ours"}')
    files.check_out(place, "ours")
    for sign in (None, "theirs"):
        with pytest.raises(ConfigError, match="did not write it"):
            files.check_out(place, sign)
    link.symlink_to(place)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert place.read_text() == "new"
    for wrong, got in ((tmp_path, "a folder"), (Path("/dev/null"), "no regular file")):
        with pytest.raises(ConfigError, match=f"cannot be replaced.*{got}"):
            files.check_out(wrong, "")
    with pytest.raises(ConfigError, match="cannot be written"):
        files.check_out(place / "below a file", "")


def test_json_has_no_nan():
    assert files.to_json({1: (float("nan"), float("-inf"), 0.5, "\u00e9")}) == '{"1": [null, null, 0.5, "\u00e9"]}'


def test_a_place_is_claimed_by_one(tmp_path: Path):
    with files.claimed(tmp_path / "new" / "a.json"):
        with pytest.raises(ConfigError, match="another run"), files.claimed(tmp_path / "new" / "a.json"):
            pass
        with files.claimed(tmp_path / "new" / "b.json"):
            pass
    with files.claimed(tmp_path / "new" / "a.json"):
        pass
    assert not list((tmp_path / "new").iterdir())


@checked_call
def _grow(depth: Annotated[Integer, Field(ge=1)], *, kind: Literal["dynamic", "static"] = "dynamic", anything=None):
    """Grow."""
    return depth, kind, anything


def test_arguments_are_checked_by_their_annotations():
    assert _grow(np.int64(3), kind="static", anything=_grow) == (3, "static", _grow)
    assert (_grow.__name__, _grow.__doc__, list(inspect.signature(_grow).parameters)) == (
        "_grow", "Grow.", ["depth", "kind", "anything"]
    )  # fmt: skip
    for args, options, words in (
        (("x",), {}, "_grow.depth has a wrong value.*'x'.*integer"),
        ((0,), {}, "_grow.depth.*greater than or equal to 1"),
        ((1,), {"kind": "dynamc"}, "_grow.kind.*did you mean 'dynamic'"),
        ((int,), {}, r"make one: int\(...\)"),
    ):
        with pytest.raises(ConfigError, match=words):
            _grow(*args, **options)
    with pytest.raises(ConfigError, match=r"_grow takes no 'dept'.*did you mean 'depth'"):
        _grow(dept=1)


def test_of_a_union_the_nearest_member_is_told():
    with pytest.raises(ConfigError, match=r"stop: 1 has a wrong value\. Got: 3"):
        _Inner(stop=["a", 3])


def test_any_value_can_be_shown():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert brief(deep) == "list, too large to show"
    assert brief(10**5000) == "int, too large to show"
    assert len(brief("x" * 1000)) == 80
    with pytest.raises(ConfigError, match="too large to show"):
        _grow(-(10**5000))
