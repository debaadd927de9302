"""The result of a run as a folder: a head, or a draft model in transformers' format, with record and model card."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.processing_utils import ProcessorMixin

from ..errors import ConfigError
from ..hf.checkpoint import quietly
from ..measure.trials import Trial
from ..methods.heads.folder import save_head, write_record
from ..methods.heads.info import DRAFT_MODEL, WEIGHTS, HeadTarget, read_record
from ..system.files import new_folder
from ..system.provenance import provenance, sha256_of
from ..target import LoadedModel
from .config import RunConfig
from .data import Answers, read_begun
from .log import read_log
from .recipe import Recipe
from .run_folder import check_same, understood


def save_trained(
    place: Path, method: str, recipe: Recipe, target: LoadedModel, config: RunConfig, answers: Answers, log: Path
) -> dict[str, Any]:
    """Write the trained module as a head or draft model; returns the parts of its record on data and training."""
    data = {
        "answers": len(answers),
        "answer tokens": answers.num_tokens,
        "sources": sorted({answer.source for answer in answers.all} - {""}),
        "temperatures": sorted({answer.temperature for answer in answers.all}),
        "sha256": answers.hash(),
    }
    lines, c = read_log(log), config.train
    evaluated = [line for line in lines if line["event"] == "evaluation"]
    training: dict[str, Any] = {"steps": lines[-1]["step"], "tokens seen": lines[-1]["tokens"]}
    columns = c.max_tokens if c.accumulate == 1 else f"{c.accumulate} of {c.max_tokens}"
    training |= {"epochs": c.epochs, "batch columns": columns, "optimizer": c.optimizer}
    training |= {"learning rate": c.lr, "seed": c.seed}
    training |= {"prompt tokens too": c.prompts, **{f"loss.{key}": value for key, value in c.loss.items()}}
    if evaluated:
        training["held-out agreement"] = [round(share, 4) for share in evaluated[-1]["agreement"]]
        training["estimated accepted length"] = round(evaluated[-1]["accepted_length"], 3)
        for part, measure in (("acceptance", "1 - TV"), ("greedy", "greedy agreement with the target")):
            if part in evaluated[-1]["parts"]:
                training[f"held-out {measure}"] = round(evaluated[-1]["parts"][part], 4)
    record = {
        "base_model": config.base_model or target.name,
        "licence": config.licence,
        "data": data,
        "training": training,
        "trained_for": target.fingerprint,  # in a full SPACE run not the model that the head drafts for
        "provenance": {**provenance(), "command": [without_folders(word) for word in sys.argv]},
        "config": _settings(method, config),
        "log": evaluated,
    }
    module, drafted_for = recipe.result(target, model_beside(place))
    if isinstance(module, PreTrainedModel):
        save_draft(place, module, target, record, recipe.processor)
        return {"data": data, "training": training}
    head = cast("Any", module)
    if drafted_for is not target:
        record["fine_tuned"] = {"of": record["base_model"], "folder": model_beside(place).name, "head": place.name}
    save_head(place, head, drafted_for, record)
    return {"data": data, "training": training}


def model_beside(head: Path) -> Path:
    """The folder of a fine-tuned target: out/model for out/head."""
    return head.with_name("model")


def without_folders(word: str) -> str:
    """A word of a command with absolute paths reduced to names, since artefacts are published."""
    return re.sub(r"(^|[=\[, ])/[^,\] ]*/", r"\1", word)


def _settings(method: str, config: RunConfig) -> dict[str, Any]:
    """The settings for a record, without paths of this machine."""
    start = config.start and Path(config.start).name
    sections = {"head": dict(config.head), "prepare": asdict(config.prepare), "train": asdict(config.train)}
    return {"method": method, "start": start, **sections}


# Draft models


@quietly()
def save_draft(
    place: Path, model: PreTrainedModel, target: LoadedModel, record: Mapping[str, object],
    processor: ProcessorMixin | None = None,
) -> None:  # fmt: skip
    """Write model (in bfloat16), tokenizer or processor, record and card into a new folder, atomically.

    Raises `ConfigError` for an existing folder and for weights that are not finite.
    """
    wrong = [name for name, tensor in model.named_parameters() if not bool(tensor.isfinite().all())]
    if wrong:
        raise ConfigError(f"the weight {wrong[0]!r} of this draft is not finite", fix="train with a lower rate")
    with new_folder(place) as written:
        dtype = model.dtype
        cast("Any", model).to(torch.bfloat16).save_pretrained(written, max_shard_size="100GB")
        cast("Any", model).to(dtype)
        reads = processor or target.tokenizer
        if reads is not None:
            reads.save_pretrained(written)
        about = {"method": DRAFT_MODEL, "target": asdict(HeadTarget.of(target)), "sees": processor is not None}
        write_record(written, place.name, {**about, **record, "weights_sha256": sha256_of(written / WEIGHTS)})


# What is there already


def record_acceptance(head: Path, trials: Sequence[Trial]) -> None:
    """Write the measurements to the artefact's record and card."""
    write_record(head, head.name, {**read_record(head), "acceptance": [trial.as_dict() for trial in trials]})


_WITHOUT_INFLUENCE = ("evaluate_every", "checkpoint_seconds", "log_every", "tensorboard")
"""Settings of `train` that do not change the result."""


def check_same_run(head: Path, method: str, config: RunConfig, fingerprint: str) -> None:
    """Raise `ConfigError` if the artefact was made by another method, for another target, from other answers or with
    other settings.

    fingerprint: of the target.
    """
    log = head.with_name("train")
    with understood(f"the record in {str(head)!r}", f"remove {str(head)!r}, and train again"):
        record, lines = read_record(head), read_begun(log)
        kept, asked = cast("dict[str, Any]", record["config"]), _settings(method, config)
        trained_for = record["trained_for"]
        then, now = (
            {
                f"{part}.{key}": value
                for part in ("head", "train")
                for key, value in settings.get(part, {}).items()
                if key not in _WITHOUT_INFLUENCE
            }
            for settings in (kept, asked)
        )
    then |= {"model": trained_for, "method": kept.get("method"), "start": kept.get("start")}
    now |= {"model": fingerprint, "method": method, "start": asked["start"]}
    if config.answers and lines is not None:
        then["answers"], now["answers"] = (
            sorted(str(Path(name).resolve()) for name in names) for names in (lines, config.answers)
        )
    beside = [f"`{path.name}`" for path in (log, model_beside(head)) if path.exists() and path != head]
    fix = f"choose another out, or remove it and {' and '.join(beside) or 'what is'} beside it to begin again"
    check_same(repr(str(head)), then, now, fix)
