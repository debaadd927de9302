"""What a generation returns."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import chain

from ..core.request import TokenLogprob
from ..core.round import Origin, Round, Timings, tokens_per_pass
from ..schema import brief


@dataclass(frozen=True, repr=False, kw_only=True)
class Completion:
    """One answer.

    index: its place among the `n` answers.
    logprobs: of each token, where asked for.
    finish_reason: "stop", "length" or "abort" (`AsyncLLM.abort`); None before the end. stop_reason: the stop string or
        token id that ended the answer.
    origins, sources: where each token came from, and which drafter proposed it ("" for the target's own).
    rounds: one record per pass of the target model.
    seed: reproduces a sampled answer.
    lossless: the answer follows the target model's distribution. exact: it is the very answer that plain decoding with
        the same seed gives. numerics: how strictly, "invariant" (bit for bit) or "fast" (up to near-ties).
    num_images, num_image_tokens: of the prompt. num_cached_tokens: tokens of the prompt that the prefix cache had.
    no_draft_reason: why the drafter drafted nothing at all, where it did not and the reason is known.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None
    stop_reason: str | int | None
    origins: list[Origin]
    sources: list[str]
    rounds: list[Round]
    seed: int
    lossless: bool
    exact: bool
    numerics: str
    num_images: int = 0
    num_image_tokens: int = 0
    no_draft_reason: str | None = None
    num_cached_tokens: int = 0

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities, where asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)

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
        """Tokens of these rounds: all but those from the prefill pass."""
        return sum(r.num_emitted for r in self.decoding)

    @cached_property
    def mean_acceptance_length(self) -> float:
        """Tokens per pass, see `tokens_per_pass`."""
        return tokens_per_pass(self.rounds)

    def to_dict(self) -> dict[str, object]:
        """The fields as a dict for JSON, without the rounds."""
        names = [field.name for field in fields(self) if field.name != "rounds"]
        names += ["cumulative_logprob", "mean_acceptance_length", "num_drafted", "num_accepted"]
        return {**{name: getattr(self, name) for name in names}, "logprobs": _listed(self.logprobs)}

    def joined(self, later: "Completion") -> "Completion":
        """Join a part of an answer and the next one."""
        names = ("text", "token_ids", "origins", "sources", "rounds")
        both = {name: getattr(self, name) + getattr(later, name) for name in names}
        if self.logprobs is not None and later.logprobs is not None:
            both["logprobs"] = self.logprobs + later.logprobs
        return replace(later, **both)

    def __repr__(self) -> str:
        text, count, reason = brief(self.text), len(self.token_ids), self.finish_reason
        return f"Completion(index={self.index}, text={text}, {count} tokens, finish_reason={reason!r})"


@dataclass(frozen=True, repr=False, kw_only=True)
class RequestOutput:
    """The `n` answers to one prompt; `text`, `token_ids` and so on are those of the first answer.

    request_id: the given id, or the number of the request in its `LLM`, as text.
    prompt: the prompt as text, a chat rendered by the model's template; None where it was given as token ids.
    prompt_logprobs: of each token of the prompt, None for the first; None where not asked for.
    all_rounds: those of each answer, also where `outputs` has parts of the answers.
    num_cached_tokens: tokens of the prompt that the prefix cache had for the first answer.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    outputs: list[Completion]
    all_rounds: list[list[Round]]
    num_cached_tokens: int = 0

    @cached_property
    def metrics(self) -> Timings:
        """The seconds of this request so far."""
        return Timings.of(chain.from_iterable(self.all_rounds))

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return all(completion.finish_reason is not None for completion in self.outputs)

    def joined(self, later: "RequestOutput") -> "RequestOutput":
        """Join parts of the answers and the next ones."""
        outputs = [completion.joined(other) for completion, other in zip(self.outputs, later.outputs, strict=True)]
        return replace(later, outputs=outputs)

    def to_dict(self) -> dict[str, object]:
        """The fields as a dict for JSON."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self) if field.name != "all_rounds"},
            "prompt_logprobs": _listed(self.prompt_logprobs),
            "outputs": [completion.to_dict() for completion in self.outputs],
            "finished": self.finished,
            "metrics": {**asdict(self.metrics), "decode": self.metrics.decode},
        }

    def __repr__(self) -> str:
        prompt = f"{len(self.prompt_token_ids)} tokens" if self.prompt is None else brief(self.prompt)
        return f"RequestOutput(request_id={self.request_id!r}, prompt={prompt}, outputs={self.outputs})"

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
        """Where its tokens came from, one `Origin` each."""
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
    """The tokens that one round added to an answer; `text` is delayed while a character is incomplete."""

    text: str
    token_ids: list[int]
    origins: list[Origin]
    finish_reason: str | None
    completion: Completion | None  # with the last chunk


def _listed(logprobs: Sequence[TokenLogprob | None] | None) -> list[dict[str, object] | None] | None:
    if logprobs is None:
        return None
    names = ("token_id", "logprob", "rank", "top")
    return [None if entry is None else {name: getattr(entry, name) for name in names} for entry in logprobs]
