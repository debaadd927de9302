"""From answers to the numbers of `summary.json` and of the line that `--json` prints: both have the same keys."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict

from .answers import Answer
from .floor import Floor
from .metrics import Cost, Speedup, acceptance_by_position, pooled, speedup
from .run import BenchRun
from .sides import PLAIN, BenchOptions
from .verdict import Verdict


def summarise(
    run: BenchRun, drafters: Seq[str], options: BenchOptions, missing_peers: Mapping[str, str]
) -> dict[str, object]:
    """Everything measured; the first drafter's numbers stand at the top, all drafters' in `runs`.

    missing_peers: those that could not be started, with the reason.
    """
    answers, seed = run.answers, options.seed
    plain = plain_summary(answers, run.floor)
    runs = [{"drafter": name, "batch": options.batch, **speculative_summary(answers, name, seed)} for name in drafters]
    sides = dict.fromkeys(one.side for one in answers)
    peers = [side for side in sides if side != PLAIN and side not in drafters]
    return {
        "complete": run.complete,
        **runs[0],
        **plain,
        **peak_memory(),
        "turns_left_out": run.too_long,
        "settings": asdict(options),
        "peers": [peer_summary(answers, side, drafters, seed) for side in peers],
        "missing_peers": dict(missing_peers),
        "failed_peers": run.failed,
        "runs": runs,
    }


def speculative_summary(answers: Seq[Answer], side: str, seed: int) -> dict[str, object]:
    """One drafter against plain decoding: overall, by category, by position, by source."""
    found = _comparison(answers, side, seed)
    categories = dict.fromkeys(one.ask.category for one in answers)
    mine = [one for one in answers if one.side == side]
    rounds = [r for one in mine for r in one.rounds if r.num_drafted or not r.with_prompt]
    positions = acceptance_by_position([(r.num_drafted, r.num_accepted) for r in rounds])
    drafting = [r for r in rounds if r.num_drafted]
    with_prefill = _versus(answers, PLAIN, side, seed, with_prefill=True)
    found |= {
        "speedup_with_prefill": None if with_prefill is None else with_prefill.weighted.value,
        "speculative_tokens_per_s_with_prefill": pooled(list(_costs(mine, True).values())),
        "categories": {
            name: _comparison([one for one in answers if one.ask.category == name], side, seed) for name in categories
        },
        "acceptance_by_position": [one.unconditional for one in positions],
        "acceptance_by_position_conditional": [one.conditional for one in positions],
        "rounds_by_position": [one.rounds for one in positions],
        "rounds": len(rounds),
        "rounds_with_draft": len(drafting),
        "mean_drafted": _mean(r.num_drafted for r in rounds),
        "mean_nodes": _mean(r.num_nodes for r in rounds),
        "sources": _sources(mine),
        "differences": [
            {
                "id": one.ask.id,
                "turn": one.ask.turn,
                "repeat": one.ask.repeat,
                "verdict": one.verdict,
                "reason": one.reason,
            }
            for one in mine
            if one.verdict not in (None, Verdict.IDENTICAL.value)
        ],
        "ms_per_round": _split(mine),
    }
    return found


def plain_summary(answers: Seq[Answer], floor: Floor) -> dict[str, object]:
    """Plain decoding against the machine."""
    mine = [one for one in answers if one.side == PLAIN]
    split = _split(mine)
    seconds = split["total"] / 1e3
    return {
        "plain_tokens_per_s": pooled(list(_costs(mine).values())),
        "plain_tokens_per_s_with_prefill": pooled(list(_costs(mine, True).values())),
        "plain_ms_per_pass": split,
        "weight_bytes": floor.weight_bytes,
        "read_bandwidth": floor.bandwidth,
        "read_bandwidth_samples": floor.samples,
        "floor_s": floor.seconds,
        "achieved_bandwidth": floor.weight_bytes / seconds if seconds else None,
        "floor_fraction": floor.seconds / seconds if floor.seconds and seconds else None,
    }


def peer_summary(answers: Seq[Answer], side: str, speculative: Seq[str], seed: int) -> dict[str, object]:
    """One mode of a peer, against ours; each ratio is the peer's speed over ours."""
    mine = [one for one in answers if one.side == side]
    peer, _, mode = side.partition(":")
    return {
        "side": side,
        "peer": peer,
        "mode": mode,
        "prompts": len(_costs(mine)),
        "tokens_per_s": pooled(list(_costs(mine).values())),
        "tokens_per_s_with_prefill": pooled(list(_costs(mine, True).values())),
        "mean_acceptance_length": _mean(one.num_tokens / one.passes for one in mine if one.passes),
        "identical_share": _mean(one.verdict == "identical" for one in mine),
        "over_plain": _told(_versus(answers, PLAIN, side, seed)),
        "over_speculative": {name: _told(_versus(answers, name, side, seed)) for name in speculative},
    }


