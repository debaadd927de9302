"""The front door: what it takes, and every field of what it gives."""

import pytest
import torch

from paceline import LLM, Coupled, Fixed, Origin, PromptLookup, Ratio, SamplingParams
from tests.adversaries import RandomTrees, Scripted
from tests.helpers import talking, tokenizer
from tests.tiny import tiny_model

TEXT = "abcabcabcab"
CHAT = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]
PARAMS = SamplingParams(temperature=0.8, max_tokens=20, seed=7, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(talking(), drafter=PromptLookup(), policy=Fixed(), max_num_seqs=3)


def test_a_prompt_of_every_kind(llm):
    ids = tokenizer().encode(TEXT)
    chat_ids = tokenizer().encode("u:abc;a:de;a:")
    alone = {"text": llm.generate(TEXT, PARAMS), "ids": llm.generate(ids, PARAMS), "chat": llm.generate(CHAT, PARAMS)}
    assert [len(results) for results in alone.values()] == [1, 1, 1]
    assert alone["text"][0].token_ids == alone["ids"][0].token_ids
    assert alone["ids"][0].prompt_token_ids == ids
    assert alone["chat"][0].prompt_token_ids == chat_ids
    mixed = llm.generate([TEXT, CHAT, ids, CHAT], PARAMS)  # more than there are slots; the order is kept
    assert [r.token_ids for r in mixed] == [alone[k][0].token_ids for k in ("text", "chat", "ids", "chat")]
    assert [len(llm.generate([p], PARAMS)) for p in (TEXT, CHAT, ids)] == [1, 1, 1]
    assert llm.generate([], PARAMS) == []


def test_params_of_their_own(llm):
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 4, 2)]
    assert [len(r.token_ids) for r in llm.generate([TEXT] * 3, each)] == [1, 4, 2]
    assert len(llm.generate(TEXT)[0].token_ids) <= 256


def test_fields_of_an_answer(llm):
    result = llm.generate(TEXT, PARAMS)[0]
    (answer,) = result.outputs
    assert len(answer.token_ids) == len(answer.origins) == len(answer.sources) == 20
    assert answer.text == result.text == tokenizer().decode(answer.token_ids, skip_special_tokens=True)
    assert (answer.finish_reason, answer.stop_reason, answer.seed) == ("length", None, 7)
    assert (answer.lossless, answer.exact, answer.numerics) == (True, True, llm.numerics)
    assert answer.logprobs is None
    assert sum(r.num_emitted for r in answer.rounds) == 20
    assert answer.num_accepted == answer.origins.count(Origin.DRAFTED)
    assert answer.num_drafted == sum(r.num_nodes for r in answer.rounds)
    alone = [r.num_emitted for r in answer.rounds if not r.with_prompt]
    assert answer.mean_acceptance_length == sum(alone) / len(alone)
    assert (answer.num_decoded, len(alone)) == (20 - answer.rounds[0].num_emitted, len(answer.rounds) - 1)
    for origin, source in zip(answer.origins, answer.sources, strict=True):
        assert source == ("lookup" if origin is Origin.DRAFTED else "")
    assert result.metrics.rounds == len(answer.rounds)
    assert result.metrics.decode > 0
    assert result.metrics.prefill > 0


def test_origins_tell_each_kind():
    """By script: one with the prompt, all of two accepted, none, then nothing proposed because one token is left."""
    model, params = tiny_model("llama"), SamplingParams(max_tokens=6, ignore_eos=True)
    prompt = [5, 6, 7]
    whole = LLM(model).generate(prompt, params)[0]
    future = {tuple(prompt): [*prompt, *whole.token_ids]}
    answer = LLM(model, drafter=Scripted(future, [None, None, 0]), policy=Fixed(2)).generate(prompt, params)[0]
    assert whole.origins == [Origin.PLAIN] * 6
    drafted = [Origin.DRAFTED, Origin.DRAFTED, Origin.BONUS]
    assert answer.origins == [Origin.PLAIN, *drafted, Origin.RECOVERED, Origin.PLAIN]
    counts = [(r.num_drafted, r.num_accepted, r.num_emitted) for r in answer.rounds]
    assert counts == [(0, 0, 1), (2, 2, 3), (1, 0, 1), (0, 0, 1)]


