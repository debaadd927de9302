"""The numbers of a benchmark, as in `summary.json`: speed-ups with intervals, acceptance, settings and machine.

The unit of every interval is the prompt: its turns and repeats, which depend on each other, are summed before anything
is resampled.
"""

import hashlib
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from resource import RUSAGE_SELF, getrusage
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..config import SpecConfig
from ..core.round import experts_per_pass, tokens_per_pass
from ..llm import LLM
from ..methods.choose import Choose
from ..methods.draft_model.drafter import DraftModel
from ..methods.spec import DrafterSpec
from ..system.provenance import sha256_of
from ..zoo.packaged import head_folder
from .check import Verdict
from .machine import weight_bytes
from .record import measured_on
from .run import PLAIN, BenchRun, TimedAnswer
from .suites import Question, hash_questions

_RESAMPLES, _INTERVAL = 2000, (0.025, 0.975)
FEW = 5
"""With fewer prompts there is no interval: a bootstrap of so few is too narrow."""
_WEIGHTS = (".safetensors", ".bin", ".pt")


def summarise(run: BenchRun, drafters: Sequence[str], missing_peers: Mapping[str, str]) -> dict[str, object]:
    """The whole summary; the first drafter's numbers are at the top level, those of all drafters in `runs`.

    missing_peers: those that could not be started, with the reason.
    """
    sides, seed, batch = by_side(run.answers), run.options.seed, run.options.batch
    plain = sides[PLAIN]
    runs = [{"drafter": name, "batch": batch, **speculative_summary(plain, sides[name], seed)} for name in drafters]
    ours = {name: sides[name] for name in drafters}
    return {
        "complete": run.complete,
        **runs[0],
        **plain_summary(plain, weight_bytes(run.plain.llm.loaded), run.bandwidths),
        "peak_memory_bytes": getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "peak_gpu_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "turns_left_out": run.too_long,
        "settings": asdict(run.options),
        "peers": [
            peer_summary(side, answers, plain, ours, seed)
            for side, answers in sides.items()
            if side != PLAIN and side not in drafters
        ],
        "missing_peers": dict(missing_peers),
        "failed_peers": run.failed,
        "runs": runs,
    }


def by_side(answers: Iterable[TimedAnswer]) -> defaultdict[str, list[TimedAnswer]]:
    """The answers by side; an empty list for a side without any."""
    sides = defaultdict[str, list[TimedAnswer]](list)
    for answer in answers:
        sides[answer.side].append(answer)
    return sides


def speculative_summary(plain: Sequence[TimedAnswer], speculative: Sequence[TimedAnswer], seed: int) -> dict[str, Any]:
    """One drafter against plain decoding: overall, by category, by position, by source."""
    categories = dict.fromkeys(answer.ask.question.category for answer in plain)
    rounds = [r for answer in speculative for r in answer.rounds if r.num_drafted or not r.with_prompt]
    drafted, accepted = sum(r.num_nodes for r in rounds), sum(r.num_accepted for r in rounds)

    def of(side: Sequence[TimedAnswer], category: str) -> list[TimedAnswer]:
        return [answer for answer in side if answer.ask.question.category == category]

    return {
        **_comparison(plain, speculative, seed),
        "speedup_with_prefill": _versus(plain, speculative, seed, with_prefill=True)["speedup"],
        "speculative_tokens_per_s_with_prefill": _speed(speculative, with_prefill=True),
        "categories": {name: _comparison(of(plain, name), of(speculative, name), seed) for name in categories},
        **acceptance_by_position([(r.num_drafted, r.num_accepted) for r in rounds]),
        "rounds": len(rounds),
        "rounds_with_draft": sum(r.num_drafted > 0 for r in rounds),
        "no_draft_reasons": Counter(answer.no_draft_reason for answer in speculative if answer.no_draft_reason),
        "mean_drafted": _mean(r.num_drafted for r in rounds),
        "mean_nodes": _mean(r.num_nodes for r in rounds),
        "mean_experts": experts_per_pass(rounds) or None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "sources": _sources(speculative),
        "differences": [
            {"id": answer.ask.question.id, "turn": answer.ask.turn, "repeat": answer.ask.repeat}
            | {"verdict": answer.verdict, "reason": answer.reason}
            for answer in speculative
            if answer.verdict not in (None, Verdict.IDENTICAL)
        ],
        "ms_per_round": _split(speculative),
    }


def plain_summary(plain: Sequence[TimedAnswer], weight_bytes: int, bandwidths: Sequence[float]) -> dict[str, object]:
    """Plain decoding against the limit of the machine. floor_s: seconds of reading the weights once."""
    split = _split(plain)
    seconds = split["total"] / 1e3
    bandwidth = statistics.median(bandwidths) if bandwidths else None
    floor_s = weight_bytes / bandwidth if bandwidth else None
    return {
        "plain_tokens_per_s": _speed(plain),
        "plain_tokens_per_s_with_prefill": _speed(plain, with_prefill=True),
        "plain_ms_per_pass": split,
        "plain_mean_experts": experts_per_pass(r for answer in plain for r in answer.rounds) or None,
        "weight_bytes": weight_bytes,
        "read_bandwidth": bandwidth,
        "read_bandwidth_samples": list(bandwidths),
        "floor_s": floor_s,
        "achieved_bandwidth": weight_bytes / seconds if seconds else None,
        "floor_fraction": floor_s / seconds if floor_s and seconds else None,
    }


