"""A draft model with another tokenizer: the draft reads the same text in its own tokens, and drafts the target's.

Timor et al. 2025 (arXiv 2502.05202). What both tokenizers share is the text, as bytes:

    target     "Ġun" "believ" "able" "Ġ" "<0xF0>" ...      tokens, whatever their alphabet
    bytes       un    believ   able       F0
    draft      "▁unbelievable" "▁" "<0xF0>" ...

intersection   The draft's logits at the tokens that both have, as logits over the target's ids (TLI, algorithm 4 of the
               paper). It is an ordinary distribution over the target's vocabulary, so every verifier can use it.
strings        The draft drafts in its own tokens, and their text is cut into the target's tokens (SLEM, algorithm 2).
               Such a draft has no distribution: a point mass.

The target verifies whatever comes of it, so that nothing here can change an answer.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeAlias, final

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, ModelFacts
from ..core.request import SamplingParams, Sequence
from ..core.tree import TokenTree
from ..errors import IncompatibleModels
from ..runner import ModelRunner
from ..sampling import DraftSampler
from ..sampling.scores import before_banned
from .chain import CommonTokens, draft_chains

VocabularyMode: TypeAlias = Literal["auto", "intersection", "strings"]

_ENOUGH = 0.9
"""The share of a text's tokens in the intersection from which on "auto" takes it."""
_LOOK_BACK = 8
"""Tokens at the end of a text that are cut anew when it goes on, and as many before them for context."""
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PARTS = re.compile("[\udc80-\udcff]|[^\udc80-\udcff]+")
_PLAIN = "The quick brown fox jumps over the lazy dog"
_SAMPLE = """The town lies at the end of a long valley, and most of the people who live there work in the mill.
"Have you seen what they're building?" she asked. In 2024, sales rose by 12.5% to $3.4 million (up from $3.0 million).

1. First, read the question carefully. 2. Then write down what you know, e.g. the distance and the time.
def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("no values")
    return sum(values) / len(values)

for (int i = 0; i < n; ++i) { total += weights[i] * x[i]; }  // O(n)
Der schnelle Fuchs läuft über die Brücke. Où est la bibliothèque ? El niño comió una manzana. Привет, мир!
"""
"""What the share of the intersection is measured on."""


