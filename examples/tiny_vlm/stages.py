"""The stages of `paceline train vlm`, each of which can be stopped and called again.

out/eyes/                   checkpoints, log.jsonl; eyes.safetensors once finished        eyes
out/talk/                   checkpoints, log.jsonl                                        talk
out/tiny-vlm/               the packaged model: low-rank layers, tower, projector         talk, once finished
out/model/                  the same merged, as plain transformers loads it               talk, once finished
out/distill/                checkpoints, log.jsonl                                        distill
out/tiny-vlm-small/         the packaged sibling, without eyes of its own                 distill, once finished
out/model-small/            the same merged                                               distill, once finished
out/eval.json               real decoding with both                                       eval
"""

import json
import os
import shutil
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from safetensors.torch import load_file, save

from paceline.errors import ConfigError
from paceline.eval.suites import EasyVqa, load_easy_vqa
from paceline.hf.load import device_of
from paceline.system.files import write_bytes, write_text
from paceline.system.provenance import sha256_of
from paceline.train.log import Finished, read_log
from paceline.train.run_folder import is_main, only_run, understood
from paceline.train.stages import Done
from paceline.zoo import ZOO, resolve
from paceline.zoo.merge import base_fingerprint
from paceline.zoo.packaged import ABOUT, PackagedVlm, read_vlm

from .check import check_run
from .config import DistillSection, EyesSection, TalkSection, VlmConfig
from .course import CourseEvent, Schedule, Task, follow
from .package import Eyes, Trained, merge_once, package_vlm, write_record
from .settled import check_settings, note_settings, settings_of
from .tasks import hash_easy

STAGES = ("eyes", "talk", "distill", "eval")
_EYES = "eyes.safetensors"


@dataclass(frozen=True)
class Asking:
    """How far the stage `eval` is with a suite of questions."""

    model: str
    suite: str
    done: int
    total: int
    right: float


VlmEvent: TypeAlias = CourseEvent | Asking | Done


