"""The stages of the training, each of which can be stopped and called again.

out/pretrain/               checkpoints, log.jsonl; vision.safetensors once finished      pretrain
out/sft/                    checkpoints, log.jsonl                                        sft
out/tiny-vlm/               the packaged model: low-rank layers, tower, projector         sft, once finished
out/model/                  the same merged, as plain transformers loads it               sft, once finished
out/distill/                checkpoints, log.jsonl                                        distill
out/tiny-vlm-small/         the packaged sibling, without vision parts of its own         distill, once finished
out/model-small/            the same merged                                               distill, once finished
out/eval.json               real decoding with both                                       eval
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from paceline_zoo.vlm import ABOUT, PackagedVlm, base_fingerprint, read_vlm
from safetensors.torch import load_file, save
from transformers import SiglipVisionModel

from paceline.errors import ConfigError
from paceline.hf.load import chosen_device
from paceline.system.files import read_json, write_bytes, write_text
from paceline.system.provenance import sha256_of
from paceline.train.log import Finished, TrainEvent, read_log
from paceline.train.loop import Task, train
from paceline.train.models import USUAL_LINEARS, check_memory, layers_of, linears_of, outlined, size_of
from paceline.train.run_folder import check_same, is_main, local_device, main_first, need, only_run, understood
from paceline.train.stages import Done
from paceline.zoo import ZOO, resolve

from .config import VlmConfig
from .model import image_token, kept_layers
from .package import Trained, merge_once, package_vlm, write_record
from .questions import EasyVqa, load_easy_vqa
from .sft import hash_easy

STAGES = ("pretrain", "sft", "distill", "eval")
_VISION = "vision.safetensors"
_SETTINGS = "settings.json"
_HARMLESS = ("micro_batch", "checkpoint_seconds", "log_every", "evaluate_every", "tensorboard")


@dataclass(frozen=True)
class Asking:
    """The progress of the stage `eval` in a suite of questions."""

    model: str
    suite: str
    done: int
    total: int
    right: float


VlmEvent: TypeAlias = TrainEvent | Asking | Done


@final
class VlmStages:
    """One run. todo: the stages that will be run."""

    def __init__(self, config: VlmConfig, todo: Sequence[str] = STAGES):
        self.config, self.out, self._todo = config, Path(config.out), todo
        self.packaged, self.packaged_small = self.out / config.name, self.out / f"{config.name}-small"

    def run(self, stage: str) -> Iterator[VlmEvent]:
        """One stage to its end; all processes begin it when the first has written the result of the one before."""
        with main_first(self.device):
            self.check()
        with only_run(self.out, "train"):
            yield from getattr(self, stage)()

    def check(self) -> None:
        """Raise `ConfigError` for what a stage would refuse. Nothing is written."""
        need("accelerate", "training")
        need("peft", "training a vision-language model", "pip install peft")
        config, device = self.config, self.device
        image_token(self.language_model)
        tower = size_of(lambda: SiglipVisionModel(config.tower.config()))
        check_memory(tower, "this tower", device, "smaller sizes in tower.*")
        ranks = {"sft": config.sft.rank, "distill": config.distill.rank}
        rank = max((ranks[stage] for stage in ranks if stage in self._todo), default=0)
        plain, _ = outlined(str(self.language_model))
        width = len(layers_of(plain)) * sum(map(sum, linears_of(plain, USUAL_LINEARS)[1]))  # parameters of rank 1
        check_memory(rank * width, "these low-rank layers", device, "a smaller rank")
        if "distill" in self._todo:
            kept_layers(self.language_model, config.distill.layers)
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
        return chosen_device(self.config.device or local_device())

    def pretrain(self) -> Iterator[VlmEvent]:
        """Vision pretraining of tower and projector."""
        from .pretrain import PretrainTask

        place = self.out / "pretrain" / _VISION
        if self._is_done("pretrain", place):
            yield Done("pretrain", place, {}, was_there=True)
            return
        task = PretrainTask(self.language_model, self.config, self.device)
        yield from self._trained("pretrain", task)
        if is_main():
            write_bytes(place, save({name: value.cpu() for name, value in task.module.parts.state_dict().items()}))
            yield Done("pretrain", place, self._last("pretrain"))

    def sft(self) -> Iterator[VlmEvent]:
        """The language model learns to answer; then everything is packaged and merged."""
        from .sft import SftTask

        if self._is_done("sft", self.packaged / ABOUT):
            yield Done("sft", self.packaged, {}, was_there=True)
            return
        file = self.out / "pretrain" / _VISION
        if not file.exists():
            raise ConfigError(f"there is no vision tower in {str(self.out)!r}", fix="run the stage `pretrain` first")
        with understood(f"the file {str(file)!r}", "remove it, and run the stage `pretrain` again"):
            vision = load_file(file)
        task = SftTask(self.language_model, vision, self.config, self.device, *self._easy)
        yield from self._trained("sft", task)
        if is_main():
            record, tower = self._record("sft"), self.config.tower
            trained = Trained(task.lora, task.parts.state_dict(), tower=tower, record=record)
            package_vlm(trained, self.packaged, self.language_model, self._base)
            merge_once(self.packaged, self.language_model, self.out / "model")
            yield Done("sft", self.packaged, self._last("sft"))

    def distill(self) -> Iterator[VlmEvent]:
        """A sibling with fewer layers learns the trained model's distributions."""
        from .distill import DistillTask

        if self._is_done("distill", self.packaged_small / ABOUT):
            yield Done("distill", self.packaged_small, {}, was_there=True)
            return
        teacher = self._teacher
        with main_first(self.device):
            merge_once(teacher.folder, self.language_model, self.out / "model")
        task = DistillTask(self.language_model, teacher, self.out / "model", self.config, self.device, *self._easy)
        yield from self._trained("distill", task)
        if is_main():
            how, record, tower = self.config.distill, self._record("distill"), self.config.tower
            trained = Trained(task.lora, None, layers=how.layers, tower=tower, record=record)
            package_vlm(trained, self.packaged_small, self.language_model, self._base, beside=teacher.folder)
            merge_once(self.packaged_small, self.language_model, self.out / "model-small")
            yield Done("distill", self.packaged_small, self._last("distill"))

    def eval(self) -> Iterator[VlmEvent]:
        """Ask the packaged models of this run, once merged, and put the results on their cards."""
        from .evaluate import evaluate, suites, table_of

        found = [place for place in (self.packaged, self.packaged_small) if (place / ABOUT).exists()]
        if not found:
            raise ConfigError(f"there is no packaged model in {str(self.out)!r}", fix="run the stage `sft` first")
        if not is_main():
            return
        asked = suites(self.config.eval, self.config.easy_vqa)
        report: dict[str, Any] = {}
        for place in found:
            merged = self.out / ("model" if place == self.packaged else "model-small")
            merge_once(place, self.language_model, merged)
            results: dict[str, Any] = {}
            for suite, done, result in evaluate(merged, asked, self.config.eval, self.config.device):
                results[suite] = result
                yield Asking(place.name, suite, done, len(asked[suite]), result["right"])
            report[place.name] = results
            write_record(place, {"evaluation": table_of(results), "evaluated": asdict(self.config.eval)})
        path = self.out / "eval.json"
        write_text(path, json.dumps(report, indent=1) + "\n")
        yield Done("eval", path, report)

    # Inside

    def _trained(self, stage: str, task: Task[Any]) -> Iterator[VlmEvent]:
        for event in train(task, getattr(self.config, stage), self.out / stage):
            if not isinstance(event, Finished):
                yield event
        if is_main():
            write_text(self.out / stage / _SETTINGS, json.dumps(self._settings(stage), indent=1) + "\n")

    def _is_done(self, stage: str, result: Path) -> bool:
        """Whether the stage is finished. Raises `ConfigError` where it was another run's."""
        if not result.exists():
            return False
        path, place = self.out / stage / _SETTINGS, result if stage == "pretrain" else result.parent
        fix = f"choose another out, or remove {str(place)!r} and {str(path.parent)!r} to begin again"
        with understood(f"the record of {str(place)!r}", fix):
            then = dict(read_json(path, "the record"))
        check_same(repr(str(place)), then, self._settings(stage), fix)
        return True

    def _settings(self, stage: str) -> dict[str, object]:
        """What the result depends on; a hash of each file."""
        config, section = self.config, asdict(getattr(self.config, stage))
        settings: dict[str, object] = {"model": base_fingerprint(self.language_model)}
        settings |= {f"{stage}.{key}": value for key, value in section.items() if key not in _HARMLESS}
        if stage == "distill":
            settings["distill.teacher"] = self._teacher.sha256
        else:
            settings |= {f"tower.{key}": value for key, value in asdict(config.tower).items()}
        if stage == "sft":
            file = self.out / "pretrain" / _VISION
            settings["vision"] = sha256_of(file) if file.exists() else None
        if stage != "pretrain":
            settings |= {"easy_vqa": hash_easy(self._easy[0]), "licence": config.licence, "base": config.base_model}
        return settings

    @property
    def _teacher(self) -> PackagedVlm:
        if not (self.packaged / ABOUT).exists():
            raise ConfigError(f"there is no packaged model in {str(self.packaged)!r}", fix="run the stage `sft` first")
        return read_vlm(self.packaged)

    @cached_property
    def _easy(self) -> tuple[list[EasyVqa], list[EasyVqa]]:
        """Training and test split of easy-VQA; empty without a folder."""
        if self.config.easy_vqa is None:
            return [], []
        folder = Path(self.config.easy_vqa)
        with understood(f"easy-VQA in {str(folder)!r}", "unpack its archive again"):
            return load_easy_vqa(folder), load_easy_vqa(folder, "test")

    @property
    def _base(self) -> str:
        return self.config.model if self.config.model in ZOO else self.language_model.name

    def _last(self, stage: str) -> dict[str, Any]:
        evaluated = [line for line in read_log(self.out / stage) if line["event"] == "evaluation"]
        return {key: evaluated[-1][key] for key in ("step", "loss", "parts", "agreement")} if evaluated else {}

    def _record(self, stage: str) -> dict[str, Any]:
        """The contents of the folder's training.json: nothing that names a place on this machine."""
        c, (easy, _) = self.config, self._easy
        lines = read_log(self.out / stage)
        data: dict[str, Any] = {"scenes": "drawn from seeds, fresh ones at every step"}
        if easy:
            data["easy-VQA (MIT)"] = f"train split, {sum(len(one.questions) for one in easy)} questions"
        section = {key: value for key, value in asdict(getattr(c, stage)).items() if key not in _HARMLESS}
        training = {**section, "steps": lines[-1]["step"], "held out": self._last(stage).get("parts")}
        return {
            "base_model": c.base_model or self._base, "licence": c.licence, "data": data, "training": training,
            "log": [line for line in lines if line["event"] == "evaluation"],
        }  # fmt: skip
