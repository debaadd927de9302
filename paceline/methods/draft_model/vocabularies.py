"""Draft models with another tokenizer: they get the same text in their own tokens, and draft tokens of the target.

Timor et al. 2025 (arXiv 2502.05202). Both tokenizers encode the same bytes.

intersection   The draft's logits at the tokens that both have, as logits over the target's ids (TLI, algorithm 4 of the
               paper). It is an ordinary distribution over the target's vocabulary, so every verifier can use it.
strings        The draft drafts its own tokens, and their text is encoded by the target's tokenizer (SLEM, algorithm 2).
               Such a draft has no distribution: it is a point mass.
auto           In each round one of the two, by the share of common tokens at the end of the texts.
"""

import codecs
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from ...core.draft import Draft
from ...core.interfaces import DraftBudget
from ...core.request import SamplingParams, TokenSequence
from ...core.tree import TokenTree
from ...errors import IncompatibleModels
from ...sampling.draft_sampler import DraftSampler
from ...sampling.scores import before_banned
from ...target.loaded import LoadedModel
from ..heads.trees import padded_confidences, up_to_end
from .chain import Chains, CommonTokens
from .spelling import Spelling

VocabularyMode: TypeAlias = Literal["auto", "intersection", "strings"]

_MIN_SHARE = 0.9
"""The share of common tokens from which on "auto" drafts by intersection."""
_RECENT = 256
"""How many tokens at the end of each text are counted for that."""
_LOOK_BACK = 8
"""How many tokens at the end of a text are encoded again when it continues; as many before them are the context."""


@dataclass
class _Text:
    """One text in the draft's tokens.

    num_read: how many target tokens it covers.
    fed: the tokens that the draft has cached, drafted ones included.
    num_same: the length of the common prefix of the text and `fed`.
    """

    num_read: int = 0
    ids: list[int] = field(default_factory=list[int])
    fed: list[int] = field(default_factory=list[int])
    num_same: int = 0


