"""The prompts of a benchmark: Spec-Bench, MT-bench, HumanEval, GSM8K, MBPP, or any file of JSON lines, as they are.

Questions about pictures: MMSpec, easy-VQA, scenes of our own (see `image_suites`), or lines with an "image".

suite        file below the data folder           where it is published
spec_bench   spec_bench/question.jsonl            the Spec-Bench project (hemingkx/Spec-Bench)
mt_bench     mt_bench/question.jsonl              the FastChat project (lm-sys/FastChat)
humaneval    humaneval/HumanEval.jsonl.gz         the human-eval project (openai/human-eval)
gsm8k        gsm8k/test.jsonl                     the grade-school-math project (openai/grade-school-math)
mbpp         mbpp/test.jsonl or mbpp/mbpp.jsonl   google-research, folder mbpp
mmspec       mmspec/test.jsonl, mmspec/images     the MMSpec benchmark (arXiv 2603.14989)
easy_vqa     easy_vqa/test/questions.json, images the easy-VQA project (vzhou842/easy-VQA), unpacked
scenes       none: drawn by Paceline
"""

import difflib
import gzip
import hashlib
import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from ..errors import ConfigError
from ..images import ImageSource
from ..prompts import EXAMPLES
from ..provenance import hash_prompts
from .image_suites import IMAGE_SUITES, easy_vqa, scenes

BUILT_IN = "built-in"
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_KEYS = '"turns", "messages", "prompt", "question", "instruction" or "text"'


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

    suite: "built-in", a name of `SUITES` or `IMAGE_SUITES`, or a file of JSON lines (.gz as well). data: the folder
    that holds the suite's folder, or the suite's file itself. Raises `ConfigError` that says what is missing, or which
    line is wrong.
    """
    if suite == BUILT_IN:
        return [Question(example.name, example.name, (example.prompt,)) for example in EXAMPLES]
    if suite in IMAGE_SUITES:
        made = easy_vqa(data) if suite == "easy_vqa" else scenes()
        return [Question(one.id, one.kind, (one.text,), image=one.image, right=one.right) for one in made]
    path = _find(suite, data)
    name = path.name.split(".")[0] if suite not in SUITES else suite
    questions = [_question(line, name, number, path) for number, line in _lines(path)]
    if not questions:
        raise ConfigError(f"{str(path)!r} holds no prompts", expected="one JSON object a line")
    return questions


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


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        # Not splitlines: JSON strings may hold U+2028 and its like.
        lines = raw.decode("utf-8-sig").split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or error
        raise ConfigError(f"the prompts in {str(path)!r} cannot be read", got=told) from error
    yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _question(line: str, name: str, number: int, path: Path) -> Question:
    where = f"{path.name}, line {number}"
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON ({where})", got=error.msg, expected="one JSON object a line") from error
    row = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(row, dict):
        raise ConfigError(f"not a JSON object ({where})", got=type(row).__name__)
    topic = str(row.get("category") or "")
    category = "mt_bench" if name == "spec_bench" and topic in _MT_BENCH else topic or name
    if name == "mmspec" and row.get("topic"):  # six topics, of which some have dozens of categories
        category = str(row["topic"])
    image = None if row.get("image") is None else _image(row["image"], path, where)
    key = next((k for k in ("question_id", "task_id", "id") if k in row), None)
    label = str(number) if key is None else str(row[key])
    for key in ("turns", "messages", "prompt", "question", "instruction", "text"):
        if key in row:
            break
    else:
        raise ConfigError(f"no prompt ({where})", got="the keys " + ", ".join(map(str, row)), expected=_KEYS)
    value = row[key]
    if key == "messages":
        if image is not None:
            raise ConfigError(f"'messages' and 'image' do not go together ({where})", fix='write "turns" and "image"')
        return _conversation(value, label, category, topic, where)
    turns = tuple(value) if key == "turns" and isinstance(value, list) else (value,)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ConfigError(f"{key!r} is no prompt ({where})", got=repr(value)[:80], expected="text that is not empty")
    is_bare = key == "prompt" and image is None
    return Question(label, category, turns, None if is_bare else (), topic, image)


def _image(value: object, path: Path, where: str) -> str:
    """The file that a line names, beside the lines or in the folder `images` there."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"'image' is no file name ({where})", got=repr(value)[:80], expected="a name such as 1.jpg")
    found = [file for file in (path.parent / "images" / value, path.parent / value) if file.is_file()]
    if not found:
        raise ConfigError(
            f"the image is missing ({where})", got=repr(value), expected=f"a file in {path.parent / 'images'}"
        )
    return str(found[0])


def _conversation(value: object, label: str, category: str, topic: str, where: str) -> Question:
    """Messages are one turn: what the assistant said in the file stays what it said."""
    good = isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )
    if not good or not value or value[-1]["role"] != "user":  # type: ignore[index]
        expected = "a list of objects with role and content, the last one the user's"
        raise ConfigError(f"'messages' is no chat ({where})", got=repr(value)[:80], expected=expected)
    pairs = tuple((m["role"], m["content"]) for m in value)  # type: ignore[union-attr]
    return Question(label, category, (pairs[-1][1],), pairs[:-1], topic)
