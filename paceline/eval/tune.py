"""Which drafter pays for a model on this machine and these prompts: measured, compared, chosen. Prints nothing.

Every candidate runs under the cost model and takes turns with plain decoding, as in `paceline bench`. Chosen is the
best speed-up, pooled over all tokens, whose 95% interval lies above 1; else none.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from ..core.outputs import Round
from ..errors import ConfigError
from ..llm import LLM
from ..policy import CostModel
from ..policy.estimates import Estimates
from ..spec_config import SpecConfig, parse
from .floor import floor_of
from .pass_costs import PassCosts
from .run import BenchRun, Progress, run_bench
from .sides import PLAIN, BenchOptions, EngineSide
from .suites import BUILT_IN, Question, read_suite
from .summary import summarise

SURE, FEW = 1.05, 5
"""Intervals over fewer prompts than FEW are too narrow, that of a single one is empty: the gain must then be SURE."""


@dataclass(frozen=True)
class Gain:
    """Speed over plain decoding and its 95% interval over `prompts` prompts."""

    value: float
    low: float
    high: float
    prompts: int

    @property
    def pays(self) -> bool:
        """Surely faster than plain decoding."""
        return self.low > 1 and (self.prompts >= FEW or self._shows)

    @property
    def is_unclear(self) -> bool:
        """Faster on the whole, but not surely."""
        return not self.pays and self.prompts > 1 and self._shows

    @property
    def _shows(self) -> bool:
        return round(self.value, 2) >= SURE  # as it is printed


@dataclass(frozen=True)
class BreakEven:
    """What one drafter's tokens cost and what they may cost, at the draft length where it does best.

    acceptance: share of the tokens judged that stood. token_s: seconds per drafted token. growth: T(n+1)/T(1), the
    round that checks n tokens over a plain one. dearest_s: seconds per token at which drafting n tokens breaks even;
    negative where even a free draft would lose. least_acceptance: from which a free draft pays; None: from none.
    """

    source: str
    num_tokens: int
    acceptance: float
    token_s: float
    growth: float
    dearest_s: float
    least_acceptance: float | None


@dataclass(frozen=True)
class Candidate:
    """What one drafter brought.

    categories: by category of prompts. depths: the number of tokens drafted most, by drafter. num_bugs: answers that
    differ from plain decoding by more than rounding. share_drafted: of rounds in which something was drafted.
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

    def as_dict(self) -> dict[str, object]:
        """For the file."""
        told = asdict(self)
        del told["costs"]
        return {"drafter": self.config.name, **told, "config": self.config.as_dict()}


def read_questions(path: str | None) -> list[Question]:
    """The user's prompts: a file as `paceline bench` reads it; None: built in.

    Raises `ConfigError` where there are none or a line cannot be read.
    """
    if path is None:
        return read_suite(BUILT_IN)
    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path!r}", expected="JSON lines or plain lines, one prompt each")
    return read_suite(path)


def candidates_of(given: Seq[str] | None) -> list[SpecConfig]:
    """The drafters to try, each under the cost model: those given, else lookup and self-int4, and all combined.

    Raises `ConfigError` for one that is not known, is "none", or is given twice.
    """
    configs = [parse(one, policy="cost_model") for one in given or ("lookup", "self-int4")]
    for config in configs:
        if config.method == "none":
            raise ConfigError("none is what every drafter is compared with", fix="leave it out")
    single = [one for one in configs if one.method != "choose"]
    if len(single) > 1:
        both = parse({"method": "choose", "drafters": [one.as_dict() for one in single]}, policy="cost_model")
        if both.name not in [one.name for one in configs]:
            configs.append(both)
    names = [one.name for one in configs]
    if len(set(names)) < len(names):
        raise ConfigError("the same drafter is given twice", got=", ".join(names))
    return configs


