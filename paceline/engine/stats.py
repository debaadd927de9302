"""Counts of an engine's work, and the same as vLLM's metrics."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from ..core.request import TokenSequence
from ..core.round import Round


@dataclass
class EngineStats:
    """What an engine has done so far, and its free slots now.

    finished, aborted, failed: requests, by how they ended.
    prompt_tokens: tokens of the prompts, counted for each answer. generated_tokens: tokens of the answers.
    prefix_cache_queries, prefix_cache_hits: prompt tokens that were looked up in the prefix cache, and found.
    drafts, draft_tokens, accepted_tokens: rounds with a draft, the tokens in them, and how many were accepted.
    accepted_by_position: how often the first, second and so on token of a draft was accepted.
    rounds: rounds of the whole batch. retried: rounds with several requests that raised.
    preemptions: how often an answer gave its slot to another before its end.
    seconds: of the rounds, and of reading the prompts of their answers.
    """

    finished: int = 0
    aborted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    generated_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    rounds: int = 0
    retried: int = 0
    preemptions: int = 0
    free_slots: int = 0
    seconds: float = 0.0

    def count_prompt(self, seq: TokenSequence, is_cached: bool) -> None:
        """Count the prompt of an answer. is_cached: whether the prefix cache is on."""
        self.prompt_tokens += len(seq.prompt_ids)
        self.prefix_cache_queries += len(seq.prompt_ids) if is_cached else 0
        self.prefix_cache_hits += seq.num_cached_tokens

    def count(self, rounds: Sequence[Round]) -> None:
        """Count rounds of an answer."""
        for record in rounds:
            own = [place < record.num_accepted for place in range(record.num_drafted)]
            self.accepted_by_position = tuple(map(sum, zip_longest(self.accepted_by_position, own, fillvalue=0)))
            self.generated_tokens += record.num_emitted
            self.drafts += record.num_nodes > 0
            self.draft_tokens += record.num_nodes
            self.accepted_tokens += record.num_accepted
            self.seconds += record.vision_s + record.prefill_s + record.seconds / record.batch

    def metrics(self) -> list["Counter | Vector"]:
        """The counts by vLLM's names."""
        counts = {
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generated_tokens,
            "num_preemptions": self.preemptions,
            "prefix_cache_queries": self.prefix_cache_queries,
            "prefix_cache_hits": self.prefix_cache_hits,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_num_draft_tokens": self.draft_tokens,
            "spec_decode_num_accepted_tokens": self.accepted_tokens,
        }
        accepted = Vector("vllm:spec_decode_num_accepted_tokens_per_pos", list(self.accepted_by_position))
        return [*(Counter(f"vllm:{name}", value) for name, value in counts.items()), accepted]


@dataclass(frozen=True)
class Counter:
    """A metric that is one number."""

    name: str
    value: int
    labels: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Vector:
    """A metric that is a number for each position."""

    name: str
    values: list[int]
    labels: dict[str, str] = field(default_factory=dict[str, str])