def peer_summary(
    side: str,
    peer_answers: Sequence[TimedAnswer],
    plain: Sequence[TimedAnswer],
    drafters: Mapping[str, Sequence[TimedAnswer]],
    seed: int,
) -> dict[str, object]:
    """One mode of a peer; each ratio is the peer's speed over Paceline's."""
    peer, _, mode = side.partition(":")
    return {
        "side": side,
        "peer": peer,
        "mode": mode,
        "prompts": len(_costs(peer_answers)),
        "tokens_per_s": _speed(peer_answers),
        "tokens_per_s_with_prefill": _speed(peer_answers, with_prefill=True),
        "mean_acceptance_length": _mean(answer.num_tokens / answer.passes for answer in peer_answers if answer.passes),
        "identical_share": _mean(answer.verdict == Verdict.IDENTICAL for answer in peer_answers),
        "over_plain": _versus(plain, peer_answers, seed),
        "over_speculative": {name: _versus(answers, peer_answers, seed) for name, answers in drafters.items()},
    }


def about_run(
    llms: Sequence[LLM],
    configs: Sequence[SpecConfig],
    questions: Sequence[Question],
    available: int,
    left_out: int,
    peers: Mapping[str, Mapping[str, str]],
) -> dict[str, object]:
    """Describe a run. llms: an engine for each config; available: prompts of the suite; left_out: those longer than the
    context.
    """
    llm = llms[0]
    return {
        "fingerprint": llm.loaded.fingerprint,
        "draft_fingerprints": draft_fingerprints(llms, configs),
        "speculative_configs": {config.name: config.as_dict() for config in configs},
        "numerics": llm.numerics,
        "lossless": llm.verifier.lossless,
        "exact": llm.verifier.exact,
        "dtype": str(llm.loaded.dtype).removeprefix("torch."),
        "device": str(llm.loaded.device),
        "max_model_len": llm.runner.max_length,
        "prompts_available": available,
        "prompts_chosen": len(questions),
        "prompts_left_out": left_out,
        "prompts_sha256": hash_questions(questions),
        "prompt_ids": [question.id for question in questions],
        "peer_versions": {name: dict(versions) for name, versions in peers.items()},
        "provenance": measured_on(),
    }


def draft_fingerprints(llms: Sequence[LLM], configs: Sequence[SpecConfig]) -> dict[str, str]:
    """The fingerprint of each draft model, head and trained weights by drafter, since names may be reused."""
    fingerprints: dict[str, str] = {}
    for llm, config in zip(llms, configs, strict=True):
        drafter = llm.decoder.drafter
        members = drafter.members if isinstance(drafter, Choose) else [drafter]
        for part, member in zip(config.drafter.parts, members, strict=True):
            known = member.runner.loaded.fingerprint if isinstance(member, DraftModel) else trained_hash(part)
            if known is not None:
                fingerprints[part.name] = known
    return fingerprints


def trained_hash(drafter: DrafterSpec) -> str | None:
    """sha256 over the files of a head, or of trained weights; None for drafters without."""
    folder = getattr(drafter, "model", None)
    if folder is None or drafter.models:
        return None
    place = head_folder(folder)
    files = [place] if place.is_file() else sorted(path for path in place.iterdir() if path.suffix in _WEIGHTS)
    return hashlib.sha256("".join(map(sha256_of, files)).encode()).hexdigest()


def speedup(base: Sequence[ArrayLike], other: Sequence[ArrayLike], seed: int = 0) -> dict[str, float | None]:
    """How much faster `other` is than `base`, from (tokens, seconds) of each prompt; all None without prompts.

    speedup: ratio of pooled speeds, sum of tokens over sum of seconds, in which a long answer counts for more.
    speedup_prompt_mean: mean over prompts of each prompt's own ratio. From `FEW` prompts on each has the bounds `_low`
    and `_high` of its 95% percentile-bootstrap interval: prompts are resampled with replacement in pairs, so that a
    hard prompt is hard on both sides.
    """
    keys = ("speedup", "speedup_prompt_mean")
    if not base:
        return {f"{key}{end}": None for key in keys for end in ("", "_low", "_high")}
    data = np.hstack([np.asarray(side, dtype=np.float64) for side in (base, other)])  # [prompts, 4]
    draws = np.random.default_rng(seed).integers(len(data), size=(_RESAMPLES, len(data)))
    ratios = _ratios(data)
    values = (_ratios(data.sum(axis=0, keepdims=True))[0], ratios.mean())
    resampled = (_ratios(data[draws].sum(axis=1)), ratios[draws].mean(axis=1))
    intervals: dict[str, float | None] = {}
    for key, value, many in zip(keys, values, resampled, strict=True):
        low, high = np.quantile(many, _INTERVAL).tolist() if len(data) >= FEW else (None, None)
        intervals |= {key: float(value), f"{key}_low": low, f"{key}_high": high}
    return intervals


