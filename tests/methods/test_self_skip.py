"""Self-drafts with skipped sub-layers: what they draft is what transformers says where those add nothing."""

from dataclasses import asdict, replace

import pytest
import torch
from transformers import PreTrainedModel

from paceline import LLM, Fixed, SamplingParams, SelfSkip
from paceline.config import parse
from paceline.errors import ConfigError, IncompatibleModels
from paceline.methods.self_skip import drafter as drafter_file
from paceline.methods.self_skip.skips import Skips, write_skips
from paceline.target import ModelRunner, native
from tests.helpers import REPEATING, assert_identical, loaded, on_torch, prompt, reading_apart, run, runner, sequence
from tests.methods.common import said_over
from tests.tiny import tiny_model

NATIVE = ["llama", "qwen2", "gemma3", "olmo2", "starcoder2", "phi3", "qwen3_moe", "deepseek_v3"]
SETS = [Skips((1,), ()), Skips((), (0,)), Skips((0,), (0, 1)), Skips((0, 1), (1,))]
TEXTS = [REPEATING, *(prompt(length, length) for length in (4, 20, 33))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
OUTPUTS = ("o_proj", "down_proj", "c_proj", "experts.down")


def drafts(on: ModelRunner, skips: Skips, depth: int = 3) -> list[list[int]]:
    """What is drafted after each text, and its root."""
    seqs = [sequence(on.loaded, ids, GREEDY) for ids in TEXTS]
    run(reading_apart(on), SelfSkip(skips.attention, skips.mlp), seqs, depth)
    return [[*seq.rounds[0].token_ids] for seq in seqs]


@torch.no_grad()
def without(model: PreTrainedModel, skips: Skips) -> PreTrainedModel:
    """The model with weights of zero where sub-layers end."""
    for path, weight in model.named_parameters():
        part = "attention" if "attn" in path else "mlp"
        if any(output in path for output in OUTPUTS) and int(path.split(".")[2]) in getattr(skips, part):
            weight.zero_()
    return model


def said(name: str, skips: Skips, ids: list[int], *limits: int) -> list[int]:
    """What transformers says after a text where sub-layers give zeros, with the columns of the whole model."""
    return said_over(tiny_model(name), without(tiny_model(name), skips), ids, *limits)


@pytest.mark.parametrize("skips", SETS)
@pytest.mark.parametrize("name", NATIVE)
def test_drafts_are_what_is_said_without_the_sublayers(name, skips):
    assert drafts(ModelRunner(loaded(name), len(TEXTS)), skips) == [said(name, skips, ids) for ids in TEXTS]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt_oss", "llama4"])  # the last two return scores, too
def test_drafts_in_torch(name):
    on = ModelRunner(on_torch(tiny_model(name)), len(TEXTS))
    assert not on.loaded.is_native
    assert drafts(on, SETS[2]) == [said(name, SETS[2], ids) for ids in TEXTS]


def without_a_place(monkeypatch):
    """The columns of the layer behind a skipped one."""
    held = native.NativeDecoder._cache_addresses

    def shifted(self, cache):
        arrays = held(self, cache)
        if any(type(module).__name__ == "Skipped" for module in self._model.modules()):
            arrays = tuple(type(array)(*reversed(array)) for array in arrays)
        return arrays

    monkeypatch.setattr(native.NativeDecoder, "_cache_addresses", shifted)


def nothing_skipped(monkeypatch):
    monkeypatch.setattr(drafter_file, "leave_out", lambda model, skips: None)


@pytest.mark.parametrize("count", [32, 50])
@pytest.mark.parametrize("target", [loaded, lambda: on_torch(tiny_model("llama"))])
def test_a_small_vocabulary(target, count):
    on = reading_apart(ModelRunner(target(), len(TEXTS)))
    seqs = [sequence(on.loaded, ids, GREEDY) for ids in TEXTS]
    run(on, SelfSkip((0,), vocabulary=count), seqs, 1)
    for seq, ids in zip(seqs, TEXTS, strict=True):
        assert [*seq.rounds[0].token_ids] == said("llama", Skips((0,)), ids, 1, count)


@pytest.mark.parametrize("fault", [without_a_place, nothing_skipped])
def test_faults_of_drafts_are_seen(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_drafts_are_what_is_said_without_the_sublayers("llama", SETS[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", [*NATIVE, "torch"])
def test_answers_are_those_of_the_target(name, temperature):
    target = on_torch(tiny_model("llama")) if name == "torch" else loaded(name)
    on = ModelRunner(target, 4) if name == "torch" else runner(target)
    for skips in SETS[:2]:
        asked = [([*REPEATING, 3 + k], SamplingParams(temperature, max_tokens=16)) for k in range(2)]
        seqs = assert_identical(on, SelfSkip(skips.attention, skips.mlp), asked)
        assert any(record.num_accepted for seq in seqs for record in seq.rounds)


def test_drafted_columns_that_stay_are_seen(monkeypatch):
    """A skipped attention layer writes no keys: a draft that is taken over unverified leaves those of other tokens."""
    forward = ModelRunner.forward

    def keeps(self, slots, tree, *args, **options):
        logits = forward(self, slots, tree, *args, **options)
        if tree.num_nodes > 1:  # verification: as if it had not written the keys of what is accepted
            for slot in slots:
                length = self.cache.lengths[slot]
                self.cache.keys[1][slot, :, length : length + tree.num_nodes] = 0
        return logits

    monkeypatch.setattr(ModelRunner, "forward", keeps)
    with pytest.raises(AssertionError):
        assert_identical(ModelRunner(loaded(), 4), SelfSkip((1,)), [(REPEATING, SamplingParams(1.0, max_tokens=24))])


def test_the_draft_takes_no_memory():
    drafter = SelfSkip(mlp=(1,))
    llm = LLM(tiny_model("llama"), drafter=drafter)
    models = drafter._runner.loaded.model, llm.loaded.model
    draft, target = ({id(tensor) for tensor in (*model.parameters(), *model.buffers())} for model in models)
    assert draft == target
    assert not any("Skipped" in type(module).__name__ for module in llm.loaded.model.modules())


def test_packed_targets(monkeypatch):
    for weights in ("int4", "int8", "q4_0"):
        llm = LLM(tiny_model("llama", hidden_size=64, intermediate_size=64), weights=weights)
        for t in (0.0, 1.0):
            params = SamplingParams(t, max_tokens=16, seed=1, ignore_eos=True)
            drafted = llm.using(drafter=SelfSkip((0,), (1,)), policy=Fixed(2)).generate([REPEATING], params)[0]
            assert drafted.token_ids == llm.generate([REPEATING], params)[0].token_ids
            assert any(record.num_drafted for record in drafted.rounds)


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4", "gemma4-k-is-v", "granitemoehybrid"])
def test_other_layers_are_refused(name):
    with pytest.raises(ConfigError, match=r"one attention and one MLP.*layer \d has.*self-int4"):
        LLM(loaded(name), drafter=SelfSkip(mlp=(0,)))


def test_wrong_sets_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"mlp names a layer that the target lacks.*0 to 1"):
        LLM(loaded(), drafter=SelfSkip(mlp=(0, 2)))
    with pytest.raises(ConfigError, match="attention names a layer twice"):
        SelfSkip((1, 1))
    with pytest.raises(ConfigError, match="nothing is skipped"):
        SelfSkip((), ())
    with pytest.raises(ConfigError, match="given twice"):
        SelfSkip((1,), fraction=0.5)
    with pytest.raises(ConfigError, match=r"more tokens than its target.*at most 97"):
        LLM(loaded(), drafter=SelfSkip(vocabulary=98))
    with pytest.raises(ConfigError, match="fraction"):
        parse("self-skip:1.5").drafter.build()
    with pytest.raises(ConfigError, match=r"only native passes.*name them"):
        LLM(on_torch(tiny_model("llama")), drafter=SelfSkip())
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a file of the kind paceline-skips"):
        LLM(loaded(), drafter=SelfSkip(file=tmp_path / "other.json"))


def test_a_set_of_another_model_is_refused(tmp_path):
    file = tmp_path / "skips.json"
    write_skips(file, Skips((1,), (0,)), loaded())
    drafter = parse(f"self-skip:{file}").drafter.build()
    LLM(loaded(), drafter=drafter)
    assert drafter.skips == Skips((1,), (0,))
    for other in (loaded(seed=1), replace(loaded(), fingerprint="0" * 64)):
        with pytest.raises(IncompatibleModels, match="chosen for another model"):
            LLM(other, drafter=SelfSkip(file=file))


def test_names():
    assert [parse(word).name for word in ("self-skip", "self-skip:0.4")] == ["self-skip", "self-skip:0.4"]
    spec = parse({"method": "self_skip", "attention": [1], "mlp": [0, 1]}).drafter
    assert asdict(spec.build().given) == {"attention": (1,), "mlp": (0, 1), "vocabulary": None}
    assert parse({"method": "self_skip", "skip": 0.25}).drafter.build().fraction == 0.25
