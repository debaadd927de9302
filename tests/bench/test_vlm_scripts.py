"""The scripts about pictures, on tiny random models: their parts, and each of them whole."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from paceline.core.outputs import Round
from paceline.errors import ConfigError
from paceline.eval.suites import read_suite
from paceline.runner import load_model
from tests.vision.families import make, picture

SCRIPTS = Path(__file__).parents[2] / "bench"
NAMES = ("vlm_log", "vlm_common", "vlm_prices", "vlm_windows", "vlm_drafters", "vlm_exact")


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return {name: importlib.import_module(name) for name in NAMES}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("vlm") / "target"
    for part in make("llava"):
        part.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def mmspec(tmp_path) -> str:
    """Two photographs, one of a conversation of two turns."""
    (tmp_path / "images").mkdir()
    rows = []
    for number, turns in enumerate((["Where is it?"], ["What is it?", "And why?"])):
        picture(number).save(tmp_path / "images" / f"{number}.png")
        rows.append({"id": str(number), "image": f"{number}.png", "turns": turns, "topic": "vqa", "category": "x"})
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path)


def spent(prices, rows: int, drafted: int = 0, draft_s: float = 0.0, turn_s: float = 0.0, **more):
    source = "d" if drafted else ""
    one = prices.Spent(source, drafted, 0, 1, rows, 0, False, (draft_s, turn_s, 0.0))
    return replace(one, **more)


def test_prices_are_medians_of_what_rounds_took(scripts):
    prices = scripts["vlm_prices"]
    rounds = [spent(prices, 1, turn_s=t) for t in (0.010, 0.010, 0.200)]
    for window in (1, 2, 4):
        rounds += [spent(prices, 1 + window, window, 0.001 + 0.002 * window, 0.012)] * 3
    rounds.append(spent(prices, 5, 4, 0.009 + 0.05, 0.012, pending=100))
    rounds.append(spent(prices, 3, 2, 0.005, 0.0, joined=True))  # its pass is among those that read the prompt
    found = prices.prices_of(rounds, [0.1], [0.001])
    assert found.turn == {1: 0.010, 2: 0.012, 3: 0.012, 5: 0.012}
    assert found.draft["d"] == pytest.approx((0.001, 0.002, 0.0005))
    assert found.parts(spent(prices, 4, 3)) == pytest.approx((0.007, 0.012))
    assert found.parts(spent(prices, 4, 3, pending=100)) == pytest.approx((0.057, 0.012))
    assert found.parts(spent(prices, 4, 3, joined=True)) == pytest.approx((0.007, 0.003))
    assert prices.Prices.from_dict(json.loads(json.dumps(found.as_dict()))) == found


class Listener:
    """A policy that remembers what it was told."""

    def __init__(self):
        self.told = []

    def bind(self, drafter, pass_seconds):
        self.pass_seconds = pass_seconds

    def observe(self, seq, record):
        self.told.append((record.draft_s, record.verify_s + record.rest_s))


@pytest.mark.parametrize(("quiet", "seen"), [(True, (0.002, 0.012)), (False, (0.5, 0.9))])
def test_a_watched_policy_sees_prices_or_the_clock(scripts, quiet, seen):
    prices = scripts["vlm_prices"]
    inner = Listener()
    told = prices.Prices({1: 0.010, 2: 0.012}, {"d": (0.0, 0.002, 0.0)})
    watched = prices.Watched(inner, told if quiet else None)
    watched.bind(None, lambda rows: 7.0)
    watched._pending = 0
    watched.observe(None, Round("d", 1, 1, 2, num_rows=2, draft_s=0.5, verify_s=0.8, rest_s=0.1))
    assert inner.told[0] == pytest.approx(seen)
    assert inner.pass_seconds(2) == (0.012 if quiet else 7.0)
    assert watched.take()[0].seconds == (0.5, 0.8, 0.1)  # the clock's, in either case
    assert not watched.spent


def test_a_log_goes_on_where_it_was_left(scripts, tmp_path):
    Log, path = scripts["vlm_common"].Log, tmp_path / "runs.jsonl"
    first = Log(path, {"model": "m"})
    first.begin({"fact": [1, 2]})
    first.add({"id": "a"})
    with path.open("a") as file:
        file.write('{"id": "b", "half a li')
    again = Log(path, {"model": "m"})
    again.begin({"fact": "another"})
    assert (again.head["fact"], again.lines) == ([1, 2], [{"id": "a"}])
    again.add({"id": "c"})
    assert [line["id"] for line in Log(path, {"model": "m"}).lines] == ["a", "c"]
    with pytest.raises(ConfigError, match="another run"):
        Log(path, {"model": "other"})


def test_verdicts_compare_with_the_best_window(scripts):
    windows = scripts["vlm_windows"]
    speeds = {"none": 1.0, "1": 1.2, "4": 1.5, windows.DYNAMIC: 1.43, windows.COST_MODEL: 1.41, windows.QUIET: 0.9}
    rows = [
        {"drafter": "d", "class": "short", "window": side, "decode": {"value": v}, "whole": {"value": v},
         "decode_quiet": v, "whole_quiet": v}
        for side, v in speeds.items()
    ]  # fmt: skip
    found = {one["policy"]: one for one in windows.verdicts_of(rows, [1, 4]) if one["count"] == "decode_quiet"}
    assert {one["best_window"] for one in found.values()} == {"4"}
    assert [found[policy]["near_best"] for policy in list(speeds)[3:]] == [True, False, False]
    assert [found[policy]["not_slower"] for policy in list(speeds)[3:]] == [True, True, False]


def test_photographs_are_questions_of_their_topic(mmspec):
    one, two = read_suite("mmspec", mmspec)
    assert (one.category, one.topic, Path(one.image).name) == ("vqa", "x", "0.png")
    first, answer, second = two.messages(["A block."])
    assert [part["type"] for part in first["content"]] == ["image", "text"]
    assert (answer["content"], second["content"]) == ("A block.", "And why?")


@pytest.mark.usefixtures("unchecked_types")
def test_settings_hold_the_checkpoints_of_drafts_too(scripts, target, tmp_path):
    """A draft that was trained again has its old name: times of the two are not of one run."""
    common, draft = scripts["vlm_common"], tmp_path / "draft"
    for part in make("llava", 1):
        part.save_pretrained(draft)
    words = [f"own=model:{draft}", f"both={json.dumps(both(draft))}", "lookup"]
    args = common.arguments(None, [], 4).parse_args([target, "--drafters", *words])
    base = common.base_engine(args)
    told = common.settings_of(args, base, {})
    one = {f"model:{draft}": load_model(str(draft)).fingerprint}
    assert told["drafts"] == {"own": one, "both": one, "lookup": {}}
    assert told["fingerprint"] != one[f"model:{draft}"]
    weights = load_file(draft / "model.safetensors")
    save_file({name: value * 1.1 for name, value in weights.items()}, draft / "model.safetensors", {"format": "pt"})
    assert common.settings_of(args, base, {})["drafts"]["own"] != one


def both(draft):
    return {"method": "choose", "drafters": [{"method": "ngram"}, {"method": "draft_model", "model": str(draft)}]}


@pytest.mark.usefixtures("unchecked_types")
def test_exactness_as_a_whole(scripts, target, mmspec, tmp_path, capsys):
    out = tmp_path / "out"
    few = ["--tokens", "6", "--drafters", "self-int4", "--temperatures", "0", "--out", str(out)]
    assert scripts["vlm_exact"].main([target, *few, "--mmspec", mmspec, "--scenes", "1", "--reference", "1"]) == 0
    assert "identical: 4 of 4" in capsys.readouterr().out
    rows = json.loads((out / "result.json").read_text())["rows"]
    assert [(row["drafter"], row["answers"]) for row in rows] == [
        ("plain transformers", 1), ("self-int4", 3), ("self-int4", 1)]  # fmt: skip
    assert scripts["vlm_exact"].main([target, "--scenes", "0"]) == 2
    assert "left out" not in capsys.readouterr().out


@pytest.mark.usefixtures("unchecked_types")
def test_drafters_as_a_whole(scripts, target, tmp_path, capsys):
    out = tmp_path / "out"
    few = ["--tokens", "6", "--limit", "1", "--warm-up", "0", "--classes", "caption", "--window", "2"]
    assert scripts["vlm_drafters"].main([target, *few, "--drafters", "self-int4", "--out", str(out)]) == 0
    result = json.loads((out / "result.json").read_text())
    plain, draft = result["rows"]
    assert (plain["passes"], plain["acceptance"], plain["whole"]["value"]) == (5, None, 1)
    assert draft["passes"] <= 5
    assert draft["ms"]["vision"] > 0
    assert 0 < result["memory"]["self-int4"]["weights"] < result["memory"]["target"]["weights"]
    assert result["memory"]["self-int4"]["kv"] == 0
    lines = (out / "runs.jsonl").read_text()
    assert scripts["vlm_drafters"].main([target, *few, "--drafters", "self-int4", "--out", str(out)]) == 0
    assert (out / "runs.jsonl").read_text() == lines  # nothing was run again
    assert "self-int4" in capsys.readouterr().out


@pytest.mark.usefixtures("unchecked_types")
def test_windows_as_a_whole(scripts, target, tmp_path, capsys):
    out, windows = tmp_path / "out", scripts["vlm_windows"]
    few = ["--tokens", "5", "--limit", "1", "--warm-up", "0", "--price-questions", "1", "--classes", "short"]
    given = [target, *few, "--windows", "1", "2", "--drafters", "self-int4", "--out", str(out)]
    assert windows.main(given) == 0
    result = json.loads((out / "result.json").read_text())
    rows = {row["window"]: row for row in result["rows"]}
    assert list(rows) == ["none", "1", "2", windows.DYNAMIC, windows.COST_MODEL, windows.QUIET]
    assert rows["none"]["decode_quiet"] == 1  # plain decoding once more, at the same medians
    assert (rows["none"]["acceptance"], rows["none"]["tokens_a_pass"]) == (None, 1)
    assert all(row["identical"] == row["answers"] == 1 for row in rows.values())
    assert len(result["verdicts"]) == 3 * 4
    assert {file.name for file in out.glob("windows.*")} == {"windows.png", "windows.svg"}
    assert "within 5% of the best window in" in capsys.readouterr().out
