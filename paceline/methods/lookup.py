"""Prompt lookup: copy what followed the last time the text ended like this (Saxena 2023)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field

from ..core.draft import Draft
from ..core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions
from ..core.request import TokenSequence
from ..core.tree import TokenTree
from ..errors import ConfigError
from ..sampling.scores import before_banned
from ..schema import checked, checked_call
from .heads.trees import up_to_end
from .spec import DrafterSpec, vllm_flag

LONGEST_HINT = 8
"""Hints tell apart matches up to this length; longer ones are not more reliable."""


@dataclass
class _Index:
    """The n-grams of one sequence.

    tables: for n = min_ngram .. max_ngram, {n-gram: index of its last token}.
    num_indexed: how many tokens have their n-grams in the tables.
    match: for a text of `num_matched` tokens, (index of the last matching token, length of the match), or None.
    """

    tables: list[dict[tuple[int, ...], int]]
    num_indexed: int = 0
    num_matched: int = -1
    match: tuple[int, int] | None = None


@final
class PromptLookup(Drafter):
    """Find the last `max_ngram` tokens, or else fewer, earlier in prompt and answer, and draft what followed there.

    match: which of several places to copy from, the most recent (chat, code) or the first (summaries).

    Example: max_ngram 2, tokens `a b c d a b`: the suffix `a b` ended before at index 1, so `c d a b ...` is drafted.
    A copy that reaches its own start continues periodically, which is how a loop in the text continues.
    """

    name: ClassVar[str] = "lookup"
    info = DrafterInfo(drafts_during_prefill=True)  # it reads tokens only

    @checked_call
    def __init__(
        self,
        max_ngram: Annotated[int, Field(ge=1, le=32)] = 3,  # each length has a table of its own
        min_ngram: Annotated[int, Field(ge=1)] = 1,
        match: Literal["recent", "first"] = "recent",
    ):
        _check_range(min_ngram, max_ngram)
        self.max_ngram, self.min_ngram, self.match = max_ngram, min_ngram, match
        self._indexes: dict[int, _Index] = {}

    def draft_options(self, seq: TokenSequence) -> Sequence[DraftOptions]:
        """The hint is the length of the match, at most 8 and possibly above `max_ngram`; -1 if there is none."""
        match = self.find(seq)
        return (DraftOptions(self.name, hint=match[1] if match else -1),)

    def propose(self, seqs: Sequence[TokenSequence], budgets: Sequence[DraftBudget]) -> Draft:
        rows, hints = list[list[int]](), list[int]()
        for seq, budget in zip(seqs, budgets, strict=True):
            match = self.find(seq) if budget.depth else None
            copied = _continuation(seq.token_ids, match[0], budget.depth) if match else []
            copied = up_to_end(seq, before_banned(copied, self.banned_token_ids))
            rows.append([seq.token_ids[-1], *copied])
            hints.append(match[1] if match else -1)
        return Draft(TokenTree.chain(rows), source=self.name, hints=tuple(hints))

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._indexes.pop(slot, None)

    def _updated(self, seq: TokenSequence) -> _Index:
        """Index the n-grams that end before the last token: each of them has a continuation."""
        index = self._indexes.get(seq.slot)
        if index is None:
            index = self._indexes[seq.slot] = _Index([{} for _ in range(self.min_ngram, self.max_ngram + 1)])
        tokens = seq.token_ids
        for end in range(index.num_indexed, len(tokens) - 1):
            for n, table in enumerate(index.tables, start=self.min_ngram):
                if end + 1 >= n:
                    gram = tuple(tokens[end + 1 - n : end + 1])
                    if self.match == "recent" or gram not in table:
                        table[gram] = end
        index.num_indexed = max(index.num_indexed, len(tokens) - 1)
        return index

    def find(self, seq: TokenSequence) -> tuple[int, int] | None:
        """The place to copy from, which is searched once for each text."""
        tokens, index = seq.token_ids, self._updated(seq)
        if index.num_matched != len(tokens):
            index.num_matched, index.match = len(tokens), self._search(index, tokens)
        return index.match

    def _search(self, index: _Index, tokens: list[int]) -> tuple[int, int] | None:
        for n in range(min(self.max_ngram, len(tokens)), self.min_ngram - 1, -1):
            end = index.tables[n - self.min_ngram].get(tuple(tokens[-n:]))
            if end is not None and tokens[end + 1] not in self.banned_token_ids:
                while n < min(LONGEST_HINT, end + 1) and tokens[end - n] == tokens[-1 - n]:
                    n += 1
                return end, n
        return None


def _continuation(tokens: list[int], end: int, depth: int) -> list[int]:
    drafted: list[int] = []
    for source in range(end + 1, end + 1 + depth):
        drafted.append(tokens[source] if source < len(tokens) else drafted[source - len(tokens)])
    return drafted


def _check_range(smallest: int, largest: int) -> None:
    if smallest > largest:
        got = f"min {smallest}, max {largest}"
        raise ConfigError("the n-gram range is empty", got=got, expected="1 <= min <= max")


_Length = Annotated[int, Field(ge=1, le=32)]


@checked
class LookupSpec(DrafterSpec):
    """Options of `PromptLookup`."""

    prompt_lookup_max: _Length = 3
    prompt_lookup_min: _Length = 1
    match: Literal["recent", "first"] = "recent"
    method = "ngram"
    label = "lookup"
    tokens = 8  # copying costs nothing, so a long guess is worth it

    def __post_init__(self) -> None:
        _check_range(self.prompt_lookup_min, self.prompt_lookup_max)

    def build(self) -> PromptLookup:
        return PromptLookup(self.prompt_lookup_max, self.prompt_lookup_min, self.match)

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        """In vLLM "ngram", in SGLang NGRAM, which counts the root, in llama.cpp "ngram-simple"."""
        most = self.prompt_lookup_max
        lengths = {"prompt_lookup_max": most, "prompt_lookup_min": self.prompt_lookup_min}
        return {
            "vLLM": (vllm_flag(method="ngram", num_speculative_tokens=tokens, **lengths), ""),
            "SGLang": (
                f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {tokens + 1} "
                "--speculative-ngram-max-bfs-breadth 1",
                "CUDA only; it has no limit on the length of a match, only on its trie (18)",
            ),
            "llama.cpp": (
                f"--spec-type ngram-simple --spec-ngram-simple-size-n {most} --spec-ngram-simple-size-m {tokens}",
                "older builds: --spec-ngram-size-n and -m",
            ),
        }
