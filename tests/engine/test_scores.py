"""Scores are probabilities of transformers' logits, and their bits depend on the two texts alone."""

import copy
import math
from dataclasses import replace
from string import printable

import pytest
import torch
from tokenizers import processors

from paceline import LLM
from paceline.engine import scores
from paceline.errors import CacheFull, ConfigError
from paceline.target.readings import Continuation, NextLogits
from tests.helpers import SPECIAL, all_free, byte_pairs, loaded
from tests.structured.common import byte_tokenizer
from tests.tiny import tiny_model

QUERY, DOCUMENTS = "a cat?", ["the cat sat", "no", "it rains in Spain " * 8]
WORDS = ["y e", "ye s", "n o"]


def llm(method: str = "likelihood", **options) -> LLM:
    """A model that judges is named as Qwen3-Reranker is, and has the two words."""
    made, tokenizer, name = loaded(max_position_embeddings=2048), byte_tokenizer(), "tiny"
    if method == "yes_no":
        pairs = [(left, right) for left, right in map(str.split, WORDS)]
        letters = [one for one in printable[:95] if one not in "`^~@$#& "]
        tokens = [*SPECIAL.values(), *letters, "Ġ", "Ċ", *map("".join, pairs)]
        tokenizer, name = byte_pairs(tokens, pairs, **SPECIAL), "Qwen3-Reranker-0.6B"
    return LLM(replace(made, tokenizer=tokenizer, name=name), max_num_seqs=2, **options)


def expected(on: LLM, ids: list[int]) -> float:
    """By transformers, in one pass."""
    with torch.inference_mode():
        logits = tiny_model("llama", max_position_embeddings=2048)(torch.tensor([ids])).logits[0].double()
    if on.loaded.name != "tiny":
        words = on.tokenizer.convert_tokens_to_ids(["yes", "no"])
        return float(logits[-1, words].softmax(-1)[0])
    count = len(on.tokenizer.encode(f" {QUERY}", add_special_tokens=False))
    logprobs = logits.log_softmax(-1)[-count - 1 : -1].gather(1, torch.tensor(ids[-count:])[:, None])
    return float(logprobs.mean().exp())


def is_exact(method: str) -> bool:
    """Whether they are those of transformers, with the same bits in all chunks, in any order and from the cache."""
    on, others = llm(method, prefix_cache_bytes=0), list[list[float]]()
    made = on.score(QUERY, DOCUMENTS)
    assert {one.method for one in made} == {method}
    whole = [one.outputs.score for one in made]
    is_close = all(
        math.isclose(one.outputs.score, expected(on, one.prompt_token_ids), rel_tol=1e-3, abs_tol=1e-9) for one in made
    )
    cached = llm(method, prefix_cache_bytes=1 << 24)
    for one, way in ((on, 1), (on, 7), (cached, 512), (cached, 512)):
        one.runner.chunk = way
        others.append([made.outputs.score for made in one.score([QUERY] * 3, DOCUMENTS[::-1])][::-1])
    assert cached.score(QUERY, DOCUMENTS)[2].num_cached_tokens > 16
    assert all_free(cached.runner)
    return is_close and all(other == whole for other in others)


@pytest.mark.parametrize("method", ["likelihood", "yes_no"])
def test_bits_depend_on_the_texts_alone(method):
    assert is_exact(method)


take = Continuation.take
MUTANTS = {
    "a token of the document counts": ("likelihood", Continuation, lambda self, rows: take(self, rows.roll(1, 0))),
    "the last chunk alone counts": ("likelihood", Continuation, lambda self, rows: (self.restart(), take(self, rows))),
    "no is yes": ("yes_no", NextLogits, lambda self, rows: setattr(self, "logits", rows[-1, [*self._token_ids][::-1]])),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_broken_is_noticed(name, monkeypatch):
    method, kind, broken = MUTANTS[name]
    monkeypatch.setattr(kind, "take", broken)
    assert not is_exact(method)


def test_the_text_of_a_judge_is_that_of_its_card():
    on = llm("yes_no")
    made = on.score("Q?", "D.", instruction="I")[0]
    assert on.tokenizer.decode(made.prompt_token_ids) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: I\n<Query>: Q?\n<Document>: D.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_pairs():
    on = llm()
    both = on.score(["a", "b"], ["c", "d"])
    assert [one.outputs for one in both] == [on.score(*pair)[0].outputs for pair in (("a", "c"), ("b", "d"))]
    assert all(0 < one.outputs.score < 1 for one in both)


REFUSED = [
    ((["a", "b"], ["c"]), {}, "2 and 1.*give one text_1"),
    (("a", ["c", 3]), {}, "scores are of texts"),
    ((" ", "c"), {}, "the query is empty"),
    (("a", "c"), {"method": "cosine"}, "method.*cosine.*likelihood"),
    (("a", "c"), {"method": "yes_no"}, "'yes' is no token"),
    (("a", "c"), {"instruction": "x"}, "takes no instruction"),
    (("a", "c"), {"queries": "x"}, "text_1"),
]


@pytest.mark.parametrize(("texts", "options", "words"), REFUSED)
def test_refusals(texts, options, words):
    with pytest.raises(ConfigError, match=words):
        llm().score(*texts, **options)


def test_a_reranker_with_another_template_is_refused():
    on = LLM(replace(llm().loaded, name="bge-reranker-v2-gemma"))
    with pytest.raises(ConfigError, match=r"template of this reranker is not known.*choose: method"):
        on.score("a", "b")
    assert on.score("a", "b", method="likelihood")[0].method == "likelihood"
    with pytest.raises(CacheFull):
        on.score("a", "b" * 3000, method="likelihood")
    too_long, fine = on.score("a", ["b" * 3000, "b"], method="likelihood", return_exceptions=True)
    assert isinstance(too_long, CacheFull)
    assert fine.outputs.score > 0


def test_a_tokenizer_that_ends_texts_does_not_end_the_document():
    on = llm()
    tokenizer = copy.deepcopy(on.tokenizer)
    ended = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.backend_tokenizer.post_processor = ended
    assert scores._begun(tokenizer, "abc") == [1, *tokenizer.encode("abc", add_special_tokens=False)]
