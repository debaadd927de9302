"""What a generation returns."""

from dataclasses import dataclass
from functools import cached_property

from .core.outputs import Origin, Round, Timings
from .core.request import Sequence, TokenLogprob


@dataclass(frozen=True)
class Completion:
    """One answer.

    origins, sources: for each token where it came from, and which drafter proposed it ("" for the target's own).
    rounds: one record per target pass. lossless: the text follows the target's law. exact: it is the very text that
    plain decoding with the same seed gives; `numerics` tells how strictly (bit for bit, or up to rounding ties).
    seed: reproduces a sampled answer. stop_reason: the stop string or token id that ended it. num_images,
    num_image_tokens: of the prompt.
    """

    text: str
    token_ids: list[int]
    origins: list[Origin]
    sources: list[str]
    logprobs: list[TokenLogprob] | None
    rounds: list[Round]
    finish_reason: str | None
    stop_reason: str | int | None
    seed: int
    lossless: bool
    exact: bool
    numerics: str
    num_images: int = 0
    num_image_tokens: int = 0

    @property
    def num_drafted(self) -> int:
        """Candidates that were verified."""
        return sum(r.num_nodes for r in self.rounds)

    @property
    def num_accepted(self) -> int:
        """Drafted tokens in the answer."""
        return sum(origin is Origin.DRAFTED for origin in self.origins)

    @cached_property
    def decoding(self) -> list[Round]:
        """The rounds after the pass that read the prompt."""
        return [r for r in self.rounds if not r.with_prompt]

    @property
    def num_decoded(self) -> int:
        """Tokens of these rounds: all but the first, and what was drafted and verified while the prompt was read."""
        return sum(r.num_emitted for r in self.decoding)

    @cached_property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass after the prompt was read, the target's own included (vLLM's meaning); 0 without."""
        return self.num_decoded / len(self.decoding) if self.decoding else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt: `n` of them; the shorthands speak of the first."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    timings: Timings  # of the call that this request was part of

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the first answer."""
        return self.outputs[0].token_ids

    @property
    def origins(self) -> list[Origin]:
        """Origins of the first answer's tokens."""
        return self.outputs[0].origins

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Logprobs of the first answer's tokens, where asked for."""
        return self.outputs[0].logprobs

    @property
    def rounds(self) -> list[Round]:
        """Rounds of the first answer."""
        return self.outputs[0].rounds

    @property
    def lossless(self) -> bool:
        """Whether the answers follow the target's law."""
        return self.outputs[0].lossless

    @property
    def finish_reason(self) -> str | None:
        """Why the first answer ended: "stop" or "length"."""
        return self.outputs[0].finish_reason


@dataclass(frozen=True)
class StreamChunk:
    """What one round added to an answer; `text` may lag behind `token_ids` while a character is incomplete."""

    text: str
    token_ids: list[int]
    origins: list[Origin]
    finish_reason: str | None
    completion: Completion | None  # with the last chunk


def completion_of(seq: Sequence, text: str, lossless: bool, exact: bool, numerics: str) -> Completion:
    """Freeze a finished sequence."""
    return Completion(
        text,
        list(seq.output_ids),
        list(seq.origins),
        list(seq.sources),
        list(seq.logprobs) if seq.params.logprobs is not None else None,
        list(seq.rounds),
        seq.finish_reason,
        seq.stop_reason,
        seq.seed,
        lossless,
        exact,
        numerics,
        len(seq.vision.images) if seq.vision else 0,
        seq.vision.num_tokens if seq.vision else 0,
    )
