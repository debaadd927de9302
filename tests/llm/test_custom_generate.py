"""`model.generate` of transformers with our drafts, side by side with its own, in float32."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from paceline import PromptLookup
from paceline.custom_generate import generate
from paceline.errors import ConfigError
from tests.helpers import REPEATING, tokenizer
from tests.tiny import tiny_model

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


def test_changed_weights_are_seen():
    model = tiny_model("llama", seed=3)
    before = generate(model, IDS, max_new_tokens=12).tolist()
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    after = generate(model, IDS, max_new_tokens=12).tolist()
    assert after == model.generate(IDS, max_new_tokens=12).tolist() != before


class Collects(BaseStreamer):
    def __init__(self):
        self.got, self.ended = list[int](), False

    def put(self, value):
        self.got += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamers_get_what_is_returned(model):
    streamer = Collects()
    done = generate(model, IDS, max_new_tokens=12, streamer=streamer)
    assert (streamer.got, streamer.ended) == (done[0].tolist(), True)


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
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "without custom_generate"),
        ({"attention_mask": torch.tensor([[1] * 12 + [0]])}, "padding_side"),
    ],
)
def test_what_drafts_cannot_follow(model, options, words):
    with pytest.raises(ConfigError, match=words):
        model.generate(IDS, max_new_tokens=4, custom_generate=generate, **options)
    with pytest.raises(ConfigError, match="one row"):
        generate(model, **PADDED, max_new_tokens=4, streamer=Collects())


def test_stop_strings(model):
    words = tokenizer()
    free = words.decode(model.generate(IDS, max_new_tokens=20, do_sample=False)[0, IDS.shape[1] :])
    options = {"stop_strings": [free[6:8]], "tokenizer": words, "max_new_tokens": 20, "do_sample": False}
    assert generate(model, IDS, **options).tolist() == model.generate(IDS, **options).tolist()


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
