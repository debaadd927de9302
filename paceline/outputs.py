"""What a generation returns."""

from dataclasses import dataclass
from functools import cached_property

from .core.outputs import Origin, Round, Timings
from .core.request import TokenLogprob


@dataclass(frozen=True)
class Completion:
    """One answer.

    token_ids, origins, sources: the tokens, where each came from, and which drafter proposed it ("" for the target's
        own).
    logprobs: of each token, where asked for. rounds: one record per pass of the target model.
    finish_reason: "stop" or "length". stop_reason: the stop string or token id that ended the answer.
    seed: reproduces a sampled answer.
    lossless: the answer follows the target model's distribution. exact: it is the very answer that plain decoding with
        the same seed gives. numerics: how strictly, "invariant" (bit for bit) or "fast" (up to rounding ties).
    num_images, num_image_tokens: of the prompt.
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
        """Drafted tokens that were verified, all nodes of trees."""
        return sum(r.num_nodes for r in self.rounds)

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were accepted."""
        return sum(origin is Origin.DRAFTED for origin in self.origins)

    @cached_property
    def decoding(self) -> list[Round]:
        """The rounds after prefill."""
        return [r for r in self.rounds if not r.with_prompt]

    @property
    def num_decoded(self) -> int:
        """Tokens of these rounds: all but those that the prefill pass gave."""
        return sum(r.num_emitted for r in self.decoding)

    @cached_property
    def mean_acceptance_length(self) -> float:
        """Tokens per pass of the target model after prefill, its own token included, as in vLLM; 0 without passes."""
        return self.num_decoded / len(self.decoding) if self.decoding else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """The `n` answers to one prompt; the properties are those of the first answer."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    timings: Timings  # of the call that this request was part of

    @property
    def text(self) -> str:
        """Its text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """Its tokens."""
        return self.outputs[0].token_ids

    @property
    def origins(self) -> list[Origin]:
        """Where its tokens came from."""
        return self.outputs[0].origins

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log-probabilities of its tokens, where asked for."""
        return self.outputs[0].logprobs

    @property
    def rounds(self) -> list[Round]:
        """Its rounds."""
        return self.outputs[0].rounds

    @property
    def lossless(self) -> bool:
        """Whether it follows the target model's distribution."""
        return self.outputs[0].lossless

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: "stop" or "length"."""
        return self.outputs[0].finish_reason


@dataclass(frozen=True)
class StreamChunk:
    """What one round added to an answer; `text` may lag behind `token_ids` while a character is incomplete."""

    text: str
    token_ids: list[int]
    origins: list[Origin]
    finish_reason: str | None
    completion: Completion | None  # with the last chunk
