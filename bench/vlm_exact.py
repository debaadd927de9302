"""Are answers about pictures those of plain decoding, token by token?

    python bench/vlm_exact.py MODEL [--drafters lookup self-int4 small=model:SMALL] [--mmspec FOLDER] [--scenes 100]
        [--limit N] [--window 4] [--temperatures 0 1] [--tokens 48] [--numerics auto invariant fast] [--reference 20]
        [--dtype float32] [--seconds S] [--out FOLDER]

Every question is answered plainly and with every drafter, a fixed number of tokens drafted each round, so that drafts
are made whether they pay or not; sampled answers have a seed of their own. A difference is measured as `paceline check`
does: near tie, where rounding decided between tokens closer than it moves them (fast numerics only), or bug.
Photographs and conversations of several turns are MMSpec's (`--mmspec`, left out without it, and said so); scenes are
drawn. `--reference` holds our plain decoding against the greedy `generate` of transformers on so many first turns.
FOLDER gets runs.jsonl, which a later run goes on from, result.json and result.md. Exits with 1 after a bug, with 2 for
what cannot be run.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from vlm_common import (
    PLAIN,
    Engine,
    Log,
    Patience,
    arguments,
    bar,
    base_engine,
    build,
    labelled,
    photographs,
    save,
    scene_questions,
    settings_of,
    table,
)
from vlm_reference import Reference

from examples.tiny_vlm.questions import KINDS
from paceline import Fixed, PacelineError, SamplingParams
from paceline.drafters import Plain
from paceline.errors import CacheFull, ConfigError
from paceline.eval.check import Verdict, compare
from paceline.eval.suites import Question, hash_questions

NO_PHOTOGRAPHS = "MMSpec's photographs are left out: no --mmspec FOLDER with its test.jsonl and images"
REFERENCE = "plain transformers"


def asked_of(args: argparse.Namespace) -> list[Question]:
    """Photographs, then scenes."""
    asked = [] if args.mmspec is None else photographs(args.mmspec, args.limit)
    asked += scene_questions(KINDS, -(-args.scenes // len(KINDS)))[: args.scenes]
    if not asked:
        raise ConfigError("there is nothing to ask", got="no --mmspec, and --scenes 0")
    return asked


def run(args: argparse.Namespace) -> Log:
    """Compare everything that the log does not hold yet."""
    patience, base, words = Patience(args.seconds), base_engine(args), labelled(args.drafters)
    asked, skipped = asked_of(args), [] if args.mmspec is not None else [NO_PHOTOGRAPHS]
    for reason in skipped:
        print(reason, file=sys.stderr)
    log = Log(None if args.out is None else args.out / "runs.jsonl", settings_of(args, base, {}))
    log.begin({"skipped": skipped, "questions": hash_questions(asked), "numerics": base.numerics})
    engines = {PLAIN: Engine.of(base, Plain(), Fixed(0))}
    engines |= {label: Engine.of(base, build(word), Fixed(args.window)) for label, word in words.items()}
    done = {(line["id"], line["temperature"]) for line in log.lines}
    work = [(i, one, t) for i, one in enumerate(asked) for t in args.temperatures if (one.id, t) not in done]
    reference = Reference(args.model, base) if args.reference else None
    compared = sum(REFERENCE in turn["sides"] for line in log.lines for turn in line["turns"])
    with bar("comparing", len(work)) as step:
        for index, question, temperature in work:
            if patience.is_over:
                break
            params = SamplingParams(temperature=temperature, max_tokens=args.tokens, seed=index)
            other = reference if temperature == 0 and compared < args.reference else None
            turns = list(turns_of(engines, question, params, other))
            compared += other is not None
            log.add({"id": question.id, "class": question.category, "temperature": temperature, "turns": turns})
            step(f"{question.category}, T = {temperature:g}")
    return log


def turns_of(
    engines: Mapping[str, Engine], question: Question, params: SamplingParams, reference: Reference | None
) -> Any:
    """What each drafter's answer is to the plain one, turn by turn; all go on from the plain answer."""
    answers: list[str] = []
    for place, _ in enumerate(question.turns):
        chat = question.messages(answers)
        try:
            plain = engines[PLAIN].llm.generate([chat], params)[0].outputs[0]
        except CacheFull:
            return
        sides: dict[str, Any] = {}
        for label, engine in engines.items():
            if label != PLAIN:
                answer = engine.llm.generate([chat], params)[0].outputs[0]
                sides[label] = compare(engine.llm, chat, params, plain, answer).as_dict()
                sides[label]["drafted"] = sum(one.num_drafted for one in answer.rounds)
                sides[label]["accepted"] = sum(one.num_accepted for one in answer.rounds)
        if reference is not None and place == 0:
            sides[REFERENCE] = reference.compare(chat, params, plain.token_ids)
        yield {"tokens": len(plain.token_ids), "sides": sides}
        answers.append(plain.text)


