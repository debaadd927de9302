"""Drafters that no user would want: whatever they propose, the answer must not change."""

import random
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from paceline.core.draft import Draft
from paceline.core.interfaces import DraftBudget, Drafter, Target, Verifier
from paceline.core.request import TokenSequence
from paceline.core.tree import TokenTree
from paceline.core.walk import Walk
from paceline.target import ModelRunner

Nodes = list[tuple[int, int, bool]]
"""(token, parent, is_probe) of every node below the root."""


class Adversary(Drafter):
    """Row by row; subclasses say which nodes hang below the root."""

    name: ClassVar[str] = "adversary"
    target: ModelRunner

    def bind(self, target: Target, verifier: Verifier) -> None:
        assert isinstance(target, ModelRunner)
        self.target = target

    @abstractmethod
    def nodes(self, seq: TokenSequence, budget: DraftBudget) -> Nodes: ...

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        rows = [self.nodes(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        banned = self.target.banned_token_ids  # not even they may draft what stands for an image
        drafted = [[0 if n[0] in banned and not n[2] else n[0] for n in row] for row in rows]
        tokens = [[seq.token_ids[-1], *row] for seq, row in zip(seqs, drafted, strict=True)]
        parents = [[-1, *[n[1] for n in row]] for row in rows]
        probes = [[False, *[n[2] for n in row]] for row in rows]
        return Draft(TokenTree.from_lists(tokens, parents, probes=probes), source=self.name)


def chain(tokens: Sequence[int]) -> Nodes:
    return [(token, index, False) for index, token in enumerate(tokens)]


class Constant(Adversary):
    """The same token for ever."""

    def __init__(self, token: int = 7):
        self.token = token

    def nodes(self, seq: TokenSequence, budget: DraftBudget) -> Nodes:
        return chain([self.token] * budget.depth)


class LeastLikely(Adversary):
    """Asks the target itself and offers what it likes least, leaving its passes behind in the cache."""

    def nodes(self, seq: TokenSequence, budget: DraftBudget) -> Nodes:
        tokens: list[int] = []
        for _ in range(budget.depth):
            tree = TokenTree.chain([[seq.token_ids[-1], *tokens]])
            tokens.append(int(self.target.forward([seq.slot], tree)[0, -1].argmin()))
        return chain(tokens)


class RandomTrees(Adversary):
    """Trees of any shape, probes hanging anywhere, siblings that repeat, sometimes nothing at all."""

    def __init__(self, seed: int = 0, tokens: range = range(3, 97), probes: bool = True):
        self.rng, self.tokens, self.probes = random.Random(seed), tokens, probes

    def nodes(self, seq: TokenSequence, budget: DraftBudget) -> Nodes:
        made: Nodes = []
        depth = [0]
        for node in range(1, self.rng.randint(0, min(24, budget.nodes)) + 1):
            parent = self.rng.randrange(node)
            under_probe = parent > 0 and made[parent - 1][2]
            is_probe = under_probe or depth[parent] >= budget.depth or (self.probes and self.rng.random() < 0.2)
            made.append((self.rng.choice(self.tokens), parent, is_probe))
            depth.append(depth[parent] + 1)
        return made


class Wide(Adversary):
    """Every token of the vocabulary under the root, as far as the budget goes; a probe under each fourth of them."""

    def nodes(self, seq: TokenSequence, budget: DraftBudget) -> Nodes:
        if budget.depth == 0:
            return []
        below = [(token, 0, False) for token in range(min(self.target.vocab_size, budget.nodes))]
        return below + [(3, node, True) for node in range(1, len(below), 4)]


class Scripted(Adversary):
    """Knows the future: right for as many tokens as the script says, then wrong. Acceptance by decree.

    future: the whole text, by prompt. script: accepted tokens of each round, repeated for ever; None: all.
    """

    name: ClassVar[str] = "scripted"

    def __init__(self, future: dict[tuple[int, ...], list[int]], script: Sequence[int | None], branching: bool = False):
        self.future, self.script, self.branching = future, script, branching

    def right(self, seq: TokenSequence, count: int) -> list[int]:
        begin = len(seq.token_ids)
        return self.future[tuple(seq.prompt_ids)][begin : begin + count]

    def nodes(self, seq: TokenSequence, budget: DraftBudget) -> Nodes:
        good = self.script[len(seq.rounds) % len(self.script)]
        tokens = self.right(seq, budget.depth)
        if good is not None and good < len(tokens):
            tokens[good:] = [(token + 1) % 97 for token in tokens[good:]]
        return (self.among_wrong_ones(tokens) if self.branching else chain(tokens))[: budget.nodes]

    @staticmethod
    def among_wrong_ones(tokens: list[int]) -> Nodes:
        """The chain with wrong siblings before and after every token, so that accepted rows have to be gathered."""
        made: Nodes = []
        parent = 0
        for token in tokens:
            made.append(((token + 5) % 97, parent, False))
            made.append((token, parent, False))
            made.append(((token + 9) % 97, parent, False))
            parent = len(made) - 1
        return made


class Window(Scripted):
    """As Lookahead: right candidates, then chains of probes under the root and under other probes."""

    def nodes(self, seq: TokenSequence, budget: DraftBudget) -> Nodes:
        made = super().nodes(seq, budget)
        if budget.depth == 0:
            return made
        for column in range(4):
            parent = column % (len(made) + 1)
            for token in (11 + column, 12, 13):
                made.append((token, parent, True))
                parent = len(made)
        return made


class Ending(Adversary):
    """Offers the end of the text at each offset in turn."""

    def __init__(self, token: int):
        self.token = token

    def nodes(self, seq: TokenSequence, budget: DraftBudget) -> Nodes:
        tokens = [17] * budget.depth
        if tokens:
            tokens[len(seq.rounds) % len(tokens)] = self.token
        return [*chain(tokens), *((self.token, node, False) for node in range(len(tokens)))][: budget.nodes]


class Sometimes(Adversary):
    """Another adversary every third round, nothing in between; by row, so that a batch mixes both."""

    def __init__(self, other: Adversary):
        self.other = other

    def bind(self, target: Target, verifier: Verifier) -> None:
        super().bind(target, verifier)
        self.other.bind(target, verifier)

    def nodes(self, seq: TokenSequence, budget: DraftBudget) -> Nodes:
        return self.other.nodes(seq, budget) if (len(seq.rounds) + seq.slot) % 3 == 0 else []


class AcceptsAll(Verifier):
    """Not a drafter: a rule that claims to be exact and keeps every drafted token."""

    name, lossless, exact = "accepts-all", True, True

    def verify(self, draft, target, seeds, positions):
        path = [*range(1, draft.tree.num_nodes)]
        return [Walk(path, token, True) for token in target.scores[:, -1].argmax(-1).tolist()]
