"""Tokens as coloured text: green for drafted and accepted ones, other colours for the target model's own."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..outputs import Completion, StreamChunk

STYLES = {"drafted": "green", "recovered": "yellow", "bonus": "cyan", "plain": "default"}
"""The colour of a token by its origin, the value of an `Origin`."""


class Painter:
    """Turns the chunks of one answer into coloured text.

    A character may span tokens: it gets the colour of the token that completes it.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop: tuple[str, ...] = ()):
        from ..sampling.detokenize import Detokenizer

        self._text = Detokenizer(tokenizer, stop)

    def paint(self, chunk: "StreamChunk | Completion") -> Text:
        """The text that this chunk, or a whole answer, completes."""
        pieces = self._text.pieces(chunk.token_ids, chunk.finish_reason is not None)
        styles = (STYLES[origin.value] for origin in chunk.origins)
        return Text.assemble(*zip(pieces, styles, strict=True))


def legend(origins: Iterable[str]) -> Text:
    """What the colours mean, and how many tokens had each."""
    from ..eval.page import MEANINGS

    seen, text = list(origins), Text()
    for origin, style in STYLES.items():
        if count := seen.count(origin):
            text.append("■ ", style).append(f"{MEANINGS[origin]} {count}   ", "dim")
    return text
