"""The loop without a model: policies plan real rounds on a clock of our own, against drafters of known quality.

The policy sees noisy seconds with outliers, as on a shared machine; the result is counted in the true ones, so that
what a test measures is the policy's decisions and not its luck.
"""

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from paceline import CostModel, SamplingParams
from paceline.core.draft import Draft
from paceline.core.interfaces import DraftBudget, Drafter, DrafterInfo, DraftOptions, DraftPolicy, TargetExperts
from paceline.core.request import TokenSequence
from paceline.core.round import Origin, Round
from tests.policy.growing import Branching, DraftTree, Marginal, with_masks
from tests.policy.mixture import Mixture

END = 9  # of an answer


class Clock:
    """Seconds that pass when we say so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Member:
    """One simulated drafter.

    chance: (request, text position, i) -> probability that the i-th drafted token (from 0) is accepted there.
    token, uncached_tokens: seconds for each of them.
    reads: whether it has a cache, which must hold the whole text.
    confident: whether it gives `chance` as its confidence.
    hint: see `DraftOptions.hint`.
    tree: drafts trees; `token` is then per level.
    masks: the most masks below each node, as in SPACE, from which the next round drafts.
    probes: rows that it adds to every draft, like Lookahead's window.
    at_once: whether a draft of any depth takes `token` seconds. tells: whether it says so.
    novelty: of its nodes, see `Mixture.read`.
    """

    name: str
    chance: Callable[[int, int, int], float]
    token: float = 0.0
    uncached_tokens: float = 0.0
    reads: bool = False
    confident: bool = False
    hint: Callable[[int, int], int] = lambda request, position: 0
    tree: Branching | Marginal | None = None
    masks: int = 0
    probes: int = 0
    at_once: bool = False
    tells: bool = True
    novelty: float = 1.0
    cached: dict[int, int] = field(default_factory=dict)
    num_masks: dict[int, int] = field(default_factory=dict)  # of the last round, by slot

    @property
    def branches(self) -> int:
        """The most children of a node, masks included."""
        return (self.tree.width if self.tree else 1) + (self.masks > 0)

    def draft(self, budget: DraftBudget, depth: int, request: int, position: int, rng: random.Random) -> DraftTree:
        """Draft, and decide what the target accepts."""
        if self.tree is not None:
            return self.tree.grow(budget, depth, request, position, rng)
        is_accepted, confidences = list[bool](), list[float]()
        while len(is_accepted) < depth:
            chance = self.chance(request, position + len(is_accepted), len(is_accepted))
            is_accepted.append(rng.random() < chance)
            confidences.append(chance)
            if self.confident and budget.should_continue is not None and not budget.should_continue(confidences):
                break
        accepted = is_accepted.index(False) if False in is_accepted else len(is_accepted)
        size = len(is_accepted)
        shown = confidences if self.confident else []
        return DraftTree(list(range(-1, size)), list(range(1, accepted + 1)), shown, size, size)


class SimDrafter(Drafter):
    """The interface of a drafter for the policy; it never drafts."""

    name = "simulated"

    def __init__(self, members: list[Member]):
        self.members, self.requests = members, dict[int, int]()

    @property
    def info(self) -> DrafterInfo:
        """The most of what any member gives."""
        return DrafterInfo(max(member.branches for member in self.members))

    def draft_options(self, seq: TokenSequence) -> list[DraftOptions]:
        looks = []
        for member in self.members:
            uncached_tokens = seq.num_cached - member.cached.get(seq.slot, 0) if member.reads else 0
            hint = member.hint(self.requests[seq.slot], seq.num_output)
            ready = member.num_masks.get(seq.slot, 0) if member.masks else 1 << 30
            masks, at_once = member.masks, member.at_once and member.tells
            looks.append(
                DraftOptions(member.name, hint, uncached_tokens, member.branches, masks, ready, member.probes, at_once)
            )
        return looks

    def seconds(self) -> dict[str, tuple[float, float]]:
        """Drafters of trees measure themselves, as heads do."""
        return {one.name: (one.token, one.uncached_tokens) for one in self.members if one.tree}

    def propose(self, seqs, budgets) -> Draft:
        raise NotImplementedError


@dataclass
class Machine:
    """T(n) in seconds, and how badly its clock behaves.

    hidden: so many times what was measured does a round's pass take if it has rows to verify. late: the round whose
    pass the stopwatch takes for 20 times as long. pads_trees: each tree takes as many rows as the largest.
    mixture: its experts; `curve` is then what else a pass takes.
    """

    curve: Callable[[int], float]
    noise: float = 0.05
    hiccups: float = 0.03
    rest: float = 0.0005
    hidden: float = 1.0
    late: int = -1
    pads_trees: bool = True
    mixture: Mixture | None = None

    def pass_seconds(self, rows: int, read: float) -> float:
        return self.curve(rows) + (self.mixture.each * read if self.mixture else 0.0)

    def seen(self, seconds: float, rng: random.Random) -> float:
        """What a stopwatch says of `seconds`."""
        slow = rng.uniform(5, 20) if rng.random() < self.hiccups else 1.0
        return seconds * math.exp(rng.gauss(0, self.noise)) * slow


def cpu(n: int) -> float:
    """Seconds of a small machine: rows in pairs, 1.5 times at 8, 2 times at 16."""
    return 0.010 * (1 + 0.066 * ((n + 1) // 2 * 2 - 2))


PLAIN = cpu(1)


@dataclass
class Outcome:
    """True seconds, tokens, and what plain decoding would have taken."""

    seconds: float = 0.0
    plain: float = 0.0
    rounds: list[tuple[int, Round]] = field(default_factory=list)
    by_request: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds of its own rounds, and plain ones, where requests come one by one."""

    @property
    def speed(self) -> float:
        """Over plain decoding."""
        return self.plain / self.seconds