@pytest.mark.parametrize("drafter", [None, PromptLookup(), RandomTrees()])
def test_logprobs_equal_a_plain_scoring(drafter):
    """Of every token, by the model alone: before temperature and penalties, after the tokens that precede it."""
    model = tiny_model("llama")
    params = SamplingParams(temperature=0.8, max_tokens=12, seed=3, logprobs=4, repetition_penalty=1.3, ignore_eos=True)
    result = LLM(model, drafter=drafter, policy=Fixed(5, 16)).generate([5, 9, 31, 5, 9], params)[0]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        ids = torch.tensor([result.prompt_token_ids + result.token_ids])
        scores = model(ids).logits[0].log_softmax(-1)[len(result.prompt_token_ids) - 1 : -1]
    assert len(result.logprobs) == 12
    for row, entry, token in zip(scores, result.logprobs, result.token_ids, strict=True):
        assert entry.token_id == token
        assert abs(entry.logprob - float(row[token])) < 1e-4
        assert list(entry.top) == row.topk(4).indices.tolist()
        assert list(entry.top.values()) == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


def test_logprobs_zero_gives_only_the_token_s_own(llm):
    result = llm.generate(TEXT, SamplingParams(max_tokens=3, logprobs=0, ignore_eos=True))[0]
    assert [entry.top for entry in result.logprobs] == [{}, {}, {}]


def test_seeds(llm):
    """Told when drawn, reproducible when given, different for the n answers of one prompt."""
    drawn = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    first, second = llm.generate(TEXT, drawn)[0].outputs[0], llm.generate(TEXT, drawn)[0].outputs[0]
    assert first.seed != second.seed
    again = SamplingParams(temperature=1.0, max_tokens=16, seed=first.seed, ignore_eos=True)
    assert llm.generate(TEXT, again)[0].token_ids == first.token_ids
    several = SamplingParams(temperature=1.0, max_tokens=16, seed=11, n=5, ignore_eos=True)
    answers = llm.generate([TEXT, CHAT], several)
    assert [len(r.outputs) for r in answers] == [5, 5]
    for result in answers:
        assert len({tuple(o.token_ids) for o in result.outputs}) == 5
        assert len({o.seed for o in result.outputs}) == 5
        assert result.outputs[0].seed == 11
    for answer in answers[0].outputs:  # each stands on its own seed
        alone = SamplingParams(temperature=1.0, max_tokens=16, seed=answer.seed, ignore_eos=True)
        assert llm.plain().generate(TEXT, alone)[0].token_ids == answer.token_ids


@pytest.mark.parametrize("seed", [0, -1, 2**62, 2**63 - 1, -(2**63), 2**64 + 5])
def test_any_integer_is_a_seed(llm, seed):
    params = SamplingParams(temperature=1.0, max_tokens=6, seed=seed, n=2, ignore_eos=True)
    ours, plain = llm.generate(TEXT, params)[0], llm.plain().generate(TEXT, params)[0]
    assert [o.token_ids for o in ours.outputs] == [o.token_ids for o in plain.outputs]


