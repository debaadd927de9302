"""Long prompts of a wanted number of tokens, made of a suite's texts and of this repository's own files.

rag         passages of many questions, those of the one that is asked in the middle, then this question
summary     many articles, and the request to summarise them
code, text  the beginning of this repository's source and documentation, to be continued
"""

from collections.abc import Callable, Sequence
from itertools import count, islice
from pathlib import Path

from paceline.measure.suites import Question, read_suite

KINDS = ("rag", "summary", "code", "text")
_ROOT = Path(__file__).parent.parent
_FILES = {"code": ("paceline/engine", "*.py"), "text": ("docs", "*.md")}


def long_prompts(
    kind: str, tokens: int, number: int, data: Path | None, encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> list[Question]:  # fmt: skip
    """`number` prompts of a kind, of about so many tokens each, the same ones every time."""
    if kind in _FILES:
        folder, pattern = _FILES[kind]
        files = sorted((_ROOT / folder).rglob(pattern))
        ids = encode("\n\n".join(path.read_text() for path in files))
        starts = [i * max(1, (len(ids) - tokens) // number) for i in range(number)]
        return [
            Question(f"{kind}-{tokens}-{i}", f"{kind} {tokens}", (decode(ids[start : start + tokens]),), None)
            for i, start in enumerate(starts)
        ]
    asked = [
        q
        for q in read_suite("spec_bench", data, data is None)
        if q.topic == {"summary": "summarization"}.get(kind, kind)
    ]
    every = max(1, len(asked) // number)
    return [_made(kind, tokens, asked, i * every, encode) for i in range(number)]


def _made(
    kind: str, tokens: int, asked: Sequence[Question], own: int, encode: Callable[[str], Sequence[int]]
) -> Question:
    """The prompt of question `own`: its text among those of the questions after it."""
    passages, left, request = list[str](), tokens - 64, _parts(kind, asked[own].turns[0])[1]
    for place in islice(count(own), len(asked)):
        passage, _ = _parts(kind, asked[place % len(asked)].turns[0])
        ids = encode(passage)
        if passages and len(ids) > left:
            break
        passages.append(passage)
        left -= len(ids)
    middle = len(passages) // 2
    passages = [*passages[1 : 1 + middle], passages[0], *passages[1 + middle :]]
    return Question(f"{kind}-{tokens}-{own}", f"{kind} {tokens}", ("\n\n".join([*passages, request]),))


def _parts(kind: str, turn: str) -> tuple[str, str]:
    """The passage of a question of the suite, and what is asked about it."""
    if kind == "rag":
        passage, _, question = turn.rstrip().rpartition("\n")
        return passage, question
    return turn.removeprefix("Summarize:").strip(), "Summarize these texts, one after another."
