"""`paceline tune`: measures drafters for a model on this machine and these prompts, and chooses one.

Every candidate runs with the cost model and takes turns with plain decoding, as in `paceline bench`. The best speed-up
over all tokens whose 95% interval is above 1 is chosen, or none.
"""

import shlex
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..config import EngineFlags, SpecConfig, engine_flags, parse
from ..core.round import Round
from ..errors import ConfigError
from ..llm import LLM
from ..methods.spec import HeadSpec
from ..methods.table import rows
from ..policy import CostModel, Profile
from ..policy.costs import Costs
from ..system.files import Progress, silent
from ..tuned import Tuned, made_for
from ..zoo import name_elsewhere, resolve
from .machine import PassCosts, about_drafts, ms
from .record import measured_on
from .run import PLAIN, BenchOptions, BenchRun, EngineSide
from .suites import Question
from .summary import FEW, by_side, speculative_summary

SURE = 1.05
"""The speed-up required of fewer than `FEW` prompts, which have no interval."""


@dataclass(frozen=True)
class Gain:
    """The speed-up over plain decoding and its 95% interval over `prompts` prompts, None for too few."""

    value: float
    low: float | None
    high: float | None
    prompts: int

    @property
    def pays(self) -> bool:
        """Whether it is significantly faster than plain decoding."""
        return round(self.value, 2) >= SURE if self.low is None else self.low > 1  # rounded as it is printed

    def __str__(self) -> str:
        return f"{self.value:.2f}x" + ("" if self.low is None else f" ({self.interval})")

    @property
    def interval(self) -> str:
        """The interval as text; a dash where there is none."""
        return "–" if self.low is None else f"{self.low:.2f}–{self.high:.2f}"


@dataclass(frozen=True)
class BreakEven:
    """The time of a drafter's tokens and the time at which they break even, at its best draft length.

    token_s: seconds per drafted token. growth: T(n+1)/T(1), a round that verifies n tokens over a plain one. dearest_s:
    seconds per token at which drafting n tokens breaks even; negative if even a free draft would lose.
    """

    source: str
    num_tokens: int
    acceptance: float
    token_s: float
    growth: float
    dearest_s: float


@dataclass(frozen=True)
class Candidate:
    """The measurements of one drafter.

    categories: by category of prompts. depths: the number of tokens drafted most, by drafter. num_bugs: answers that
    differ from plain decoding by more than rounding. share_drafted: of rounds in which something was drafted.
    no_draft_reasons: of answers for which nothing was, see `Completion`.
    """

    config: SpecConfig
    overall: Gain
    categories: dict[str, Gain]
    plain_tokens_per_s: float
    tokens_per_s: float
    mean_acceptance_length: float
    share_drafted: float
    depths: dict[str, int]
    breakeven: tuple[BreakEven, ...] = ()
    num_bugs: int = 0
    num_near_ties: int = 0
    costs: PassCosts | None = None
    no_draft_reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        fields = asdict(self)
        del fields["costs"]
        return {"drafter": self.config.name, **fields, "config": self.config.as_dict()}


def candidates_of(words: Sequence[str] | None, more: Sequence[str] = ()) -> list[SpecConfig]:
    """The drafters to try, each with the cost model: those given, else all that need no model; and `combined` of them.

    Those that need no model are lookup, suffix, recycling, self-int4, the ones of installed packages, and `more`, what
    this model brings. Raises `ConfigError` for one that is unknown, is "none", or is given twice.
    """
    by_default = [row.word for row in rows() if row.is_tried]
    configs = [parse(word, policy="cost_model") for word in words or [*by_default, *more]]
    for config in configs:
        if config.method == "none":
            raise ConfigError("every drafter is compared with none already", fix="leave it out")
    all_in_one = combined(configs)
    if all_in_one is not None and all_in_one.name not in [config.name for config in configs]:
        configs.append(all_in_one)
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise ConfigError("the same drafter is given twice", got=", ".join(names))
    return configs


def combined(configs: Iterable[SpecConfig]) -> SpecConfig | None:
    """All these drafters in one, combinations left out; None where fewer than two remain.

    Where suffix is among them, lookup is left out: suffix finds all that lookup finds. Of heads, the first stays.
    """
    members = [config for config in configs if config.method != "choose"]
    heads = [config for config in members if isinstance(config.drafter, HeadSpec)]
    members = [config for config in members if config not in heads[1:]]
    if any(config.method == "suffix" for config in members):
        members = [config for config in members if config.method != "ngram"]
    if len(members) < 2:
        return None
    return parse({"method": "choose", "drafters": [config.as_dict() for config in members]}, policy="cost_model")


