"""`paceline tune` as a user meets it, and `--profile` in the other commands."""

import json

import pytest

from paceline.errors import IncompatibleModels
from paceline.measure.run import BenchRun
from paceline.methods import SelfQuantized
from paceline.tuned import load_tuned, save_tuned
from tests.cli.helpers import GENERATE, answer, paceline, refusal, save, saved
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("tune"), tiny_model("llama", max_position_embeddings=512))


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> str:
    return save(tmp_path_factory.mktemp("another"), tiny_model("llama", seed=1, max_position_embeddings=512))


@pytest.fixture
def tune(model, tmp_path):
    """The arguments of a short run that keeps its result in `tmp_path / "t.json"`."""
    file = tmp_path / "p.jsonl"
    rows = [("one", "w5 w9 w5 w9"), ("two", "w8 w8")]
    file.write_text("".join(json.dumps({"prompt": p, "category": c}) + "\n" for c, p in rows))
    return ("tune", model, "--prompts", str(file), "--max-tokens", "16", "--out", str(tmp_path / "t.json"))


def test_json_and_file(tune, model, tmp_path):
    got = answer(*tune, "-d", "lookup", "-d", f"model:{model}")
    assert [one["drafter"] for one in got["candidates"]] == ["lookup", f"model:{model}", f"lookup+model:{model}"]
    assert all(one["categories"].keys() == {"one", "two"} for one in got["candidates"])
    assert [one["engine"] for one in got["flags"]] == ["vLLM", "SGLang", "llama.cpp"]
    assert (got["prompts"]["chosen"], len(got["prompts"]["sha256"])) == (2, 64)
    assert got["words"][0].startswith("Choice for ")
    kept = load_tuned(tmp_path / "t.json")
    assert kept.config.as_dict() == got["config"]
    assert json.loads(json.dumps(kept.profile.to_dict())) == got["profile"]
    assert (kept.profile.dtype, kept.profile.threads >= 1) == ("float32", True)
    assert kept.profile.pass_seconds
    assert kept.provenance["torch"]
    for run, one in zip(saved(got, tmp_path / "json").runs, got["candidates"], strict=True):
        assert (run.drafter, run.speedup, run.tokens_per_s) == (
            one["drafter"],
            one["overall"]["value"],
            one["tokens_per_s"],
        )
        assert run.categories["one"].speedup == one["categories"]["one"]["value"]


def test_for_people(tune, tmp_path):
    result = paceline(*tune, "-d", "lookup")
    assert result.exit_code == 0, result.output
    for told in ("Drafter", "Choice for", "A draft model would pay", "vLLM", "SGLang", "llama.cpp", "--profile"):
        assert told in result.stdout


def test_a_candidate_that_drafted_nothing_is_reported(tune):
    told = paceline(*tune, "-d", "prediction")
    assert "prediction: nothing was drafted: the drafter found nothing to propose" in told.stdout
    assert "2 prompts, each answered plainly and with prediction, up to 16 tokens" in told.stderr