def copying(worth: float = 0.97) -> Member:
    """Lookup: right where the text copies, a third of the time, and it says where that is."""

    def copies(position: int) -> bool:
        return position // 32 % 3 == 1

    return Member(
        "lookup",
        lambda r, p, i: worth if copies(p) else 0.15 * worth,
        0.005 * PLAIN,
        hint=lambda r, p: 8 if copies(p) else p % 3 - 1,
    )


def model(clock: Clock) -> CostModel:
    """The default policy."""
    return CostModel(clock=clock)


def speed_of(outcomes: Iterable[Outcome]) -> float:
    """Of all together, over plain decoding."""
    outcomes = list(outcomes)
    return sum(one.plain for one in outcomes) / sum(one.seconds for one in outcomes)


def taught(members: list[Member], **options) -> CostModel:
    """The default policy after a simulation."""
    made = list[CostModel]()
    simulate(lambda clock: made.append(model(clock)) or made[0], members, **options)
    return made[0]


def simulate(
    policy_of: Callable[[Clock], DraftPolicy],
    members: list[Member],
    requests: int = 1,
    tokens: int = 256,
    prompt: int = 100,
    batch: int = 1,
    machine: Machine | None = None,
    seed: int = 0,
    length: Callable[[int], int] | None = None,
    asks: Callable[[int], list[int]] | None = None,
) -> Outcome:
    """Decode `requests` answers, `batch` side by side.

    length: tokens of each, where it ends before `tokens`. asks: the question behind each prompt, in tokens.
    """
    machine, rng, clock, outcome = machine or Machine(cpu), random.Random(seed), Clock(), Outcome()
    policy, drafter = policy_of(clock), SimDrafter(members)

    mixture, read = machine.mixture, 0

    def pass_seconds(rows: int, alike: bool = False) -> float:
        nonlocal read
        if mixture:
            read = mixture.read([(range(-1, rows - 1), mixture.alike if alike else mixture.made_up)], rng)
        seconds = machine.pass_seconds(rows, read)
        clock.now += 4 * seconds
        return sorted(machine.seen(seconds, rng) for _ in range(3))[1]

    experts = mixture and TargetExperts(mixture.count, lambda: read, lambda rows: pass_seconds(rows, True))
    policy.bind(drafter, pass_seconds, machine.pads_trees, experts)
    running = list[TokenSequence]()
    waiting, played = list(range(requests))[::-1], 0
    while waiting or running:
        while waiting and len(running) < batch:
            slot = min(set(range(batch)) - {seq.slot for seq in running})
            ends = length(waiting[-1]) if length else 0
            text = [1] * prompt + (asks(waiting[-1]) if asks else [])
            seq = TokenSequence(text, SamplingParams(max_tokens=tokens), ends, frozenset({END}), 10**6, slot=slot)
            drafter.requests[slot] = waiting.pop()
            running.append(seq)
        begin = clock.now
        budgets = policy.budgets(running)
        planning = clock.now - begin
        records, parts = play(running, budgets, drafter, machine, rng)
        seen = [machine.seen(part, rng) for part in parts]
        seen[0] += planning
        seen[1] *= 20.0 if played == machine.late else 1.0
        played += 1
        clock.now += sum(seen) - planning
        outcome.seconds += sum(parts)
        emitted = sum(record.num_emitted for record in records)
        roots = mixture.plain(len(running)) if mixture else 0.0
        plain = emitted / len(running) * (machine.pass_seconds(len(running), roots) + machine.rest)
        outcome.plain += plain
        for seq in running:
            spent, would = outcome.by_request.get(drafter.requests[seq.slot], (0.0, 0.0))
            outcome.by_request[drafter.requests[seq.slot]] = spent + sum(parts), would + plain
        for seq, record in zip(list(running), records, strict=True):
            timed = Round(**{**record.__dict__, "draft_s": seen[0], "verify_s": seen[1], "rest_s": seen[2]})
            outcome.rounds.append((drafter.requests[seq.slot], timed))
            policy.observe(seq, timed)
            if seq.is_finished:
                running.remove(seq)
                policy.release([seq.slot])
                for member in members:
                    member.cached.pop(seq.slot, None)
                    member.num_masks.pop(seq.slot, None)
    return outcome