def measure(
    configs: Sequence[SpecConfig],
    llms: Sequence[LLM],
    questions: Sequence[Question],
    options: BenchOptions,
    progress: Progress = silent,
) -> list[Candidate]:
    """Decode the prompts plainly and with every candidate in turns; `llms` belong to `configs`, on the same weights."""
    sides = [EngineSide(config.name, llm) for config, llm in zip(configs, llms, strict=True)]
    run = BenchRun(EngineSide(PLAIN, llms[0].plain()), sides, options)
    run.measure(questions, progress)
    answers, candidates = by_side(run.answers), []
    for config, llm in zip(configs, llms, strict=True):
        speculative, policy = answers[config.name], llm.decoder.policy
        summary = speculative_summary(answers[PLAIN], speculative, options.seed)
        learnt = policy.costs if isinstance(policy, CostModel) else None
        candidates.append(candidate_of(config, summary, [r for answer in speculative for r in answer.rounds], learnt))
    return candidates


def candidate_of(
    config: SpecConfig, summary: Mapping[str, Any], rounds: Sequence[Round], learnt: Costs | None
) -> Candidate:
    """One candidate from its summary, its rounds, and the costs that its policy has learnt."""
    sources = list(dict.fromkeys(r.source for r in rounds if r.num_drafted))
    costs, even = None, list[BreakEven]()
    if learnt is not None and learnt.curve is not None:
        round_seconds = learnt.round_seconds(1)
        # Times of rounds, not of passes, since a draft must also pay for the overhead of the loop. No floor is needed.
        costs = PassCosts(0, 1.0, {1 + depth: round_seconds.of(depth) for depth in range(17)})
        for source in sources:
            accepted = acceptance(r for r in rounds if r.source == source)
            if accepted is not None:
                even.append(break_even(source, accepted, learnt.draft(source).step.value, costs))
    drafting = sum(r.num_drafted > 0 for r in rounds)
    return Candidate(
        config,
        _gain(summary),
        {name: _gain(category) for name, category in summary["categories"].items() if category["speedup"] is not None},
        summary["plain_tokens_per_s"],
        summary["speculative_tokens_per_s"],
        summary["mean_acceptance_length"],
        drafting / len(rounds) if rounds else 0.0,
        {source: usual_depth(r for r in rounds if r.source == source) for source in sources},
        tuple(even),
        summary["verdicts"]["bug"],
        summary["verdicts"]["near_tie"],
        costs,
        tuple(summary["no_draft_reasons"]),
    )


def best_of(candidates: Iterable[Candidate]) -> Candidate | None:
    """The fastest of those that pay and have no bugs."""
    paying = [candidate for candidate in candidates if candidate.overall.pays and not candidate.num_bugs]
    return max(paying, key=lambda candidate: candidate.overall.value, default=None)


def acceptance(rounds: Iterable[Round]) -> float | None:
    """Share of accepted tokens among the drafted tokens that were verified; None without any.

    (drafted 4, accepted 1) verifies two tokens and accepts one; (4, 4) accepts four of four: together 5/6.
    """
    accepted = judged = 0
    for r in rounds:
        accepted += r.num_accepted
        judged += r.num_accepted + (r.num_accepted < r.num_drafted)
    return accepted / judged if judged else None


def usual_depth(rounds: Iterable[Round]) -> int:
    """The most frequent draft length, weighted by emitted tokens; 0 without drafts."""
    weights = Counter[int]()
    for r in rounds:
        if r.num_drafted:
            weights[r.num_drafted] += r.num_emitted
    return min(weights, key=lambda depth: (-weights[depth], depth), default=0)


def break_even(source: str, accepted: float, token_s: float, costs: PassCosts) -> BreakEven:
    """The break-even time of a drafted token, at the best draft length for this acceptance and time."""
    depth = max(range(1, max(costs.seconds)), key=lambda n: costs.speedup(n, accepted, token_s))
    growth = costs.at(depth + 1) / costs.seconds[1]
    return BreakEven(source, depth, accepted, token_s, growth, costs.dearest_draft(depth, accepted))


def tuned_of(
    plain: LLM,
    candidates: Sequence[Candidate],
    llms: Sequence[LLM],
    how: BenchOptions,
    prompts: Mapping[str, Any],
    model: str,
) -> Tuned:
    """The choice, its report and flags, and the profile of the drafter chosen, or of the fastest where none pays.

    prompts: their "file" (None: built in), how many were "chosen", and further facts to keep. model: its name on the
    command line.
    """
    best, loaded = best_of(candidates), plain.loaded
    shown = best or max(candidates, key=lambda candidate: candidate.overall.value)
    policy = llms[list(candidates).index(shown)].decoder.policy
    remarks = list[str]()
    if prompts["file"] is None:
        remarks.append("These were built-in prompts; use --prompts FILE to choose for yours.")
    if prompts["chosen"] < 8:
        remarks.append(f"Few prompts give wide intervals, fewer than {FEW} none: use more for a surer choice.")
    return Tuned(
        SpecConfig() if best is None else best.config,
        policy.profile(*made_for(loaded)) if isinstance(policy, CostModel) else Profile(),
        measured_on(),
        tune_report(candidates, best, loaded.name, remarks),
        {
            "candidates": [candidate.as_dict() for candidate in candidates],
            "prompts": dict(prompts),
            "settings": {**asdict(how), "numerics": plain.numerics},
            "flags": [asdict(flag) for flag in flags_of(candidates, best, model)],
        },
    )


