"""The prompts of a benchmark: Spec-Bench, MT-bench, HumanEval, GSM8K, MBPP, or a file of prompts, as they are.

Of a file every kind of line is read that `prompt_files` knows.
Questions about images: MMSpec, easy-VQA, or lines with an "image".

suite        file below the data folder           where it is published
spec_bench   spec_bench/question.jsonl            the Spec-Bench project (hemingkx/Spec-Bench)
mt_bench     mt_bench/question.jsonl              the FastChat project (lm-sys/FastChat)
humaneval    humaneval/HumanEval.jsonl.gz         the human-eval project (openai/human-eval)
gsm8k        gsm8k/test.jsonl                     the grade-school-math project (openai/grade-school-math)
mbpp         mbpp/test.jsonl or mbpp/mbpp.jsonl   google-research, folder mbpp
mmspec       mmspec/test.jsonl, mmspec/images     the MMSpec benchmark (arXiv 2603.14989)
easy_vqa     easy_vqa/test/questions.json, images the easy-VQA project (vzhou842/easy-VQA), unpacked
"""

import difflib
import hashlib
import json
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..errors import ConfigError
from ..hf.images import ImageSource
from ..system.provenance import hash_prompts
from .examples import EXAMPLES
from .image_suites import IMAGE_SUITES, easy_vqa
from .prompt_files import PromptLine, is_address, read_lines

