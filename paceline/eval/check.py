"""Does speculation change the answers? Decode each prompt with and without it and explain every difference."""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass

from ..core.request import SamplingParams
from ..errors import ConfigError
from ..hf.prompts import Prompt
from ..llm import LLM
from ..outputs import Completion
from .judge import judge
from .law_test import LawTest, law_test
from .reference import NUM_TOP, Decoded
from .verdict import Measured, Verdict

Progress = Callable[[str, int, int], None]
"""progress(what, done, total)."""

NUM_REFERENCES = 4
"""Answers that are held against the independent reference whether they differ or not."""


@dataclass(frozen=True)
class Comparison:
    """One prompt at one temperature.

    position: index in the answer of the first token that differs. measured: what the independent reference says, of
    answers that differ and of the first `num_references`.
    """

    prompt: int
    temperature: float
    verdict: Verdict
    reason: str
    num_tokens: int
    mean_acceptance_length: float
    position: int | None = None
    plain_token: str | None = None
    speculative_token: str | None = None
    measured: Measured | None = None

    def as_dict(self) -> dict[str, object]:
        """As JSON can hold it."""
        flat: dict[str, object] = asdict(self)
        measured = flat.pop("measured")
        gap, noise = (None, None) if self.measured is None else (self.measured.gap, self.measured.noise)
        return {**flat, "gap": gap, "noise": noise, "reference": measured, "verdict": self.verdict.value}


@dataclass(frozen=True)
class CheckReport:
    """Everything a check found.

    skipped: temperatures that were not compared, because the verifier promises the law of the answers and not their
    tokens; the law test is what speaks about them.
    """

    comparisons: list[Comparison]
    skipped: list[float]
    law_test: LawTest | None
    numerics: str
    lossless: bool
    exact: bool

    @property
    def verdicts(self) -> dict[str, int]:
        """How many comparisons came to each verdict."""
        counts = Counter(c.verdict for c in self.comparisons)
        return {verdict.value: counts[verdict] for verdict in Verdict}

    @property
    def passed(self) -> bool:
        """No bug, and no failed law test."""
        return self.verdicts["bug"] == 0 and (self.law_test is None or self.law_test.passed)

    @property
    def num_references(self) -> int:
        """How many comparisons were held against the independent reference."""
        return sum(c.measured is not None for c in self.comparisons)

    @property
    def mean_acceptance_length(self) -> float:
        """Mean over the comparisons, weighted by their tokens' passes."""
        tokens = sum(c.num_tokens for c in self.comparisons)
        passes = sum(c.num_tokens / c.mean_acceptance_length for c in self.comparisons if c.mean_acceptance_length)
        return tokens / passes if passes else 0.0


def check(
    llm: LLM,
    prompts: Seq[Prompt],
    *,
    max_tokens: int = 64,
    temperatures: Seq[float] = (0.0, 0.8),
    seed: int = 0,
    with_law_test: bool = True,
    num_references: int = NUM_REFERENCES,
    progress: Progress = lambda what, done, total: None,
) -> CheckReport:
    """Compare plain and speculative decoding of `llm`, prompt by prompt, with the same seeds.

    Plain decoding uses the same kernels and cache, and may pad its passes to several rows: a fault could change both
    sides alike. So the first `num_references` answers, and all that differ, are held against the independent
    reference as well, see `checks.reference`. With invariant numerics both sides' log-probabilities are compared bit
    for bit in every answer.

    Raises `ConfigError` where there is nothing to compare.
    """
    if not prompts:
        raise ConfigError("there is nothing to check", got="no prompts")
    if not temperatures:
        raise ConfigError("there is nothing to check", got="no temperatures")
    compared = [t for t in temperatures if llm.verifier.exact or t == 0]
    comparisons: list[Comparison] = []
    plain = llm.plain()
    total = len(prompts) * len(compared)
    for index, prompt in enumerate(prompts):
        for temperature in compared:
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + index, logprobs=NUM_TOP)
            one = plain.generate([prompt], params)[0].outputs[0]
            other = llm.generate([prompt], params)[0].outputs[0]
            with_reference = len(comparisons) < num_references
            comparisons.append(compare(llm, prompt, params, one, other, index, with_reference))
            progress("comparing answers", len(comparisons), total)
    law = None
    if with_law_test:
        law = law_test(llm.verifier, seed=seed, progress=lambda done, whole: progress("testing the law", done, whole))
    skipped = [t for t in temperatures if t not in compared]
    return CheckReport(comparisons, skipped, law, llm.numerics, llm.verifier.lossless, llm.verifier.exact)


def compare(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams,
    one: Completion,
    other: Completion,
    index: int = 0,
    with_reference: bool = False,
) -> Comparison:
    """The plain answer `one` and the speculative answer `other` of `llm` to a prompt, see `judge`."""
    sides = [Decoded(side.token_ids, side.finish_reason, side.logprobs) for side in (one, other)]
    found = judge(llm, prompt, params, other.seed, *sides, with_reference=with_reference)
    parted = found.divergence
    return Comparison(
        index,
        params.temperature,
        found.verdict,
        found.reason,
        len(other.token_ids),
        other.mean_acceptance_length,
        None if parted is None else parted.position,
        None if parted is None else _text(llm, parted.plain_token),
        None if parted is None else _text(llm, parted.speculative_token),
        found.measured,
    )


def _text(llm: LLM, token: int | None) -> str:
    if token is None:
        return "end of answer"
    return str(token) if llm.loaded.tokenizer is None else f"{llm.tokenizer.decode([token])!r} ({token})"
