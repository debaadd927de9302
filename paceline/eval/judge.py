"""The one verdict on a plain and a speculative answer: that of `check`, `bench` and the experiments."""

from dataclasses import dataclass

from ..core.request import SamplingParams, Sequence
from ..hf.prompts import Prompt, read_prompt
from ..llm import LLM
from .reference import Decoded, measure
from .verdict import Divergence, Measured, Verdict, classify, first_difference


@dataclass(frozen=True)
class Judgement:
    """A verdict, why, and what it rests on."""

    verdict: Verdict
    reason: str
    divergence: Divergence | None
    measured: Measured | None


def judge(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    seed: int,
    plain: Decoded,
    speculative: Decoded,
    with_reference: bool = False,
) -> Judgement:
    """Compare two answers of `llm` to a prompt; seed: of the answers, as they tell it.

    A difference is held against the reference; with_reference: so are answers without one.
    """
    divergence = first_difference(plain.token_ids, speculative.token_ids)
    if divergence is None:
        count = len(plain.token_ids)
    else:  # what both sides took from the same past
        ended = None in (divergence.plain_token, divergence.speculative_token)
        count = divergence.position + (not ended)
    measured = None
    if count and (divergence is not None or with_reference):
        measured = measure(llm.runner.loaded, _sequence(llm, prompt, params, seed), plain, speculative, count)
    same = True
    if plain.logprobs is not None and speculative.logprobs is not None:
        same = list(plain.logprobs[:count]) == list(speculative.logprobs[:count])
    verdict, reason = classify(divergence, measured, llm.numerics == "invariant", same)
    if verdict is not Verdict.BUG and divergence is None and plain.finish_reason != speculative.finish_reason:
        verdict = Verdict.BUG
        reason = f"plain decoding ended by {plain.finish_reason}, speculation by {speculative.finish_reason}"
    return Judgement(verdict, reason, divergence, measured)


def _sequence(llm: LLM, prompt: Prompt, params: SamplingParams, seed: int) -> Sequence:
    """The prompt as the engine holds it."""
    ids, vision = read_prompt(llm.loaded, prompt, llm.runner.max_length)
    return Sequence(ids, params, seed, llm.loaded.eos_ids, llm.runner.max_length, vision=vision)
