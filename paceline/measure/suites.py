"""The prompts of a benchmark: a published suite, or a file of prompts (see `prompts`)."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigError
from ..schema import meant
from ..system.files import write_bytes
from ..system.provenance import hash_prompts, sha256_of
from ..system.web import fetch
from ..zoo.cache import models_dir
from .prompts import EXAMPLES, PromptLine, is_address, read_lines

BUILT_IN = "built-in"
_MAX_BYTES, _SECONDS = 1 << 26, 120.0  # of a download
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_RAW = "https://raw.githubusercontent.com"


class Suite(NamedTuple):
    """A published file of prompts.

    files: its possible names. published: where to find it, as text. url, sha256: of the published file; None where
    unknown.
    """

    files: tuple[str, ...]
    published: str
    url: str | None = None
    sha256: str | None = None


SUITES: dict[str, Suite] = {
    "spec_bench": Suite(
        ("question.jsonl",),
        "question.jsonl of the Spec-Bench project (hemingkx/Spec-Bench)",
        f"{_RAW}/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
    ),
    "mt_bench": Suite(
        ("question.jsonl",),
        "MT-bench's question.jsonl of the FastChat project (lm-sys/FastChat)",
        f"{_RAW}/lm-sys/FastChat/main/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
    "humaneval": Suite(
        ("HumanEval.jsonl.gz", "HumanEval.jsonl"),
        "HumanEval.jsonl.gz of the human-eval project (openai/human-eval)",
        f"{_RAW}/openai/human-eval/master/data/HumanEval.jsonl.gz",
        "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
    "gsm8k": Suite(
        ("test.jsonl", "test.jsonl.gz"),
        "test.jsonl of the grade-school-math project (openai/grade-school-math)",
        f"{_RAW}/openai/grade-school-math/master/grade_school_math/data/test.jsonl",
    ),
    "mbpp": Suite(
        ("test.jsonl", "mbpp.jsonl"),
        "mbpp.jsonl of the google-research project, folder mbpp",
        f"{_RAW}/google-research/google-research/master/mbpp/mbpp.jsonl",
    ),
    "mmspec": Suite(("test.jsonl",), "test.jsonl and images of the MMSpec benchmark (arXiv 2603.14989)"),
}


@dataclass(frozen=True)
class Question:
    """One prompt, of one turn or several.

    chat: messages before the first turn; None where `turns[0]` is raw text to continue.
    turns: the user's messages, each after the model's answer to the one before.
    category: the group in the report; topic: a finer name, where the suite has one.
    image: a file; it comes before the text of the first turn.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    chat: tuple[tuple[str, str], ...] | None = ()
    topic: str = ""
    image: str | None = None

    def messages(self, answers: Sequence[str]) -> list[dict[str, object]]:
        """The conversation up to the turn that follows these answers, as role and content."""
        messages: list[dict[str, object]] = [{"role": role, "content": content} for role, content in self.chat or ()]
        for place, (turn, answer) in enumerate(zip(self.turns, (*answers, None), strict=False)):
            parts = [{"type": "image", "image": self.image}, {"type": "text", "text": turn}]
            messages.append({"role": "user", "content": turn if place or self.image is None else parts})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return messages


def read_suite(suite: str, data: str | Path | None = None, download: bool = False) -> list[Question]:
    """All prompts of a suite, in its own order.

    suite: "built-in", a name of `SUITES`, or a file of prompts (see `prompts`). data: the folder that contains
    the suite's folder, or the suite's file; None: the downloaded file. download: fetch a published file into the user's
    cache if it is missing. Raises `ConfigError` that says what is missing, or which line is wrong.
    """
    if suite == BUILT_IN:
        return [Question(example.name, example.name, (example.prompt,)) for example in EXAMPLES]
    path = _find(suite, data, download)
    name = path.name.split(".")[0] if suite not in SUITES else suite
    return [_question(line, name) for line in read_lines(path)]


