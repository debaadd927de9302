"""Calibrating: the counts are those of two plain runs; foreign, changed and other models' files are refused."""

import json
from dataclasses import replace

import pytest

from paceline import LLM, Ratio, SamplingParams
from paceline.cascade import Calibration, Signal, calibrate, load_calibration
from paceline.cascade.bound import Point, last_that_holds
from paceline.cascade.calibration import THRESHOLDS, ModelId, confidences, digest, sampling_options
from paceline.cascade.measure import Journal, Observed, check_sample, curve_of, draw
from paceline.core.request import TokenLogprob
from paceline.errors import ConfigError, IncompatibleModels
from paceline.kernels import load as load_kernels
from paceline.policy.profile import Profile
from paceline.tuned import check_profile
from tests.cascade.common import LIMIT, PARAMS, PROMPTS, large, made_up, small
from tests.tiny import tiny_model

COUNT, MOST = 60, 0.5


def run(**options) -> Calibration:
    given = {"max_disagreement": MOST, "short_limit": LIMIT, "params": PARAMS, **options}
    return calibrate(small(), large(), PROMPTS[:COUNT], **given)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_counts_are_those_of_two_plain_runs(temperature):
    params = replace(PARAMS, temperature=temperature, seed=50)
    made = run(params=params, signals=tuple(Signal))
    seeded = [replace(params, seed=50 + i, logprobs=2) for i in range(COUNT)]
    theirs = large().plain().generate(PROMPTS[:COUNT], seeded)
    ours = small().plain().generate(PROMPTS[:COUNT], seeded)
    rows = [
        (confidences(one.logprobs), one.token_ids == two.token_ids)
        for one, two in zip(ours, theirs, strict=True)
        if len(one.token_ids) <= LIMIT and one.finish_reason == "stop"
    ]
    assert (made.count, made.ended) == (COUNT, len(rows))
    assert 0 < sum(agrees for _, agrees in rows) < len(rows)
    for signal in Signal:
        for point in made.curves[signal]:
            sure = [agrees for confidence, agrees in rows if confidence[signal] >= point.threshold]
            assert (point.covered, point.differ) == (len(sure), sure.count(False))


def test_kinds_of_confidence():
    logprobs = [TokenLogprob(3, -0.1, {3: -0.1, 4: -2.5}), TokenLogprob(5, -0.7, {5: -0.7, 6: -0.8})]
    got = confidences(logprobs)
    assert got[Signal.MIN_PROB] == pytest.approx(2.718281828**-0.7)
    assert got[Signal.MEAN_PROB] == pytest.approx(2.718281828**-0.4)
    assert got[Signal.MARGIN] == pytest.approx(2.718281828**-0.7 - 2.718281828**-0.8)
    assert confidences([TokenLogprob(9, -3.0, {3: -0.1, 9: -3.0})])[Signal.MARGIN] == 0.0, "a sampled token that trails"
    assert list(THRESHOLDS) == sorted(set(THRESHOLDS), reverse=True)
    assert (THRESHOLDS[0] < 1.0, THRESHOLDS[-1]) == (True, 0.0)


def test_the_threshold_is_the_lowest_that_holds():
    made = run()
    choice = made.choose()
    points = made.curves[Signal.MIN_PROB]
    assert last_that_holds(points, COUNT, MOST, 0.95).threshold == choice.threshold
    assert choice.coverage == choice.point.covered / COUNT
    assert choice.wrong_alone[0] <= choice.wrong_alone[1] <= 1


def test_several_signals_are_tested_more_strictly():
    """At 0 of 60 a promise of 5% holds at the full level (59 needed), not at a third of it (80 needed)."""
    one = made_up(0.5, count=60, ended=60, max_disagreement=0.05, curves={Signal.MIN_PROB: (Point(0.5, 50, 0),)})
    assert one.choose().threshold == 0.5
    three = replace(one, curves={signal: (Point(0.5, 50, 0),) for signal in Signal})
    with pytest.raises(ConfigError, match="at least 80 prompts"):
        three.choose()


