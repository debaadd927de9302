"""Checks whether speculation changes answers: decodes each prompt with and without it, and explains differences.

Two answers that should be equal are identical, differ by a near-tie, or show a bug. `judge` gives the verdicts of
`check`, `bench` and the scripts.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from ..core.request import SamplingParams, TokenSequence
from ..errors import ConfigError
from ..llm import LLM
from ..system.files import Progress, silent
from ..target.prompts import Prompt, read_prompt
from .distribution_test import DistributionTest, distribution_test
from .reference import NUM_TOP, TIE, Decoded, Measured, measure_scores


class Verdict(StrEnum):
    """The result of a comparison."""

    IDENTICAL = "identical"
    NEAR_TIE = "near_tie"  # rounding decided between two tokens with nearly equal scores
    BUG = "bug"


@dataclass(frozen=True)
class Judgement:
    """A verdict, its reason, and the measurement behind it.

    position: index of the first token that differs; the length of the shorter answer where it is a prefix of the other.
    measured: the comparison with the independent reference, where it was needed.
    """

    verdict: Verdict
    reason: str
    position: int | None
    measured: Measured | None


def first_difference(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ, None where they are equal."""
    pairs = enumerate(zip_longest(plain, speculative))
    return next((place for place, (plain_token, token) in pairs if plain_token != token), None)


def classify(
    differs: bool, measured: Measured | None, invariant: bool, same_scores: bool = True
) -> tuple[Verdict, str]:
    """The verdict and its reason in words.

    With invariant numerics no bit may differ; with fast ones a near-tie needs a gap that rounding can close. With both,
    scores that are further from the reference than rounding explains are a bug, even if the tokens are the same.
    same_scores: whether the log-probabilities of both sides are bit-identical up to the first difference.
    """
    if invariant and differs:
        return Verdict.BUG, "with invariant numerics every difference is a bug"
    if invariant and not same_scores:
        return Verdict.BUG, "the same tokens with other scores, and with invariant numerics no bit may differ"
    for side in ("plain", "speculative"):
        if measured is not None and not getattr(measured, side).is_rounding:
            return Verdict.BUG, f"the {side} scores are further from the reference than rounding can move them"
    if not differs:
        return Verdict.IDENTICAL, "the same tokens"
    if measured is None or measured.gap is None:
        return Verdict.BUG, "one answer ended where the other continued"
    if not (math.isfinite(measured.gap) and math.isfinite(measured.noise)):
        return Verdict.BUG, "a token was emitted that the target forbids"
    if abs(measured.gap) > TIE * measured.noise:
        return Verdict.BUG, "the tokens are further apart than rounding can move them"
    return Verdict.NEAR_TIE, "the tokens are closer than rounding moves them"


def judge(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    seed: int,
    plain: Decoded,
    speculative: Decoded,
    with_reference: bool = False,
) -> Judgement:
    """Compare two answers of `llm` to a prompt. seed: of the answers.

    A difference is compared with the independent reference; with_reference: equal answers are, too.
    """
    position = first_difference(plain.token_ids, speculative.token_ids)
    differs = position is not None
    # The tokens that both sides chose after the same prefix.
    count = len(plain.token_ids)
    if differs:
        count = min(count, len(speculative.token_ids), position + 1)
    measured = None
    if count and (differs or with_reference):
        ids, vision = read_prompt(llm.loaded, prompt, llm.runner.max_length)
        seq = TokenSequence(ids, params, seed, llm.loaded.eos_ids, llm.runner.max_length, vision=vision)
        measured = measure_scores(llm.runner.loaded, seq, plain, speculative, count)
    same = True
    if plain.logprobs is not None and speculative.logprobs is not None:
        same = list(plain.logprobs[:count]) == list(speculative.logprobs[:count])
    verdict, reason = classify(differs, measured, llm.numerics == "invariant", same)
    if verdict is Verdict.IDENTICAL and plain.finish_reason != speculative.finish_reason:
        verdict = Verdict.BUG
        reason = f"plain decoding ended by {plain.finish_reason}, speculation by {speculative.finish_reason}"
    return Judgement(verdict, reason, position, measured)


