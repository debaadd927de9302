"""How many tokens should be drafted for which kind of answer? Fixed windows against policies that choose.

    python bench/vlm_windows.py MODEL [--drafters lookup self-int4 small=model:SMALL] [--windows 1 2 4 8 16]
        [--classes yes/no choice short caption steps] [--limit 12] [--warm-up 6] [--tokens 128] [--seconds S]
        [--numerics auto] [--dtype float32] [--out FOLDER]

Every question, about a scene that no model was trained on, is decoded plainly and under every window and policy before
the next; every answer is compared with the plain one. Policies that learn meet the classes apart, each class as a
workload of its own after `--warm-up` questions, and are shown twice: as they are, and with a quiet clock, which tells
them what rounds of that size take in the median. All rows are counted by the clock and at those medians (`vlm_prices`).
The row "none" is plain decoding once more: how far it is from 1 is the machine's noise. FOLDER gets runs.jsonl, which a
later run goes on from, result.json, result.md and pictures. Exits with 1 if an answer differs, with 2 for what cannot
be run.
"""

import argparse
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from vlm_common import (
    PLAIN,
    Engine,
    Line,
    Log,
    Patience,
    arguments,
    bar,
    base_engine,
    build,
    converse,
    labelled,
    middle,
    save,
    scene_questions,
    settings_of,
    table,
)
from vlm_prices import Prices, Watched, prices_of

from examples.tiny_vlm.questions import KINDS
from paceline import LLM, CostModel, Fixed, PacelineError, SamplingParams
from paceline.drafters import Plain
from paceline.eval.suites import hash_questions
from paceline.eval.summary import Cost, speedup
from paceline.policy import Dynamic

WINDOWS = (1, 2, 4, 8, 16)
NONE, DYNAMIC, COST_MODEL, QUIET = "none", "dynamic", "cost model", "cost model, quiet clock"
NEAR = 0.95
"""Of the best fixed window: what a policy has to reach in every class."""
_WARM = 1000
"""Scenes of each class from here on are for warming up and for prices."""


def measure_prices(base: LLM, fixed: Mapping[str, Mapping[int, Engine]], args: argparse.Namespace) -> dict[str, Prices]:
    """Medians of rounds, by drafter, from a few questions of each class under every window, which are not counted."""
    plain = Engine.of(base, Plain(), Fixed(0))
    questions = scene_questions(args.classes, args.price_questions, _WARM)
    lines: dict[str, list[Line]] = {label: [] for label in fixed}
    with bar("prices", len(questions)) as step:
        for question in questions:
            for label, engines in fixed.items():
                sides = {PLAIN: plain, **{str(window): engine for window, engine in engines.items()}}
                lines[label] += [line for turn in converse(question, sides, params_of(args)) for line in turn.values()]
            step(question.id)
    return {label: priced(found) for label, found in lines.items()}


def priced(lines: Seq[Line]) -> Prices:
    """Medians over answers."""
    rounds = [one for line in lines for one in line.rounds]
    rows = [line.prompt + sum(one.rows - 1 for one in line.rounds if one.joined) for line in lines]
    read = [line.read / count for line, count in zip(lines, rows, strict=True)]
    return prices_of(rounds, [line.vision for line in lines], read)


def params_of(args: argparse.Namespace) -> SamplingParams:
    """Greedy."""
    return SamplingParams(temperature=0.0, max_tokens=args.tokens)


def policies_of(engine: Engine, prices: Prices) -> dict[str, Engine]:
    """The policies that choose, new."""
    quiet = Watched(CostModel(max(WINDOWS), prices.profile()), prices)
    return {DYNAMIC: engine.under(Dynamic()), COST_MODEL: engine.under(CostModel()), QUIET: engine.under(quiet)}