BUILT_IN = "built-in"
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Question:
    """One prompt, of one turn or several.

    chat: messages before and including the first question; None where `turns[0]` is bare text to continue.
    turns: what the user says, one after the other, each after the model's answer to the one before.
    category: what the report groups by; topic: the finer name, where the suite has one.
    image: stands before the text of the first turn. right: the answer, where it is known.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    chat: tuple[tuple[str, str], ...] | None = ()
    topic: str = ""
    image: ImageSource | None = None
    right: str | None = None

    def messages(self, answers: Seq[str]) -> list[dict[str, object]]:
        """The conversation up to the turn that follows these answers, as role and content."""
        told: list[dict[str, object]] = [{"role": role, "content": content} for role, content in self.chat or ()]
        for place, (turn, answer) in enumerate(zip(self.turns, (*answers, None), strict=False)):
            parts = [{"type": "image", "image": self.image}, {"type": "text", "text": turn}]
            told.append({"role": "user", "content": turn if place or self.image is None else parts})
            if answer is not None:
                told.append({"role": "assistant", "content": answer})
        return told


@dataclass(frozen=True)
class _Suite:
    files: tuple[str, ...]
    published: str


SUITES: dict[str, _Suite] = {
    "spec_bench": _Suite(("question.jsonl",), "question.jsonl of the Spec-Bench project (hemingkx/Spec-Bench)"),
    "mt_bench": _Suite(("question.jsonl",), "MT-bench's question.jsonl of the FastChat project (lm-sys/FastChat)"),
    "humaneval": _Suite(
        ("HumanEval.jsonl.gz", "HumanEval.jsonl"), "HumanEval.jsonl.gz of the human-eval project (openai/human-eval)"
    ),
    "gsm8k": _Suite(
        ("test.jsonl", "test.jsonl.gz"), "test.jsonl of the grade-school-math project (openai/grade-school-math)"
    ),
    "mbpp": _Suite(("test.jsonl", "mbpp.jsonl"), "mbpp.jsonl of the google-research project, folder mbpp"),
    "mmspec": _Suite(("test.jsonl",), "test.jsonl and images of the MMSpec benchmark (arXiv 2603.14989)"),
}


def read_suite(suite: str, data: str | Path | None = None) -> list[Question]:
    """All prompts of a suite, in its own order.

    suite: "built-in", a name of `SUITES` or `IMAGE_SUITES`, or a file of prompts (see `prompt_files`). data: the folder
    that holds the suite's folder, or the suite's file itself. Raises `ConfigError` that says what is missing, or which
    line is wrong.
    """
    if suite == BUILT_IN:
        return [Question(example.name, example.name, (example.prompt,)) for example in EXAMPLES]
    if suite in IMAGE_SUITES:
        return [
            Question(
                f"{one.path.stem}-{place}", "yes/no" if right in ("yes", "no") else "short", (text,),
                image=str(one.path), right=right,
            )
            for one in easy_vqa(data)
            for place, (text, right) in enumerate(one.questions)
        ]  # fmt: skip
    path = _find(suite, data)
    name = path.name.split(".")[0] if suite not in SUITES else suite
    return [_question(line, name) for line in read_lines(path)]


def choose(questions: Seq[Question], count: int | None = None) -> list[Question]:
    """`count` prompts, as many of each category as there are, the categories taking turns; the same ones every time.

    Of a category those are taken that lie evenly spread over it, since suites are sorted by topic.
    """
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    quota = dict.fromkeys(groups, 0)
    left = len(questions) if count is None else min(count, len(questions))
    while left:
        for name in [name for name, group in groups.items() if quota[name] < len(group)][:left]:
            quota[name] += 1
            left -= 1
    picked = [
        [group[(2 * i + 1) * len(group) // (2 * quota[name])] for i in range(quota[name])]
        for name, group in groups.items()
    ]
    longest = max(quota.values(), default=0)
    return [group[i] for i in range(longest) for group in picked if i < len(group)]


def hash_questions(questions: Seq[Question]) -> str:
    """SHA-256 over the prompts, pictures included, and their order."""
    return hash_prompts(
        [json.dumps([one.id, one.chat, one.turns, *_picture_hash(one.image)], ensure_ascii=False) for one in questions]
    )


def _picture_hash(image: ImageSource | None) -> list[str]:
    """Of the file, or of the pixels; empty without a picture, so that prompts of text keep their hashes."""
    if image is None:
        return []
    if isinstance(image, Image.Image):
        data = image.tobytes()
    else:
        data = bytes(image) if isinstance(image, bytes) else Path(image).read_bytes()
    return [hashlib.sha256(data).hexdigest()]


def _find(suite: str, data: str | Path | None) -> Path:
    known = SUITES.get(suite)
    if known is None:
        path = Path(suite)
        if path.is_file():
            return path
        names = [*SUITES, *IMAGE_SUITES]
        close = difflib.get_close_matches(suite.lower().replace("-", "_"), names, n=1, cutoff=0.5)
        looks_like_file = ".json" in path.name or len(path.parts) > 1
        raise ConfigError(
            f"there is no file {suite!r}" if looks_like_file else f"unknown suite {suite!r}",
            expected="one of " + ", ".join(names) + ", or a file of JSON lines",
            fix=f"did you mean {close[0]!r}?" if close and not looks_like_file else None,
        )
    expected = f"the folder that holds {suite}/{known.files[0]}"
    if data is None:
        raise ConfigError(
            f"the prompts of {suite} are not part of Paceline", got="no --data", expected=expected,
            fix=f"fetch {known.published} and give its folder as --data",
        )  # fmt: skip
    folder = Path(data)
    for path in [folder / suite / file for file in known.files] + [folder / file for file in known.files]:
        if path.is_file():
            return path
    if folder.is_file():
        return folder
    raise ConfigError(
        f"no prompts of {suite} in {str(folder)!r}", got="no such folder" if not folder.exists() else "other files",
        expected=expected, fix=f"fetch {known.published}",
    )  # fmt: skip


def _question(line: PromptLine, name: str) -> Question:
    row, where = line.row, line.where
    topic = str(row.get("category") or "")
    category = "mt_bench" if name == "spec_bench" and topic in _MT_BENCH else topic or name
    if name == "mmspec" and row.get("topic"):  # six topics, of which some have dozens of categories
        category = str(row["topic"])
    key = next((k for k in ("question_id", "task_id", "id") if k in row), None)
    label = str(line.number) if key is None else str(row[key])
    if line.chat:
        return _conversation(line, label, category, topic)
    if len(line.images) > 1 or any(map(is_address, line.images)):
        raise ConfigError(f"more than one image, or an address ({where})", expected="one image file")
    image = line.images[0] if line.images else None
    return Question(label, category, line.turns, None if line.is_bare else (), topic, image)


def _conversation(line: PromptLine, label: str, category: str, topic: str) -> Question:
    """Messages are one turn: what the assistant said in the file stays what it said."""
    is_text = all(isinstance(message["content"], str) for message in line.chat)
    if line.images or not is_text or line.chat[-1]["role"] != "user":
        raise ConfigError(
            f"this chat cannot be measured ({line.where})", expected="texts alone, the last one the user's",
            fix='write "turns", and "image" for a picture',
        )  # fmt: skip
    pairs = tuple((message["role"], message["content"]) for message in line.chat)
    return Question(label, category, (pairs[-1][1],), pairs[:-1], topic)