@final
class VlmStages:
    """One run. todo: the stages that will be asked for."""

    def __init__(self, config: VlmConfig, todo: Seq[str] = STAGES):
        self.config, self.out, self._todo = config, Path(config.out), todo

    def run(self, stage: str) -> Iterator[VlmEvent]:
        """One stage to its end; all processes begin it when the first has written what the one before made."""
        self.check()
        self._wait()
        with only_run(self.out, "train"):
            yield from {"eyes": self.eyes, "talk": self.talk, "distill": self.distill, "eval": self.eval}[stage]()

    def check(self) -> None:
        """Raise `ConfigError` for what a stage would refuse. Nothing is written."""
        check_run(self.config, self.language_model, self.device, self._todo)
        if "distill" in self._todo and self.config.distill.teacher is not None:
            _ = self._teacher
        _ = self._easy

    @cached_property
    def language_model(self) -> Path:
        """Folder of the language model; pulled where it is a name of the zoo."""
        place = Path(resolve(self.config.model))
        if not (place / "config.json").is_file():
            raise ConfigError(
                "the language model must be a local folder or a name of the zoo", got=repr(self.config.model),
                fix="download it, and name its folder",
            )  # fmt: skip
        return place

    @property
    def device(self) -> torch.device:
        """Where this process trains."""
        rank = os.environ.get("LOCAL_RANK")  # set by `accelerate launch`: one process a device
        own = f"cuda:{rank}" if rank is not None and torch.cuda.is_available() else None
        return device_of(self.config.device or own)

    @property
    def packaged(self) -> Path:
        """Folder of the packaged model."""
        return self.out / self.config.name

    @property
    def packaged_small(self) -> Path:
        """Folder of the packaged sibling."""
        return self.out / f"{self.config.name}-small"

    def eyes(self) -> Iterator[VlmEvent]:
        """Tower and projector learn to see."""
        from .tasks import EyesTask

        place = self.out / "eyes" / _EYES
        if self._is_done("eyes", place):
            yield Done("eyes", place, {}, was_there=True)
            return
        task = EyesTask(self.language_model, self.config, self.device)
        yield from self._followed("eyes", task, self.config.eyes)
        if is_main():
            state = Eyes(task.eyes.tower.state_dict(), task.eyes.projector.state_dict())
            self._note("eyes")
            write_bytes(place, save({name: value.cpu() for name, value in state.named().items()}))
            yield Done("eyes", place, self._told("eyes"))

    def talk(self) -> Iterator[VlmEvent]:
        """The language model learns to speak of what they see; then everything is packaged and merged."""
        from .tasks import TalkTask

        if self._is_done("talk", self.packaged / ABOUT):
            yield Done("talk", self.packaged, {}, was_there=True)
            return
        seen = self.out / "eyes" / _EYES
        if not seen.exists():
            raise ConfigError(f"there are no eyes in {str(self.out)!r}", fix="run the stage `eyes` first")
        easy, test = self._easy
        with understood(f"the file {str(seen)!r}", "remove it, and run the stage `eyes` again"):
            found = Eyes.of(load_file(seen))
        task = TalkTask(self.language_model, found, self.config, self.device, easy, test)
        yield from self._followed("talk", task, self.config.talk)
        if is_main():
            self._note("talk")
            trained = Trained(task.lora, task.eyes, tower=self.config.tower, record=self._record("talk"))
            package_vlm(trained, self.packaged, self.language_model, self._base)
            merge_once(self.packaged, self.language_model, self.out / "model")
            yield Done("talk", self.packaged, self._told("talk"))

    def distill(self) -> Iterator[VlmEvent]:
        """A sibling with fewer layers learns the trained model's law."""
        from .distill import DistillTask

        if self._is_done("distill", self.packaged_small / ABOUT):
            yield Done("distill", self.packaged_small, {}, was_there=True)
            return
        teacher = self._teacher
        if is_main():
            self._put_beside(teacher)
            merge_once(teacher.folder, self.language_model, self.out / "model")
        self._wait()
        easy, test = self._easy
        task = DistillTask(
            self.language_model, teacher, self.out / "model", self.config, self.device, easy, test
        )  # fmt: skip
        yield from self._followed("distill", task, self.config.distill)
        if is_main():
            self._note("distill")
            how = self.config.distill
            record = self._record("distill")
            trained = Trained(task.lora, None, layers=how.layers, over=how.over, tower=self.config.tower, record=record)
            package_vlm(trained, self.packaged_small, self.language_model, self._base, beside=self.packaged)
            merge_once(self.packaged_small, self.language_model, self.out / "model-small")
            yield Done("distill", self.packaged_small, self._told("distill"))

    def eval(self) -> Iterator[VlmEvent]:
        """Ask the packaged models of this run, as they are once merged, and put the results on their cards."""
        from .evaluate import evaluate, suites, table_of

        found = [place for place in (self.packaged, self.packaged_small) if (place / ABOUT).exists()]
        if not found:
            raise ConfigError(f"there is no packaged model in {str(self.out)!r}", fix="run the stage `talk` first")
        if not is_main():
            return
        asked = suites(self.config.eval, self.config.easy_vqa)
        told: dict[str, Any] = {}
        for place in found:
            merged = self.out / ("model" if place == self.packaged else "model-small")
            merge_once(place, self.language_model, merged)
            results: dict[str, Any] = {}
            for suite, done, result in evaluate(merged, asked, self.config.eval, self.config.device):
                results[suite] = result
                yield Asking(place.name, suite, done, len(asked[suite]), result["right"])
            told[place.name] = results
            write_record(place, {"evaluation": table_of(results), "evaluated": asdict(self.config.eval)})
        path = self.out / "eval.json"
        write_text(path, json.dumps(told, indent=1) + "\n")
        yield Done("eval", path, told)

    # Inside

    def _is_done(self, stage: str, result: Path) -> bool:
        """Whether it is finished. Raises `ConfigError` where that was another run."""
        if not result.exists():
            return False
        check_settings(self.out / stage, self._settings(stage), result if stage == "eyes" else result.parent)
        return True

    def _note(self, stage: str) -> None:
        note_settings(self.out / stage, self._settings(stage))

    def _settings(self, stage: str) -> dict[str, object]:
        """What the result depends on; of files a hash."""
        seen, eyes = None, self.out / "eyes" / _EYES
        if stage == "distill":
            seen = self._teacher.sha256
        elif stage == "talk" and eyes.exists():
            seen = sha256_of(eyes)
        return settings_of(self.config, stage, base_fingerprint(self.language_model), hash_easy(self._easy[0]), seen)

    @property
    def _teacher(self) -> PackagedVlm:
        """Of the sibling."""
        beside = self.packaged if self.config.distill.teacher is None else Path(self.config.distill.teacher)
        if not (beside / ABOUT).exists():
            raise ConfigError(f"there is no packaged model in {str(beside)!r}", fix="run the stage `talk` first")
        return read_vlm(beside)

    @cached_property
    def _easy(self) -> tuple[list[EasyVqa], list[EasyVqa]]:
        """Training and test split of easy-VQA; empty without a folder."""
        if self.config.easy_vqa is None:
            return [], []
        folder = Path(self.config.easy_vqa)
        with understood(f"easy-VQA in {str(folder)!r}", "unpack its archive again"):
            return load_easy_vqa(folder), load_easy_vqa(folder, "test")

    def _wait(self) -> None:
        """For every other process."""
        if os.environ.get("WORLD_SIZE", "1") != "1":
            from accelerate import PartialState

            PartialState(cpu=self.device.type == "cpu").wait_for_everyone()

    @property
    def _base(self) -> str:
        return self.config.model if self.config.model in ZOO else self.language_model.name

    def _followed(
        self, stage: str, task: Task[Any], section: EyesSection | TalkSection | DistillSection
    ) -> Iterator[VlmEvent]:
        c = self.config
        how = Schedule(
            section.steps, section.minutes, section.warmup, section.weight_decay, c.clip, c.checkpoint_seconds,
            c.log_every, c.evaluate_every,
        )  # fmt: skip
        for event in follow(task, how, self.out / stage):
            if not isinstance(event, Finished):
                yield event

    def _told(self, stage: str) -> dict[str, Any]:
        evaluated = [line for line in read_log(self.out / stage) if line["event"] == "evaluation"]
        return {key: evaluated[-1][key] for key in ("step", "loss", "parts", "agreement")} if evaluated else {}

    def _record(self, stage: str) -> dict[str, Any]:
        """What the folder's training.json keeps: nothing that names a place on this machine."""
        c, (easy, _) = self.config, self._easy
        section = asdict(getattr(c, stage)) | {"teacher": None}
        lines = read_log(self.out / stage)
        last = {key: self._told(stage).get(key) for key in ("loss", "parts")}
        data: dict[str, Any] = {"scenes": "rendered by this package, fresh ones at every step", "seed": c.seed}
        if easy:
            data["easy-VQA (MIT)"] = f"train split, {sum(len(one.questions) for one in easy)} questions"
        training = {key: value for key, value in section.items() if value is not None}
        training |= {
            "steps": lines[-1]["step"],
            "tokens, pictures included": lines[-1]["tokens"],
            "held out": last["parts"],
        }
        evaluated = [line for line in lines if line["event"] == "evaluation"]
        return {
            "base_model": c.base_model or self._base, "licence": c.licence, "data": data, "training": training,
            "log": evaluated,
        }  # fmt: skip

    def _put_beside(self, teacher: PackagedVlm) -> None:
        """Copy a teacher of another place to where this run's own would lie: its sibling names files beside it."""
        if teacher.folder.resolve() == self.packaged.resolve():
            return
        if (self.packaged / ABOUT).exists():
            if read_vlm(self.packaged).sha256 != teacher.sha256:
                raise ConfigError(
                    "the teacher would replace another trained model", got=str(teacher.folder),
                    expected=f"the model in {str(self.packaged)!r}, or none there",
                    fix="leave distill.teacher out, or give another out",
                )  # fmt: skip
            return
        shutil.copytree(teacher.folder, self.packaged, dirs_exist_ok=True, ignore=shutil.ignore_patterns(ABOUT))
        shutil.copy2(teacher.folder / ABOUT, self.packaged / ABOUT)  # last: with it the folder counts as whole