@dataclass(frozen=True)
class Comparison(Judgement):
    """One prompt at one temperature.

    num_tokens: after the prefill. plain_token, speculative_token: at the first difference, as text.
    """

    prompt: int
    temperature: float
    num_tokens: int
    num_drafted: int
    no_draft_reason: str | None
    mean_acceptance_length: float
    plain_token: str | None
    speculative_token: str | None


@dataclass(frozen=True)
class CheckReport:
    """Everything a check found.

    skipped: temperatures not compared, since the verifier guarantees only the distribution, which has its own test.
    """

    comparisons: list[Comparison]
    skipped: list[float]
    distribution_test: DistributionTest | None

    @property
    def verdicts(self) -> dict[str, int]:
        counts = Counter(c.verdict for c in self.comparisons)
        return {verdict.value: counts[verdict] for verdict in Verdict}

    @property
    def passed(self) -> bool:
        return self.verdicts["bug"] == 0 and (self.distribution_test is None or self.distribution_test.passed)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per pass over all comparisons, see `tokens_per_pass`."""
        tokens = sum(c.num_tokens for c in self.comparisons)
        passes = sum(c.num_tokens / c.mean_acceptance_length for c in self.comparisons if c.mean_acceptance_length)
        return tokens / passes if passes else 0.0


def check(
    llm: LLM,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 64,
    temperatures: Sequence[float] = (0.0, 0.8),
    seed: int = 0,
    with_distribution_test: bool = True,
    num_references: int = 4,
    progress: Progress = silent,
) -> CheckReport:
    """Compare plain and speculative decoding of `llm`, prompt by prompt, with the same seeds.

    A fault could change both sides alike, so the first `num_references` answers, and all that differ, are also compared
    with the independent reference, see `reference`. With invariant numerics both sides' log-probabilities are
    compared bit for bit in every answer. Raises `ConfigError` where there is nothing to compare.
    """
    if not (prompts and temperatures):
        raise ConfigError("there is nothing to check", got="no temperatures" if prompts else "no prompts")
    compared = [t for t in temperatures if llm.verifier.exact or t == 0]
    comparisons: list[Comparison] = []
    plain = llm.plain()

    def text(answer: Decoded, position: int | None) -> str | None:
        """The token of an answer at a position, for messages."""
        if position is None:
            return None
        if position >= len(answer.token_ids):
            return "end of answer"
        token = answer.token_ids[position]
        pieces = llm.loaded.pieces
        return str(token) if pieces is None else f"{pieces.text(token)!r} ({token})"

    progress("comparing answers", 0, len(prompts) * len(compared))
    for index, prompt in enumerate(prompts):
        for temperature in compared:
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + index, logprobs=NUM_TOP)
            plain_completion, completion = (side.generate([prompt], params)[0].outputs[0] for side in (plain, llm))
            sides = [
                Decoded(side.token_ids, side.finish_reason, side.logprobs) for side in (plain_completion, completion)
            ]
            judgement = judge(
                llm, prompt, params, completion.seed, *sides, with_reference=len(comparisons) < num_references
            )
            comparisons.append(
                Comparison(
                    **vars(judgement),
                    prompt=index,
                    temperature=temperature,
                    num_tokens=completion.num_decoded,
                    num_drafted=completion.num_drafted,
                    no_draft_reason=completion.no_draft_reason,
                    mean_acceptance_length=completion.mean_acceptance_length,
                    plain_token=text(sides[0], judgement.position),
                    speculative_token=text(sides[1], judgement.position),
                )
            )
            progress("comparing answers", len(comparisons), len(prompts) * len(compared))
    distribution = distribution_test(llm.verifier, seed=seed, progress=progress) if with_distribution_test else None
    return CheckReport(comparisons, [t for t in temperatures if t not in compared], distribution)