def choose(questions: Sequence[Question], count: int | None = None) -> list[Question]:
    """`count` prompts, divided evenly among the categories; the same ones every time.

    Within a category they are evenly spaced, since suites are sorted by topic.
    """
    groups: dict[str, list[Question]] = defaultdict(list)
    for question in questions:
        groups[question.category].append(question)
    longest = max(map(len, groups.values()), default=0)
    turns = [(i, name) for i in range(longest) for name, group in groups.items() if i < len(group)][:count]
    quota = Counter(name for _, name in turns)
    return [groups[name][(2 * i + 1) * len(groups[name]) // (2 * quota[name])] for i, name in turns]


def hash_questions(questions: Sequence[Question]) -> str:
    """SHA-256 over the prompts, images included, and their order."""
    images = ([] if question.image is None else [sha256_of(question.image)] for question in questions)
    rows = (
        [question.id, question.chat, question.turns, *image] for question, image in zip(questions, images, strict=True)
    )
    return hash_prompts([json.dumps(row, ensure_ascii=False) for row in rows])


def _find(suite: str, data: str | Path | None, download: bool) -> Path:
    """The suite's file: in `data`, or in the user's cache, downloaded if that is allowed."""
    if (known := SUITES.get(suite)) is None:
        if not Path(suite).is_file():
            raise ConfigError(
                f"there is no file and no suite {suite!r}",
                expected="one of " + ", ".join(SUITES) + ", or a file of JSON lines",
                fix=meant(suite.replace("-", "_"), [*SUITES]),
            )
        return Path(suite)
    expected, by_hand = f"the folder that holds {suite}/{known.files[0]}", f"fetch {known.published}"
    if data is not None:
        folder = Path(data)
        places = [*(place / file for place in (folder / suite, folder) for file in known.files), folder]
        if path := next((path for path in places if path.is_file()), None):
            return path
        got = "other files" if folder.exists() else "no such folder"
        raise ConfigError(f"no prompts of {suite} in {str(folder)!r}", got=got, expected=expected, fix=by_hand)
    by_hand += " and give its folder as --data"
    path = models_dir().parent / "suites" / suite / (known.url or "").rpartition("/")[2]
    if path.is_file():
        return path
    if known.url is None or not download:
        fix = by_hand if known.url is None else f"add --download to fetch {known.url}, or {by_hand}"
        raise ConfigError(f"the prompts of {suite} are not here", got="no --data", expected=expected, fix=fix)
    content = fetch(known.url, _MAX_BYTES, _SECONDS)
    digest = hashlib.sha256(content).hexdigest()
    if known.sha256 not in (None, digest):
        message = f"{known.url} is not the file that was published"
        raise ConfigError(message, got=f"sha256 {digest}", expected=known.sha256, fix=by_hand)
    write_bytes(path, content)
    return path


def _question(line: PromptLine, name: str) -> Question:
    row, where = line.row, line.where
    topic = str(row.get("category") or "")
    category = "mt_bench" if name == "spec_bench" and topic in _MT_BENCH else topic or name
    if name == "mmspec" and row.get("topic"):  # six topics; some have dozens of categories
        category = str(row["topic"])
    label = str(next((row[key] for key in ("question_id", "task_id", "id") if key in row), line.number))
    if line.chat:  # one turn: the assistant's messages in the file stay as they are
        is_text = all(isinstance(message["content"], str) for message in line.chat)
        if line.images or not is_text or line.chat[-1]["role"] != "user":
            raise ConfigError(
                f"this chat cannot be measured ({where})", expected="texts alone, the last one the user's",
                fix='write "turns", and "image" for an image',
            )  # fmt: skip
        *before, (_, asked) = [(message["role"], message["content"]) for message in line.chat]
        return Question(label, category, (asked,), tuple(before), topic)
    if len(line.images) > 1 or any(map(is_address, line.images)):
        raise ConfigError(f"more than one image, or an address ({where})", expected="one image file")
    image = line.images[0] if line.images else None
    return Question(label, category, line.turns, None if line.is_bare else (), topic, image)
