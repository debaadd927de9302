"""The folder that a benchmark writes its results to, line by line; `results` reads it."""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, PacelineError
from ..system.files import check_folder, claimed, to_json, write_text
from .results import ANSWERS, PEER_ANSWERS, SUMMARY, last_part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .run import TimedAnswer


class ResultFolder:
    """A folder that only this run writes to; see `claim`."""

    def __init__(self, path: Path):
        self.path = path
        self.count = 0
        self._files = {name: FileIO(path / name, "x") for name in (ANSWERS, PEER_ANSWERS)}

    def add(
        self, answers: "Sequence[TimedAnswer]", ours: Collection[str], tokenizer: "PreTrainedTokenizerBase"
    ) -> None:
        """Append answers; `ours` are the names of Paceline's sides, the others are peers.

        Raises `PacelineError` where the disk is full; earlier lines stay intact.
        """
        from ..sampling.detokenize import Detokenizer
        from ..sampling.pieces import Pieces

        pieces = Pieces(tokenizer)
        for answer in answers:
            line, is_ours = answer.as_dict(), answer.side in ours
            if is_ours:  # special tokens by name; joined, the text of the answer
                detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
                line["pieces"] = detokenizer.pieces(line["token_ids"], is_end=True)
                for r in line["rounds"]:
                    r["pieces"] = [pieces.text(token) for token in r["token_ids"]]
            self._append(self._files[ANSWERS if is_ours else PEER_ANSWERS], (to_json(line) + "\n").encode())
            self.count += 1

    def finish(self, summary: dict[str, object]) -> None:
        """Write the summary atomically. Raises `PacelineError` where the disk is full."""
        try:
            write_text(self.path / SUMMARY, to_json(summary, indent=2) + "\n")
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Close the files, and remove empty ones."""
        for name, file in self._files.items():
            file.close()
            if not (self.path / name).stat().st_size:
                (self.path / name).unlink()

    def _append(self, file: FileIO, line: bytes) -> None:
        before = file.tell()
        try:
            while line:
                line = line[file.write(line) :]
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
def claim(out: Path | None, model: str, drafters: Sequence[str]) -> Iterator[ResultFolder]:
    """The folder for a run, created and locked before the measurement.

    out: None takes a new `results/<date>-<model>-<drafters>`. Raises `ConfigError` where the folder cannot be written
    or already has results. Empty folders are removed at the end.
    """
    folder = out if out is not None else _unused(model, drafters)
    check_folder(folder)
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with claimed(folder):
            folder.mkdir(exist_ok=True)
            for name in (SUMMARY, ANSWERS, PEER_ANSWERS):
                if (folder / name).exists():
                    raise _taken(folder, name)
            with closing(ResultFolder(folder)) as results:
                yield results
    finally:
        for path in created:
            with suppress(OSError):  # it holds something
                path.rmdir()


def _taken(folder: Path, name: str) -> ConfigError:
    message, fix = f"{str(folder)!r} holds results already", "give another --out, or move them away"
    if name == ANSWERS:
        with (folder / ANSWERS).open("rb") as file:
            if file.read(9) == b'{"index":':  # as our lines begin
                message, fix = f"{message}, of a run that was killed", f"{fix}; `paceline show` shows what it measured"
    return ConfigError(message, got=name, fix=fix)


def _unused(model: str, drafters: Sequence[str]) -> Path:
    """`results/<date>-<model>-<drafters>`, with a number appended if that exists."""
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    # Of a path the last part, and only what can be part of a file's name.
    short = [re.sub(r"[^\w.+-]+", "-", last_part(label)).strip("-")[:60] or "model" for label in (model, *drafters)]
    name, number = "-".join([day, *short])[:200], 1
    while (folder := Path("results", name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return folder