class Translation:
    """Translates texts and drafts between a target and a draft model with another tokenizer. State is keyed by slot.

    ours, theirs: the spelling of the target and of the draft.
    common: the tokens that both have; None if drafts are by strings only.
    """

    def __init__(self, mode: VocabularyMode, target: LoadedModel, draft: LoadedModel, ours: Spelling, theirs: Spelling):
        self.mode, self._ours, self._theirs = mode, ours, theirs
        common = {} if mode == "strings" else common_tokens(ours, theirs)
        self.common = CommonTokens(common, draft.device) if common else None
        self._draft_vocab_size = draft.vocab_size
        self._begins = _begin(target.tokenizer), _begin(draft.tokenizer)
        self._ends = ours.end, theirs.end
        self._texts: dict[int, _Text] = {}

    def read(self, slot: int, token_ids: list[int]) -> list[int]:
        """The target's text in the draft's tokens. New text is encoded together with the end of the old."""
        text, begin = self._texts.setdefault(slot, _Text()), self._begins[0]
        is_new = text.num_read == 0
        if is_new and token_ids[: len(begin)] == begin:
            text.num_read = len(begin)
        new = self._ours.join(token_ids[text.num_read :])
        if is_new:  # a text that spells the draft's beginning has it already
            new = new.removeprefix(self._theirs.join(self._begins[1]))
        if new:
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
        return self._texts[slot].num_same

    def release(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def draft(
        self,
        chains: Chains,
        seqs: Sequence[TokenSequence],
        budgets: Sequence[DraftBudget],
        uncached_tokens: Sequence[Sequence[int]],
    ) -> Draft:
        """As `Chains.draft`; `uncached_tokens` are the draft's tokens, all others the target's.

        By strings, the draft drafts its own top tokens, and `should_continue` gets their confidences.
        """
        if (common := self.common_for([seq.token_ids for seq in seqs])) is not None:
            common_draft = replace(chains, common=common).draft(seqs, budgets, uncached_tokens)
            self._has_read(seqs, [[common.draft_ids[token] for token in row] for row in _drafted(common_draft)])
            return common_draft
        by_strings = replace(chains, sampler=DraftSampler(True), vocab_size=self._draft_vocab_size)
        string_draft = by_strings.draft([self._as_read(seq) for seq in seqs], budgets, uncached_tokens)
        self._has_read(seqs, drafted := _drafted(string_draft))
        each = zip(seqs, drafted, budgets, strict=True)
        cut = [self._cut(seq, row, budget.depth, chains.sampler.banned_token_ids) for seq, row, budget in each]
        tree = TokenTree.chain([[seq.token_ids[-1], *row] for seq, row in zip(seqs, cut, strict=True)])
        if string_draft.confidence is None:
            return Draft(tree, source=chains.source)
        parts = zip(cut, drafted, string_draft.confidence[:, 1:].tolist(), strict=True)
        confidence = padded_confidences([self._confidences(*part) for part in parts], tree.num_nodes)
        return Draft(tree, source=chains.source, confidence=confidence)

    def common_for(self, texts: Iterable[Sequence[int]]) -> CommonTokens | None:
        """The common tokens if these texts, in target tokens, are drafted by intersection; None: by strings.

        The whole batch is drafted in the same way, so that its rows share the passes of the draft.
        """
        if self.common is None or self.mode == "intersection":
            return self.common
        recent = [token in self.common.draft_ids for text in texts for token in text[-_RECENT:]]
        return self.common if sum(recent) >= _MIN_SHARE * len(recent) else None

    def _has_read(self, seqs: Sequence[TokenSequence], drafted: Sequence[Sequence[int]]) -> None:
        """Record what the draft has cached, for rows with a draft."""
        for seq, tokens in zip(seqs, drafted, strict=True):
            if tokens:
                text = self._texts[seq.slot]
                text.num_same, text.fed = len(whole := self._whole(text)), [*whole, *tokens]

    def _whole(self, text: _Text) -> list[int]:
        """The text after its beginning-of-text token; never empty."""
        return self._begins[1] + text.ids or [0]

    def _as_read(self, seq: TokenSequence) -> TokenSequence:
        """The sequence in the draft's tokens, decoded greedily."""
        ends = frozenset() if self._ends[1] is None or seq.params.ignore_eos else frozenset([self._ends[1]])
        params, text = SamplingParams(extra_args=seq.params.owner), self._whole(self._texts[seq.slot])
        return TokenSequence(text, params, 0, ends, 1 << 62, slot=seq.slot)

    def _cut(self, seq: TokenSequence, drafted: list[int], depth: int, banned: Collection[int]) -> list[int]:
        """The drafted text in target tokens, up to one that would end the answer."""
        ends = bool(drafted) and drafted[-1] == self._ends[1]
        spelled = self._theirs.join(drafted[:-1] if ends else drafted)
        # The decoder drops an incomplete character at the end.
        data = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(spelled)
        tokens = self._ours.encode(data.encode(errors="surrogateescape"), self._ours.join(seq.token_ids[-_LOOK_BACK:]))
        if ends and self._ends[0] is not None:
            tokens.append(self._ends[0])
        return up_to_end(seq, before_banned(tokens[:depth], banned))

    def _confidences(self, tokens: list[int], drafted: list[int], confidences: list[float]) -> list[float]:
        """The confidence in each target token: the product over the drafted tokens that begin in it.

        confidences: those in the drafted tokens, padded.
        """
        begins = accumulate((len(self._theirs.pieces[token]) for token in drafted), initial=0)
        ends = list(accumulate(len(self._ours.pieces[token]) for token in tokens))
        products = [1.0] * (len(tokens) + 1)
        for begin, confidence in zip(begins, confidences[: len(drafted)], strict=False):
            products[bisect_right(ends, begin)] *= confidence
        return products[:-1]


def translation(mode: VocabularyMode, target: LoadedModel, draft: LoadedModel) -> Translation:
    """The translation for a draft with another tokenizer; "auto" without common tokens is "strings".

    Raises `IncompatibleModels` if a tokenizer is not supported, or if "intersection" has no common tokens.
    """
    if draft.vision is not None:
        raise IncompatibleModels(
            f"{draft.name} and {target.name} have different tokenizers, and the draft reads images",
            expected="a draft for text alone, or one with the target's tokenizer",
            fix="take a language model without vision as the draft",
        )
    translated = Translation(mode, target, draft, Spelling(target), Spelling(draft))
    if mode == "intersection" and translated.common is None:
        raise IncompatibleModels(f"{draft.name} and {target.name} have no token in common", fix='vocabulary="strings"')
    return translated


def common_tokens(ours: Spelling, theirs: Spelling) -> dict[int, int]:
    """From target ids to draft ids, for tokens with the same bytes and for the end of text; one to one."""
    same = {index: theirs.index[key] for key, index in ours.index.items() if key in theirs.index}
    if ours.end is not None and theirs.end is not None:
        same = {index: twin for index, twin in same.items() if index != ours.end and twin != theirs.end}
        same[ours.end] = theirs.end
    return same


def _begin(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before every text: the beginning-of-text token, or nothing."""
    return [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]


def _drafted(draft: Draft) -> list[list[int]]:
    return [tree.token_ids[1:] for tree in draft.tree.rows]
