"""Decodes prompts with and without speculation on the same loaded weights, and streams both."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..core.request import SamplingParams
from ..core.round import MIN_TIMED, Timings, tokens_per_pass
from ..engine.output import Completion, StreamChunk
from ..errors import ConfigError
from ..llm import LLM
from .prompts import Example, user_prompt

_WARM_UP = 12  # tokens: the first passes are slower, since they allocate memory and load kernels


@dataclass(frozen=True)
class Pair:
    """One prompt, decoded both ways; plain_s, speculative_s: seconds of decoding, without reading the prompt."""

    name: str
    plain: Completion
    plain_s: float
    speculative: Completion
    speculative_s: float

    @property
    def identical(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids


@dataclass(frozen=True)
class Speeds:
    """Speeds for one prompt or several: tokens over seconds, summed first, so that a long answer has more weight.

    Speeds are None for answers of fewer than `MIN_TIMED` tokens. identical: to plain decoding.
    """

    plain_tokens_per_s: float | None
    speculative_tokens_per_s: float | None
    speedup: float | None
    mean_acceptance_length: float
    identical: bool


@dataclass(frozen=True)
class Begin:
    """The next answer starts."""

    name: str
    is_speculative: bool


Event: TypeAlias = Begin | StreamChunk | Pair


def demo(llm: LLM, examples: Sequence[Example], params: SamplingParams) -> Iterator[Event]:
    """Decode each example plainly, then with speculation: a `Begin` and the chunks of each answer, a `Pair` after both.

    The two take turns prompt by prompt, so that a machine that slows down slows both.
    """
    if not examples:
        raise ConfigError("there is nothing to show", got="no prompts")
    plain = llm.plain()
    prompts = [user_prompt(llm.loaded, example.prompt) for example in examples]
    warm_up = SamplingParams(temperature=params.temperature, max_tokens=min(_WARM_UP, params.most_tokens), seed=0)
    for side in (plain, llm):
        for _ in side.stream(prompts[0], warm_up):
            pass
    for example, prompt in zip(examples, prompts, strict=True):
        runs: list[Any] = []
        for side in (plain, llm):
            yield Begin(example.name, side is llm)
            completion: Any = None
            for chunk in side.stream(prompt, params):
                completion = chunk.completion
                yield chunk
            runs += [completion, Timings.of(completion.rounds).decode]
        yield Pair(example.name, *runs)


def speeds(pairs: Sequence[Pair]) -> Speeds:
    """Tokens after the prefill over seconds of decoding, on both sides."""
    answers = [pair.speculative for pair in pairs]
    plain = _speed(sum(pair.plain.num_decoded for pair in pairs), sum(pair.plain_s for pair in pairs))
    fast = _speed(sum(answer.num_decoded for answer in answers), sum(pair.speculative_s for pair in pairs))
    return Speeds(
        plain_tokens_per_s=plain,
        speculative_tokens_per_s=fast,
        speedup=None if plain is None or fast is None else fast / plain,
        mean_acceptance_length=tokens_per_pass(r for answer in answers for r in answer.rounds),
        identical=all(pair.identical for pair in pairs),
    )


def _speed(tokens: int, seconds: float) -> float | None:
    return None if tokens < MIN_TIMED else tokens / max(seconds, 1e-9)
