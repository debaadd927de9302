"""Suffix decoding: drafts what followed earlier in the text after the tokens with which it ends.

Oliaro et al. 2024 (SuffixDecoding, arXiv 2411.04975), Hu et al. 2024 (SAM-Decoding, arXiv 2411.10666). With the index
of a corpus it is retrieval as well (He et al. 2023, REST, arXiv 2311.08252). `answers` has what a tenant was answered.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import log
from os import PathLike
from typing import Annotated, ClassVar, final

from pydantic import Field
from torch import Tensor

from ...core.draft import Draft
from ...core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, Target, Verifier
from ...core.nodes import Tree
from ...core.request import TokenSequence
from ...core.walk import Walk
from ...schema import checked, checked_call
from ..heads.trees import DynamicTree, Grown, draft_of
from ..lookup import LONGEST_HINT
from ..spec import DrafterSpec, vllm_flag
from ..tenants import PerTenant
from .answers import Answers, WeightedAutomaton
from .automaton import MAX_CONTEXT, NO_CONTEXT, TOP_K, Context, Continuations, SuffixAutomaton
from .corpus import CorpusIndex

NumTokens = Annotated[int, Field(ge=4 * MAX_CONTEXT)]
_HINTS = {SuffixAutomaton: 0, CorpusIndex: LONGEST_HINT, WeightedAutomaton: 2 * LONGEST_HINT}  # below those of a source
_log = logging.getLogger(__name__)


@dataclass
class _Text:
    """The state of one sequence.

    source, context: the longest match of its last tokens, and where it was found.
    drafted: the tokens of the text when it was last drafted from answers; 0: the last draft was of something else.
    """

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    source: Continuations = field(init=False)
    context: Context = NO_CONTEXT
    drafted: int = 0

    @property
    def hint(self) -> int:
        length = min(self.context.length, LONGEST_HINT)
        return _HINTS[type(self.source)] + length if length else -1


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
    answers: how many tokens of the last answers to each tenant to keep, in memory, and to draft from where their match
        is longer; None: none. A private request reads those of its tenant and leaves nothing.
    """

    name: ClassVar[str] = "suffix"
    info = DrafterInfo(branches=TOP_K, drafts_during_prefill=True)  # it reads tokens only

    @checked_call
    def __init__(self, corpus: str | PathLike[str] | None = None, answers: NumTokens | None = None):
        self._corpus = None if corpus is None else CorpusIndex(corpus)
        self.answers = None if answers is None else PerTenant(lambda: Answers(answers))
        self._texts: dict[int, _Text] = {}

    def bind(self, target: Target, verifier: Verifier) -> None:
        """Check that the corpus has the same tokenizer."""
        if self._corpus is not None:
            self._corpus.check_tokenizer(target.loaded)
        super().bind(target, verifier)

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """The hint is the length of the match, up to 8; 8 more in the corpus, 16 more in answers; -1: there is none."""
        return (DraftOptions(self.name, hint=self._read(seq).hint, branches=TOP_K),)

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        texts = [self._read(seq) for seq in seqs]
        trees = [self._tree(*row) for row in zip(seqs, texts, budgets, strict=True)]
        for seq, text in zip(seqs, texts, strict=True):
            text.drafted = len(seq.token_ids) if isinstance(text.source, WeightedAutomaton) else 0
        return replace(draft_of(trees, self.name), hints=tuple(text.hint for text in texts))

    def observe(self, seqs: Sequence[TokenSequence], draft: Draft, logits: Tensor, walks: Sequence[Walk]) -> None:
        """Keep the answers that have ended, and lower the weight of what was drafted from others and rejected."""
        for seq, tree, walk in zip(seqs, draft.tree.rows, walks, strict=True):
            if self.answers is None or seq.params.is_private:
                continue
            kept, text = self.answers.of(seq), self._texts.get(seq.slot)
            if text is not None and text.drafted:
                for path in _rejected(tree, walk):
                    kept.reject([*seq.token_ids[: text.drafted][-MAX_CONTEXT:], *path])
                text.drafted = 0
            if seq.is_finished:  # with what it began after, so that its first tokens are found
                kept.add(seq.token_ids[max(0, len(seq.prompt_ids) - MAX_CONTEXT) :])

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
            if self.answers is not None:
                for half in self.answers.of_tenant(seq.params.tenant).halves:
                    self._search(half, seq, text)
            if self._corpus is not None:
                self._search(self._corpus, seq, text)
        return text

    def _search(self, source: CorpusIndex | WeightedAutomaton, seq: TokenSequence, text: _Text) -> None:
        """Take the match in this source if it is longer."""
        try:
            match = source.context(seq.token_ids, text.context.length + 1)
        except OSError as error:
            _log.warning("suffix decoding goes on without its corpus: %s", error)
            self._corpus = None
            return
        if match.length:
            text.source, text.context = source, match

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


def _rejected(tree: Tree, walk: Walk) -> Iterator[list[int]]:
    """The paths to the tokens that were drafted in vain: the better ones beside each accepted token, and the last."""
    path, node = list[int](), 0
    for token in [*(tree.token_ids[node] for node in walk.path), walk.next_token]:
        for child in tree.children[node] if token >= 0 else ():
            if tree.token_ids[child] == token:
                path, node = [*path, token], child
                break
            yield [*path, tree.token_ids[child]]


@checked
class SuffixSpec(DrafterSpec):
    """Options of `Suffix`."""

    corpus: str | None = None
    answers: NumTokens | None = None
    method = "suffix"
    drafter = Suffix
    tokens = 8  # counting costs nothing, so a long guess is worth it
    draws_tree = True

    @property
    def name(self) -> str:
        options = [] if self.corpus is None else [self.corpus]
        options += [] if self.answers is None else [f"answers={self.answers}"]
        return ":".join(["suffix", *filter(None, [",".join(options)])])

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """In vLLM "suffix", which drafts a chain."""
        remark = "a chain, no tree; needs the package arctic-inference, and remembers earlier answers, of all tenants"
        remark += "" if self.corpus is None else "; takes no corpus"
        return {"vLLM": (vllm_flag(method="suffix", num_speculative_tokens=tokens), remark)}