def flags_of(candidates: Sequence[Candidate], best: Candidate | None, model: str) -> list[EngineFlags]:
    """Options of other engines for the choice, with model names that those engines can open.

    model: its name on the command line, for the command that exports a head.
    """
    if best is None:
        return engine_flags(SpecConfig(), {})
    single = [candidate for candidate in candidates if candidate.config.method != "choose" and best_of([candidate])]
    single.sort(key=lambda candidate: -candidate.overall.value)
    depths = ChainMap(best.depths, *(candidate.depths for candidate in single))
    flags = engine_flags(for_others(best.config), depths, [for_others(candidate.config) for candidate in single])
    return [
        replace(flag, remark=flag.remark.replace("--model MODEL", f"--model {shlex.quote(model)}")) for flag in flags
    ]


def for_others(config: SpecConfig) -> SpecConfig:
    """With hub ids or folders instead of zoo names, which only Paceline knows."""

    def opened(drafter: Any) -> Any:
        if len(drafter.parts) > 1:
            return replace(drafter, drafters=tuple(map(opened, drafter.parts)))
        return replace(drafter, model=resolve(name_elsewhere(drafter.model))) if drafter.models else drafter

    return replace(config, drafter=opened(config.drafter))


def tune_report(
    candidates: Sequence[Candidate], best: Candidate | None, model: str, remarks: Sequence[str] = ()
) -> list[str]:
    """The choice, each candidate by category, what its tokens may cost, and what a draft model would have to."""
    choice = f"Choice for {model}: none. No drafter is surely faster than plain decoding here."
    if best is not None:
        choice = (
            f"Choice for {model}: {best.config.name}, {best.overall.value:.2f}x as fast as plain decoding on these "
            f"prompts ({best.tokens_per_s:.1f} against {best.plain_tokens_per_s:.1f} tokens/s)."
        )
    lines = [choice, *remarks]
    for candidate in candidates:
        lines.append(about_gains(candidate))
        lines += [
            about_costs(candidate.config.name, even, candidate.share_drafted)
            for even in candidate.breakeven
            if not candidate.overall.pays and candidate.config.method != "choose"
        ]
        if not candidate.breakeven:
            lines.append(f"{candidate.config.name} never drafted: it had nothing to propose, or a try cost too much.")
        if candidate.num_bugs:
            lines.append(
                f"{candidate.config.name} cannot be chosen: {candidate.num_bugs} of its answers differ from plain "
                "decoding by more than rounding. This is a bug; `paceline check` shows where."
            )
    costs = next((candidate.costs for candidate in candidates if candidate.costs is not None), None)
    if costs is not None:
        lines.append(about_drafts(costs))
    return lines


def about_gains(candidate: Candidate) -> str:
    """What a drafter gains, overall and by category."""
    text = f"{candidate.config.name} {'pays' if candidate.overall.pays else 'does not surely pay'}: {candidate.overall}"
    if len(candidate.categories) < 2:
        return text + "."
    ordered = sorted(candidate.categories.items(), key=lambda pair: -pair[1].value)
    return f"{text}; by category: {', '.join(f'{name} {gain}' for name, gain in ordered)}."


def about_costs(name: str, even: BreakEven, share_drafted: float) -> str:
    """Why the drafts of one drafter, which drafted in this share of the rounds, do not pay."""
    case = f"acceptance {even.acceptance:.2f}, T({even.num_tokens + 1})/T(1) = {even.growth:.2f}"
    if even.dearest_s <= 0:
        return f"{name}: even a draft that costs nothing would not pay ({case})."
    return (
        f"{name} drafted in {share_drafted:.0%} of the rounds: a drafted token costs {ms(even.token_s)}, and pays "
        f"below {ms(even.dearest_s)} ({case})."
    )


def _gain(summary: Mapping[str, Any]) -> Gain:
    if summary["speedup"] is None:
        raise ConfigError(
            "nothing could be timed", got="answers of a single token", fix="raise --max-tokens, or take other prompts"
        )
    return Gain(summary["speedup"], summary["speedup_low"], summary["speedup_high"], summary["prompts"])
