"""The result folder: `summary.json`, `answers.jsonl`, and `peer_answers.jsonl` where peers took part."""

import json
import math
import re
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from ..sampling import Detokenizer
from .answers import Answer
from .opened import ANSWERS, SUMMARY

PEER_ANSWERS = "peer_answers.jsonl"


def default_folder(model: str, drafters: Seq[str], root: Path | str = "results") -> Path:
    """`results/<date>-<model>-<drafters>`, with a number behind it where that is taken."""
    name = "-".join([datetime.now(UTC).strftime("%Y-%m-%d"), _short(model), *map(_short, drafters)])
    folder, number = Path(root) / name, 2
    while folder.exists():
        folder, number = Path(root) / f"{name}-{number}", number + 1
    return folder


def prepare(folder: Path) -> list[Path]:
    """Make the folder before minutes of measuring; returns what was made, for `discard`.

    Raises `ConfigError` where it holds results already or cannot be written.
    """
    if (folder / SUMMARY).exists():
        raise ConfigError(
            f"{str(folder)!r} holds results already", got=SUMMARY, fix="give another --out, or move them away"
        )
    made = [path for path in (folder / ANSWERS, folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ANSWERS).touch()
    except OSError as error:
        raise ConfigError(f"the folder {str(folder)!r} cannot be written", got=error.strerror) from error
    return made


def discard(made: Iterable[Path]) -> None:
    """Take back what `prepare` made, where nothing was measured."""
    for path in made:
        # Another run may have written into a folder meanwhile.
        with suppress(OSError):
            path.rmdir() if path.is_dir() else path.unlink()


def write(
    folder: Path,
    summary: dict[str, object],
    answers: Iterable[Answer],
    peer_answers: Seq[Answer] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Write everything, the summary last, so that a folder with a summary is whole."""
    with (folder / ANSWERS).open("w", encoding="utf-8") as file:
        for answer in answers:
            file.write(_line(_with_pieces(answer, tokenizer)))
    if peer_answers:
        with (folder / PEER_ANSWERS).open("w", encoding="utf-8") as file:
            for answer in peer_answers:
                file.write(_line(answer.as_dict()))
    text = json.dumps(finite(summary), ensure_ascii=False, indent=2, allow_nan=False)
    (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")


def finite(value: object) -> object:
    """The value with NaN and infinities as null, since JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def _line(value: dict[str, object]) -> str:
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False) + "\n"


def _with_pieces(answer: Answer, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, object]:
    """The line of an answer, with the text of each token and of each drafted node, for pages that show them."""
    line = answer.as_dict()
    if tokenizer is None or answer.token_ids is None:
        return line
    text, pieces = Detokenizer(tokenizer, skip_special_tokens=False), list[str]()
    for token in answer.token_ids:
        text.feed(token)
        pieces.append(text.take())  # a character that spans tokens goes to its last
    if pieces:
        pieces[-1] += text.finish()
    line["pieces"] = pieces
    known: dict[int, str] = {}
    for r in line["rounds"]:  # type: ignore[attr-defined]
        for token in r["token_ids"]:
            if token not in known:
                known[token] = str(tokenizer.decode([token]))
        r["pieces"] = [known[token] for token in r["token_ids"]]
    return line


def _short(name: str) -> str:
    """A name that can be part of a file's: of a path its last part."""
    last = name.rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    return re.sub(r"[^\w.+-]+", "-", last).strip("-")[:60] or "model"