def test_a_small_sample_is_refused_with_the_number_that_is_missing():
    with pytest.raises(ConfigError, match="at least 239 more prompts"):
        check_sample(60, 0.01, 0.95)
    check_sample(299, 0.01, 0.95)
    with pytest.raises(ConfigError, match="at least 239 more prompts"):
        run(max_disagreement=0.01)
    wrong = made_up(0.5, count=299, curves={Signal.MIN_PROB: (Point(0.9, 9, 2), Point(0.5, 50, 3))})
    with pytest.raises(ConfigError, match=r"of which 2 differ even at the strictest.*at least 329 more"):
        wrong.choose()


def test_file_round_trip(tmp_path):
    made, file = run(signals=(Signal.MIN_PROB, Signal.MARGIN), prompts_info={"file": "p.jsonl"}), tmp_path / "c.json"
    made.save(file)
    again = load_calibration(file)
    assert again == made
    assert again.choose() == made.choose()
    content = json.loads(file.read_text())
    assert {"threshold", "signal", "curves", "provenance", "sha256", "prompts", "small", "large"} <= content.keys()
    draw(made, tmp_path / "c.svg")
    draw(made, tmp_path / "c.png")
    assert (tmp_path / "c.svg").read_text().startswith("<?xml")
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"


def test_foreign_and_damaged_files_are_refused(tmp_path):
    file = tmp_path / "c.json"
    made_up(0.4).save(file)
    good = json.loads(file.read_text())

    def refused(content: object, match: str) -> None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ConfigError, match=match):
            load_calibration(file)

    refused("{", "not valid JSON")
    refused("[" * 1000, "not valid JSON")
    refused('"\\ud800"', "not valid JSON")
    refused([1], "not a file of the kind paceline-cascade")
    refused({"kind": "paceline-tune"}, "not a file of the kind paceline-cascade")
    refused({**good, "version": 99}, "another version")
    refused({**good, "threshold": 0.1}, "changed or damaged")
    refused({**good, "curves": {}}, "changed or damaged")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_calibration(tmp_path / "none.json")


def resigned(content: dict) -> dict:
    body = {key: value for key, value in content.items() if key != "sha256"}
    return {**body, "sha256": digest(body)}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"curves": {"guess": [[0.5, 9, 0]]}}, "curves has a wrong value.*'guess'"),
        ({"curves": {"min_prob": [[0.5, 9]]}}, "curves"),
        ({"small": {"name": "x"}}, "there is no 'small.fingerprint'"),
        ({"prompts": {"count": 0, "ended": 0}}, "count has a wrong value"),
        ({"confidence": 7.0}, "confidence has a wrong value"),
        ({"more": 1}, "unknown key 'more'"),
    ],
)
def test_files_that_do_not_hold_together_are_refused(tmp_path, changes, match):
    file = tmp_path / "c.json"
    made_up(0.4).save(file)
    file.write_text(json.dumps(resigned({**json.loads(file.read_text()), **changes})))
    with pytest.raises(ConfigError, match=match):
        load_calibration(file)


def test_other_models_are_told_apart():
    ours = ModelId.of(small())
    made = made_up(0.4)
    made.check_models(ours, ModelId.of(large()))
    rounded = LLM(tiny_model("llama", intermediate_size=64), weights="int8", numerics="fast")
    plain = LLM(tiny_model("llama", intermediate_size=64), numerics="fast")
    assert ModelId.of(rounded).fingerprint == ModelId.of(plain).fingerprint
    assert ModelId.of(rounded).weights.startswith("q8_0 ")
    assert "weights" in ModelId.of(plain).difference(ModelId.of(rounded))
    for change in ({"dtype": "bfloat16"}, {"weights": "int4 abc"}, {"vision": "abc"}, {"fingerprint": "abc"}):
        with pytest.raises(IncompatibleModels, match=next(iter(change))):
            made.check_models(replace(ours, **change), ModelId.of(large()))
    assert ours.difference(replace(ours, name="moved")) is None