def run(args: argparse.Namespace) -> tuple[Log, dict[str, Prices]]:
    """Decode everything that the log does not hold yet."""
    patience, base, words = Patience(args.seconds), base_engine(args), labelled(args.drafters)
    asked = scene_questions(args.classes, args.limit or 60)
    log = Log(None if args.out is None else args.out / "runs.jsonl", settings_of(args, base, {"suite": "scenes"}))
    fixed: dict[str, dict[int, Engine]] = {}
    for label, word in words.items():
        first = Engine.of(base, build(word), Fixed(args.windows[0]))
        fixed[label] = {window: first.under(Fixed(window)) for window in args.windows}
    if "prices" not in log.head:
        found = measure_prices(base, fixed, args)
        log.begin(
            {"prices": {label: one.as_dict() for label, one in found.items()}, "questions": hash_questions(asked)}
        )
    prices = {label: Prices.from_dict(one) for label, one in log.head["prices"].items()}
    done = {(line["id"], line["drafter"]) for line in log.lines}
    plain, again = (Engine.of(base, Plain(), Fixed(0)) for _ in range(2))
    policies: dict[tuple[str, str], dict[str, Engine]] = {}
    with bar("questions", len(asked) * len(words)) as step:
        for place, question in enumerate(asked):
            for label in words:
                if (question.id, label) in done or patience.is_over:
                    step("done" if not patience.is_over else "out of time")
                    continue
                key = (label, question.category)
                if key not in policies:
                    policies[key] = policies_of(next(iter(fixed[label].values())), prices[label])
                    for warm in scene_questions([question.category], args.warm_up, _WARM + args.price_questions):
                        for _ in converse(warm, {PLAIN: plain, **policies[key]}, params_of(args)):
                            pass
                engines = {PLAIN: plain, NONE: again, **{str(w): fixed[label][w] for w in args.windows}}
                for sides in converse(question, engines | policies[key], params_of(args), place % 2 == 1):
                    told = {name: line.as_dict() for name, line in sides.items()}
                    log.add({"id": question.id, "class": question.category, "drafter": label, "sides": told})
                step(f"{question.category}, {label}")
    return log, prices


def rows_of(log: Log, prices: Mapping[str, Prices]) -> list[dict[str, Any]]:
    """One row for each drafter, class and window or policy."""
    groups: dict[tuple[str, str], list[dict[str, Line]]] = {}
    for line in log.lines:
        sides = {name: Line.from_dict(one) for name, one in line["sides"].items()}
        groups.setdefault((line["drafter"], line["class"]), []).append(sides)
    return [
        row_of(label, kind, side, found, prices[label])
        for (label, kind), found in sorted(groups.items(), key=lambda item: (item[0][0], KINDS.index(item[0][1])))
        for side in found[0]
        if side != PLAIN
    ]


def row_of(label: str, kind: str, side: str, found: Seq[Mapping[str, Line]], prices: Prices) -> dict[str, Any]:
    """What one side brought over plain decoding, prompt by prompt."""
    pairs = [(one[PLAIN], one[side]) for one in found]
    rounds = [spent for _, mine in pairs for spent in mine.rounds]
    drafted = sum(one.drafted for one in rounds)
    row: dict[str, Any] = {"drafter": label, "class": kind, "window": side, "answers": len(pairs)}
    timed = {
        "decode": [(plain.decode, mine.beyond(plain)) for plain, mine in pairs],
        "whole": [(plain.whole, mine.whole) for plain, mine in pairs],
    }
    for name, seconds in timed.items():
        costs = [
            (Cost(len(plain.token_ids), one), Cost(len(mine.token_ids), other))
            for (plain, mine), (one, other) in zip(pairs, seconds, strict=True)
        ]
        pooled = speedup(*zip(*costs, strict=True))
        assert pooled is not None
        ratios = [mine.tokens_per_s / plain.tokens_per_s for plain, mine in costs]
        row[name] = {"median": middle(ratios), **vars(pooled.weighted)}
    for name, more in (("decode_quiet", 0.0), ("whole_quiet", 1.0)):
        totals = [
            sum(prices.decode(pair[i].rounds) + more * (prices.vision + prices.read * pair[i].prompt) for pair in pairs)
            for i in range(2)
        ]
        row[name] = totals[0] / totals[1]
    return {
        **row,
        "acceptance": sum(one.accepted for one in rounds) / drafted if drafted else None,
        "tokens_a_pass": sum(one.emitted for one in rounds) / len(rounds),
        "passes": sum(mine.passes for _, mine in pairs) / len(pairs),
        "drafted_a_pass": drafted / len(rounds),
        "tokens": sum(len(plain.token_ids) for plain, _ in pairs),
        "vision_ms": 1e3 * middle([mine.vision for _, mine in pairs]),
        "prefill_ms": 1e3 * middle([mine.read for _, mine in pairs]),
        "decode_ms": 1e3 * middle([mine.decode for _, mine in pairs]),
        "identical": sum(plain.token_ids == mine.token_ids for plain, mine in pairs),
    }


