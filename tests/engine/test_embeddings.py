"""Embeddings are transformers' last hidden states, pooled, and their bits depend on the text alone."""

from collections import deque

import pytest
import torch

from paceline import LLM, PoolingParams, PromptLookup, SamplingParams
from paceline.attention.states import StateStore
from paceline.core.reading import Reading
from paceline.engine.embeddings import open_embedding
from paceline.engine.scores import open_score
from paceline.errors import CacheFull, ConfigError, EngineStopped
from paceline.target.readings import LastState, MeanState
from tests.helpers import all_free, loaded, on_torch, prompt, talking
from tests.tiny import tiny_model
from tests.vision.families import make_image, seeing, user

WAYS = [PoolingParams(), PoolingParams(pooling="mean"), PoolingParams(pooling="mean", normalize=False, dimensions=5)]
MORE = [pytest.param(name, marks=pytest.mark.more) for name in ("qwen3", "olmo2", "falcon_h1", "deepseek_v2")]
IDS = [prompt(length, length) for length in (1, 2, 16, 17, 40)]


def vectors(llm: LLM, texts=IDS, ways=WAYS) -> list[torch.Tensor]:
    """Of each text in each way."""
    return [torch.tensor(one.outputs.embedding) for way in ways for one in llm.embed(texts, way)]


def expected(name: str, way: PoolingParams, ids: list[int]) -> torch.Tensor:
    """By transformers, in one pass."""
    with torch.inference_mode():
        states = tiny_model(name).base_model(torch.tensor([ids])).last_hidden_state[0]
    state = (states.mean(0) if way.pooling == "mean" else states[-1])[: way.dimensions]
    return state if way.normalize is False else state / state.square().sum().sqrt()


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def is_close(name: str, whole: list[torch.Tensor]) -> bool:
    want = [expected(name, way, ids) for way in WAYS for ids in IDS]
    return all(torch.allclose(got, one, atol=5e-5) for got, one in zip(whole, want, strict=True))


def is_exact(name: str = "llama") -> bool:
    """Whether they are those of transformers, with the same bits in all chunks, from the cache, and in any order."""
    llm = LLM(loaded(name), max_num_seqs=2, prefix_cache_bytes=0)
    whole, others = vectors(llm), list[list[torch.Tensor]]()
    for llm.runner.chunk in (1, 7):
        others.append(vectors(llm))
    others.append(vectors(llm, IDS[::-1], WAYS[::-1])[::-1])
    cached = LLM(loaded(name), max_num_seqs=2, prefix_cache_bytes=1 << 24)
    cached.generate(IDS, SamplingParams(max_tokens=4))
    others.append(vectors(cached))
    assert all_free(llm.runner)
    assert all_free(cached.runner)
    return is_close(name, whole) and all(equal(one, whole) for one in others)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba2", *MORE])
def test_bits_depend_on_the_text_alone(name):
    assert is_exact(name)


def _shorter(self, num_tokens):
    Reading.__init__(self, max(num_tokens - 2, 0), max(num_tokens - 1, 1))
    self.restart()


def _longer(self, num_tokens):
    Reading.__init__(self, 0, num_tokens)
    self.restart()
    self.stop += 1