def acceptance_by_position(rounds: Sequence[tuple[int, int]]) -> dict[str, list[Any]]:
    """Acceptance of the 1st, 2nd, ... drafted token, from (length of the longest drafted path, tokens accepted).

    rounds_by_position: those that drafted at least i tokens in a row. acceptance_by_position: share of them that
    accepted at least i. (3, 1), (3, 3), (1, 1), (0, 0) give: position 1: 3 rounds, 3/3; position 2: 2 rounds, 1/2;
    position 3: 2 rounds, 1/2.
    """
    counts, shares = list[int](), list[float]()
    for i in range(1, max((drafted for drafted, _ in rounds), default=0) + 1):
        reached = [accepted for drafted, accepted in rounds if drafted >= i]
        counts.append(len(reached))
        shares.append(sum(accepted >= i for accepted in reached) / len(reached))
    return {"acceptance_by_position": shares, "rounds_by_position": counts}


# Helpers


def _ratios(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Speed of the other side over that of the base, for rows of (tokens, seconds, tokens, seconds)."""
    least = np.finfo(np.float64).tiny
    seconds = np.maximum(sums[:, [1, 3]], least)
    return (sums[:, 2] / seconds[:, 1]) / np.maximum(sums[:, 0] / seconds[:, 0], least)


def _comparison(plain: Sequence[TimedAnswer], speculative: Sequence[TimedAnswer], seed: int) -> dict[str, object]:
    """The numbers of a category, or of the whole."""
    counts = Counter(answer.verdict for answer in speculative)
    return {
        **_versus(plain, speculative, seed),
        "prompts": len(_costs(speculative)),
        "answers": len(speculative),
        "tokens": sum(answer.length for answer in speculative),
        "plain_tokens_per_s": _speed(plain),
        "speculative_tokens_per_s": _speed(speculative),
        "mean_acceptance_length": tokens_per_pass(r for answer in speculative for r in answer.rounds) or None,
        "verdicts": {verdict.value: counts[verdict.value] for verdict in Verdict},
        "not_compared": counts[None],
    }


def _costs(answers: Iterable[TimedAnswer], with_prefill: bool = False) -> dict[int, NDArray[np.float64]]:
    """(tokens, seconds) of each prompt, its turns and repeats together."""
    sums = defaultdict[int, NDArray[np.float64]](lambda: np.zeros(2))
    for answer in answers:
        cost = (
            (answer.length, answer.seconds + answer.prefill_s) if with_prefill else (answer.num_tokens, answer.seconds)
        )
        sums[answer.ask.index] += cost
    return sums


def _speed(answers: Iterable[TimedAnswer], with_prefill: bool = False) -> float | None:
    """Tokens per second over all prompts together; None where nothing was timed."""
    tokens, seconds = sum(_costs(answers, with_prefill).values(), np.zeros(2)).tolist()
    return tokens / seconds if seconds else None


def _versus(
    base: Sequence[TimedAnswer], other: Sequence[TimedAnswer], seed: int, with_prefill: bool = False
) -> dict[str, float | None]:
    """Compare two sides over the turns that both have answered."""
    turns = [
        {(answer.ask.index, answer.ask.turn, answer.ask.repeat): answer for answer in side} for side in (base, other)
    ]
    costs = [
        _costs((side[key] for key in side if all(key in answered for answered in turns)), with_prefill)
        for side in turns
    ]
    # An answer that a peer ends with its first token took no decoding at all.
    timed = [i for i in costs[0] if all((cost[i] > 0).all() for cost in costs)]
    return speedup([costs[0][i] for i in timed], [costs[1][i] for i in timed], seed)


def _sources(answers: Sequence[TimedAnswer]) -> dict[str, dict[str, float]]:
    """For each drafter: rounds that it drafted in, candidates verified, and drafted tokens that are in the answers."""
    rounds, drafted = Counter[str](), Counter[str]()
    for r in (r for answer in answers for r in answer.rounds if r.num_drafted):
        rounds[r.source] += 1
        drafted[r.source] += r.num_nodes
    accepted = Counter(source for answer in answers for source in answer.sources if source)
    total = sum(answer.length for answer in answers)
    counts = {"rounds": rounds, "drafted": drafted, "accepted": accepted}
    return {
        name: {**{key: count[name] for key, count in counts.items()}, "share_of_tokens": accepted[name] / total}
        for name in {**rounds, **accepted}
    }


def _split(answers: Sequence[TimedAnswer]) -> dict[str, float]:
    """Milliseconds of a pass of the model and what they went to; `rest` is all that is neither draft nor verify."""
    rounds = [r for answer in answers for r in answer.rounds]
    passes = sum(1 / r.batch for r in rounds)
    if not passes:
        return dict.fromkeys(("draft", "verify", "rest", "total"), 0.0)
    total = 1e3 * sum(answer.seconds for answer in answers) / passes
    draft, verify = (1e3 * sum(getattr(r, key) / r.batch for r in rounds) / passes for key in ("draft_s", "verify_s"))
    return {"draft": draft, "verify": verify, "rest": total - draft - verify, "total": total}


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
