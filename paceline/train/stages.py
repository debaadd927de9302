"""The three stages of a run, each of which can be stopped and called again: prepare, train, eval.

    out/answers-0/       answers of part 0 and their states         prepare
    out/train/           checkpoints, log.jsonl, data.json          train
    out/head/            the trained head                           train, once finished
    out/draft/           of qat and distill: the trained draft      instead of head/
    out/model/           the fine-tuned target of a full SPACE run  train, once finished
    out/eval.json        acceptance in decoding                     eval, which also writes it into the head's record
    out/curve.png        estimated accepted length against tokens   train

Stages yield events; the command line draws them.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, final

from ..errors import ConfigError, IncompatibleModels
from ..hf.chats import has_images
from ..llm import LLM
from ..measure.trials import Trial, trials_of
from ..methods.heads.info import read_record, trained_info
from ..methods.method import named
from ..methods.table import trained_method
from ..system.files import Progress, check_folder, silent, write_text
from ..target import LoadedModel, load_model
from ..zoo import resolve
from .artefact import check_same_run, model_beside, record_acceptance, save_trained
from .config import EvalSection, RunConfig
from .data import DATA, Answers, read_begun
from .log import TrainEvent, draw, need_tensorboard
from .loop import train
from .measure import check_eval, evaluate
from .prepare import chat_of, encode_line, ordered, prepare, read_files
from .prepare import read_record as read_prepared
from .recipe import Plan
from .run_folder import is_main, local_device, main_first, need, only_run, understood
from .task import AnswerTask


@dataclass(frozen=True)
class Preparing:
    """Progress of `prepare`. skipped: prompts longer than `prompt_tokens`."""

    done: int
    total: int
    tokens: int
    skipped: int


@dataclass(frozen=True)
class Done:
    """The end of a stage: the path of its result, the result, and whether it existed before."""

    stage: str
    path: Path
    result: Mapping[str, Any]
    was_there: bool = False


StageEvent: TypeAlias = Preparing | TrainEvent | Done


@final
class Stages:
    """One run of one method. The target is loaded once, when a stage first needs it."""

    def __init__(self, method: str, config: RunConfig):
        self.method, self.recipe, self.config, self.out = (
            method,
            named(trained_method(method).recipe),
            config,
            Path(config.out),
        )
        self._is_checked = False

    @cached_property
    def llm(self) -> LLM:
        """The target, with plain decoding."""
        how = self.config.prepare
        return LLM(
            resolve(self.config.model), dtype=self.config.dtype, device=self.config.device or local_device(),
            numerics="fast", max_num_seqs=how.batch, max_model_len=how.prompt_tokens + how.max_tokens + 1,
        )  # fmt: skip

    @property
    def target(self) -> LoadedModel:
        return self.llm.loaded

    @cached_property
    def plan(self) -> Plan:
        return self.recipe.plan(self.method, self.config, self.target)

    def run(self, stage: str, report: Progress = silent) -> Iterator[StageEvent]:
        """Run the stage prepare, train or eval. report: the progress of eval. Raises as `check` does."""
        self.check()
        # Other parts of the answers are written by other processes.
        with only_run(self.out, f"answers-{self.config.prepare.part[0]}" if stage == "prepare" else "train"):
            yield from self._eval(report) if stage == "eval" else getattr(self, f"_{stage}")()

    def check(self) -> None:
        """Load the target and check the whole configuration against it, once. Nothing is written.

        Raises `ConfigError` or `IncompatibleModels` for what any stage would refuse.
        """
        if self._is_checked:
            return
        check_folder(self.out)
        need("accelerate", "training")
        if self.config.train.tensorboard:
            need_tensorboard()
        check_eval(self.result, self.method, self._evaluation)
        if self.config.train.prompts and not self.recipe.learns_prompts:
            fix = "train.prompts=false"
            raise ConfigError("only heads over the target's states learn from prompts", got=self.method, fix=fix)
        self.recipe.check(self.plan)
        self._is_checked = True

    @property
    def result(self) -> Path:
        """The folder of the trained head or draft."""
        return self.out / ("draft" if self.recipe.makes_draft else "head")

    def _prepare(self) -> Iterator[StageEvent]:
        """Let the target answer the prompts. Raises `ConfigError` without prompts."""
        c = self.config.prepare
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                "prepare is not for `accelerate launch`", fix="run n processes by themselves, with prepare.part=[i,n]"
            )
        index, parts = c.part
        layers = self.recipe.layers(self.plan)
        recomputes = bool(layers) and c.states == "online"
        layers = () if recomputes else layers
        reads_images = self.recipe.makes_draft or layers  # states are computed with the images
        lines = ordered(read_files(self.config.prompts), c)
        if not reads_images and any(has_images(chat_of(line)) for line in lines):
            fix = "prepare them with prepare.states=store" if recomputes else "take prompts without them"
            raise ConfigError(f"{self.method} does not learn from images" + " read again" * recomputes, fix=fix)
        rows = [encode_line(self.llm.runner, line) for line in lines]
        longest = min(c.prompt_tokens, self.llm.runner.max_length - 1)
        kept = [prompt for prompt in rows if prompt is not None and len(prompt.token_ids) <= longest]
        skipped, total, tokens = len(rows) - len(kept), len(kept[index::parts]), 0
        if not total:
            fix = "raise prepare.prompt_tokens"
            raise ConfigError("there is no prompt to answer", got=f"{skipped} too long", fix=fix)
        folder = self.out / f"answers-{index}"
        for new_tokens, done in prepare(self.llm.runner, kept, self.target.eos_ids, c, folder, layers):
            tokens += new_tokens
            yield Preparing(done, total, tokens, skipped)
        yield Done("prepare", folder, {"answers": total, "skipped": skipped})

    def _train(self) -> Iterator[StageEvent]:
        """Train on the answers, and write the result as a folder."""
        config, place, folder = self.config.train, self.result, self.out / "train"
        if (place / "config.json").exists():
            check_same_run(place, self.method, self.config, self.target.fingerprint)
            yield Done("train", place, {}, was_there=True)
            return
        with main_first(self.target.device):
            everything = self._answers(folder)
        answers, held_out = everything.split(config.held_out)
        answers = answers.limited(config.limit)
        recipe = self.recipe.build(self.plan, answers)
        task = AnswerTask(recipe, answers, held_out, config, self.target, self.plan.identity)
        yield from train(task, config, folder)
        if is_main():
            result = save_trained(place, self.method, recipe, self.target, self.config, answers, folder)
            draw(folder, self.out / "curve.png")
            yield Done("train", place, result)

    def _answers(self, folder: Path) -> Answers:
        """The answers; a resumed run uses those it started with."""
        folders = [str(Path(name)) for name in self.config.answers]
        folders = folders or sorted(str(path) for path in self.out.glob("answers-*"))
        if not folders:
            raise ConfigError(f"there are no answers in {str(self.out)!r}", fix="run the stage `prepare` first")
        for name in folders:
            record = read_prepared(Path(name)) or {}
            if record.get("fingerprint", self.target.fingerprint) != self.target.fingerprint:
                raise IncompatibleModels(
                    f"the answers in {name!r} were written by another model", got=record.get("target"),
                    expected=self.target.name, fix="prepare answers of this model, or name the model that wrote them",
                )  # fmt: skip
        begun = read_begun(folder)
        answers = Answers.read(begun or folders, begun)
        most = max((max(ids) for ids in answers.texts), default=0)
        if most >= self.target.vocab_size:
            raise ConfigError(
                "the answers have tokens that the target does not have", got=most,
                expected=f"0 to {self.target.vocab_size - 1}", fix="prepare answers of this model in a new folder",
            )  # fmt: skip
        if begun is None:
            write_text(folder / DATA, json.dumps(Counter(str(answer.folder) for answer in answers.all)) + "\n")
        return answers

    def _eval(self, report: Progress) -> Iterator[StageEvent]:
        """Decode prompts with the result; measurements that are in its record already are kept."""
        if not is_main():
            return
        head = self.result
        if not (head / "config.json").exists():
            raise ConfigError(f"there is no head in {str(head)!r}", fix="run the stage `train` first")
        trials = list[Trial]()
        with understood(f"the head {str(head)!r}", "remove it, and train again"):
            done, target = trials_of(read_record(head)), self._target_of(head)
        for trial in evaluate(head, self.method, target, self._evaluation, done, report):
            trials.append(trial)
            if trial not in done:
                record_acceptance(head, [*trials, *(t for t in done if t not in trials)])
        path = self.out / "eval.json"
        rows = [trial.as_dict() for trial in trials]
        write_text(path, json.dumps(rows, indent=1) + "\n")
        yield Done("eval", path, {"trials": rows})

    @property
    def _evaluation(self) -> EvalSection:
        """The settings of `eval`; a draft that reads images does so as in training."""
        how = self.config.eval
        vision = self.config.head.get("vision", "auto")
        return how if vision == "auto" else replace(how, drafter={"vision": vision, **how.drafter})

    def _target_of(self, head: Path) -> LoadedModel:
        """The model that a head drafts for: the run's target, or the fine-tuned one beside the head."""
        info, folder = trained_info(head), model_beside(head)
        if info.target.fingerprint != self.target.fingerprint and (folder / "config.json").exists():
            model = load_model(str(folder), self.config.dtype, self.config.device)
            if model.fingerprint == info.target.fingerprint:
                return model
        return self.target