def rows_of(log: Log) -> list[dict[str, Any]]:
    """Verdicts by drafter, temperature and where the picture is from."""
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for line in log.lines:
        source = "photographs" if line["class"].startswith("mmspec") else "scenes"
        for turn in line["turns"]:
            for side, told in turn["sides"].items():
                groups.setdefault((side, line["temperature"], source), []).append({**told, "id": line["id"]})
    rows = []
    for (side, temperature, source), found in sorted(groups.items(), key=lambda item: item[0]):
        counts = Counter(one["verdict"] for one in found)
        drafted = sum(one.get("drafted", 0) for one in found)
        different = [one for one in found if one["verdict"] != Verdict.IDENTICAL.value]
        gaps = [one["gap"] for one in different if one["gap"] is not None]
        rows.append(
            {
                "drafter": side, "temperature": temperature, "pictures": source, "answers": len(found),
                **{verdict.value: counts[verdict.value] for verdict in Verdict},
                "tokens": sum(one["num_tokens"] for one in found),
                "acceptance": sum(one.get("accepted", 0) for one in found) / drafted if drafted else None,
                "widest_gap": max(gaps, key=abs, default=None), "different": different,
            }
        )  # fmt: skip
    return rows


def report(rows: Seq[Mapping[str, Any]], head: Mapping[str, Any]) -> str:
    """The table and what was left out."""
    columns = ["against plain decoding", "pictures", "T", "answers", "identical", "near ties", "bugs", "tokens"]
    columns += ["accepted", "widest gap"]
    cells = []
    for row in rows:
        share, gap = row["acceptance"], row["widest_gap"]
        cells.append([row["drafter"], row["pictures"], f"{row['temperature']:g}", row["answers"], row["identical"]])
        cells[-1] += [row["near_tie"], row["bug"], row["tokens"], "" if share is None else f"{share:.0%}"]
        cells[-1] += ["" if gap is None else f"{gap:.2g}"]
    answers = sum(row["answers"] for row in rows if row["drafter"] != REFERENCE)
    same = sum(row["identical"] for row in rows if row["drafter"] != REFERENCE)
    told = f"Numerics: {head['numerics']}. Speculative answers identical: {same} of {answers}."
    return "\n\n".join([table(columns, cells), told, *head["skipped"]])


def main(given: list[str] | None = None) -> int:
    """Compare, print, write; 1 after a bug."""
    parser = arguments(__doc__, ["lookup", "self-int4"], 48)
    parser.add_argument("--mmspec", metavar="FOLDER", help="with test.jsonl and images of MMSpec, or the one above it")
    parser.add_argument("--scenes", type=int, default=100, metavar="N", help="questions about scenes")
    parser.add_argument("--window", type=int, default=4, help="tokens drafted every round")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--reference", type=int, default=0, metavar="N", help="first turns for plain transformers")
    args = parser.parse_args(given)
    try:
        log = run(args)
        rows = rows_of(log)
        text = report(rows, log.head)
        save(args, {"rows": rows, **log.head}, text)
    except PacelineError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 1 if any(row["bug"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
