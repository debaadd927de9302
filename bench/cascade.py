"""Does a calibration keep its promise on prompts that it has not seen, and what does the cascade save?

    python bench/cascade.py CALIBRATION --prompts FRESH.jsonl [--num-prompts N] [--small SMALL] [--large LARGE]
        [--tokens 64] [--threads N] [--out FILE]

Every prompt is answered by the cascade and by the large model's plain decoding, in turns, the first one changing.
Counted are answers given alone and different, which the promise is about, and answers that the large model decided and
that are not its own, of which there may be none. Prompts have to be drawn as the calibration's were, and be none of
them. Prints a table and one JSON line. Exits with 1 if a decided answer is not the large model's, 2 if it cannot run.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import track

from paceline import LLM, Cascade, PacelineError, SamplingParams
from paceline.cascade import Calibration, load_calibration
from paceline.cascade.bound import binomial_cdf, upper_bound
from paceline.errors import ConfigError
from paceline.llm import Prompt
from paceline.measure.prompts import read_prompts
from paceline.zoo import resolve


@dataclass(frozen=True)
class Compared:
    """One prompt, answered twice. seconds: of the cascade and of the large model alone."""

    reason: str
    by_small: bool
    is_same: bool
    seconds: tuple[float, float]


def open_models(made: Calibration, args: argparse.Namespace) -> tuple[LLM, LLM]:
    """The two models as they were calibrated, one prompt at a time."""
    told = {name: made.prompts.get(name) for name in ("paths", "weights")}
    opened = []
    for role, known in (("small", made.small), ("large", made.large)):
        path = getattr(args, role) or cast("Any", told["paths"] or {}).get(role)
        if path is None:
            raise ConfigError(f"the calibration does not say where its {role} model was", fix=f"give --{role}")
        weights = cast("Any", told["weights"] or {}).get(role)
        length = cast("int | None", made.prompts.get("max_model_len"))
        opened.append(LLM(resolve(path), weights=weights, dtype=known.dtype, max_num_seqs=1, max_model_len=length))
    return opened[0], opened[1]


def compare(cascade: Cascade, plain: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> list[Compared]:
    """Answer everything twice; the first prompt once more before, for what is set up on first use."""
    found: list[Compared] = []
    for place, prompt in enumerate(track([prompts[0], *prompts], "prompts", console=Console(stderr=True))):
        answers: dict[str, Any] = {}
        took: dict[str, float] = {}
        for name, engine in (("cascade", cascade), ("plain", plain))[:: -1 if place % 2 else 1]:
            began = time.perf_counter()
            answers[name] = engine.generate([prompt], params)[0]
            took[name] = time.perf_counter() - began
        if place:
            given, own = answers["cascade"], answers["plain"].token_ids
            by_small, seconds = given.decided_by == "small", (took["cascade"], took["plain"])
            found.append(Compared(given.reason.value, by_small, given.token_ids == own, seconds))
    return found


def told_of(found: Sequence[Compared], limit: float, confidence: float) -> dict[str, Any]:
    """The sample against the promise. chance: of at least so many differences if exactly `limit` of all differed."""
    count, alone = len(found), [one for one in found if one.by_small]
    decided = [one for one in found if not one.by_small]
    differ = sum(not one.is_same for one in alone)
    return {
        "prompts": count,
        "alone": len(alone),
        "alone_and_different": differ,
        "share": differ / count,
        "at_most": upper_bound(differ, count, confidence),
        "promised": limit,
        "confidence": confidence,
        "chance": 1.0 - binomial_cdf(differ - 1, count, limit),
        "decided_by_large": len(decided),
        "of_these_not_its_own": sum(not one.is_same for one in decided),
        "reasons": dict(Counter(one.reason for one in found)),
        "speedup": {
            name: statistics.median(one.seconds[1] / one.seconds[0] for one in rows)
            for name, rows in (("all", found), ("alone", alone), ("decided", decided))
            if rows
        },
        "seconds": {name: sum(one.seconds[i] for one in found) for i, name in enumerate(("cascade", "large"))},
    }


def report(told: dict[str, Any]) -> str:
    """Two columns."""
    speed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in told["speedup"].items())
    rows = [
        ["answered alone", f"{told['alone']} of {told['prompts']} ({told['alone'] / told['prompts']:.1%})"],
        ["alone and different", f"{told['alone_and_different']} ({told['share']:.2%} of all)"],
        ["promised", f"at most {told['promised']:.2%} of all, with confidence {told['confidence']:.0%}"],
        ["chance of so many if just that share differed", f"{told['chance']:.2f}"],
        ["decided by the large model, not its own", f"{told['of_these_not_its_own']} of {told['decided_by_large']}"],
        ["speed-up over the large model, median", speed],
    ]
    return "\n".join(f"| {name} | {value} |" for name, value in [("", ""), ("---", "---"), *rows])


def main(given: list[str] | None = None) -> int:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE")
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--small", help="where it is now")
    parser.add_argument("--large", help="where it is now")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, metavar="FILE", help="for the JSON line")
    args = parser.parse_args(given)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    try:
        made = load_calibration(str(args.calibration))
        prompts = read_prompts(args.prompts, args.num_prompts)
        small, large = open_models(made, args)
        cascade = Cascade(small, large, made, allow_lossy=True, audit_share=0.0)
        found = compare(cascade, large.plain(), prompts, made.params(args.tokens))
    except PacelineError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    told = told_of(found, made.max_disagreement, made.confidence)
    print(report(told))
    print(line := json.dumps(told))
    if args.out is not None:
        args.out.write_text(line + "\n", encoding="utf-8")
    return 1 if told["of_these_not_its_own"] else 0


if __name__ == "__main__":
    sys.exit(main())
