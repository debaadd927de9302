"""From the engine's outputs to the choices of an answer, whole or piece by piece.

Both ways read the same deltas, so the pieces of a stream joined are the whole answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.figures import tokens_per_pass
from ..core.outputs import Origin, Round
from ..core.request import TokenLogprob
from ..drafters import PredictedOutput
from ..outputs import Completion
from ..sampling.detokenize import Detokenizer
from .tools import ToolReader


@dataclass
class Choice:
    """One answer as it comes. tools: takes calls out of its text. pieces: the text of each token, for provenance.

    num_accepted: drafted tokens in it. num_predicted: those of them that the request predicted.
    """

    index: int
    tools: ToolReader | None = None
    pieces: Detokenizer | None = None
    text: str = ""
    num_tokens: int = 0
    num_accepted: int = 0
    num_predicted: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    provenance: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    rounds: list[Round] = field(default_factory=list[Round])
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def take(self, part: Completion) -> "Delta":
        """Take in what came; returns what of it clients see."""
        text = part.text if self.tools is None else self.tools.feed(part.text)
        self.finish_reason, self.stop_reason = part.finish_reason, part.stop_reason
        if self.tools is not None and self.finish_reason is not None:
            text += self.tools.finish()
            if self.tools.calls:
                self.finish_reason = "tool_calls"
        delta = Delta(text, part.logprobs or [], self._provenance(part))
        self.text += text
        self.num_tokens += len(part.token_ids)
        self.num_accepted += sum(origin is Origin.DRAFTED for origin in part.origins)
        self.num_predicted += part.sources.count(PredictedOutput.name)
        self.logprobs += delta.logprobs
        self.provenance += delta.provenance
        self.rounds += part.rounds
        return delta

    def _provenance(self, part: Completion) -> list[dict[str, object]]:
        if self.pieces is None:
            return []
        texts = self.pieces.pieces(part.token_ids, part.finish_reason is not None)
        rows = zip(part.token_ids, texts, part.origins, part.sources, strict=True)
        return [
            {"id": token, "text": text, "origin": origin.value, "source": source}
            for token, text, origin, source in rows
        ]


@dataclass(frozen=True)
class Delta:
    """What one output of the engine added to a choice."""

    text: str
    logprobs: list[TokenLogprob]
    provenance: list[dict[str, object]]


class ChatForm:
    """Answers of /v1/chat/completions."""

    id_prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first piece of a choice: who speaks."""
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def piece(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A piece of a choice."""
        message: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if choice.finish_reason is not None and choice.tools is not None and choice.tools.calls:
            message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(choice.tools.calls)]
        return {"delta": message, "logprobs": self.logprobs(delta.logprobs)}

    def entire(self, choice: Choice) -> dict[str, Any]:
        """A whole choice."""
        calls = choice.tools.calls if choice.tools is not None else []
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if calls:
            message |= {"content": choice.text.strip() or None, "tool_calls": calls}
        return {"message": message, "logprobs": self.logprobs(choice.logprobs)}

    def logprobs(self, given: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Those of its tokens, where asked for."""
        if not given:
            return None
        return {
            "content": [
                {**_token(one, one.token_id), "top_logprobs": [_token(one, token) for token in one.top]}
                for one in given
            ]
        }


class CompletionForm:
    """Answers of /v1/completions. echo: the prompt of each choice, which comes before it; or none."""

    id_prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(self, echo: Sequence[str] = ()):
        self.echo, self._offsets = echo, dict[int, int]()

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first piece of a choice: its prompt, where that is asked for."""
        return {"text": self.echo[choice.index], "logprobs": None} if self.echo else None

    def piece(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """A piece of a choice."""
        return {"text": delta.text, "logprobs": self._logprobs(choice, delta.logprobs)}

    def entire(self, choice: Choice) -> dict[str, Any]:
        """A whole choice."""
        prompt = self.echo[choice.index] if self.echo else ""
        return {"text": prompt + choice.text, "logprobs": self._logprobs(choice, choice.logprobs)}

    def _logprobs(self, choice: Choice, given: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not given:
            return None
        tokens = [one.texts.get(one.token_id, "") for one in given]
        at = self._offsets.get(choice.index, len(self.echo[choice.index]) if self.echo else 0)
        offsets = [at := at + len(text) for text in ["", *tokens]]
        self._offsets[choice.index] = offsets.pop()
        top = [{one.texts.get(token, ""): _finite(one[token].logprob) for token in one} for one in given]
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(one.logprob) for one in given],
            "top_logprobs": top,
            "text_offset": offsets,
        }


def choice_of(choice: Choice, content: dict[str, Any], is_last: bool, provenance: Sequence[object]) -> dict[str, Any]:
    """A choice, or a piece of one, with what both APIs have."""
    made = {"index": choice.index, **content, "finish_reason": None}
    if is_last:
        made |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    return made | ({"provenance": list(provenance)} if choice.pieces is not None else {})


def usage_of(
    num_prompt_tokens: int, num_cached_tokens: int, choices: Sequence[Choice], is_predicted: bool = False
) -> dict[str, Any]:
    """The numbers of tokens; those of a prompt count once for all its choices.

    num_cached_tokens: of the prompts, those that the prefix cache had.
    is_predicted: also of the prediction. Its rejected tokens were drafted and are not in the answer: they are no
        completion tokens.
    """
    num = sum(one.num_tokens for one in choices)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num,
        "total_tokens": num_prompt_tokens + num,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    if is_predicted:
        rounds = [one for choice in choices for one in choice.rounds if one.source == PredictedOutput.name]
        accepted = sum(one.num_predicted for one in choices)
        rejected = sum(one.num_nodes for one in rounds) - accepted
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        }
    return usage


def figures_of(choices: Sequence[Choice], first_s: float | None, seconds: float) -> dict[str, Any]:
    """How an answer was decoded, by vLLM's names; first_s: until the first token."""
    rounds = [one for choice in choices for one in choice.rounds]
    drafted, accepted = sum(one.num_nodes for one in rounds), sum(one.num_accepted for one in choices)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": tokens_per_pass(rounds) if rounds else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
            "num_spec_steps": sum(one.num_nodes > 0 for one in rounds),
            "num_draft_tokens": drafted,
            "num_accepted_draft_tokens": accepted,
            "num_accepted_tokens_per_pos": [
                sum(one.num_accepted > place for one in rounds)
                for place in range(max((one.num_drafted for one in rounds), default=0))
            ],
        },
        "time_to_first_token_s": first_s,
        "seconds": seconds,
    }


def _token(one: TokenLogprob, token: int) -> dict[str, Any]:
    text = one.texts.get(token, "")
    return {"token": text, "logprob": _finite(one[token].logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    """JSON has no -inf."""
    return max(logprob, -9999.0)