@final
class Spelling:
    """The bytes that each token of a tokenizer stands for, and the tokens of any bytes.

    pieces: the bytes of each token id; special and added tokens stand for their name, unused ids for nothing.
    index: the token id of (whether it is special, its bytes). Of two with the same bytes it is the one that is no
        byte fallback.

    Raises `IncompatibleModels` for a tokenizer whose tokens do not spell the text, for instance in lower case.
    """

    def __init__(self, model: ModelFacts):
        self._tokenizer = model.tokenizer
        added: Mapping[int, Any] = getattr(self._tokenizer, "added_tokens_decoder", {})
        special = {*self._tokenizer.all_special_ids, *(index for index, one in added.items() if one.special)}
        names = {index: one.content.encode() for index, one in added.items()}
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        for spell in (_of_byte_level, _of_sentencepiece):
            found = {index: spell(token) for token, index in vocab.items()} | names
            self.pieces = [found.get(index, b"") for index in range(model.vocab_size)]
            if self.join(self._ids(_PLAIN)).removeprefix(b" ") == _PLAIN.encode():
                break
        else:
            raise IncompatibleModels(
                f"a draft with another tokenizer reads the text, which the tokenizer of {model.name} does not spell",
                got=repr(self._tokenizer.convert_ids_to_tokens(self._ids(_PLAIN)))[:120],
                expected="byte-level BPE, or SentencePiece with its spaces",
                fix="take a draft of the target's own family",
            )
        fallbacks_first = sorted(vocab.items(), key=lambda item: _BYTE.fullmatch(item[0]) is None)
        ids = [index for _, index in fallbacks_first if self.join([index])]
        self.index = {(index in special, self.pieces[index]): index for index in ids}
        unknown = self.index.get((False, b"?"), self._ids(_PLAIN)[0])  # some tokenizers lack rare bytes
        self._of_byte = [self.index.get((False, bytes([byte])), unknown) for byte in range(256)]

    def join(self, ids: Iterable[int]) -> bytes:
        """The bytes of some tokens."""
        return b"".join(self.pieces[index] if index < len(self.pieces) else b"" for index in ids)

    def encode(self, data: bytes, before: bytes = b"") -> list[int]:
        """The tokens of `data` in the middle of a text, where it follows `before`.

        They spell `data`, except for bytes that the tokenizer has no token for. What is no UTF-8, such as a part of a
        character, is spelled byte by byte.
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
        """The tokens of a text that follows the context, if their boundary is there; else of the text alone.

        A tokenizer may put a space before a text or normalise it. Whatever cannot be spelled as a whole is halved.
        """
        data = text.encode()
        for anchor in dict.fromkeys((context, "", "\n", ".")):
            for found in self._behind(self._ids(anchor + text), anchor.encode()):
                if self.join(found) == data:
                    return found
        if len(text) == 1:
            return [self._of_byte[byte] for byte in data]
        half = len(text) // 2
        return self._tokens(text[:half], "") + self._tokens(text[half:], "")

    def _behind(self, ids: list[int], anchor: bytes) -> Iterator[list[int]]:
        """The tokens behind those that spell the anchor, which may have got a space before it."""
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
    """The text in `data`, with each byte that is no UTF-8 apart, as Python escapes it."""
    return _PARTS.findall(data.decode(errors="surrogateescape"))


def _is_escaped(part: str) -> bool:
    return "\udc80" <= part[:1] <= "\udcff"


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE (GPT-2): printable ones themselves, the others from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _of_byte_level(token: str) -> bytes:
    """The bytes of a token of byte-level BPE; none where it is of another alphabet."""
    return bytes(_ALPHABET[one] for one in token) if all(one in _ALPHABET for one in token) else b""


def _of_sentencepiece(token: str) -> bytes:
    """The bytes of a SentencePiece: U+2581 is a space, <0xNN> a byte."""
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


@dataclass
class _Text:
    """One text in the draft's tokens.

    num_read: how many tokens of the target are in it.
    fed: the tokens that the draft has read, drafted ones included.
    num_same: how many tokens of the text, from its beginning, are as they are in `fed`.
    """

    num_read: int = 0
    ids: list[int] = field(default_factory=list[int])
    fed: list[int] = field(default_factory=list[int])
    num_same: int = 0


class Translation(ABC):
    """How a draft model with another tokenizer reads texts and drafts, by slot. `vocab_size` is the target's."""

    mode: ClassVar[str]

    def __init__(self, target: ModelFacts, draft: ModelFacts, ours: Spelling, theirs: Spelling):
        self._ours, self._theirs = ours, theirs
        self._begins = _begin(target.tokenizer), _begin(draft.tokenizer)
        self._texts: dict[int, _Text] = {}

    def read(self, slot: int, token_ids: list[int]) -> list[int]:
        """The target's text in the draft's tokens. What is new is cut into tokens together with the end of the old."""
        text, begin = self._texts.setdefault(slot, _Text()), self._begins[0]
        if text.num_read == 0 and token_ids[: len(begin)] == begin:
            text.num_read = len(begin)
        if new := self._ours.join(token_ids[text.num_read :]):
            kept = max(0, len(text.ids) - _LOOK_BACK)
            before = self._theirs.join(text.ids[max(0, kept - _LOOK_BACK) : kept])
            text.ids[kept:] = self._theirs.encode(self._theirs.join(text.ids[kept:]) + new, before)
            same, whole = min(text.num_same, len(self._begins[1]) + kept), self._whole(text)
            while same < min(len(text.fed), len(whole)) and text.fed[same] == whole[same]:
                same += 1
            text.num_same = same
        text.num_read = len(token_ids)
        return self._whole(text)

    def num_unchanged(self, slot: int) -> int:
        """How many tokens of the text, from its beginning, are those that the draft has read."""
        return self._texts[slot].num_same

    def release(self, slot: int) -> None:
        """Forget the text of this slot."""
        self._texts.pop(slot, None)

    @abstractmethod
    def draft(
        self,
        runner: ModelRunner,
        sampler: DraftSampler,
        seqs: Seq[Sequence],
        budgets: Seq[DraftBudget],
        uncached_tokens: Seq[Seq[int]],
        vocab_size: int,
        source: str,
    ) -> Draft:
        """As `draft_chains`, of which `uncached_tokens` are tokens of the draft and all others the target's."""

    def _has_read(self, seqs: Seq[Sequence], drafted: Seq[Seq[int]]) -> None:
        """Note what the draft has read, for rows that drafted something."""
        for seq, tokens in zip(seqs, drafted, strict=True):
            if tokens:
                text = self._texts[seq.slot]
                text.num_same, text.fed = len(whole := self._whole(text)), [*whole, *tokens]

    def _whole(self, text: _Text) -> list[int]:
        """A text has a token at least."""
        return self._begins[1] + text.ids or [0]


@final
class Intersection(Translation):
    """The draft drafts tokens that both have. common: the draft's id by the target's id."""

    mode: ClassVar[str] = "intersection"

    def __init__(self, target: ModelFacts, draft: ModelFacts, ours: Spelling, theirs: Spelling):
        super().__init__(target, draft, ours, theirs)
        self.common = common_tokens(target, draft, ours, theirs)
        self._columns = CommonTokens(self.common, draft.device)

    def draft(
        self,
        runner: ModelRunner,
        sampler: DraftSampler,
        seqs: Seq[Sequence],
        budgets: Seq[DraftBudget],
        uncached_tokens: Seq[Seq[int]],
        vocab_size: int,
        source: str,
    ) -> Draft:
        """A chain, with its distribution over the target's vocabulary where the sampler gives one."""
        made = draft_chains(runner, sampler, seqs, budgets, uncached_tokens, vocab_size, source, common=self._columns)
        self._has_read(seqs, [[self.common[token] for token in row] for row in _drafted(made)])
        return made


