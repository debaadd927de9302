"""Suffix decoding: the text so far says how often each token followed the words it ends with.

Oliaro et al. 2024 (SuffixDecoding, arXiv 2411.04975), Hu et al. 2024 (SAM-Decoding, arXiv 2411.10666); no model and no
training. Where prompt lookup copies one place, this drafts a tree of all of them, the likeliest continuations.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from math import log
from typing import ClassVar, NamedTuple, final

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, TargetView, Verifier
from ..core.request import Sequence
from ..schema import checked, checked_call
from .registry import TREE_NODES, DrafterSpec, vllm_flag
from .trees import DraftTree, DynamicTree, draft_of

LONGEST = 32
"""Tokens of the longest context: its continuations are counted, and more context tells no more."""
LONGEST_HINT = 8
"""Matches of different length count as different up to this length: longer ones are not more reliable."""
TOP_K = 8
"""The most children of a node."""


class Context(NamedTuple):
    """The last tokens of a path that occur earlier with a token after them: a state of the automaton, and their number.

    length 0: not even the last token does.
    """

    state: int
    length: int


NO_CONTEXT = Context(0, 0)


@final
class SuffixAutomaton:
    """Every context of a growing text with what followed it: Blumer et al. 1985, and the occurrences of each state.

    A state stands for the parts of the text that end at the same places; the longest of them has `_lengths` tokens. Its
    link leads to their longest suffix that also ends elsewhere, so a chain of links is a context that gets shorter:

        text a b c a b    state of `a b` (2 occurrences)  --c-->  state of `a b c` (1)
                          link: the empty context

    A token costs O(1) on average, and `longest` steps along the links to count it. At most two states and three edges a
    token: about 0.6 KB.

    longest: the most tokens of a context.
    """

    def __init__(self, longest: int = LONGEST):
        self.longest, self.num_tokens = longest, 0
        self._edges: list[dict[int, int]] = [{}]
        self._links, self._lengths, self._counts, self._newest = [-1], [0], [0], [0]
        self._whole = self._end = 0  # the states of the whole text, and of its last `longest` + 1 tokens

    @property
    def num_states(self) -> int:
        """At most twice the tokens, and one."""
        return len(self._edges)

    def append(self, token: int) -> None:
        """Take the next token of the text."""
        self.num_tokens += 1
        new = self._add_state({}, self.num_tokens, 0, 0, 0)
        at = self._whole
        while at >= 0 and token not in self._edges[at]:
            self._edges[at][token] = new
            at = self._links[at]
        if at >= 0:
            self._links[new] = self._split(at, token)
        self._whole = new
        self._end = self._of_length(self._edges[self._end][token], self.longest + 1)
        at = self._end
        while at > 0:
            self._counts[at] += 1
            self._newest[at] = self.num_tokens
            at = self._links[at]

    def context(self) -> Context:
        """Of the whole text."""
        return self._with_edges(self._end, self.num_tokens)

    def step(self, context: Context, token: int) -> Context:
        """The context after one more token, one of `following`; the text stays as it is."""
        return self._with_edges(self._edges[context.state][token], context.length + 1)

    def following(self, context: Context) -> tuple[int, list[tuple[int, int]]]:
        """Tokens that followed in all, and the `TOP_K` most frequent with their counts; of equals the newest first."""
        edges, counts, newest = self._edges[context.state], self._counts, self._newest
        best = nsmallest(TOP_K, edges.items(), key=lambda edge: (-counts[edge[1]], -newest[edge[1]]))
        return sum([counts[state] for state in edges.values()]), [(token, counts[state]) for token, state in best]

    def _add_state(self, edges: dict[int, int], length: int, link: int, count: int, newest: int) -> int:
        self._edges.append(edges)
        self._lengths.append(length)
        self._links.append(link)
        self._counts.append(count)
        self._newest.append(newest)
        return len(self._edges) - 1

    def _split(self, at: int, token: int) -> int:
        """The state of the longest part of `at` with this token; made from the one that has held it, if need be."""
        old, length = self._edges[at][token], self._lengths[at] + 1
        if self._lengths[old] == length:
            return old
        new = self._add_state(dict(self._edges[old]), length, self._links[old], self._counts[old], self._newest[old])
        self._links[old] = new
        while at >= 0 and self._edges[at].get(token) == old:
            self._edges[at][token] = new
            at = self._links[at]
        return new

    def _of_length(self, state: int, length: int) -> int:
        """The state of the last `length` tokens of what this one stands for."""
        while state and self._lengths[self._links[state]] >= length:
            state = self._links[state]
        return state

    def _with_edges(self, state: int, length: int) -> Context:
        """The longest context that has a continuation: the end of the text itself has none."""
        length = min(length, self.longest)
        state = self._of_length(state, length)
        while state and not self._edges[state]:
            state = self._links[state]
            length = self._lengths[state]
        return Context(state, length)


@dataclass
class _Text:
    """What is known of one sequence. context: of a text of `automaton.num_tokens` tokens."""

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    context: Context = NO_CONTEXT


@final
class Suffix(Drafter):
    """Find the longest end of the text that occurs earlier, and draft what followed it there, as a tree.

    A token that followed a context of L tokens c times out of n has the probability c / (n + 1 / L): a long context is
    trusted at its first occurrence, a short one when it has been seen often. A path has the product of its tokens, and
    the likeliest nodes are drafted, so drafts get longer with the match. The context of a node is the longest end of
    its path that occurs in the text; a copy that reaches the end of the text goes on periodically.

    Example: tokens `a b c a b d a b`: `c` and `d` follow `a b`, each with the probability 1 / (2 + 1/2), the newer
    one, `d`, first.
    """

    name: ClassVar[str] = "suffix"
    info = DrafterInfo(branches=TOP_K, drafts_during_prefill=True)  # it reads tokens only

    @checked_call
    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}
        self._banned_token_ids: frozenset[int] = frozenset()

    def bind(self, target: TargetView, verifier: Verifier) -> None:
        """Ask which tokens cannot be drafted."""
        self._banned_token_ids = target.banned_token_ids

    def draft_options(self, seq: Sequence) -> Seq[DraftOptions]:
        """The hint is the length of the match, up to 8; -1 where there is none."""
        return (DraftOptions(self.name, hint=_hint(self._read(seq).context), branches=TOP_K),)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> Draft:
        """A tree per row; rows without a match propose nothing."""
        texts = [self._read(seq) for seq in seqs]
        trees = [self._tree(*row) for row in zip(seqs, texts, budgets, strict=True)]
        return replace(draft_of(seqs, trees, self.name), hints=tuple(_hint(text.context) for text in texts))

    def release(self, slots: Seq[int]) -> None:
        """Forget the texts of these slots."""
        for slot in slots:
            self._texts.pop(slot, None)

    def _read(self, seq: Sequence) -> _Text:
        """The text, with the tokens that are new since the last round."""
        text = self._texts.setdefault(seq.slot, _Text())
        if text.automaton.num_tokens < len(seq.token_ids):
            for token in seq.token_ids[text.automaton.num_tokens :]:
                text.automaton.append(token)
            text.context = text.automaton.context()
        return text

    def _tree(self, seq: Sequence, text: _Text, budget: DraftBudget) -> DraftTree:
        """Grown level by level; nothing comes behind a token that would end the answer."""
        tree = DynamicTree(budget, TOP_K, None if text.context.length else 0)
        contexts = {-1: text.context}
        while tree.frontier:
            tokens, logps = list[list[int]](), list[list[float]]()
            for node in tree.frontier:
                if node >= 0:
                    contexts[node] = text.automaton.step(contexts[tree.parents[node]], tree.tokens[node])
                ends = node >= 0 and seq.would_end(tree.tokens[node], tree.level)
                children = {} if ends else self._children(text.automaton, contexts[node])
                tokens.append([*children])
                logps.append([*children.values()])
            tree.add(tokens, logps)
        return tree.finish()

    def _children(self, automaton: SuffixAutomaton, context: Context) -> dict[int, float]:
        """Log-probabilities of the most likely tokens; none where no context is left."""
        if not context.length:
            return {}
        total, found = automaton.following(context)
        of = total + 1 / context.length
        return {token: log(count / of) for token, count in found if token not in self._banned_token_ids}


def _hint(context: Context) -> int:
    return min(context.length, LONGEST_HINT) or -1


@checked
class SuffixSpec(DrafterSpec):
    """Options of `Suffix`."""

    method = "suffix"
    drafter = Suffix
    tokens = 8  # counting costs nothing, so a long guess is worth it

    def tree_nodes(self, depth: int) -> int:
        """As of other trees."""
        return max(TREE_NODES, depth)

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """In vLLM "suffix", which drafts a chain."""
        remark = "a chain, no tree; needs the package arctic-inference, and remembers earlier answers too"
        return {"vLLM": (vllm_flag(method="suffix", num_speculative_tokens=tokens), remark)}