def test_reasons_to_finish(llm):
    whole = llm.generate(TEXT, PARAMS)[0]
    token = whole.token_ids[6]
    cut = whole.token_ids.index(token) + 1
    by_id = SamplingParams(temperature=0.8, max_tokens=20, seed=7, ignore_eos=True, stop_token_ids=(token,))
    result = llm.generate(TEXT, by_id)[0]
    assert (result.token_ids, result.finish_reason) == (whole.token_ids[:cut], "stop")
    assert result.outputs[0].stop_reason == token
    stop = whole.text[5:8]
    by_text = SamplingParams(temperature=0.8, max_tokens=20, seed=7, ignore_eos=True, stop=(stop,))
    result = llm.generate(TEXT, by_text)[0]
    assert result.text == whole.text[: whole.text.index(stop)]
    assert (result.finish_reason, result.outputs[0].stop_reason) == ("stop", stop)
    by_end = SamplingParams(max_tokens=20, logit_bias={2: 100.0})
    result = llm.generate(TEXT, by_end)[0]
    assert (result.token_ids, result.text, result.finish_reason) == ([2], "", "stop")
    assert result.outputs[0].stop_reason is None


@pytest.mark.parametrize("stop", [(), ("a",), ("zz", "q")])
@pytest.mark.parametrize("prompt", [TEXT, CHAT])
def test_streams_say_what_generate_says(llm, prompt, stop):
    params = SamplingParams(temperature=0.8, max_tokens=20, seed=7, stop=stop)
    whole = llm.generate(prompt, params)[0]
    chunks = list(llm.stream(prompt, params))
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert [o for c in chunks for o in c.origins] == whole.origins
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason
    assert chunks[-1].completion == whole.outputs[0]
    assert all(c.completion is None for c in chunks[:-1])
    assert len(chunks) == len(whole.rounds)


def test_a_declined_stop_string_cuts_nothing():
    """`min_tokens` declines the hit; an answer that then ends by length is whole."""
    llm = LLM(talking(), max_model_len=12)
    free = SamplingParams(temperature=1.0, max_tokens=40, seed=1, ignore_eos=True)
    whole = llm.generate("abcd", free)[0]
    assert whole.finish_reason == "length"
    stop = whole.text[-2:]
    assert whole.text.index(stop) == len(whole.text) - 2
    declined = SamplingParams(temperature=1.0, max_tokens=40, seed=1, ignore_eos=True, stop=(stop,), min_tokens=30)
    result = llm.generate("abcd", declined)[0]
    assert (result.text, result.finish_reason) == (whole.text, "length")
    assert "".join(c.text for c in llm.stream("abcd", declined)) == whole.text


def test_levels_are_told():
    model = tiny_model("llama")
    assert LLM(model, verifier=Coupled()).generate([5], PARAMS)[0].outputs[0].exact
    ratio = LLM(model, verifier=Ratio(), drafter=PromptLookup(), policy=Fixed(3))
    answer = ratio.generate([5, 6], PARAMS)[0].outputs[0]
    assert (answer.lossless, answer.exact) == (True, False)
    assert ratio.plain().generate([5, 6], PARAMS)[0].outputs[0].exact
    assert ratio.generate([5, 6], PARAMS)[0].token_ids == answer.token_ids  # the same drafts and the same seed


def test_one_model_serves_many_engines():
    """Wrapping leaves the caller's model usable, by us and by transformers."""
    model = tiny_model("llama")
    first = LLM(model, drafter=PromptLookup())
    answers = first.generate([5, 6, 7], PARAMS)[0].token_ids
    assert LLM(model).generate([5, 6, 7], PARAMS)[0].token_ids == answers
    assert LLM(model, drafter=RandomTrees(), policy=Fixed(5, 16)).generate([5, 6, 7], PARAMS)[0].token_ids == answers
    assert first.generate([5, 6, 7], PARAMS)[0].token_ids == answers
    with torch.inference_mode():
        assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 97)


def test_plain_shares_the_cache_and_says_so(llm):
    plain = llm.plain()
    assert plain.runner is llm.runner
    assert all(r.num_nodes == 0 for r in plain.generate(TEXT, PARAMS)[0].rounds)
    assert plain.generate(TEXT, PARAMS)[0].token_ids == llm.generate(TEXT, PARAMS)[0].token_ids
