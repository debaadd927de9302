"""Tokens as coloured text: green what was drafted and accepted, other colours what the target said itself."""

from collections.abc import Iterable

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..core.outputs import Origin
from ..outputs import StreamChunk
from ..sampling import Detokenizer

STYLES = {Origin.DRAFTED: "green", Origin.RECOVERED: "yellow", Origin.BONUS: "cyan", Origin.PLAIN: "default"}
_MEANINGS = {
    Origin.DRAFTED: "drafted and accepted",
    Origin.RECOVERED: "the target's correction",
    Origin.BONUS: "the target's bonus after a full draft",
    Origin.PLAIN: "plain step",
}


class Painter:
    """Turns the chunks of one answer into coloured text.

    A character may span tokens: it gets the colour of the one that completes it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...] = ()):
        self._text = Detokenizer(tokenizer, stop)

    def paint(self, chunk: StreamChunk) -> Text:
        """The text that became certain with this chunk."""
        text, style = Text(), STYLES[Origin.PLAIN]
        for token, origin in zip(chunk.token_ids, chunk.origins, strict=True):
            self._text.feed(token)
            style = STYLES[origin]
            text.append(self._text.take(), style)
        if chunk.finish_reason is not None:
            text.append(self._text.finish(), style)
        return text


def legend(origins: Iterable[Origin]) -> Text:
    """What the colours mean, and how many tokens had each."""
    seen = list(origins)
    text = Text()
    for origin, style in STYLES.items():
        if count := seen.count(origin):
            text.append("■ ", style).append(f"{_MEANINGS[origin]} {count}   ", "dim")
    return text