def verdicts_of(rows: Seq[Mapping[str, Any]], windows: Seq[int]) -> list[dict[str, Any]]:
    """Each policy against the best fixed window of its drafter and class, by the clock and at the medians."""
    found = []
    for label, kind in dict.fromkeys((row["drafter"], row["class"]) for row in rows):
        by_side = {row["window"]: row for row in rows if (row["drafter"], row["class"]) == (label, kind)}
        for policy in (DYNAMIC, COST_MODEL, QUIET):
            for count in ("decode_quiet", "whole_quiet", "decode", "whole"):
                speeds = {side: _speed(row[count]) for side, row in by_side.items()}
                best = max(map(str, windows), key=lambda window: speeds[window])
                found.append(
                    {
                        "drafter": label, "class": kind, "policy": policy, "count": count, "best_window": best,
                        "best": speeds[best], "reached": speeds[policy], "share": speeds[policy] / speeds[best],
                        "near_best": speeds[policy] / speeds[best] >= NEAR,
                        "not_slower": speeds[policy] >= 1.0,
                    }
                )  # fmt: skip
    return found


def _speed(told: Any) -> float:
    return told["value"] if isinstance(told, dict) else told


def report(rows: Seq[Mapping[str, Any]], verdicts: Seq[Mapping[str, Any]]) -> str:
    """Both tables. In the second each policy's speed-up, that of the best fixed window (which), and their ratio."""
    columns = ["drafter", "answer", "window", "decoding, median (all, 95%)", "at medians", "end to end, median"]
    columns += ["at medians", "accepted", "tokens a pass", "identical"]
    cells = []
    for row in rows:
        decode, share = row["decode"], row["acceptance"]
        timed = f"{decode['median']:.2f} ({decode['value']:.2f}, {decode['low']:.2f}–{decode['high']:.2f})"
        accepted = "" if share is None else f"{share:.0%}"
        cells.append([row["drafter"], row["class"], row["window"], timed, f"{row['decode_quiet']:.2f}"])
        cells[-1] += [f"{row['whole']['median']:.2f}", f"{row['whole_quiet']:.2f}", accepted]
        cells[-1] += [f"{row['tokens_a_pass']:.2f}", f"{row['identical']} of {row['answers']}"]
    heads = ["drafter", "answer", "policy", *COUNTED.values()]
    judged: dict[tuple[str, str, str], list[str]] = {}
    for one in verdicts:
        mark = "" if one["near_best"] and one["not_slower"] else " **no**"
        told = f"{one['reached']:.2f} of {one['best']:.2f} ({one['best_window']}): {one['share']:.0%}{mark}"
        judged.setdefault((one["drafter"], one["class"], one["policy"]), []).append(told)
    told = [[*key, *cells] for key, cells in judged.items()]
    return f"{table(columns, cells)}\n\n{table(heads, told)}\n\n{summary(verdicts)}"


COUNTED = {
    "decode_quiet": "decoding, at medians", "whole_quiet": "end to end, at medians", "decode": "decoding, by the clock",
    "whole": "end to end, by the clock",
}  # fmt: skip


def summary(verdicts: Seq[Mapping[str, Any]]) -> str:
    """How often each policy reached its aims."""
    lines = []
    for policy, count in dict.fromkeys((one["policy"], one["count"]) for one in verdicts):
        mine = [one for one in verdicts if (one["policy"], one["count"]) == (policy, count)]
        near, kept = (sum(one[key] for one in mine) for key in ("near_best", "not_slower"))
        lines.append(
            f"{policy}, {COUNTED[count]}: within {1 - NEAR:.0%} of the best window in {near} of {len(mine)}, not below "
            f"plain in {kept} of {len(mine)}"
        )
    return "\n".join(lines)


def main(given: list[str] | None = None) -> int:
    """Measure, print, write; 1 where an answer is not that of plain decoding."""
    parser = arguments(__doc__, ["lookup", "self-int4"], 128)
    parser.add_argument("--windows", type=int, nargs="+", default=list(WINDOWS))
    parser.add_argument("--classes", nargs="+", default=list(KINDS), choices=KINDS, metavar="CLASS")
    parser.add_argument("--warm-up", type=int, default=6, help="questions of each class, unmeasured, for the policies")
    parser.add_argument("--price-questions", type=int, default=2, help="questions of each class behind the medians")
    args = parser.parse_args(given)
    try:
        log, prices = run(args)
        rows = rows_of(log, prices)
        verdicts = verdicts_of(rows, args.windows)
        text = report(rows, verdicts)
        save(args, {"rows": rows, "verdicts": verdicts, **log.head}, text)
        if args.out is not None and rows:
            from vlm_plot import draw_windows

            draw_windows(rows, args.out, args.label or args.model)
    except PacelineError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 1 if any(row["identical"] < row["answers"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