read = StateStore.read
MUTANTS = {
    "the last token is missing": (LastState, "__init__", _shorter),
    "padding counts": (MeanState, "__init__", _longer),
    "the last chunk alone counts": (MeanState, "take", lambda self, rows: setattr(self, "_sum", rows.sum(0))),
    "a chunk is summed before it is added": (
        MeanState, "take", lambda self, rows: setattr(self, "_sum", self._sum + rows.sum(0)),
    ),
    "texts share a state": (LastState, "take", lambda self, rows: setattr(LastState, "_state", rows[-1])),
    "the rows of other columns are read": (
        StateStore, "read", lambda self, slot, begin, *rest: read(self, slot, max(begin - 1, 0), *rest),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_broken_is_noticed(name, monkeypatch):
    kind, method, broken = MUTANTS[name]
    monkeypatch.setattr(kind, method, broken)
    if name == "texts share a state":
        monkeypatch.setattr(LastState, "restart", lambda self: None)
    assert not is_exact()


def test_torch_says_that_it_rounds():
    llm = LLM(on_torch(tiny_model("llama")))
    assert {one.numerics for one in llm.embed(IDS)} == {"fast"}
    assert is_close("llama", vectors(llm))
    assert {one.numerics for one in LLM(loaded()).embed(IDS)} == {"invariant"}


def test_the_cache_is_used_where_columns_are_enough():
    llm = LLM(loaded(), prefix_cache_bytes=1 << 24)
    for pooling, count in (("last", 32), ("mean", 0)):
        seen = [llm.embed(IDS[-1], pooling=pooling)[0].num_cached_tokens for _ in range(2)]
        assert seen == [0, count], pooling


def test_outputs_are_those_of_vllm():
    llm = LLM(talking())
    one, two = llm.embed(["abc", {"prompt_token_ids": [7, 8]}], dimensions=6)
    assert one.prompt_token_ids == llm.encode("abc")
    assert (two.prompt_token_ids, two.finished, two.pooling, two.normalize) == ([7, 8], True, "last", True)
    assert one.outputs.hidden_size == len(one.outputs.embedding) == 6
    assert torch.tensor(one.outputs.embedding).norm() == pytest.approx(1)
    whole = torch.tensor(llm.embed("abc", normalize=False)[0].outputs.embedding)
    torch.testing.assert_close(torch.nn.functional.normalize(whole[:6], dim=0), torch.tensor(one.outputs.embedding))
    assert llm.embed("abc", PoolingParams(dimensions=6))[0].outputs == one.outputs


def test_images_are_read():
    llm = LLM(seeing(), max_num_seqs=2)
    chats = [[user("see ", make_image(seed), " this")] for seed in (1, 2)]
    whole = vectors(llm, chats)
    llm.runner.chunk = 8
    assert equal(vectors(llm, chats), whole)
    assert not torch.equal(whole[0], whole[1])


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"pooling": "cls"}, ConfigError, "pooling.*cls.*last"),
        ({"dimensions": 0}, ConfigError, "dimensions"),
        ({"dimensions": 1 << 20}, ConfigError, "at most 32, the width"),
        ({"pooling": "last", "pooling_params": PoolingParams()}, ConfigError, "give one of them"),
        ({"use_activation": True}, ConfigError, "normalize"),
        ({"prompts": []}, None, ""),
        ({"prompts": [[]]}, ConfigError, "the prompt is empty"),
        ({"prompts": [[5] * 5000]}, CacheFull, "fills the context"),
    ],
)
def test_refusals(given, kind, words):
    llm = LLM(loaded())
    given = {"prompts": [[5, 6]], **given}
    if kind is None:
        assert llm.embed(**given) == []
        return
    with pytest.raises(kind, match=words):
        llm.embed(**given)
    (got, fine) = llm.embed([[5] * 5000, [5, 6]], return_exceptions=True)
    assert isinstance(got, CacheFull)
    assert fine.outputs.hidden_size == 32
    assert all_free(llm.runner)


@pytest.mark.parametrize("drafter", [lambda: None, PromptLookup])
@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_token_has_the_logprob_that_it_had_when_it_was_generated(name, drafter):
    """Bit for bit, of all tokens of the vocabulary, in any chunks."""
    llm = LLM(loaded(name), drafter=drafter())
    for temperature in (0.0, 1.5):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=2, logprobs=-1, ignore_eos=True)
        made = llm.generate([IDS[3]], params)[0]
        text = [*made.prompt_token_ids, *made.token_ids]
        for llm.runner.chunk in (5, 512):
            read = llm.generate([text], SamplingParams(max_tokens=0, prompt_logprobs=-1))[0]
            assert read.prompt_logprobs[len(IDS[3]) :] == made.logprobs
            assert (read.token_ids, read.finish_reason) == ([], "length")


def test_what_gives_its_slot_is_read_from_its_beginning():
    llm = LLM(loaded(), prefix_cache_bytes=0)
    llm.runner.chunk = 5
    request = open_embedding(llm, IDS[4], WAYS[1])
    (seq,) = request.seqs
    next(llm.decoder.admit(seq))
    llm.decoder.release(seq)
    deque(llm.decoder.admit(seq), 0)
    llm.decoder.release(seq)
    assert request.output().outputs == llm.embed([IDS[4]], WAYS[1])[0].outputs


def test_the_logprobs_of_a_prompt_are_read_once():
    llm, params = LLM(loaded()), SamplingParams(max_tokens=12, prompt_logprobs=1, ignore_eos=True)
    request, want = llm.open_request(IDS[3], params), llm.generate([IDS[3]], params)[0]
    (seq,) = request.seqs
    for stop in (5, 12):  # its slot is given to others in between
        deque(llm.decoder.admit(seq), 0)
        while seq.num_output < stop:
            llm.decoder.step([seq])
        llm.decoder.release(seq)
    assert (seq.output_ids, request.output().prompt_logprobs) == (want.token_ids, want.prompt_logprobs)


def test_what_was_aborted_has_no_output():
    llm = LLM(talking())
    for opened in (open_embedding(llm, IDS[3], PoolingParams()), open_score(llm, "a", "b", "likelihood", None)):
        opened.seqs[0].finish_reason = "abort"
        with pytest.raises(EngineStopped, match="aborted"):
            opened.output()
