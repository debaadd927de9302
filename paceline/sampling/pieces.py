"""The bytes and the text of single tokens, from their pieces in the vocabulary.

Decoding a token alone would lose both: half a character becomes U+FFFD, and a decoder may drop the first space.

    token          byte-level BPE    SentencePiece    bytes      text
    " the"         Ġthe              ▁the             b" the"    " the"
    half of "é"    Ã                 <0xC3>           b"\\xc3"    "bytes:\\xc3"
"""

import json
import re
from typing import Any, final

from transformers import PreTrainedTokenizerBase

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of byte fallback."""
_SPACES: dict[str, Any] = {"type": "Metaspace", "replacement": "\u2581"}
_REPLACING = ("Replace", "Metaspace")
_STEPS = {"ByteLevel", "ByteFallback", "Fuse", *_REPLACING}


@final
class Pieces:
    """The tokens of a tokenizer, one by one.

    Joined, the bytes of an answer's tokens are the UTF-8 of its text, apart from what is not a token's alone: the text
    has no special tokens if they are skipped, ends before a stop string, begins without the space that a SentencePiece
    decoder drops, and has U+FFFD for bytes that are no UTF-8.

    Tokenizers of other kinds, such as WordPiece, decode each token alone.

    special: the ids of special tokens, which decoding can skip.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.special = special_ids(tokenizer)
        self._tokenizer, self._known = tokenizer, dict[int, bytes]()
        steps = _decoder(tokenizer)
        kinds = {step["type"] for step in steps}
        regexes = any("String" not in step["pattern"] for step in steps if step["type"] == "Replace")
        whole = {"Strip"} if "Fuse" in kinds else set[str]()  # it strips the text, not each token
        self._is_spelled = bool(steps) and kinds <= _STEPS | whole and not regexes
        self._is_byte_level, self._has_byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._replaced = [_replaced(step) for step in steps if self._is_spelled and step["type"] in _REPLACING]

    def data(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id without a token."""
        if token_id not in self._known:
            self._known[token_id] = self._spelled(token_id)
        return self._known[token_id]

    def text(self, token_id: int) -> str:
        """The text of a token; bytes that are no UTF-8 are written `bytes:\\xf0\\x9f`, as in the OpenAI API."""
        data = self.data(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return f"bytes:{repr(data)[2:-1]}"

    def may_be_part(self, token_id: int) -> bool:
        """Whether a token may begin inside a character."""
        if not self._is_spelled or self._is_byte_level:
            return self._is_spelled
        return self._has_byte_fallback and BYTE.fullmatch(self._name(token_id)) is not None

    def _name(self, token_id: int) -> str:
        name = self._tokenizer.convert_ids_to_tokens(token_id)
        return name if isinstance(name, str) else ""

    def _spelled(self, token_id: int) -> bytes:
        if not self._is_spelled:
            return str(self._tokenizer.decode([token_id])).encode()
        name = self._name(token_id)
        if self._has_byte_fallback and (byte := BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replaced:
            name = name.replace(old, new)
        if self._is_byte_level and all(char in _ALPHABET for char in name):
            return bytes(_ALPHABET[char] for char in name)
        return name.encode()


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids of special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset([*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)])


def _decoder(tokenizer: Any) -> list[dict[str, Any]]:
    """The steps of its decoder, as in tokenizer.json; none if it has no decoder that is known."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # in Python
        if hasattr(tokenizer, "sp_model"):
            return [_SPACES, {"type": "ByteFallback"}]
        return [{"type": "ByteLevel"}] if hasattr(tokenizer, "byte_decoder") else []
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _replaced(step: dict[str, Any]) -> tuple[str, str]:
    return (step["replacement"], " ") if step["type"] == "Metaspace" else (step["pattern"]["String"], step["content"])


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE (GPT-2): printable ones themselves, the others from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
