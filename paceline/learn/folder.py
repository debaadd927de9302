"""The folder of a drafter that learns: what it has recorded, and the heads that it has learnt.

    folder/learn.json               the target, the method, and the head that it began with
    folder/target.safetensors       what training needs of the target, see `target`
    folder/answers-000001/          answers with their states, as the stage `prepare` of `paceline train` writes them
    folder/heads/000002/            the head in use; one with a higher number is on trial
    folder/trainer.log              what the trainer says

An answer is complete once its line is written, and a head once its folder has its name. So a killed process loses the
answers in progress, and at most a round of training.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, final

from pydantic import Field
from torch import Tensor

from ..errors import ConfigError
from ..schema import checked
from ..system.files import check_folder, claimed, folder_bytes, write_text
from ..train.prepare import PreparedAnswer, append_answers, read_answers, write_record
from ..train.run_folder import check_same, read_if_there

_PARTS = 16
"""Folders of answers at the limit: the oldest one is removed as a whole."""


@checked
class LearnSettings:
    """How much is recorded and learnt.

    max_bytes: of recorded answers and states; the oldest go first. prompt_tokens: recorded of a prompt, its last ones.
    every: answer tokens between rounds of training. recent: answer tokens that a round learns from, the newest ones.
    held_out: share of the prompts whose answers are held back to compare heads. epochs, max_tokens, accumulate, lr: of
    a round, as in `paceline train`; lr None: 1e-3, and 5e-3 for the first head where there was none. trial: drafts of
    the old and of the new head until the live comparison ends. idle_s: how long nothing must run before training does.
    """

    max_bytes: Annotated[int, Field(ge=1)] = 2 << 30
    prompt_tokens: Annotated[int, Field(ge=1)] = 128
    every: Annotated[int, Field(ge=1)] = 8192
    recent: Annotated[int, Field(ge=1)] = 65536
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.1
    epochs: Annotated[int, Field(ge=1)] = 3
    max_tokens: Annotated[int, Field(ge=8)] = 1024
    accumulate: Annotated[int, Field(ge=1)] = 2
    lr: Annotated[float, Field(gt=0)] | None = None
    trial: Annotated[int, Field(ge=1)] = 500
    idle_s: Annotated[float, Field(ge=0)] = 0.25


@dataclass(frozen=True)
class Recorded:
    """An answer that has ended, and the states of all its tokens but the last, by layer."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    temperature: float
    seed: int
    finish_reason: str | None
    states: Mapping[int, Tensor] = field(repr=False)


@final
class LearnFolder:
    """Such a folder. Only the process that has called `claim` writes into it, and the trainer that it started."""

    def __init__(self, path: Path | str):
        self.path = Path(path).absolute()
        self._held = ExitStack()

    def claim(self, identity: Mapping[str, object]) -> None:
        """Lock the folder for what learns here, and remove what a killed process left half-written.

        Raises `ConfigError` where another process holds it, or where it belongs to another target or head.
        """
        check_folder(self.path)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # what is in it are answers to users
        self._held.enter_context(claimed(self.path / "learn", "name another folder, or end the other server"))
        try:
            fix = "name another folder, or remove this one and all that was learnt"
            then = read_if_there(dict[str, object], self.path / "learn.json", fix)
            if then is None:
                if other := [entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")]:
                    message = f"{str(self.path)!r} is not a folder of a drafter that learns"
                    raise ConfigError(message, got=", ".join(sorted(other)[:3]), expected="a new folder", fix=fix)
            else:
                check_same(repr(str(self.path)), then, identity, fix)
            for part in (*self.path.rglob(".*.part"), *self.path.glob("heads/.*"), self.path / "round"):
                _remove(part)
            for part in self.parts():
                if not read_answers(part):
                    _remove(part)
            write_text(self.path / "learn.json", json.dumps(identity, indent=2) + "\n")
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Unlock it."""
        self._held.close()

    def parts(self) -> list[Path]:
        """The folders of answers, the oldest first."""
        return sorted(self.path.glob("answers-" + "[0-9]" * 6))

    def heads(self) -> list[Path]:
        """The head in use, and then one on trial; empty before the first."""
        return sorted(self.path.glob("heads/" + "[0-9]" * 6))

    def next_head(self) -> Path:
        """The name of a new head."""
        return self.path / "heads" / f"{int(heads[-1].name) + 1 if (heads := self.heads()) else 1:06d}"

    def keep(self, head: Path) -> None:
        """Remove all heads but this one."""
        for other in self.heads():
            if other != head:
                _remove(other)


@final
class Recorder:
    """Writes answers into a folder, and removes the oldest beyond `max_bytes`. record: prepare.json of each part.

    It does not wait for the disk: after a power cut the trainer leaves out what is torn.
    """

    def __init__(self, folder: LearnFolder, record: Mapping[str, object], max_bytes: int):
        self._folder, self._record, self._max_bytes = folder, record, max_bytes
        self._sizes = {part: folder_bytes(part) for part in folder.parts()}
        newest = read_answers([*self._sizes][-1]) if self._sizes else []
        self._next, self._part = max((answer.index + 1 for answer in newest), default=0), None
        self.answers = self.tokens = 0

    def write(self, answer: Recorded) -> None:
        """Append an answer. Raises `OSError`."""
        part = self._part
        if part is None or not part.is_dir() or self._sizes[part] > self._max_bytes // _PARTS:
            part = self._part = self._folder.path / f"answers-{self._number():06d}"
            part.mkdir(mode=0o700)  # also where the folder was there before, and others may read it
            write_record(part, self._record)
            self._sizes[part] = 0
        states = {f"{self._next}.{layer}": state for layer, state in answer.states.items()}
        line = {
            "index": self._next, "source": "", "temperature": answer.temperature, "seed": answer.seed,
            "finish_reason": answer.finish_reason, "prompt_ids": list(answer.prompt_ids),
            "answer_ids": list(answer.answer_ids),
        }  # fmt: skip
        append_answers(part, [line], states, f"states-{self._next:06d}.safetensors", syncs=False)
        self._next += 1
        self.answers, self.tokens = self.answers + 1, self.tokens + len(answer.answer_ids)
        self._sizes[part] = folder_bytes(part)
        while sum(self._sizes.values()) > self._max_bytes and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            _remove(oldest)
            del self._sizes[oldest]

    def _number(self) -> int:
        return 1 + max((int(part.name.partition("-")[2]) for part in self._sizes), default=0)


def recent(folder: LearnFolder, tokens: int) -> list[PreparedAnswer]:
    """The newest answers, with at most so many answer tokens. A part that is being removed is left out."""
    chosen, left = list[PreparedAnswer](), tokens
    for part in reversed(folder.parts()):
        for answer in reversed(read_answers(part)):
            left -= len(answer.answer_ids)
            if left < 0:
                return chosen
            chosen.append(answer)
    return chosen


def _remove(path: Path) -> None:
    """Remove a file or a folder, which loses its name before the first of its files is gone."""
    if path.is_dir():
        gone = path if path.name.startswith(".") else path.with_name(f".{path.name}.part")
        if gone != path:
            shutil.rmtree(gone, ignore_errors=True)
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
