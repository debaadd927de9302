"""What `paceline tune` found, in sentences. Pure: from numbers to words."""

from collections.abc import Sequence as Seq

from .pass_costs import PassCosts, tokens_per_round
from .tune import BreakEven, Candidate, Gain

_COPIES = "lookup"
"""The source whose drafts cost next to nothing, so that only acceptance decides."""


def words(candidates: Seq[Candidate], best: Candidate | None, model: str, remarks: Seq[str] = ()) -> list[str]:
    """The choice, each candidate by category, what its tokens may cost, and what a draft model would have to."""
    told = [_choice(best, model), *remarks]
    for one in candidates:
        told.append(about_gains(one))
        told += [
            about_costs(one.config.name, even, one.share_drafted)
            for even in one.breakeven
            if not one.overall.pays and one.config.method != "choose"
        ]
        if not one.breakeven:
            told.append(f"{one.config.name} never drafted: it had nothing to propose, or a try was too dear.")
        if one.num_bugs:
            told.append(
                f"{one.config.name} is out of the question: {one.num_bugs} of its answers differ from plain decoding "
                "by more than rounding. This is a fault; `paceline check` tells where."
            )
    costs = next((one.costs for one in candidates if one.costs is not None), None)
    if costs is not None:
        told.append(about_drafts(costs))
    return told


def about_gains(one: Candidate) -> str:
    """What a drafter gains, overall and by category."""
    name, gain = one.config.name, one.overall
    verb = "pays" if gain.pays else "may pay, not surely," if gain.is_unclear else "does not pay:"
    told = f"{name} {verb} {_times(gain)}{_interval(gain)}"
    if len(one.categories) < 2:
        return told + "."
    paying = [f"{_times(g)} on {name}" for name, g in _sorted(one.categories) if g.pays]
    unclear = [f"{name} ({_times(g)}{_interval(g, ', ')})" for name, g in _sorted(one.categories) if g.is_unclear]
    nothing = [f"{name} ({_times(g)})" for name, g in _sorted(one.categories) if not g.pays and not g.is_unclear]
    parts = [", ".join(paying)] if paying else []
    parts += ["unclear on " + ", ".join(unclear)] if unclear else []
    parts += ["nothing on " + ", ".join(nothing)] if nothing else []
    return f"{told}: {'; '.join(parts)}." if gain.pays or gain.is_unclear else f"{told}; {'; '.join(parts)}."


def about_costs(name: str, even: BreakEven, share_drafted: float) -> str:
    """Why the drafts of one drafter, which drafted in this share of the rounds, do not pay."""
    case = f"acceptance {even.acceptance:.2f}, T({even.num_tokens + 1})/T(1) = {even.growth:.2f}"
    if even.source == _COPIES:
        if even.least_acceptance is None:
            return f"{name}: even perfect copies would not pay ({case})."
        return (
            f"{name} drafted in {share_drafted:.0%} of the rounds: {even.acceptance:.0%} of what was copied stands, "
            f"where drafts of {_tokens(even.num_tokens)} pay from {max(even.least_acceptance, 0.01):.0%} on ({case})."
        )
    if even.dearest_s <= 0:
        return f"{name}: even a draft that costs nothing would not pay ({case})."
    if even.token_s > even.dearest_s:
        return (
            f"{name}: a drafted token costs {_ms(even.token_s)} where it may cost at most {_ms(even.dearest_s)} "
            f"to pay ({case})."
        )
    return (
        f"{name}: a drafted token costs {_ms(even.token_s)} and may cost {_ms(even.dearest_s)} ({case}); "
        "reading the prompt for it and trying it take what that leaves."
    )


def about_drafts(costs: PassCosts) -> str:
    """What a draft model would have to cost on this machine, plain rounds as they were."""
    step = costs.seconds[1]
    cases: list[str] = []
    for num_tokens, acceptance in ((5, 0.8), (3, 0.6)):
        dearest = costs.dearest_draft(num_tokens, acceptance)
        case = f"{num_tokens} tokens at a time, each accepted {acceptance:.0%} of the time"
        if dearest <= 0:
            cases.append(f"not even for nothing with {case}")
            continue
        half_more = _dearest_for(costs, num_tokens, acceptance, 1.5)
        more = f", and at most {_ms(half_more)} for 1.5x" if half_more > 0 else ""
        cases.append(f"below {_ms(dearest)} a drafted token ({dearest / step:.0%} of a plain round) with {case}{more}")
    return f"A draft model would pay here {'; '.join(cases)}."


def _dearest_for(costs: PassCosts, num_tokens: int, acceptance: float, speedup: float) -> float:
    """Seconds per drafted token at which a draft reaches this speed-up."""
    plain = tokens_per_round(num_tokens, acceptance) * costs.seconds[1]
    return (plain / speedup - costs.at(num_tokens + 1)) / num_tokens


def _choice(best: Candidate | None, model: str) -> str:
    if best is None:
        return f"Choice for {model}: none. No drafter is surely faster than plain decoding here."
    return (
        f"Choice for {model}: {best.config.name}, {_times(best.overall)} as fast as plain decoding on these prompts "
        f"({best.tokens_per_s:.1f} against {best.plain_tokens_per_s:.1f} tokens/s)."
    )


def _sorted(categories: dict[str, Gain]) -> list[tuple[str, Gain]]:
    return sorted(categories.items(), key=lambda pair: -pair[1].value)


def _interval(gain: Gain, before: str = " (") -> str:
    """One prompt has no spread to speak of."""
    if gain.prompts < 2:
        return ""
    return f"{before}{gain.low:.2f}–{gain.high:.2f}" + (")" if before == " (" else "")


def _times(gain: Gain) -> str:
    return f"{gain.value:.2f}x"


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
