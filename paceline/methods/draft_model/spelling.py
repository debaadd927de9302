"""Converts between the tokens of a tokenizer and the bytes of the text."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

from ...errors import IncompatibleModels
from ...sampling.pieces import BYTE, Pieces
from ...target.loaded import LoadedModel

_PARTS = re.compile("[\udc80-\udcff]|[^\udc80-\udcff]+")
_PLAIN = "The quick brown fox jumps over the lazy dog"


@final
class Spelling:
    """The bytes of each token of a tokenizer, and the tokens of any bytes.

    pieces: the bytes of each token id. Special and added tokens have the bytes of their name, unused ids have none.
    index: the token id of (whether it is special, its bytes). Byte-fallback tokens come last if several have the same.

    Raises `IncompatibleModels` for a tokenizer whose tokens do not spell the text, for instance a lower-casing one.
    """

    def __init__(self, model: LoadedModel):
        self._tokenizer: Any = model.tokenizer
        self.end: int | None = self._tokenizer.eos_token_id
        added: Mapping[int, Any] = getattr(self._tokenizer, "added_tokens_decoder", {})
        names = {index: token.content.encode() for index, token in added.items()}
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        pieces = Pieces(self._tokenizer)
        spelled = {index: pieces.data(index) for index in vocab.values()} | names
        self.pieces = [spelled.get(index, b"") for index in range(model.vocab_size)]
        if self.join(self._ids(_PLAIN)).removeprefix(b" ") != _PLAIN.encode():
            raise IncompatibleModels(
                f"a draft with another tokenizer reads the text, which the tokenizer of {model.name} does not spell",
                got=repr(self._tokenizer.convert_ids_to_tokens(self._ids(_PLAIN)))[:120],
                expected="byte-level BPE, or SentencePiece with its spaces",
                fix="take a draft of the target's own family",
            )
        fallbacks_first = sorted(vocab.items(), key=lambda item: BYTE.fullmatch(item[0]) is None)
        ids = [index for _, index in fallbacks_first if self.join([index])]
        self.index = {(index in pieces.special, self.pieces[index]): index for index in ids}
        unknown = self.index.get((False, b"?"), self._ids(_PLAIN)[0])  # some tokenizers lack rare bytes
        self._of_byte = [self.index.get((False, bytes([byte])), unknown) for byte in range(256)]

    def join(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.pieces[index] if index < len(self.pieces) else b"" for index in ids)

    def encode(self, data: bytes, before: bytes = b"") -> list[int]:
        """The tokens of `data` in the middle of a text, after `before`.

        They spell `data`, except for bytes without a token. Bytes that are not UTF-8, such as part of a character, are
        spelled one by one.
        """
        ids, context = list[int](), (_parts(before) or [""])[-1]
        for part in _parts(data):
            if _is_escaped(part):
                ids.append(self._of_byte[ord(part) - 0xDC00])
            else:
                ids += self._tokens(part, "" if _is_escaped(context) else context)
            context = part
        return ids

    def _tokens(self, text: str, context: str) -> list[int]:
        """The tokens of a text after a context, if a token boundary is between the two; else of the text alone.

        A tokenizer may add a space before a text or normalise it. A text that cannot be spelled as a whole is halved.
        """
        data = text.encode()
        for anchor in dict.fromkeys((context, "", "\n", ".")):
            for ids in self._behind(self._ids(anchor + text), anchor.encode()):
                if self.join(ids) == data:
                    return ids
        if len(text) == 1:
            return [self._of_byte[byte] for byte in data]
        half = len(text) // 2
        return self._tokens(text[:half], "") + self._tokens(text[half:], "")

    def _behind(self, ids: list[int], anchor: bytes) -> Iterator[list[int]]:
        """The tokens after those that spell the anchor, before which the tokenizer may have added a space."""
        spelled = b""
        for place in range(len(ids) + 1):
            if spelled in (anchor, b" " + anchor):
                yield ids[place:]
            if place == len(ids) or len(spelled) > len(anchor) + 1:
                return
            spelled += self.join(ids[place : place + 1])

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _parts(data: bytes) -> list[str]:
    """The text in `data`, split so that each byte that is not UTF-8 is a part of its own, in Python's escaped form."""
    return _PARTS.findall(data.decode(errors="surrogateescape"))


def _is_escaped(part: str) -> bool:
    return "\udc80" <= part[:1] <= "\udcff"