def test_built_in_prompts_are_said_not_to_be_the_users(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    got = answer("tune", model, "-d", "lookup", "--num-prompts", "1", "--max-tokens", "4")
    assert got["prompts"]["file"] is None
    assert "built-in prompts" in got["words"][1]
    assert got["file"].startswith("paceline-")


def test_a_default_that_the_model_cannot_have_is_left_out(tune, tmp_path, monkeypatch):
    def refuse(*_):
        raise IncompatibleModels("no layers in INT4 here")

    monkeypatch.setattr(SelfQuantized, "bind", refuse)
    result = paceline(*tune)
    assert "without self-int4: no layers in INT4 here" in result.stderr, result.output
    tried = [one["drafter"] for one in load_tuned(tmp_path / "t.json").measured["candidates"]]
    assert tried == ["lookup", "suffix", "recycling", "suffix+recycling"]
    assert paceline(*tune, "-d", "self-int4").exit_code == 1


def test_interrupted(tune, tmp_path, monkeypatch):
    measure = BenchRun.measure

    def interrupted(run, questions, _):
        def at_first(what, done, total):
            if what == "measuring":
                raise KeyboardInterrupt

        measure(run, questions, at_first)

    monkeypatch.setattr(BenchRun, "measure", interrupted)
    result = paceline(*tune, "-d", "lookup")
    assert result.exit_code == 130
    assert "Nothing was written" in result.stderr
    assert not (tmp_path / "t.json").exists()


def test_refusals(tune, model, tmp_path):
    assert "there is no file" in refusal("tune", model, "--prompts", "absent.txt")
    (tmp_path / "empty.txt").touch()
    assert "has no prompts" in refusal("tune", model, "--prompts", str(tmp_path / "empty.txt"))
    assert "cannot be written" in refusal(*tune, "--out", str(tmp_path / "p.jsonl" / "t.json"))
    assert "cannot be replaced" in refusal(*tune, "--out", "/dev/null")
    assert "did not write" in refusal(*tune, "--out", str(tmp_path / "p.jsonl"))
    assert "no prompt fits" in refusal(*tune, "--max-model-len", "2")
    assert "twice" in refusal(*tune, "-d", "lookup", "-d", "lookup")


@pytest.fixture
def profile(tune, tmp_path) -> str:
    """A file whose choice is lookup, whatever this machine says."""
    answer(*tune, "-d", "lookup")
    made = load_tuned(tmp_path / "t.json")
    whole = json.loads((tmp_path / "t.json").read_text())
    config = {"method": "ngram", "policy": "cost_model", "num_speculative_tokens": 16, "prompt_lookup_max": 2}
    (tmp_path / "t.json").write_text(json.dumps({**whole, "config": config}))
    assert made.profile.model
    return str(tmp_path / "t.json")


def test_commands_take_the_profile(profile, model, tmp_path):
    plain = answer("generate", model, *GENERATE)
    got = answer("generate", model, *GENERATE, "--profile", profile)
    assert got["speculative_config"]["prompt_lookup_max"] == 2
    assert got["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"]
    fixed = answer("generate", model, *GENERATE, "--profile", profile, "-k", "3")["speculative_config"]
    assert (fixed["policy"], fixed["num_speculative_tokens"], fixed["prompt_lookup_max"]) == ("fixed", 3, 2)
    own = answer("generate", model, *GENERATE, "--profile", profile, "-d", "none")["speculative_config"]
    assert own["method"] == "none"
    demo = answer("demo", model, "--profile", profile, "--num-prompts", "1", "--max-tokens", "4")
    assert demo["speculative_config"]["prompt_lookup_max"] == 2
    check = answer(
        "check", model, "--profile", profile, "--num-prompts", "1", "--max-tokens", "4", "--no-distribution-test"
    )
    assert check["passed"]
    assert check["speculative_config"]["prompt_lookup_max"] == 2
    folder = ("--out", str(tmp_path / "r"))
    bench = answer("bench", model, "--profile", profile, "--num-prompts", "1", "--max-tokens", "4", *folder)
    assert bench["speculative_configs"]["lookup"]["prompt_lookup_max"] == 2


def test_a_profile_of_another_model_is_refused(profile, model, other):
    assert "another model" in refusal("generate", other, *GENERATE, "--profile", profile)
    assert "float32 there, bfloat16 here" in refusal(
        "generate", model, *GENERATE, "--profile", profile, "--dtype", "bfloat16"
    )
    assert "is not a file of" in refusal("generate", model, *GENERATE, "--profile", f"{model}/config.json")


def test_other_threads_are_warned_of(profile, model):
    made = load_tuned(profile)
    raised = {**made.profile.to_dict(), "threads": 77}
    save_tuned(profile, type(made)(made.config, type(made.profile).from_dict(raised), {}, made.words))
    result = paceline("generate", model, *GENERATE, "--profile", profile)
    assert result.exit_code == 0, result.output
    assert "measured with 77 threads" in " ".join(result.stderr.split())
