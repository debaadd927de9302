"""Which servers change their answers? `paceline check` on servers that are started here, in pairs.

    python -m bench.referee --peer llama.cpp=PYTHON --peer-model llama.cpp=FILE.gguf --data DIR --out FOLDER
    python -m bench.referee --peer vllm=PYTHON --peer-model vllm=FOLDER --peer openvino=PYTHON ...
    python -m bench.referee --peer paceline=PYTHON --peer-model paceline=MODEL ...

Each peer is asked plainly and with drafts, from n-grams and from --peer-draft-model where one is given, and then
against Paceline with the same weights; Paceline's own server is asked alone, with its drafts and without. The prompts
are from Spec-Bench, drawn evenly from its groups, up to 400 characters long. Reports go to --out; the table that is
printed counts identical answers, near-ties and others:

    against    the first server's answers, asked alone, against the other's
    itself     each server's answers asked again: alone, in another order, and several at a time, against the first ones
    p          of the test of the sampled distribution, first against other
    speed      tokens a second over the first server's, from one client; only of a quiet machine
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from .serve_load import named, started

LONGEST = 400
"""Characters of a prompt: long ones are read for minutes where eight programs share two cores."""
SCRIPTS = {
    "llama.cpp": "llamacpp_server.py",
    "vllm": "vllm_server.py",
    "openvino": "openvino_server.py",
    "paceline": "",
}
HALF, FULL, LOOKUP = "bfloat16", "float32", {"llama.cpp": "--lookup --ngram 3"}


class Case(NamedTuple):
    """A pair. first, other: options of a peer's server. other is None: Paceline, computing in `dtype`.

    Paceline's own server is asked alone: it can leave drafts out of a request.
    """

    name: str
    first: str
    other: str | None
    dtype: str = HALF


def cases(peer: str, draft: str | None) -> Iterator[Case]:
    """What is compared, of a peer. GGUF files hold their own precision; OpenVINO's default depends on the processor."""
    if peer == "paceline":
        yield Case("n-grams", "--drafter lookup", None, "")
        return
    lookup, model = LOOKUP.get(peer, "--lookup"), f"--draft {shlex.quote(draft or '')}"
    if peer == "llama.cpp":
        yield Case("its prompt cache", "--no-cache", "", "")
    for dtype, option in ({"": "--no-cache"} if peer == "llama.cpp" else {HALF: "", FULL: "--f32"}).items():
        told = f", {dtype}" if dtype else ""
        yield Case(f"n-grams{told}", option, f"{option} {lookup}", dtype)
        if draft is not None:
            yield Case(f"a draft model{told}", option, f"{option} {model}", dtype)
        yield Case(f"Paceline{told}", option, None, dtype)


def verdicts(audit: Mapping[str, Any], is_own: bool, side: str = "") -> str:
    """Identical / near-ties / different of how many, over the comparisons of a kind; "-" where there are none."""
    counts = Counter[str]()
    for one in audit["comparisons"]:
        if one["is_own"] == is_own and one["name"].startswith(f"{side}, " if is_own else ""):
            counts.update(one["counts"])
    return f"{counts['identical']} / {counts['near-tie']} / {counts['different'] + counts['failed']}" if counts else "-"


def row(peer: str, case: Case, audit: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    first, other = audit["sides"]
    pair = [test["p_value"] for test in audit["tests"] if " and " in test["name"]]
    ratios = [speed["ratio"][0] for speed in audit["speeds"] if speed["ratio"]]
    lengths = [drafts["length"][0] for drafts in audit["drafts"] if drafts["name"] == other]
    return [
        f"{peer}, {case.name}",
        verdicts(audit, False),
        verdicts(audit, True, first),
        verdicts(audit, True, other),
        f"{pair[0]:.2g}" if pair else "-",
        f"{lengths[0]:.2f}" if lengths else "-",
        f"{ratios[0]:.2f}" if ratios else "-",
    ]


HEADS = ["pair", "against", "the first itself", "the other itself", "p", "tokens a pass", "speed"]


def audited(peer: str, case: Case, given: argparse.Namespace, prompts: Path) -> dict[str, Any]:
    """One audit, with its reports in --out. Raises SystemExit where it comes to nothing."""
    model = given.peer_model[peer]
    script = [str(Path(__file__).parent / "peers" / SCRIPTS[peer])] if SCRIPTS[peer] else ["-m", "paceline", "serve"]
    begin = [given.peer[peer], *script, model, "--port", "{port}", "--threads", str(given.threads)]
    with ExitStack() as stack:
        both = [
            stack.enter_context(started(f"{peer} {options}", f"{shlex.join(begin)} {options}")).url
            for options in (case.first, case.other)
            if options is not None
        ]
        ours = ["--threads", str(given.threads)] + (["--dtype", case.dtype] if case.dtype else [])
        other = both[1:] or ([] if peer == "paceline" else [given.model or model, *ours])
        words = [sys.executable, "-m", "paceline", "check", both[0], *other]
        words += ["--prompts", str(prompts), "--max-tokens", str(given.max_tokens), "--repeats", str(given.repeats)]
        words += ["--samples", str(given.samples)] if given.samples else ["--temperature", "0"]
        words += ["--timings", str(given.timings), "--timeout", "900", "--json"]
        name = f"{peer}-{case.name}".replace(", ", "-").replace(" ", "-")
        words += [word for kind in ("md", "html") for word in ("--report", str(given.out / f"{name}.{kind}"))]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{shlex.join(words)} exited with {done.returncode}: {done.stdout[-1000:]}")
    return json.loads(done.stdout)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", type=named, action="append", required=True, metavar="NAME=PYTHON",
                        help=", ".join(SCRIPTS))  # fmt: skip
    parser.add_argument("--peer-model", type=named, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--peer-draft-model", type=named, action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--model", help="the same weights for Paceline; default: the peer's model")
    parser.add_argument("--data", help="the folder of published suites")
    parser.add_argument("--out", type=Path, required=True, help="a folder for reports")
    parser.add_argument("--only", default="", help="the cases that have this in their names")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--samples", type=int, default=100, help="to each of four prompts; 0: none")
    parser.add_argument("--timings", type=int, default=0, help="of each prompt; 0 where the machine is not quiet")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    for key in ("peer", "peer_model", "peer_draft_model"):
        setattr(given, key, dict(getattr(given, key)))
    for name in given.peer:
        if name not in SCRIPTS or name not in given.peer_model:
            parser.error(f"{name}: choose from {', '.join(SCRIPTS)}, and give its --peer-model")
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    """Audit, and print the table."""
    given = parse(arguments)
    from paceline.measure.suites import choose, read_suite

    given.out.mkdir(parents=True, exist_ok=True)
    prompts = given.out / "prompts.jsonl"
    suite = [one for one in read_suite("spec_bench", given.data) if len(str(one.messages(())[0]["content"])) <= LONGEST]
    chosen = [{"messages": one.messages(())[:1]} for one in choose(suite, given.num_prompts)]
    prompts.write_text("".join(json.dumps(one) + "\n" for one in chosen), encoding="utf-8")
    print("\n".join([f"| {' | '.join(HEADS)} |", f"|{' --- |' * len(HEADS)}"]), flush=True)
    for peer in given.peer:
        for case in cases(peer, given.peer_draft_model.get(peer)):
            if given.only in f"{peer}, {case.name}":
                print(f"| {' | '.join(row(peer, case, audited(peer, case, given, prompts)))} |", flush=True)


if __name__ == "__main__":
    main()