@final
class Strings(Translation):
    """The draft drafts its own likeliest tokens, and the target's tokenizer cuts what they spell."""

    mode: ClassVar[str] = "strings"

    def __init__(self, target: ModelFacts, draft: ModelFacts, ours: Spelling, theirs: Spelling):
        super().__init__(target, draft, ours, theirs)
        self._draft_vocab_size = draft.vocab_size
        self._ends: tuple[int | None, int | None] = target.tokenizer.eos_token_id, draft.tokenizer.eos_token_id

    def draft(
        self,
        runner: ModelRunner,
        sampler: DraftSampler,
        seqs: Seq[Sequence],
        budgets: Seq[DraftBudget],
        uncached_tokens: Seq[Seq[int]],
        vocab_size: int,
        source: str,
    ) -> Draft:
        """A chain without a distribution. Its tokens differ in number from those that the draft drafted."""
        theirs = [self._as_read(seq) for seq in seqs]
        budgets = [replace(budget, should_continue=None) for budget in budgets]  # it would count tokens of the draft
        made = draft_chains(
            runner, DraftSampler(True), theirs, budgets, uncached_tokens, self._draft_vocab_size, source
        )
        self._has_read(seqs, drafted := _drafted(made))
        each = zip(seqs, drafted, budgets, strict=True)
        rows = [[seq.token_ids[-1], *self._cut(seq, row, one.depth, sampler)] for seq, row, one in each]
        return Draft(TokenTree.chain(rows), source=source)

    def _as_read(self, seq: Sequence) -> Sequence:
        """The sequence in the draft's tokens, decoded greedily."""
        ends = frozenset() if self._ends[1] is None or seq.params.ignore_eos else frozenset([self._ends[1]])
        return Sequence(self._whole(self._texts[seq.slot]), SamplingParams(), 0, ends, 1 << 62, slot=seq.slot)

    def _cut(self, seq: Sequence, drafted: list[int], depth: int, sampler: DraftSampler) -> list[int]:
        """The target's tokens of what was drafted, up to one that would end the answer."""
        ends = bool(drafted) and drafted[-1] == self._ends[1]
        spelled = self._theirs.join(drafted[:-1] if ends else drafted)
        # The decoder keeps back a part of a character at the end.
        data = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(spelled)
        tokens = self._ours.encode(data.encode(errors="surrogateescape"), self._ours.join(seq.token_ids[-_LOOK_BACK:]))
        if ends and self._ends[0] is not None:
            tokens.append(self._ends[0])
        tokens = before_banned(tokens[:depth], sampler.banned_token_ids)
        over = next((place for place, token in enumerate(tokens, start=1) if seq.would_end(token, place)), len(tokens))
        return tokens[:over]


def translation(mode: VocabularyMode, target: ModelFacts, draft: ModelFacts) -> Translation:
    """For a draft with another tokenizer; "auto" takes the intersection if it has nine in ten tokens of a text.

    Raises `IncompatibleModels` where one of them cannot be translated, or has no token in common for "intersection".
    """
    if draft.vision is not None:
        raise IncompatibleModels(
            f"{draft.name} and {target.name} have different tokenizers, and the draft reads images",
            expected="a draft for text alone, or one with the target's tokenizer",
        )
    ours, theirs = Spelling(target), Spelling(draft)
    common = common_tokens(target, draft, ours, theirs)
    if mode == "intersection" and not common:
        raise IncompatibleModels(f"{draft.name} and {target.name} have no token in common", fix='vocabulary="strings"')
    text = ours.encode(_SAMPLE.encode())
    enough = sum(token in common for token in text) >= _ENOUGH * len(text)
    kind = Intersection if mode == "intersection" or (mode == "auto" and enough) else Strings
    return kind(target, draft, ours, theirs)


def common_tokens(target: ModelFacts, draft: ModelFacts, ours: Spelling, theirs: Spelling) -> dict[int, int]:
    """The draft's id of each token of the target that spells the same, and of the end of text; one to one."""
    ends = target.tokenizer.eos_token_id, draft.tokenizer.eos_token_id
    same = {one: theirs.index[key] for key, one in ours.index.items() if key in theirs.index}
    if None not in ends:
        same = {one: other for one, other in same.items() if one != ends[0] and other != ends[1]} | {ends[0]: ends[1]}
    return same


def _begin(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before every text: nothing, or the token that begins it."""
    return [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]


def _drafted(draft: Draft) -> list[list[int]]:
    """The tokens of each chain."""
    ids, _, probes = draft.tree.lists
    return [[one for one, probe in zip(*row, strict=True) if not probe][1:] for row in zip(ids, probes, strict=True)]
