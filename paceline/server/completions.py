"""Answers in the format of /v1/completions, in which a prompt may be echoed with its log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.request import TokenLogprob
from ..sampling.detokenize import Detokenizer
from .answers import Answering, Choice, Delta, finite


@dataclass(kw_only=True)
class CompletionAnswering(Answering):
    """One request to /v1/completions. echo: the prompt of each choice, to put before it; or none.

    An echo has log-probabilities where the answer has some: those of the prompt, in which the first token has none.
    """

    echo: Sequence[str]
    texts: dict[int, Detokenizer] = field(default_factory=dict[int, Detokenizer])  # of each choice, for its offsets
    id_prefix, whole_name, piece_name = "cmpl-", "text_completion", "text_completion"

    def _opening(self, choice: Choice) -> dict[str, Any] | None:
        return {"text": self.echo[choice.index], "logprobs": self._echoed(choice)} if self.echo else None

    def _piece(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text, "logprobs": self._listed(choice, delta.logprobs)}

    def _entire(self, choice: Choice) -> dict[str, Any]:
        piece = self._piece(choice, choice) | self.prompt_logprobs(choice.index // self.params.n)
        if not self.echo:
            return piece
        echoed, own = self._echoed(choice), piece["logprobs"]
        both = {name: echoed[name] + own[name] for name in echoed} if echoed and own else own or echoed
        return {**piece, "text": self.echo[choice.index] + choice.text, "logprobs": both}

    def _of_prompt(self) -> dict[str, Any]:
        return {}  # each choice has them

    def _echoed(self, choice: Choice) -> dict[str, Any] | None:
        """The log-probabilities of the prompt of a choice."""
        output = self.last[choice.index // self.params.n]
        if self.params.logprobs is None or output.prompt_logprobs is None:
            return None
        entries, ids = output.prompt_logprobs, output.prompt_token_ids
        pieces, tokenizer = self.service.llm.loaded.pieces, self.service.llm.tokenizer
        shown = Detokenizer(tokenizer, (), skip_special_tokens=False)
        offsets = [0] * len(ids) if pieces is None else shown.offsets(ids, pieces)
        text = self.echo[choice.index]
        more = max(0, str(tokenizer.decode(ids)).find(text))  # what the tokenizer put before it
        return {
            "tokens": [pieces.text(token) if pieces else "" for token in ids],
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else by_text(entry) for entry in entries],
            "text_offset": [min(max(0, offset - more), len(text)) for offset in offsets],
        }

    def _listed(self, choice: Choice, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        return {
            "tokens": [entry.texts.get(entry.token_id, "") for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [by_text(entry) for entry in entries],
            "text_offset": self._offsets(choice, [entry.token_id for entry in entries]),
        }

    def _offsets(self, choice: Choice, token_ids: Sequence[int]) -> list[int]:
        """Where each of the next tokens of a choice begins in its text."""
        begin, pieces = len(self.echo[choice.index]) if self.echo else 0, self.service.llm.loaded.pieces
        if pieces is None:
            return [begin] * len(token_ids)
        if choice.index not in self.texts:
            self.texts[choice.index] = self.service.detokenizer(self.params)
        return [begin + at for at in self.texts[choice.index].offsets(token_ids, pieces)]


def by_text(entry: TokenLogprob) -> dict[str, float]:
    """The log-probabilities by the text of each token. A further token of the same text is named as in vLLM."""
    logprobs = dict[str, float]()
    for token in entry:
        text = entry.texts.get(token, "")
        logprobs[f"token_id:{token}" if text in logprobs else text] = finite(entry[token].logprob)
    return logprobs
