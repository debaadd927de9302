"""`model.generate` of transformers with our drafts, side by side with its own, in float32."""

import copy
import functools
import gc
import logging
import threading
import weakref

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from paceline import LLM, DraftModel, Fixed, PromptLookup, SamplingParams, hf_model
from paceline.engine.scheduler import run
from paceline.errors import ConfigError
from paceline.integrations import custom_generate
from paceline.integrations.custom_generate import generate
from paceline.target import wrap_model
from tests.helpers import REPEATING, tokenizer
from tests.methods.test_vocabularies import twin_models
from tests.methods.tokenizers_made import byte_level, permuted
from tests.tiny import tiny_model
from tests.vision.families import make

IDS = torch.tensor([REPEATING])
PADDED = {
    "input_ids": torch.tensor([[0, 0, 5, 9, 31, 7, 5, 9], REPEATING[:8]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8]),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = tiny_model("llama")
    made.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0, bos_token_id=1)
    return made


def favour(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores = scores.clone()
    for row, text in enumerate(ids):
        scores[row, int(text.sum()) % 7 :: 7] += 3
    return scores


def at_20(ids: torch.Tensor, scores: torch.Tensor | None, **_: object) -> torch.Tensor:
    return torch.tensor([ids.shape[1] >= 20])


OPTIONS = {
    "greedy": {"max_new_tokens": 24},
    "length of all": {"max_length": 30},
    "penalty": {"max_new_tokens": 24, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "least length": {"max_new_tokens": 24, "min_new_tokens": 20, "eos_token_id": list(range(3, 60))},
    "an end": {"max_new_tokens": 24, "eos_token_id": list(range(3, 20))},
    "processor": {"max_new_tokens": 24, "logits_processor": LogitsProcessorList([favour])},
    "criterion": {"max_new_tokens": 24, "stopping_criteria": StoppingCriteriaList([at_20])},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_answers_are_those_of_transformers(model, name):
    drafter = PromptLookup(2, min_ngram=1) if name == "greedy" else "lookup"
    for inputs in ({"input_ids": IDS}, PADDED):
        want = model.generate(**inputs, **OPTIONS[name], do_sample=False)
        got = model.generate(**inputs, **OPTIONS[name], do_sample=False, custom_generate=generate, drafter=drafter)
        assert got.tolist() == want.tolist()
        assert generate(model, **inputs, **OPTIONS[name], do_sample=False, drafter=drafter).tolist() == want.tolist()


class Watched(PromptLookup):
    """Notes how many rows each round had."""

    def __init__(self) -> None:
        super().__init__(2, min_ngram=1)
        self.rows = list[int]()

    def observe(self, seqs, draft, logits, walks):
        self.rows.append(len(seqs))
        super().observe(seqs, draft, logits, walks)


def test_rows_are_answered_side_by_side_and_end_alone(model):
    """Ten rows have eight slots; a seed of torch gives each row the tokens that it has in any drafting."""
    ids = torch.stack([IDS[0].roll(row) for row in range(10)])
    options = {**OPTIONS["criterion"], "repetition_penalty": 1.2, "eos_token_id": list(range(3, 12))}
    want = model.generate(ids, **options, do_sample=False)
    drafter = Watched()
    got = generate(model, ids, **options, do_sample=False, drafter=drafter)
    assert got.tolist() == want.tolist()
    assert len({int((row != 0).sum()) for row in got}) > 1, "all rows end alike"
    assert max(drafter.rows) == 8
    drawn = []
    for name in ("lookup", "recycling", Watched()):
        torch.manual_seed(4)
        drawn.append(generate(model, ids, max_new_tokens=12, do_sample=True, drafter=name).tolist())
    assert drawn[0] == drawn[1] == drawn[2]


def test_assistants_and_lookup_as_transformers_names_them(model):
    want = model.generate(IDS, max_new_tokens=20, do_sample=False).tolist()
    draft = tiny_model("llama", seed=1, num_hidden_layers=1)
    for options in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}, {}):
        assert generate(model, IDS, max_new_tokens=20, do_sample=False, **options).tolist() == want
    whole = generate(model, IDS, max_new_tokens=20, return_dict_in_generate=True)
    assert whole.sequences.tolist() == want
    assert "drafter" not in model.generation_config.to_dict()


@pytest.mark.parametrize("name", ["qwen3_5", "jamba"])
def test_models_with_recurrent_layers(name):
    model, draft = tiny_model(name), tiny_model("llama", seed=1)
    want = model.generate(IDS, max_new_tokens=20, do_sample=False).tolist()
    for options in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}, {}):
        assert generate(model, IDS, max_new_tokens=20, do_sample=False, **options).tolist() == want
    assert model._is_stateful


def test_changed_weights_are_seen():
    model = tiny_model("llama", seed=3)
    before = generate(model, IDS, max_new_tokens=12).tolist()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    after = generate(model, IDS, max_new_tokens=12).tolist()
    assert after == model.generate(IDS, max_new_tokens=12).tolist() != before