@pytest.mark.skipif(load_kernels().library is None, reason="blocks need native kernels")
def test_inputs_in_more_bits_make_another_model():
    rounded = LLM(tiny_model("llama", intermediate_size=64), weights="int8")
    wide = LLM(rounded.loaded, activations="int16")
    assert "x int16" in ModelId.of(rounded).difference(ModelId.of(wide))
    with pytest.raises(ConfigError, match=r"llama-int8 there, llama-int8-int16 here"):
        check_profile(Profile(model=rounded.loaded.name), wide.loaded)
    again = LLM(wide.loaded, activations="int8")
    assert ModelId.of(again) == ModelId.of(rounded)


def test_an_interrupted_run_goes_on(tmp_path):
    out, asked = tmp_path / "c.json", list[int]()

    def stop(stage: str, done: int, total: int) -> None:
        asked.append(done)
        if done == 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out=out, progress=stop)
    (journal,) = tmp_path.iterdir()
    journal.write_text(journal.read_text() + '[{"min_prob": 0.5')  # cut in the middle of a line
    asked.clear()
    made = run(out=out, progress=lambda stage, done, total: asked.append(done))
    assert asked[0] == 25
    assert asked[-1] == COUNT
    whole = run()
    assert (made.curves, made.ended) == (whole.curves, whole.ended)
    assert [one.name for one in tmp_path.iterdir()] == ["c.json"]
    assert load_calibration(out).curves == made.curves


def test_what_would_count_answers_as_cut_is_refused():
    with pytest.raises(ConfigError, match="max_tokens would cut"):
        run(params=replace(PARAMS, max_tokens=LIMIT - 1))
    assert run(params=replace(PARAMS, max_tokens=LIMIT)).small_context == small().runner.max_length
    loose = LLM(small().loaded, verifier=Ratio(), numerics="fast", allow_lossy=True)
    with pytest.raises(ConfigError, match="the small model needs an exact verifier"):
        calibrate(loose, large(), PROMPTS[:COUNT], max_disagreement=MOST, short_limit=LIMIT, params=PARAMS)


def test_a_journal_is_of_its_prompts_and_damage_is_told(tmp_path):
    head = {"sha256": "a"}
    journal = Journal(tmp_path / "c.json", head)
    journal.add(Observed(None, None))
    journal.add(Observed({signal: 0.5 for signal in Signal}, True))
    assert Journal(tmp_path / "c.json", head).rows == journal.rows
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    for line in (b"{", b"[3]", b"\xff", b"[null, true]", b'[{"min_prob": 0.5}, true]', b'[{"guess": 0.5}, true]'):
        file.write_bytes(good + line + b"\n")
        with pytest.raises(ConfigError, match="line 3"):
            Journal(tmp_path / "c.json", head)


def test_other_prompts_do_not_go_on_from_a_journal(tmp_path):
    def stop(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    for prompts in (PROMPTS[:COUNT], PROMPTS[COUNT : 2 * COUNT]):
        with pytest.raises(KeyboardInterrupt):
            calibrate(small(), large(), prompts, max_disagreement=MOST, short_limit=LIMIT, params=PARAMS,
                      out=tmp_path / "c.json", progress=stop)  # fmt: skip
    assert len(list(tmp_path.iterdir())) == 2


def test_what_decides_the_law():
    assert sampling_options(PARAMS) == {"logit_bias": {"2": 4.0}}
    assert sampling_options(replace(PARAMS, seed=3, max_tokens=7, n=1, logprobs=2)) == sampling_options(PARAMS)
    assert sampling_options(replace(PARAMS, stop="x")) != sampling_options(PARAMS)
    chosen = sampling_options(SamplingParams(structured_outputs={"choice": ["a", "b"]}))
    assert chosen == json.loads(json.dumps(chosen)), "a loaded calibration's are compared with a request's"


def test_answers_that_did_not_end_are_never_counted():
    sure = {signal: 0.9 for signal in Signal}
    rows = [Observed(None, None), Observed(sure, False), Observed(sure, True)]
    assert curve_of(rows, Signal.MARGIN, (0.95, 0.9)) == (Point(0.95, 0, 0), Point(0.9, 2, 1))