def play(
    seqs: list[TokenSequence], budgets: Iterable[DraftBudget], drafter: SimDrafter, machine: Machine, rng: random.Random
) -> tuple[list[Round], tuple[float, float, float]]:
    """One round: its records without times, and the true seconds of drafting, verification and the rest."""
    records, levels, widths, drafting, trees = [], dict[str, int](), list[int](), 0.0, []
    for seq, budget in zip(seqs, budgets, strict=True):
        member = drafter.members[budget.drafter_index]
        request, position = drafter.requests[seq.slot], seq.num_output
        hint = member.hint(request, position)
        depth = min(budget.depth, budget.nodes, seq.remaining - 1) if hint >= 0 else 0
        masks = min(depth, member.masks)
        grown = member.draft(
            budget, min(depth, member.num_masks.get(seq.slot, 0)) if masks else depth, request, position, rng
        )
        num_masks = predicted = 0
        if masks:
            grown, num_masks, predicted = with_masks(grown, budget, masks, seq.remaining - 2)
        for one in drafter.members:
            one.num_masks[seq.slot] = predicted if one is member else 0
        if depth and member.reads:
            drafting += member.uncached_tokens * (seq.num_cached - member.cached.get(seq.slot, 0))
            member.cached[seq.slot] = seq.num_cached
        accepted = len(grown.path)
        steps = min(grown.levels, 1) if member.at_once else grown.levels
        levels[member.name] = max(levels.get(member.name, 0), steps)
        widths.append(len(grown.parents) + num_masks + (member.probes if depth else 0))
        trees.append(([*grown.parents, *range(len(grown.parents) - 1, widths[-1] - 1)], member.novelty))
        emitted = 0
        for _ in range(accepted + 1):
            emitted += 1
            token = END if seq.num_output + 1 == seq.seed else 5  # nothing is drawn: the seed holds the length
            if seq.append(token, Origin.DRAFTED, member.name):
                break
        if depth and member.reads:
            member.cached[seq.slot] += min(accepted, depth - 1)
        records.append(
            Round(
                member.name,
                grown.depth,
                accepted,
                emitted,
                token_ids=tuple(range(len(grown.parents))),
                parents=tuple(grown.parents),
                path=tuple(grown.path),
                confidences=tuple(grown.confidences),
                hint=hint,
                batch=len(seqs),
                num_probes=num_masks,
            )
        )
    widths = [max(widths)] * len(seqs) if machine.pads_trees else widths
    read = machine.mixture.read(trees, rng) if machine.mixture else 0
    records = [replace(one, num_rows=width, num_experts=read) for one, width in zip(records, widths, strict=True)]
    drafting += sum(levels.get(member.name, 0) * member.token for member in drafter.members)
    target = machine.pass_seconds(sum(widths), read) * (machine.hidden if max(widths) > 1 else 1.0)
    return records, (drafting, target, machine.rest)
