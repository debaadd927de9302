"""Incremental detokenization: the text equals that of decoding the whole answer. Also finds stop strings.

Decoding one token at a time is wrong: a character may span tokens, and a decoder may treat the first token of a
sequence differently. So each step decodes a short window twice, without and with the new tokens:

    ids      ... a b | c d | e         `_start` = index of a, `_read` = index of c or d: all before is final
    decode      [a b]                  text of the window that is known already
    decode      [a b   c d   e]        the same and what c, d, e add; final unless a character is incomplete
"""

import codecs
import copy
from collections.abc import Collection, Sequence
from typing import final

from transformers import PreTrainedTokenizerBase

from .pieces import BYTE, Pieces, special_ids

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@final
class Detokenizer:
    """The text of one answer.

    stop_hit: the stop string that ended the text, or None. The text is cut before it, with `include_stop` after it. If
        the same token completes several, the one that ends first in the text counts, and of those the longest. Feeding
        another token discards the hit (for `min_tokens`): only stop strings that end later are then looked for.
    spaces_between_special: False omits the space that a few tokenizers put between two added tokens, as in vLLM.
    shown: special tokens that are not skipped.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        spaces_between_special: bool = True,
        shown: Collection[int] = (),
    ):
        self._tokenizer = tokenizer
        self._stop, self._include_stop = stop, include_stop
        self._skip_special = skip_special_tokens and not shown
        self._special = special_ids(tokenizer).difference(shown) if skip_special_tokens else frozenset[int]()
        added = () if skip_special_tokens or spaces_between_special else tokenizer.added_tokens_decoder
        self._joined = frozenset(added)
        self._overlap = max((len(text) for text in stop), default=1) - 1
        self._ids: list[int] = []
        self._start = 0  # the window's first token
        self._read = 0  # tokens before this one are in `_final`
        self._known = ""  # text of the window's tokens up to `_read`
        self._final = ""
        self._pending = ""  # text of the tokens from `_read` on, which later tokens may change
        self._taken = 0  # characters that `take` and `finish` have returned
        self._floor = 0  # where a declined stop string ended
        self._hit_end = 0
        self._cut: int | None = None
        self.stop_hit: str | None = None

    @property
    def text(self) -> str:
        """The answer so far: all of it, incomplete characters included, cut before the stop string."""
        return (self._final + self._pending)[: self._cut]

    def feed(self, token_id: int) -> bool:
        """Take one token; True iff a stop string is complete now."""
        self.decline()
        if token_id in self._special:  # not even in the window, where its empty text would hide a leading space
            return False
        searched = len(self._final)
        self._decode(token_id)
        return bool(self._stop) and self._find_stop(max(0, searched - self._overlap))

    def would_stop(self, token_ids: list[int]) -> bool:
        """Whether the last of these tokens would complete a stop string; nothing is taken."""
        ahead = copy.copy(self)
        ahead._ids = list(self._ids)
        return [ahead.feed(token) for token in token_ids][-1]

    def decline(self) -> None:
        """Discard a stop string that was found too early; harmless if there is none."""
        if self._cut is not None:
            self._floor, self._cut, self.stop_hit = self._hit_end, None, None

    def take(self) -> str:
        """The new final text since the last call, without an incomplete character or a beginning of a stop string."""
        return self._take_to(min(self._certain(), len(self._final) if self._cut is None else self._cut))

    def finish(self) -> str:
        """The rest of the text, at the end of the answer."""
        return self._take_to(len(self.text))

    def pieces(self, token_ids: Sequence[int], is_end: bool) -> list[str]:
        """Feed tokens; returns the new final text after each, and at the end of the answer all of the rest."""
        texts = list[str]()
        for token in token_ids:
            self.feed(token)
            texts.append(self.take())
        if texts and is_end:
            texts[-1] += self.finish()
        return texts

    def offsets(self, token_ids: Sequence[int], pieces: Pieces) -> list[int]:
        """Feed tokens; returns where in the text each begins, or the character that it is a later part of."""
        offsets = list[int]()
        for token in token_ids:
            offsets.append(self._offset_of(token, pieces))
            self.feed(token)
        return offsets

    def _offset_of(self, token_id: int, pieces: Pieces) -> int:
        """Where the next token would begin."""
        is_hidden = token_id in self._special
        if not (self._pending and (is_hidden or pieces.may_be_part(token_id))):
            return len(self._final) + len(self._pending)
        decoder, first = codecs.getincrementaldecoder("utf-8")("replace"), pieces.data(token_id)[: not is_hidden]
        text = decoder.decode(b"".join(map(pieces.data, self._ids[self._read :])) + first)
        is_dropped = not self._final and text.startswith(" ") and not self._pending.startswith(" ")
        has_ended = first and not decoder.getstate()[0]  # the first byte has completed a character
        return len(self._final) + len(text) - is_dropped - bool(has_ended)

    def _take_to(self, end: int) -> str:
        begin, self._taken = self._taken, max(self._taken, end)
        return self.text[begin : self._taken]

    def _decode(self, token_id: int) -> None:
        self._ids.append(token_id)
        whole = self._text_of(self._ids[self._start :])
        self._pending = whole[len(self._known) :]
        if self._read == len(self._ids) - 1 > 0 and self._joined.issuperset(self._ids[-2:]):
            self._pending = self._pending.removeprefix(" ")
        # a run of byte tokens is decoded together and may still become replacement characters
        if not self._pending or self._pending.endswith(_REPLACEMENT) or self._is_byte(token_id):
            return
        self._final += self._pending
        self._pending = ""
        self._start, self._read = self._read, len(self._ids)
        self._known = self._text_of(self._ids[self._start : self._read])

    def _text_of(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        assert isinstance(text, str)  # a list only where a batch is decoded
        return text

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and BYTE.fullmatch(token) is not None

    def _find_stop(self, begin: int) -> bool:
        """Find the stop string that ends first in the text from `begin` on, and cut the text there."""
        text = self._final[begin:] + self._pending
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = text.find(stop, max(0, self._floor - begin - len(stop) + 1))
            if at >= 0:
                match = (begin + at + len(stop), begin + at, stop)
                best = match if best is None or match < best else best
        if best is None:
            return False
        self._hit_end, self._cut, self.stop_hit = best
        self._cut = self._hit_end if self._include_stop else self._cut
        return True

    def _certain(self) -> int:
        """The length of the final text without its longest suffix that could begin a stop string."""
        length = len(self._final)
        for begin in range(max(0, length - self._overlap), length):
            if any(stop.startswith(self._final[begin:]) for stop in self._stop):
                return begin
        return length
