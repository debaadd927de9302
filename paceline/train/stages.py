"""The three stages of a run, each of which can be stopped and called again: prepare, train, eval.

    out/answers-0/       answers of part 0 and their states         prepare
    out/train/           checkpoints, log.jsonl, data.json          train      (train-0.25/ for a fraction of the data)
    out/head/            the trained head                           train, once finished; head-0.25/
    out/draft/           of qat and distill: the trained draft      instead of head/
    out/model/           the fine-tuned target of a full SPACE run  train, once finished; model-0.25/
    out/eval.json        real decoding with the head                eval, which also writes it into the head's record
    out/curve.png        estimated accepted length against tokens   train

Stages yield what happens; the command line draws it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, final

import torch

from ..errors import CacheFull, ConfigError, IncompatibleModels
from ..eval.trials import Progress, Trial
from ..heads import head_info, read_record
from ..hf.chats import has_images
from ..llm import LLM
from ..runner import LoadedModel, load_model
from ..system.files import parse_json, read_text, write_text
from ..zoo import resolve
from .config import EvalSection, RunConfig
from .curve import draw
from .data import Answers, read_lines, write_lines
from .draft_folder import is_draft
from .extras import need
from .finish import check_eval, evaluate, model_beside, record_acceptance, recorded, save_trained
from .log import Event, Finished, need_tensorboard
from .loop import train
from .online import OnlineStates
from .pictures import Asked, asked, chat_of, row_of
from .prepare import PrepareConfig, ordered, prepare, prepared, written
from .recipes import check_head, layers_of, recipe_for
from .run_folder import is_main, only_run, understood
from .same_run import check_same_run


@dataclass(frozen=True)
class Preparing:
    """Answers that stand, of those that this part writes. skipped: prompts longer than `prompt_tokens`."""

    done: int
    total: int
    tokens: int
    skipped: int


@dataclass(frozen=True)
class Training:
    """What the loop told, of a fraction of the data."""

    fraction: float
    event: Event


@dataclass(frozen=True)
class Done:
    """The end of a stage: where its result lies, what it is, and whether it was there already."""

    stage: str
    path: Path
    result: dict[str, Any]
    was_there: bool = False


StageEvent: TypeAlias = Preparing | Training | Done


@final
class Stages:
    """One run. The target is loaded once, when a stage first needs it."""

    def __init__(self, method: str, config: RunConfig):
        self.method, self.config, self.out = method, config, Path(config.out)
        self._is_checked = False

    @cached_property
    def llm(self) -> LLM:
        """The target, decoding plainly."""
        rank = os.environ.get("LOCAL_RANK")  # set by `accelerate launch`: one process a device
        own = f"cuda:{rank}" if rank is not None and torch.cuda.is_available() else None
        device, how = self.config.device or own, self.config.prepare
        return LLM(
            resolve(self.config.model), dtype=self.config.dtype, device=device, numerics="fast",
            max_batch_size=how.batch, max_model_len=how.prompt_tokens + how.max_tokens + 1,
        )  # fmt: skip

    @property
    def target(self) -> LoadedModel:
        """The target itself."""
        return self.llm.loaded

    def check(self) -> None:
        """Load the target and hold the whole configuration against it, once. Nothing is written.

        Raises `ConfigError` or `IncompatibleModels` for what any stage would refuse.
        """
        if self._is_checked:
            return
        need("accelerate", "training")
        if self.config.train.tensorboard:
            need_tensorboard()
        check_eval(self.head_folder(), self.method, self._evaluation)
        check_head(self.method, self.config, self.target)
        self._is_checked = True

    def head_folder(self, fraction: float = 1.0) -> Path:
        """Where the head of a fraction of the data is kept."""
        name = "draft" if self.method in ("qat", "distill") else "head"
        return self.out / (name if fraction == 1.0 else f"{name}-{fraction:g}")

    # prepare

    def prepare(self) -> Iterator[StageEvent]:
        """Have the target answer the prompts. Raises `ConfigError` without prompts."""
        c = self.config.prepare
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                "prepare is not for `accelerate launch`", fix="run n processes by themselves, with prepare.part=[i,n]"
            )
        self.check()
        index, parts = c.part
        layers = layers_of(self.method, self.config, self.target) if c.states == "store" else ()
        how = PrepareConfig(c.limit, c.max_tokens, c.temperatures, c.mix, layers, c.seed, c.part)
        sees = self.method in ("qat", "distill") or bool(layers)  # states are computed while the target looks
        rows = [self._asked(row, sees) for row in ordered(self._prompts(), how)]
        longest = min(c.prompt_tokens, self.llm.runner.max_length - 1)
        kept = [one for one in rows if one is not None and len(one.token_ids) <= longest]
        skipped, total, tokens = len(rows) - len(kept), len(kept[index::parts]), 0
        if not total:
            raise ConfigError(
                "there is no prompt to answer", got=f"{skipped} too long", fix="raise prepare.prompt_tokens"
            )
        folder = self.out / f"answers-{index}"
        with only_run(self.out, folder.name):  # other parts are written by other processes
            for written in prepare(self.llm.runner, kept, self.target.eos_ids, how, folder):
                tokens += written.tokens
                yield Preparing(written.answers, total, tokens, skipped)
        yield Done("prepare", folder, {"answers": total, "skipped": skipped})

    def _prompts(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = []
        for path in self.config.prompts:
            for number, line in enumerate(read_text(path, "the prompts in").split("\n"), start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    rows.append(row_of(parse_json(line, where), Path(path).parent, where))
        if not rows:
            raise ConfigError(
                "there are no prompts to answer", fix="name files in the configuration, as prompts: [a.jsonl]"
            )
        return rows

    def _asked(self, row: Mapping[str, object], sees: bool) -> Asked | None:
        """A text as a user's message where the model has a template for one; heads are served the same way.

        None for what fills the context. Raises `ConfigError` for pictures that this method does not read.
        """
        source, chat = str(row.get("source", "")), chat_of(row)
        if has_images(chat) and not sees:
            reads = layers_of(self.method, self.config, self.target)
            fix = "prepare them with prepare.states=store" if reads else "take prompts without them"
            raise ConfigError(f"{self.method} does not learn from pictures" + " read again" * bool(reads), fix=fix)
        if "prompt" in row and self.target.vision is None and not getattr(self.llm.tokenizer, "chat_template", None):
            return Asked(source, list(self.llm.tokenizer.encode(str(row["prompt"]))))
        try:
            return asked(self.llm.runner, source, chat)
        except CacheFull:
            return None

    # train

    def train(self) -> Iterator[StageEvent]:
        """Train a head on each fraction of the answers, smallest first, and keep each as a folder."""
        self.check()
        with only_run(self.out, "train"):
            for fraction in sorted(set(self.config.train.fractions)):
                yield from self._train(fraction)
            if is_main():
                draw(self.out)

    def _train(self, fraction: float) -> Iterator[StageEvent]:
        config, place = self.config.train, self.head_folder(fraction)
        if (place / "config.json").exists():
            check_same_run(place, self.config, self.target.fingerprint)
            yield Done("train", place, {"fraction": fraction}, was_there=True)
            return
        folder = self.out / ("train" if fraction == 1.0 else f"train-{fraction:g}")
        with _main_first():
            everything = self._answers(folder)
        answers, held_out = everything.split(config.held_out)
        answers = answers.limited(config.limit)
        answers = answers.limited(max(1, round(fraction * len(answers))))
        recipe = recipe_for(self.method, self.config, self.target, answers)
        online = None if answers.has_states and held_out.has_states else OnlineStates(self.target)
        for event in train(recipe, answers, config, folder, online, held_out):
            yield Training(fraction, event)
            if isinstance(event, Finished) and is_main():
                result = save_trained(place, recipe, self.target, self.config, answers, folder)
                yield Done("train", place, {"fraction": fraction, **result})

    def _answers(self, folder: Path) -> Answers:
        """The answers, those of a run that goes on being the ones it began with."""
        folders = [str(Path(name)) for name in self.config.answers] or sorted(
            str(path) for path in self.out.glob("answers-*")
        )
        if not folders:
            raise ConfigError(f"there are no answers in {str(self.out)!r}", fix="run the stage `prepare` first")
        for name in folders:
            self._same_target(Path(name))
        begun = read_lines(folder)
        lines = begun or {name: len(written(Path(name))) for name in folders}
        answers = Answers.read(lines, lines)
        most = max((max(ids) for ids in answers.texts), default=0)
        if most >= self.target.vocab_size:
            raise ConfigError(
                "the answers hold tokens that the target does not have", got=most,
                expected=f"0 to {self.target.vocab_size - 1}", fix="prepare answers of this model in a new folder",
            )  # fmt: skip
        if begun is None:
            write_lines(folder, lines)
        return answers

    def _same_target(self, folder: Path) -> None:
        """Raise `IncompatibleModels` for answers that another model wrote; a folder without a record passes."""
        told = prepared(folder) or {}
        if told.get("fingerprint", self.target.fingerprint) != self.target.fingerprint:
            raise IncompatibleModels(
                f"the answers in {str(folder)!r} were written by another model", got=told.get("target"),
                expected=self.target.name, fix="prepare answers of this model, or name the model that wrote them",
            )  # fmt: skip

    # eval

    def eval(self, report: Progress = lambda what, done, total: None) -> Iterator[StageEvent]:
        """Decode held-out prompts with the trained heads; measurements already in a head's record are kept."""
        self.check()
        if not is_main():
            return
        with only_run(self.out, "train"):
            for fraction in sorted(set(self.config.train.fractions)):
                yield self._eval(fraction, report)
            draw(self.out)

    def _eval(self, fraction: float, report: Progress) -> Done:
        head = self.head_folder(fraction)
        if not (head / "config.json").exists():
            raise ConfigError(f"there is no head in {str(head)!r}", fix="run the stage `train` first")
        trials = list[Trial]()
        with understood(f"the head {str(head)!r}", "remove it, and train again"):
            done, target = recorded(head), self._target_of(head)
        for trial in evaluate(head, self.method, target, self._evaluation, done, report):
            trials.append(trial)
            if trial not in done:
                record_acceptance(head, target, [*trials, *(t for t in done if t not in trials)])
        path = self.out / ("eval.json" if fraction == 1.0 else f"eval-{fraction:g}.json")
        told = [trial.as_dict() for trial in trials]
        write_text(path, json.dumps(told, indent=1) + "\n")
        return Done("eval", path, {"fraction": fraction, "trials": told})

    @property
    def _evaluation(self) -> EvalSection:
        """How heads are measured; a distilled draft sees what it saw while it was trained."""
        how = self.config.eval
        sight = self.config.head.get("vision", "auto") if self.method == "distill" else "auto"
        return how if sight == "auto" else replace(how, drafter={"vision": sight, **how.drafter})

    def _target_of(self, head: Path) -> LoadedModel:
        """What a head drafts for: the run's target, or the one that the run made of it, whose folder may be stale."""
        if is_draft(read_record(head)):
            return self.target
        info, folder = head_info(head), model_beside(head)
        if info.fingerprint != self.target.fingerprint and (folder / "config.json").exists():
            made = load_model(str(folder), self.config.dtype, self.config.device)
            if made.fingerprint == info.fingerprint:
                return made
        return self.target


def _main_first() -> AbstractContextManager[None]:
    """The main process goes first, and the others find what it wrote."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return nullcontext()
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available()).main_process_first()