class Collects(BaseStreamer):
    """Takes what transformers puts: the prompt, then one token after another."""

    def __init__(self):
        self.got, self.ends = list[list[int]](), 0

    def put(self, value):
        self.got.append(value[0].tolist() if value.dim() == 2 else [value.item()])

    def end(self):
        self.ends += 1


def test_streamers_get_what_transformers_gives_them(model):
    plain, direct, partial = Collects(), Collects(), Collects()
    options = {"max_new_tokens": 12, "do_sample": False}
    model.generate(IDS, streamer=plain, **options)
    generate(model, IDS, streamer=direct, **options)
    model.generate(IDS, custom_generate=functools.partial(generate, streamer=partial), **options)
    assert direct.got == partial.got == plain.got
    assert direct.ends == partial.ends == plain.ends == 1


def streamed(of: PreTrainedModel, **options) -> str:
    """A thread generates, and its text is read from a queue; what the thread raises is left aside."""
    streamer = TextIteratorStreamer(tokenizer(), timeout=30, skip_prompt=True)
    thread = threading.Thread(target=of.generate, args=(IDS,), kwargs={"streamer": streamer, **options})
    thread.start()
    text = "".join(streamer)
    thread.join()
    return text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_streamers_of_threads_end(model):
    options = {"max_new_tokens": 12, "do_sample": False}
    assert streamed(hf_model(model), **options) == streamed(model, **options) != ""
    assert streamed(hf_model(model), num_beams=2) == ""
    assert streamed(model, custom_generate=generate) == ""


def test_sampling_follows_the_seed_of_torch(model):
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(generate(model, IDS, max_new_tokens=16, do_sample=True, temperature=0.9, top_k=20).tolist())
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"output_scores": True, "return_dict_in_generate": True}, "logprobs"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "own generate"),
        ({"attention_mask": torch.tensor([[1] * 12 + [0]])}, "padding_side"),
    ],
)
def test_what_drafts_cannot_follow(model, options, words):
    with pytest.raises(ConfigError, match=words):
        model.generate(IDS, max_new_tokens=4, custom_generate=generate, **options)
    with pytest.raises(ConfigError, match="one row"):
        generate(model, **PADDED, max_new_tokens=4, streamer=Collects())
    with pytest.raises(ConfigError, match="differ in shape"):
        generate(model, IDS, max_new_tokens=4, attention_mask=torch.ones(1, 20).index_fill_(1, torch.tensor([0]), 0))


@pytest.mark.parametrize("name", ["streamer", "assistant_model", "tokenizer", "assistant_tokenizer", "stop_strings"])
def test_what_transformers_does_not_pass_on_is_refused(model, name):
    values = {"streamer": Collects(), "assistant_model": model, "stop_strings": "a"}
    with pytest.raises(ConfigError, match=f"not pass {name}.*hf_model"):
        model.generate(IDS, max_new_tokens=4, custom_generate=generate, **{name: values.get(name, tokenizer())})


def test_stop_strings_of_the_call_and_of_configs(model):
    words, options = tokenizer(), {"max_new_tokens": 20, "do_sample": False}
    free = words.decode(model.generate(IDS, **options)[0, IDS.shape[1] :])
    want = model.generate(IDS, **options, stop_strings=[free[6:8]], tokenizer=words).tolist()
    config = GenerationConfig(stop_strings=free[6:8], **options)
    assert generate(model, IDS, **options, stop_strings=[free[6:8]], tokenizer=words).tolist() == want
    assert hf_model(model, tokenizer=words).generate(IDS, config).tolist() == want
    own = copy.copy(model)
    own.generation_config = GenerationConfig(stop_strings=free[6:8], pad_token_id=0, eos_token_id=2)
    assert hf_model(own).generate(IDS, **options, tokenizer=words).tolist() == want
    with pytest.raises(ConfigError, match="tokenizer"):
        hf_model(own).generate(IDS, **options)


def test_hf_model_is_the_model_with_another_generate(model):
    fast = hf_model(model, drafter="recycling", tokenizer=tokenizer())
    assert isinstance(fast, type(model))
    assert fast.lm_head is model.lm_head
    assert "generate" not in vars(model)
    ask = pipeline("text-generation", fast, tokenizer=tokenizer())
    plain = pipeline("text-generation", model, tokenizer=tokenizer())
    options = {"max_new_tokens": 8, "do_sample": False, "stop_sequence": "a"}
    assert ask("abcabcab", **options) == plain("abcabcab", **options)
    assert custom_generate._engines[fast][1].drafters == ("recycling",)
    assert (
        copy.deepcopy(fast).generate(IDS, max_new_tokens=4).tolist() == model.generate(IDS, max_new_tokens=4).tolist()
    )
    with pytest.raises(ConfigError, match="model"):
        hf_model("smollm2-135m")