def measure(
    configs: Seq[SpecConfig],
    llms: Seq[LLM],
    questions: Seq[Question],
    options: BenchOptions,
    progress: Progress = lambda what, done, total: None,
) -> list[Candidate]:
    """Decode the prompts plainly and with every candidate in turns; `llms` belong to `configs`, on the same weights."""
    names = [config.name for config in configs]
    sides = [EngineSide(name, llm) for name, llm in zip(names, llms, strict=True)]
    run = BenchRun(floor_of(llms[0].loaded))
    run_bench(run, EngineSide(PLAIN, llms[0].plain()), sides, [], questions, options, progress)
    runs = cast("list[dict[str, Any]]", summarise(run, names, options, {})["runs"])
    return [
        candidate_of(config, told, _rounds(run, config.name), _estimates(llm), run.floor.weight_bytes)
        for config, told, llm in zip(configs, runs, llms, strict=True)
    ]


def candidate_of(
    config: SpecConfig, told: Mapping[str, Any], rounds: Seq[Round], estimates: Estimates | None, weight_bytes: int
) -> Candidate:
    """One candidate from its summary, its rounds, and what its policy has learnt."""
    sources = list(dict.fromkeys(r.source for r in rounds if r.num_drafted))
    costs, even = None, list[BreakEven]()
    if estimates is not None and estimates.curve is not None:
        turn = estimates.turn(1)
        # Rounds as they were, and not passes: what the loop adds has to be earned as well. The floor is not asked for.
        costs = PassCosts(weight_bytes, 1.0, {1 + depth: turn.seconds(depth) for depth in range(17)})
        for source in sources:
            accepted = acceptance(r for r in rounds if r.source == source)
            if accepted is not None:
                even.append(break_even(source, accepted, estimates.cost(source).token.value, costs))
    drafting = sum(r.num_drafted > 0 for r in rounds)
    return Candidate(
        config,
        _gain(told),
        {name: _gain(one) for name, one in told["categories"].items() if one["speedup"] is not None},
        told["plain_tokens_per_s"],
        told["speculative_tokens_per_s"],
        told["mean_acceptance_length"],
        drafting / len(rounds) if rounds else 0.0,
        {source: usual_depth(r for r in rounds if r.source == source) for source in sources},
        tuple(even),
        told["verdicts"]["bug"],
        told["verdicts"]["near_tie"],
        costs,
    )


def best_of(candidates: Iterable[Candidate]) -> Candidate | None:
    """The fastest of those that surely pay and answer as plain decoding does."""
    paying = [one for one in candidates if one.overall.pays and not one.num_bugs]
    return max(paying, key=lambda one: one.overall.value, default=None)


def acceptance(rounds: Iterable[Round]) -> float | None:
    """Share of the drafted tokens that stood, of those that were judged; None where none was.

    (drafted 4, accepted 1) judges two tokens, of which one stood; (4, 4) four of four: together 5/6.
    """
    stood = judged = 0
    for r in rounds:
        stood += r.num_accepted
        judged += r.num_accepted + (r.num_accepted < r.num_drafted)
    return stood / judged if judged else None


def usual_depth(rounds: Iterable[Round]) -> int:
    """The draft length that the policy took most, each round counting the tokens that it brought; 0 without drafts."""
    weights = Counter[int]()
    for r in rounds:
        if r.num_drafted:
            weights[r.num_drafted] += r.num_emitted
    return min(weights, key=lambda depth: (-weights[depth], depth), default=0)


def break_even(source: str, accepted: float, token_s: float, costs: PassCosts) -> BreakEven:
    """What a drafted token may cost, at the draft length that does best with this acceptance and cost."""
    depth = max(range(1, max(costs.seconds)), key=lambda n: costs.speedup(n, accepted, token_s))
    growth = costs.at(depth + 1) / costs.seconds[1]
    dearest = costs.dearest_draft(depth, accepted)
    return BreakEven(source, depth, accepted, token_s, growth, dearest, costs.least_acceptance(depth))


def _gain(told: Mapping[str, Any]) -> Gain:
    if told["speedup"] is None:
        raise ConfigError(
            "nothing could be timed", got="answers of a single token", fix="raise --max-tokens, or take other prompts"
        )
    return Gain(told["speedup"], told["speedup_low"], told["speedup_high"], told["prompts"])


def _rounds(run: BenchRun, side: str) -> list[Round]:
    return [r for answer in run.answers if answer.side == side for r in answer.rounds]


def _estimates(llm: LLM) -> Estimates | None:
    policy = llm.decoder.policy
    return policy.estimates if isinstance(policy, CostModel) else None
