"""Which drafter and how many tokens: the most expected tokens per second.

    rate(d) = (B + sum over rows of gain(d)) / (R(d) + draft(d) + reading)      gain(d) = sum_{i<=d} prod_{j<=i} a_j

d = 0 is plain decoding, B / R(0). Reading what a draft model has missed is spread over the tokens it is read for.
Where a drafter of trees is among them, `tree_choice` looks for the best depth and number of nodes instead.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from ..core.interfaces import DraftBudget
from .acceptance import Calibration
from .costs import DraftSeconds, TurnSeconds
from .option import MARGIN, Choice, Option, is_affordable
from .tree_choice import best_shape

PATIENCE = 3
"""Depths without improvement before the search ends; the pass curve has steps, so one is not enough."""


def choose(
    rows: Seq[Seq[Option]], turn: TurnSeconds, costs: Mapping[str, DraftSeconds], credit: float, max_nodes: int = 0
) -> Choice:
    """The best depth for the best team: one drafter for all rows or, in a batch, each row's most promising one.

    credit: passes that the round may lose if half of what is expected comes true. max_nodes: of a tree.
    """
    batch = len(rows)
    plain = turn.seconds(0)
    best = Choice(batch / plain, 0, [None] * batch)
    most = best.rate * MARGIN
    sources = list(dict.fromkeys(option.source for row in rows for option in row))
    teams = [[source] for source in sources]
    if batch > 1 and len(sources) > 1:
        teams.append(sources)
    for team in teams:
        options = [
            max((o for o in row if o.source in team), key=lambda o: o.gains[-1], default=None) for row in rows
        ]  # fmt: skip
        if any(o and o.tree for o in options):
            found = best_shape(options, turn, costs, credit, max_nodes)
        else:
            found = _best_depth(options, turn, costs, credit)
        if (worth := found.worth(rows, plain)) > most:
            best, most = found, worth
    return best


def _best_depth(
    options: Seq[Option | None], turn: TurnSeconds, costs: Mapping[str, DraftSeconds], credit: float
) -> Choice:
    drafting = [o for o in options if o]
    token = sum(costs[source].token.value for source in {o.source for o in drafting})
    reading = [(o.gains, o.reading / o.horizon) for o in drafting]
    plain = turn.seconds(0)
    best_rate, best_tokens, best_depth, deepest = 0.0, 0.0, 0, 0
    for depth in range(1, max((len(o.gains) for o in drafting), default=1)):
        seconds = turn.seconds(depth) + depth * token
        tokens, read = float(len(options)), 0.0
        for gains, per_token in reading:
            gain = gains[depth] if depth < len(gains) else gains[-1]
            tokens += gain
            read += per_token * (1 + gain)
        if not is_affordable(seconds, tokens / len(options), credit, plain):
            break
        deepest = depth
        if depth > best_depth + PATIENCE:
            continue
        seconds += read
        if tokens > best_rate * seconds:
            best_rate, best_tokens, best_depth = tokens / seconds, tokens, depth
    return Choice(best_rate, best_depth, options, deepest, tokens=best_tokens)


def chain_budget(
    wish: DraftBudget,
    option: Option,
    calibration: Calibration,
    rate: float,
    token: float,
    turn: TurnSeconds,
    sharing: int,
) -> DraftBudget:
    """`wish`, ended early by a drafter that tells its confidence.

    rate: expected tokens per second. token: seconds of drafting one. sharing: rows that pay for a longer pass together.
    """

    def should_continue(confidences: Seq[float]) -> bool:
        """One more token must be worth its seconds: P(it stands) >= tokens per second * seconds it adds."""
        depth = len(confidences)
        if depth >= len(option.accept):
            return False
        stands = calibration.chance_of_all(confidences) * option.accept[depth]
        return stands * sharing >= rate * (token + turn.step(depth))

    return replace(wish, should_continue=should_continue)
