"""The result folder while it is written: `answers.jsonl` line by line, and `summary.json` at the end.

Answers of peers go to `peer_answers.jsonl`. What was measured stays, whatever ends the run.
"""

import re
from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError, PacelineError
from ..sampling import Detokenizer
from ..system.files import claimed, to_json, write_text
from .answers import Answer
from .opened import ANSWERS, SUMMARY

PEER_ANSWERS = "peer_answers.jsonl"


class ResultFolder:
    """A folder that this run alone writes to; see `claim`."""

    def __init__(self, path: Path):
        self.path = path
        self.count = 0
        self._files = {name: FileIO(path / name, "x") for name in (ANSWERS, PEER_ANSWERS)}

    def add(self, answers: Seq[Answer], ours: Collection[str], tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Write answers at once; `ours` are the names of our sides, the others are peers'.

        Raises `PacelineError` where the disk is full, with every line before still whole.
        """
        for answer in answers:
            mine = answer.side in ours
            line = _with_pieces(answer, tokenizer) if mine else answer.as_dict()
            self._append(self._files[ANSWERS if mine else PEER_ANSWERS], (to_json(line) + "\n").encode())
            self.count += 1

    def finish(self, summary: dict[str, object]) -> None:
        """Write the summary, whole or not at all. Raises `PacelineError` where the disk is full."""
        try:
            write_text(self.path / SUMMARY, to_json(summary, indent=2) + "\n")
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Remove the files that hold nothing."""
        for name, file in self._files.items():
            file.close()
            if not (self.path / name).stat().st_size:
                (self.path / name).unlink()

    def _append(self, file: FileIO, line: bytes) -> None:
        before = file.tell()
        try:
            written = 0
            while written < len(line):
                written += file.write(line[written:])
        except OSError as error:
            file.seek(file.truncate(before))
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> PacelineError:
        return PacelineError(
            f"the results cannot be written to {str(self.path)!r}",
            got=error.strerror or error,
            fix=f"make room; the {self.count} finished answers are kept there",
        )


@contextmanager
def claim(out: Path | None, model: str, drafters: Seq[str]) -> Iterator[ResultFolder]:
    """The folder for a run, before minutes of measuring, and nobody else's meanwhile.

    out: None takes a new `results/<date>-<model>-<drafters>`. Raises `ConfigError` where the folder cannot be written
    or holds results, of an earlier run or of something else. What is left empty at the end is removed.
    """
    folder, made = _made(out) if out is not None else _new(model, drafters)
    try:
        with claimed(folder), closing(_open(folder)) as results:
            yield results
    finally:
        for one in made:
            with suppress(OSError):  # it holds something
                one.rmdir()


def _open(folder: Path) -> ResultFolder:
    for name in (SUMMARY, ANSWERS, PEER_ANSWERS):
        if (folder / name).exists():
            raise _taken(folder, name)
    return ResultFolder(folder)


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the folder {str(folder)!r} cannot be written", got=error.strerror, fix="give another --out")


def _taken(folder: Path, name: str) -> ConfigError:
    what, fix = f"{str(folder)!r} holds results already", "give another --out, or move them away"
    if name == ANSWERS:
        with (folder / ANSWERS).open("rb") as file:
            if file.read(9) == b'{"index":':  # as our lines begin
                what, fix = f"{what}, of a run that was killed", f"{fix}; `paceline show` shows what it measured"
    return ConfigError(what, got=name, fix=fix)


def _made(folder: Path) -> tuple[Path, list[Path]]:
    """The folder, and those that had to be made for it, the innermost first."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder, made


def _new(model: str, drafters: Seq[str]) -> tuple[Path, list[Path]]:
    """`results/<date>-<model>-<drafters>`, with a number behind it where that is taken."""
    root, made = _made(Path("results"))
    name, number = "-".join([datetime.now(UTC).strftime("%Y-%m-%d"), _short(model), *map(_short, drafters)])[:200], 1
    while True:
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise _unwritable(folder, error) from error
        else:
            return folder, [folder, *made]


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
