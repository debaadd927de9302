"""Suffix decoding: drafts what followed earlier in the text after the tokens with which it ends.

Oliaro et al. 2024 (SuffixDecoding, arXiv 2411.04975), Hu et al. 2024 (SAM-Decoding, arXiv 2411.10666). With the index
of a corpus it is retrieval as well (He et al. 2023, REST, arXiv 2311.08252).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import log
from os import PathLike
from typing import ClassVar, final

from ...core.draft import Draft
from ...core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, Target, Verifier
from ...core.request import TokenSequence
from ...schema import checked, checked_call
from ..heads.trees import DynamicTree, Grown, draft_of
from ..lookup import LONGEST_HINT
from ..spec import DrafterSpec, vllm_flag
from .automaton import NO_CONTEXT, TOP_K, Context, Continuations, SuffixAutomaton
from .corpus import CorpusIndex

_log = logging.getLogger(__name__)


@dataclass
class _Text:
    """The state of one sequence. source, context: the longest match of its last tokens, and where it was found."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    source: Continuations = field(init=False)
    context: Context = NO_CONTEXT

    @property
    def hint(self) -> int:
        length = min(self.context.length, LONGEST_HINT)
        return (length if self.source is self.automaton else LONGEST_HINT + length) if length else -1


@final
class Suffix(Drafter):
    """Find the longest suffix of the text that occurs earlier, and draft what followed it there, as a tree.

    A token that followed a context of L tokens c times out of n has the probability c / (n + 1 / L). The probability of
    a path is the product of its tokens', and the most probable nodes are drafted. The context of a node is the longest
    suffix of its path that occurs in the text; a copy that reaches the end of the text continues periodically.

    Example: tokens `a b c a b d a b`: `c` and `d` follow `a b`, each with the probability 1 / (2 + 1/2), the newer
    one, `d`, first.

    corpus: a folder that `paceline index` wrote with this model's tokenizer; it is used if the text has only a shorter
        match. Raises `ConfigError` if it is damaged; `bind` raises `IncompatibleModels` for another tokenizer. It is
        not used any more once its files have changed.
    """

    name: ClassVar[str] = "suffix"
    info = DrafterInfo(branches=TOP_K, drafts_during_prefill=True)  # it reads tokens only

    @checked_call
    def __init__(self, corpus: str | PathLike[str] | None = None):
        self._corpus = None if corpus is None else CorpusIndex(corpus)
        self._texts: dict[int, _Text] = {}

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Check that the corpus has the same tokenizer."""
        if self._corpus is not None:
            self._corpus.check_tokenizer(target.loaded)
        super().bind(target, verifier)

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """The hint is the length of the match, up to 8, and 8 more for one in the corpus; -1 where there is none."""
        return (DraftOptions(self.name, hint=self._read(seq).hint, branches=TOP_K),)

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        texts = [self._read(seq) for seq in seqs]
        trees = [self._tree(*row) for row in zip(seqs, texts, budgets, strict=True)]
        return replace(draft_of(trees, self.name), hints=tuple(text.hint for text in texts))

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._texts.pop(slot, None)

    def _read(self, seq: TokenSequence) -> _Text:
        """The state of a sequence, updated with its new tokens."""
        text = self._texts.setdefault(seq.slot, _Text())
        if text.automaton.num_tokens < len(seq.token_ids):
            for token in seq.token_ids[text.automaton.num_tokens :]:
                text.automaton.append(token)
            text.source, text.context = text.automaton, text.automaton.context()
            if self._corpus is not None:
                self._search(self._corpus, seq, text)
        return text

    def _search(self, corpus: CorpusIndex, seq: TokenSequence, text: _Text) -> None:
        """Take the match in the corpus if it is longer."""
        try:
            match = corpus.context(seq.token_ids, text.context.length + 1)
        except OSError as error:
            _log.warning("suffix decoding goes on without its corpus: %s", error)
            self._corpus = None
            return
        if match.length:
            text.source, text.context = corpus, match

    def _tree(self, seq: TokenSequence, text: _Text, budget: DraftBudget) -> Grown:
        """A tree grown level by level; tokens that would end the answer get no children."""
        tree = DynamicTree(seq.token_ids[-1], budget, TOP_K, None if text.context.length else 0)
        contexts = {0: text.context}
        while tree.frontier:
            tokens, logps = list[list[int]](), list[list[float]]()
            for node in tree.frontier:
                if node:
                    contexts[node] = text.source.step(contexts[tree.parents[node]], tree.tokens[node])
                ends = node > 0 and seq.would_end(tree.tokens[node], tree.level)
                children = {} if ends else self._children(text.source, contexts[node])
                tokens.append([*children])
                logps.append([*children.values()])
            tree.add(tokens, logps)
        return tree.finish()

    def _children(self, source: Continuations, context: Context) -> dict[int, float]:
        """Log-probabilities of the most likely tokens; empty without a context."""
        if not context.length:
            return {}
        total, following = source.following(context)
        of = total + 1 / context.length
        return {token: log(count / of) for token, count in following if token not in self.banned_token_ids}


@checked
class SuffixSpec(DrafterSpec):
    """Options of `Suffix`."""

    corpus: str | None = None
    method = "suffix"
    drafter = Suffix
    tokens = 8  # counting costs nothing, so a long guess is worth it
    draws_tree = True

    @property
    def name(self) -> str:
        return "suffix" if self.corpus is None else f"suffix:{self.corpus}"

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """In vLLM "suffix", which drafts a chain."""
        remark = "a chain, no tree; needs the package arctic-inference, and remembers earlier answers too"
        remark += "" if self.corpus is None else "; takes no corpus"
        return {"vLLM": (vllm_flag(method="suffix", num_speculative_tokens=tokens), remark)}
