"""Result folders made by hand, with texts that try to break out of a page."""

import json
from pathlib import Path

NASTY = ("Hello", "</script>", "<b>", "\n\n", "\t", " naïve", " {{data}}", "  ", " world", "", "", " é", ".")
PROMPT = "Say </script><img src=x onerror=alert(1)> https://example.org/x.js"
_ORIGINS = ["drafted"] * 2 + ["recovered"] + ["drafted"] * 4 + ["bonus", "plain"] + ["drafted"] * 4


def make_round(source="tree", parents=(-1,), path=(), emitted=1, pieces=None, ms=(1, 20, 1), confidences=()):
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    return {
        "source": source if len(parents) > 1 else "",
        "num_drafted": max(depth),
        "num_accepted": len(path),
        "num_emitted": emitted,
        "token_ids": list(range(10, 10 + len(parents))),
        "parents": list(parents),
        "path": list(path),
        "confidences": list(confidences),
        "draft_s": ms[0] / 1e3,
        "verify_s": ms[1] / 1e3,
        "rest_s": ms[2] / 1e3,
        **({"pieces": list(pieces)} if pieces else {}),
    }


def nasty_answer(**changes):
    """13 tokens in 4 rounds: a branching tree, a chain with a bonus, a plain step, a chain cut short."""
    rounds = [
        make_round(parents=(-1, 0, 0, 1, 1), path=(1, 3), emitted=3, confidences=(0.6, 0.2, 0.5, 0.3),
                   pieces=("<s>", "Hello", "Hi", "</script>", "<i>")),
        make_round("lookup", (-1, 0, 1, 2, 3), (1, 2, 3, 4), 5, ("<b>", "\n\n", "\t", " naïve", " {{data}}")),
        make_round(pieces=("  ",), ms=(0, 400, 1)),
        make_round("lookup", (-1, 0, 1, 2, 3, 4), (1, 2, 3, 4), 4, (" world", "", "", " é", ".", "x")),
    ]  # fmt: skip
    return {
        "index": 0,
        "id": "<q>&1",
        "category": "a<b>",
        "turn": 0,
        "repeat": 0,
        "side": "tree",
        "prompt": PROMPT,
        "token_ids": list(range(100, 113)),
        "text": "".join(NASTY),
        "num_tokens": 12,
        "seconds": 0.2,
        "prefill_s": 0.01,
        "verdict": "identical",
        "origins": list(_ORIGINS),
        "sources": [""] * 13,
        "rounds": rounds,
        "pieces": list(NASTY),
        **changes,
    }


def make_summary(**changes):
    run = {
        "drafter": "tree",
        "batch": 1,
        "speedup": 1.9,
        "speedup_low": 1.7,
        "speedup_high": 2.2,
        "mean_acceptance_length": 3.25,
        "speculative_tokens_per_s": 80.0,
        "categories": {
            "math": {"speedup": 2.5, "speedup_low": 2.0, "speedup_high": 3.0},
            "chat": {"speedup": 0.9, "speedup_low": None, "speedup_high": None},
        },
        "acceptance_by_position": [0.8, 0.5, 0.2],
        "rounds_by_position": [40, 20, 10],
        "verdicts": {"identical": 2, "near_tie": 0, "bug": 0},
    }
    about = {"cpu": "A CPU", "threads": 1, "time": "2026-01-02T03:04:05", "paceline": "9.9"}
    return {"model": "org/mod<el>", "runs": [run], "plain_tokens_per_s": 40.0, "provenance": about, **changes}


def write_folder(folder: Path, summary=None, answers=None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary or make_summary()))
    lines = [nasty_answer(), nasty_answer(side="plain", rounds=[], seconds=0.4)] if answers is None else answers
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