def peak_memory() -> dict[str, int | None]:
    """Most bytes this process has held, in memory and on the GPU."""
    import torch

    try:
        import resource
    except ImportError:  # Windows
        return {"peak_memory_bytes": None, "peak_gpu_memory_bytes": None}
    unit = 1 if sys.platform == "darwin" else 1024  # kilobytes, but on macOS
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    return {
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "peak_gpu_memory_bytes": gpu,
    }


# Helpers


def _comparison(answers: Seq[Answer], side: str, seed: int) -> dict[str, object]:
    """What is told of a category and of the whole alike."""
    plain = [one for one in answers if one.side == PLAIN]
    mine = [one for one in answers if one.side == side]
    counts = Counter(one.verdict for one in mine)
    passes = sum(not r.with_prompt for one in mine for r in one.rounds)
    return {
        **_told(_versus(answers, PLAIN, side, seed)),
        "prompts": len(_costs(mine)),
        "answers": len(mine),
        "tokens": sum(one.length for one in mine),
        "plain_tokens_per_s": pooled(list(_costs(plain).values())),
        "speculative_tokens_per_s": pooled(list(_costs(mine).values())),
        "mean_acceptance_length": sum(one.num_tokens for one in mine) / passes if passes else None,
        "verdicts": {verdict.value: counts[verdict.value] for verdict in Verdict},
        "not_compared": counts[None],
    }


def _costs(answers: Iterable[Answer], with_prefill: bool = False) -> dict[int, Cost]:
    """What each prompt took, its turns and repeats together."""
    sums: dict[int, tuple[int, float]] = {}
    for one in answers:
        tokens, seconds = sums.get(one.ask.index, (0, 0.0))
        more = (one.length, one.seconds + one.prefill_s) if with_prefill else (one.num_tokens, one.seconds)
        sums[one.ask.index] = (tokens + more[0], seconds + more[1])
    return {index: Cost(*both) for index, both in sums.items()}


def _versus(answers: Seq[Answer], base: str, other: str, seed: int, with_prefill: bool = False) -> Speedup | None:
    """Compare two sides over the turns that both have answered."""
    keys = [{(one.ask.index, one.ask.turn, one.ask.repeat) for one in answers if one.side == s} for s in (base, other)]
    shared = keys[0] & keys[1]
    both = [one for one in answers if (one.ask.index, one.ask.turn, one.ask.repeat) in shared]
    costs = [_costs((one for one in both if one.side == side), with_prefill) for side in (base, other)]
    # An answer that a peer ends with its first token took no decoding at all.
    timed = [i for i in costs[0] if costs[0][i].tokens_per_s > 0 and costs[1][i].tokens_per_s > 0]
    return speedup([costs[0][i] for i in timed], [costs[1][i] for i in timed], seed)


def _told(one: Speedup | None) -> dict[str, object]:
    """Both ways to average, with their intervals; all None where nothing can be compared."""
    told: dict[str, object] = {}
    for key, estimate in (("speedup", one and one.weighted), ("speedup_prompt_mean", one and one.prompt_mean)):
        low, high = (None, None) if estimate is None else (estimate.low, estimate.high)
        told |= {key: None if estimate is None else estimate.value, f"{key}_low": low, f"{key}_high": high}
    return told


def _sources(answers: Seq[Answer]) -> dict[str, dict[str, float]]:
    """For each drafter: rounds that it drafted in, candidates verified, and drafted tokens that are in the answers."""
    found: dict[str, dict[str, float]] = {}
    for answer in answers:
        for r in answer.rounds:
            if r.num_drafted:
                one = found.setdefault(r.source, {"rounds": 0, "drafted": 0, "accepted": 0})
                one["rounds"] += 1
                one["drafted"] += r.num_nodes
        for source in answer.sources:
            if source:
                found.setdefault(source, {"rounds": 0, "drafted": 0, "accepted": 0})["accepted"] += 1
    total = sum(answer.length for answer in answers)
    return {name: {**one, "share_of_tokens": one["accepted"] / total} for name, one in found.items()}


def _split(answers: Seq[Answer]) -> dict[str, float]:
    """Milliseconds of a pass of the model and what they went to; `rest` is all that is neither draft nor verify."""
    passes = sum(1 / r.batch for one in answers for r in one.rounds)
    if not passes:
        return {"draft": 0.0, "verify": 0.0, "rest": 0.0, "total": 0.0}
    total, draft, verify = (
        1e3 * seconds / passes
        for seconds in (
            sum(one.seconds for one in answers),
            sum(r.draft_s / r.batch for one in answers for r in one.rounds),
            sum(r.verify_s / r.batch for one in answers for r in one.rounds),
        )
    )
    return {"draft": draft, "verify": verify, "rest": total - draft - verify, "total": total}


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
