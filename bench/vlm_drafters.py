"""What does each drafter bring on pictures, and where does the time go?

    python bench/vlm_drafters.py MODEL [--drafters lookup self-int4 small=model:SMALL
        shared=model:SMALL,vision=shared text=model:smollm2-135m head:HEAD]
        [--classes yes/no caption steps] [--mmspec FOLDER] [--limit 12] [--window N] [--tokens 128] [--seconds S]
        [--numerics auto] [--dtype float32] [--out FOLDER]

Every question is answered plainly and with every drafter before the next, by default under the policy that an `LLM`
has by default, one for all kinds of answers as they come; `--window` takes that many drafted tokens every round
instead. Questions are about scenes that no model was trained on, and with `--mmspec` about photographs: conversations
of several turns go on from the plain answers. Pictures are forgotten before each answer, so that all look themselves.

vision is the target's tower; a draft model's own tower, and its reading of the prompt, count as draft. FOLDER gets
runs.jsonl, which a later run goes on from, result.json and result.md. Exits with 1 if an answer differs, with 2 for
what cannot be run.
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
    draft_bytes,
    kv_bytes,
    labelled,
    middle,
    modules_of,
    photographs,
    save,
    scene_questions,
    settings_of,
    table,
)

from examples.tiny_vlm.questions import KINDS
from paceline import CostModel, Fixed, PacelineError, SamplingParams
from paceline.core.interfaces import DraftPolicy
from paceline.drafters import Plain
from paceline.eval.suites import Question, hash_questions
from paceline.eval.summary import Cost, speedup

PARTS = ("vision", "prefill", "draft", "verify", "rest")
_WARM = 2000
"""Scenes of each class from here on are for warming up."""


def asked_of(args: argparse.Namespace) -> list[Question]:
    """Scenes, then photographs: as many of each topic."""
    asked = scene_questions(args.classes, args.limit or 60)
    if args.mmspec is not None:
        asked += photographs(args.mmspec, args.limit)
    return asked


def policy_of(args: argparse.Namespace) -> DraftPolicy:
    """A new one, since they learn."""
    return CostModel() if args.window is None else Fixed(args.window)


def run(args: argparse.Namespace) -> Log:
    """Decode everything that the log does not hold yet."""
    patience, base, words = Patience(args.seconds), base_engine(args), labelled(args.drafters)
    asked = asked_of(args)
    log = Log(None if args.out is None else args.out / "runs.jsonl", settings_of(args, base, {}))
    engines = {PLAIN: Engine.of(base, Plain(), Fixed(0))}
    engines |= {label: Engine.of(base, build(word), policy_of(args)) for label, word in words.items()}
    target = {id(t): t.nbytes for t in modules_of(base.loaded)}
    memory = {"target": {"weights": sum(target.values()), "kv": kv_bytes(base.runner)}}
    memory |= {label: draft_bytes(engines[label].llm.decoder.drafter, base.loaded) for label in words}
    log.begin({"memory": memory, "questions": hash_questions(asked)})
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    done = {line["id"] for line in log.lines}
    left = [question for question in asked if question.id not in done]
    warm = scene_questions(args.classes, args.warm_up, _WARM) if left else []
    with bar("questions", len(warm) + len(left)) as step:
        for question in warm:
            for _ in converse(question, engines, params):
                pass
            step("warming up")
        for place, question in enumerate(left):
            if patience.is_over:
                break
            turns = [
                {name: line.as_dict() for name, line in sides.items()}
                for sides in converse(question, engines, params, place % 2 == 1)
            ]
            log.add({"id": question.id, "class": question.category, "turns": turns})
            step(question.category)
    return log


def rows_of(log: Log) -> list[dict[str, Any]]:
    """One row for each class and side, plain decoding first."""
    groups: dict[str, list[list[dict[str, Line]]]] = {}
    for line in log.lines:
        turns = [{name: Line.from_dict(one) for name, one in sides.items()} for sides in line["turns"]]
        if turns:
            groups.setdefault(line["class"], []).append(turns)
    known = [kind for kind in KINDS if kind in groups]
    kinds = [*known, *sorted(set(groups) - set(known))]
    return [row_of(kind, side, groups[kind]) for kind in kinds for side in groups[kind][0][0]]


def row_of(kind: str, side: str, found: Seq[Seq[Mapping[str, Line]]]) -> dict[str, Any]:
    """Speed-ups over plain decoding by conversations, the unit of every interval; the rest by answers."""
    pairs = [(turn[PLAIN], turn[side]) for turns in found for turn in turns]
    mine = [line for _, line in pairs]
    rounds = [one for line in mine for one in line.rounds]
    drafted = sum(one.drafted for one in rounds)
    row: dict[str, Any] = {"class": kind, "drafter": side, "conversations": len(found), "answers": len(pairs)}
    for name in ("decode", "whole"):
        costs = [
            (Cost(sum(len(turn[PLAIN].token_ids) for turn in turns), sum(getattr(turn[PLAIN], name) for turn in turns)),
             Cost(sum(len(turn[side].token_ids) for turn in turns), sum(_seconds(turn, side, name) for turn in turns)))
            for turns in found
        ]  # fmt: skip
        pooled = speedup(*zip(*costs, strict=True))
        assert pooled is not None
        ratios = [one.tokens_per_s / plain.tokens_per_s for plain, one in costs]
        row[name] = {"median": middle(ratios), **vars(pooled.weighted)}
    return {
        **row,
        "ms": {part: 1e3 * sum(line.parts[part] for line in mine) / len(mine) for part in PARTS},
        "tokens": sum(len(line.token_ids) for line in mine) / len(mine),
        "prompt": sum(line.prompt for line in mine) / len(mine),
        "passes": sum(line.passes for line in mine) / len(mine),
        "in_prefill": sum(any(one.joined and one.drafted for one in line.rounds) for line in mine),
        "only_prefill": sum(line.passes == 0 for line in mine),
        "acceptance": sum(one.accepted for one in rounds) / drafted if drafted else None,
        "tokens_a_pass": sum(one.emitted for one in rounds) / len(rounds),
        "identical": sum(plain.token_ids == line.token_ids for plain, line in pairs),
    }


def _seconds(turn: Mapping[str, Line], side: str, name: str) -> float:
    return turn[side].whole if name == "whole" else turn[side].beyond(turn[PLAIN])


def report(rows: Seq[Mapping[str, Any]], memory: Mapping[str, Mapping[str, int]]) -> str:
    """Both tables."""
    columns = ["answer", "drafter", "end to end, median (all, 95%)", "decoding, median", "vision", "prefill", "draft"]
    columns += ["verify", "rest", "tokens", "passes", "first draft in prefill", "accepted", "identical"]
    cells = []
    for row in rows:
        whole, share = row["whole"], row["acceptance"]
        timed = f"{whole['median']:.2f} ({whole['value']:.2f}, {whole['low']:.2f}–{whole['high']:.2f})"
        cells.append([row["class"], row["drafter"], timed, f"{row['decode']['median']:.2f}"])
        cells[-1] += [f"{row['ms'][part]:.1f}" for part in PARTS]
        cells[-1] += [f"{row['tokens']:.1f}", f"{row['passes']:.1f}", f"{row['in_prefill']} of {row['answers']}"]
        cells[-1] += ["" if share is None else f"{share:.0%}", f"{row['identical']} of {row['answers']}"]
    whole = memory["target"]["weights"]
    kept = [
        [name, f"{one['weights'] / 1e6:.1f}", f"{one['weights'] / whole:.1%}", f"{one['kv'] / 1e3:.1f}"]
        for name, one in memory.items()
    ]
    told = "Milliseconds of an answer on average; passes: of the target after the prompt was read."
    heads = ["of what", "weights of its own, MB", "of the target's", "KV of its own, kB a cached token"]
    return f"{table(columns, cells)}\n\n{told}\n\n{table(heads, kept)}"


def main(given: list[str] | None = None) -> int:
    """Measure, print, write; 1 where an answer is not that of plain decoding."""
    parser = arguments(__doc__, ["lookup", "self-int4"], 128)
    parser.add_argument("--classes", nargs="+", default=["yes/no", "caption", "steps"], choices=KINDS, metavar="CLASS")
    parser.add_argument("--mmspec", metavar="FOLDER", help="with test.jsonl and images of MMSpec, or the one above it")
    parser.add_argument("--window", type=int, help="draft so many tokens every round")
    parser.add_argument("--warm-up", type=int, default=4, help="questions of each class, unmeasured")
    args = parser.parse_args(given)
    try:
        log = run(args)
        rows = rows_of(log)
        text = report(rows, log.head["memory"])
        save(args, {"rows": rows, **log.head}, text)
    except PacelineError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 1 if any(row["identical"] < row["answers"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
