"""The main job, shown: the same prompts decoded plainly and with speculation, by the same loaded weights."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

from ..core.outputs import Timings
from ..core.request import SamplingParams
from ..errors import ConfigError
from ..llm import LLM
from ..outputs import Completion, StreamChunk
from .prompts import Example, user_prompt

_WARM_UP = 12  # tokens: the first passes pay for memory and kernels that later ones have


@dataclass(frozen=True)
class Run:
    """One answer and what it took; both sides are counted alike: emitted tokens over seconds of decoding."""

    completion: Completion
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, the reading of the prompt apart."""
        return len(self.completion.token_ids) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Pair:
    """One prompt, decoded both ways."""

    name: str
    plain: Run
    speculative: Run

    @property
    def speedup(self) -> float:
        """Speculative over plain speed."""
        return self.speculative.tokens_per_s / self.plain.tokens_per_s if self.plain.tokens_per_s else 0.0

    @property
    def identical(self) -> bool:
        """The same tokens."""
        return self.plain.completion.token_ids == self.speculative.completion.token_ids


@dataclass(frozen=True)
class Totals:
    """Over all prompts: sums of tokens over sums of seconds, so that a long answer counts for more."""

    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float
    mean_acceptance_length: float
    identical: bool
    num_identical: int


@dataclass(frozen=True)
class Begin:
    """The next answer starts."""

    name: str
    is_speculative: bool


Event: TypeAlias = Begin | StreamChunk | Pair


def demo(llm: LLM, examples: Seq[Example], params: SamplingParams) -> Iterator[Event]:
    """Decode each example plainly, then with speculation, telling everything as it happens.

    Yields a `Begin` and the chunks of each answer, and a `Pair` after both. The two take turns prompt by prompt, so
    that a machine that slows down slows both.
    """
    if not examples:
        raise ConfigError("there is nothing to show", got="no prompts")
    plain = llm.plain()
    prompts = [user_prompt(llm.loaded, example.prompt) for example in examples]
    warm_up = SamplingParams(temperature=params.temperature, max_tokens=min(_WARM_UP, params.max_tokens), seed=0)
    for side in (plain, llm):
        for _ in side.stream(prompts[0], warm_up):
            pass
    for example, prompt in zip(examples, prompts, strict=True):
        runs: list[Run] = []
        for side in (plain, llm):
            yield Begin(example.name, side is llm)
            completion = None
            for chunk in side.stream(prompt, params):
                completion = chunk.completion
                yield chunk
            assert completion is not None  # with the last chunk
            timings: Timings = side.decoder.timings
            runs.append(Run(completion, timings.decode))
        yield Pair(example.name, *runs)


def totals(pairs: Seq[Pair]) -> Totals:
    """Sum up a demo."""
    speeds = [
        sum(len(run.completion.token_ids) for run in runs) / max(sum(run.seconds for run in runs), 1e-9)
        for runs in ([pair.plain for pair in pairs], [pair.speculative for pair in pairs])
    ]
    answers = [pair.speculative.completion for pair in pairs]
    passes = sum(len(answer.decoding) for answer in answers)
    identical = sum(pair.identical for pair in pairs)
    return Totals(
        plain_tokens_per_s=speeds[0],
        speculative_tokens_per_s=speeds[1],
        speedup=speeds[1] / speeds[0] if speeds[0] else 0.0,
        mean_acceptance_length=sum(answer.num_decoded for answer in answers) / passes if passes else 0.0,
        identical=identical == len(pairs),
        num_identical=identical,
    )