def test_assistants_with_another_tokenizer_draft_as_with_the_llm(monkeypatch):
    model, draft = twin_models()
    words, theirs = byte_level(), permuted()
    llm = LLM(model, drafter=DraftModel(wrap_model(draft, theirs)), policy=Fixed(4), tokenizer=words)
    want = llm.generate([REPEATING], SamplingParams(max_tokens=24, ignore_eos=True))[0]
    seqs, options = [], {"max_new_tokens": 24, "assistant_model": draft, "num_assistant_tokens": 4}
    record = lambda decoder, these: seqs.extend(one.seqs[0] for one in these) or run(decoder, these)  # noqa: E731
    monkeypatch.setattr(custom_generate, "run", record)
    got = hf_model(model, tokenizer=words).generate(IDS, assistant_tokenizer=theirs, eos_token_id=None, **options)
    assert got[0, IDS.shape[1] :].tolist() == want.token_ids
    counts = [[(one.num_drafted, one.num_accepted) for one in rounds] for rounds in (seqs[0].rounds, want.rounds)]
    assert counts[0] == counts[1]
    assert sum(accepted for _, accepted in counts[0]) > 10
    with pytest.raises(ConfigError, match="beside tokenizer"):
        hf_model(model).generate(IDS, assistant_tokenizer=theirs, **options)
    with pytest.raises(ConfigError, match="both say how to draft"):
        hf_model(model, drafter="lookup").generate(IDS, **options)


@pytest.mark.parametrize("options", [{"num_assistant_tokens": 3}, {"prompt_lookup_num_tokens": 3}])
def test_how_much_is_drafted(model, options):
    fast = hf_model(model)
    fast.generate(IDS, max_new_tokens=20, max_matching_ngram_size=4, **options)
    decoder = custom_generate._engines[fast][1].decoder
    assert decoder.policy._depth == 3
    assert decoder.drafter.max_ngram == 4 or "num_assistant_tokens" in options


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_vision_language_models_answer_text_and_refuse_images(family):
    model, processor = make(family)
    options = {**processor(text=["abc abc abc"], return_tensors="pt"), "max_new_tokens": 6, "do_sample": False}
    assert hf_model(model).generate(**options).tolist() == model.generate(**options).tolist()
    kinds = {name: torch.ones_like(value) for name, value in options.items() if "type_ids" in str(name)}
    with pytest.raises(ConfigError, match="type_ids"):
        hf_model(model).generate(**{**options, **kinds})
    with pytest.raises(ConfigError, match="pixel_values"):
        hf_model(model).generate(**options, pixel_values=torch.zeros(1, 3, 32, 32))


def test_the_config_of_an_assistant_counts(model):
    fast, draft = hf_model(model), tiny_model("llama", seed=1, num_hidden_layers=1)
    draft.generation_config.num_assistant_tokens = 3
    fast.generate(IDS, max_new_tokens=8, assistant_model=draft)
    assert custom_generate._engines[fast][1].decoder.policy._depth == 3
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    with pytest.raises(ConfigError, match="num_assistant_tokens_schedule"):
        fast.generate(IDS, max_new_tokens=8, assistant_model=draft)


def test_several_answers_and_dicts(model):
    fast = hf_model(model)
    many = fast.generate(IDS, max_new_tokens=8, do_sample=True, num_return_sequences=3)
    assert len(many) == len({str(row.tolist()) for row in many}) == 3
    assert fast.generate(IDS, max_new_tokens=8, return_dict_in_generate=True).keys() == {"sequences"}


def test_watermarks_that_remember_the_text_are_of_each_row(model):
    mark = SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3)
    options = {**PADDED, "max_new_tokens": 20, "do_sample": False, "watermarking_config": mark}
    assert hf_model(model).generate(**options).tolist() == model.generate(**options).tolist()


def test_rows_are_padded_as_in_transformers_or_refused(model):
    """Without a padding token, transformers takes the first end of text; without both, rows go on together."""
    bare, ends = copy.copy(model), list(range(3, 20))
    bare.generation_config = GenerationConfig()
    options = {**PADDED, "max_new_tokens": 24, "do_sample": False}
    want = bare.generate(**options, eos_token_id=ends)
    assert int((want == 3).sum()) > 2
    assert hf_model(bare).generate(**options, eos_token_id=ends).tolist() == want.tolist()
    assert hf_model(bare).generate(**options).tolist() == bare.generate(**options).tolist()
    with pytest.raises(ConfigError, match="pad_token_id"):
        hf_model(bare).generate(**options, max_time=9.0)


def test_the_end_of_the_context_is_logged(caplog):
    made = tiny_model("llama", max_position_embeddings=24)
    made.generation_config = GenerationConfig()
    with caplog.at_level(logging.WARNING, "paceline"):
        assert hf_model(made).generate(IDS, max_new_tokens=40).shape[1] == 24
    assert "context of 24" in caplog.text


def test_an_engine_is_freed_with_its_model_and_copies_of_the_model_have_none():
    made = tiny_model("llama")
    made.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    want = generate(made, IDS, max_new_tokens=4).tolist()
    other = copy.deepcopy(made)
    assert generate(other, IDS, max_new_tokens=4).tolist() == want
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
