"""What the scripts that compare drafters share: the prompts, engines on one cache, and the turns that they take."""

import argparse
import copy
import statistics
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline import LLM, CostModel, SamplingParams
from paceline.core.interfaces import Drafter, DraftPolicy
from paceline.core.outputs import Round
from paceline.decoding import SpeculativeDecoder
from paceline.eval.suites import choose, hash_questions, read_suite
from paceline.llm import Prompt


@dataclass(frozen=True)
class Asked:
    """A prompt of a suite: its first turn only. seed: of a sampled answer."""

    suite: str
    id: str
    prompt: Prompt
    seed: int


def read_prompts(suites: Seq[str], data: str | None, count: int | None) -> tuple[list[Asked], str]:
    """`count` prompts of each suite (a name, or a file), and the hash of them all."""
    chosen = [(suite, choose(read_suite(suite, data), count)) for suite in suites]
    asked = [
        Asked(suite, one.id, one.messages([]) if one.chat is not None else one.turns[0], seed)
        for suite, questions in chosen
        for seed, one in enumerate(questions)
    ]
    return asked, hash_questions([one for _, questions in chosen for one in questions])


def beside(llm: LLM, drafter: Drafter, policy: DraftPolicy) -> LLM:
    """An engine with another drafter on the cache, and with the adapter, of `llm`; they take turns."""
    other = copy.copy(llm)
    other.decoder = SpeculativeDecoder(llm.runner, drafter, llm.verifier, policy)
    _measure(other, policy)
    return other


def under(llm: LLM, policy: DraftPolicy) -> LLM:
    """An engine with the very drafter of `llm`, as it is bound, and another policy."""
    other, other_decoder = copy.copy(llm), copy.copy(llm.decoder)
    other.decoder, other_decoder.policy = other_decoder, policy
    policy.bind(other_decoder.drafter, llm.runner.pass_seconds)
    _measure(other, policy)
    return other


def _measure(llm: LLM, policy: DraftPolicy) -> None:
    if isinstance(policy, CostModel):  # as LLM does: not in the first answer, which is timed
        policy.measure(llm.runner.max_length)


@dataclass
class Tally:
    """What one engine did. seconds: of decoding, per token of each turn. lengths: tokens of each pass, by suite."""

    seconds: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    lengths: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    answers: int = 0
    differing: list[str] = field(default_factory=list)  # ids of prompts

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per pass and sequence, the target's own counted."""
        return statistics.mean(n for lengths in self.lengths.values() for n in lengths)

    @property
    def by_depth(self) -> list[float]:
        """Share of the passes in which a drafted token stood at each depth."""
        depths = max(r.num_accepted for r in self.rounds)
        return [round(sum(r.num_accepted > d for r in self.rounds) / len(self.rounds), 3) for d in range(depths)]

    @property
    def draft_share(self) -> float:
        """Of the time."""
        return sum(r.draft_s for r in self.rounds) / sum(r.seconds for r in self.rounds)

    def mean_of(self, count: str) -> float:
        """Of a count that rounds have."""
        return statistics.mean(getattr(r, count) for r in self.rounds)

    def ratios(self, plain: "Tally") -> list[float]:
        """How many times as fast as plain decoding, turn by turn."""
        return [theirs / ours for theirs, ours in zip(plain.seconds, self.seconds, strict=True)]

    def as_row(self, plain: "Tally") -> dict[str, object]:
        """The numbers, rounded."""
        return {
            "mean_acceptance_length": round(self.mean_acceptance_length, 3),
            **{suite: round(statistics.mean(lengths), 3) for suite, lengths in self.lengths.items()},
            "speedup": round(statistics.median(self.ratios(plain)), 3),
            "draft_share": round(self.draft_share, 3),
            "nodes": round(self.mean_of("num_nodes"), 1),
            "rows": round(self.mean_of("num_rows"), 1),
            "by_depth": self.by_depth,
        }


def take_turns(
    engines: Mapping[str, LLM], asked: Seq[Asked], temperature: float, tokens: int, batch: int = 1
) -> dict[str, Tally]:
    """Decode the prompts, `batch` at a time, with every engine; "plain" among them says what the answers should be.

    Each group is decoded by all engines before the next, so that a machine that slows down slows all of them; who
    begins goes round, so that nobody is always the furthest from plain decoding. An unmeasured turn warms them up.
    """
    tallies = {label: Tally() for label in engines}
    labels = list(engines)
    for llm in engines.values():
        llm.generate([asked[0].prompt], SamplingParams(temperature=temperature, max_tokens=4, seed=0))
    for turn, start in enumerate(range(0, len(asked), batch)):
        group = asked[start : start + batch]
        params = [SamplingParams(temperature=temperature, max_tokens=tokens, seed=one.seed) for one in group]
        first = turn % len(labels)
        results = {
            label: engines[label].generate([one.prompt for one in group], params)
            for label in labels[first:] + labels[:first]
        }
        for label, tally in tallies.items():
            made = results[label]
            tally.seconds.append(made[0].timings.decode / sum(one.outputs[0].num_decoded for one in made))
            for one, result, plain in zip(group, made, results["plain"], strict=True):
                tally.rounds += result.rounds
                tally.lengths[one.suite] += [r.num_emitted for r in result.rounds]
                tally.answers += 1
                if result.token_ids != plain.token_ids:
                    tally.differing.append(one.id)
    return tallies


def filled_in(args: argparse.Namespace, quick: Mapping[str, object], full: Mapping[str, object]) -> argparse.Namespace:
    """The options that were not given (None), from the set that `--quick` chooses."""
    for key, value in (quick if args.quick else full).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    return args
