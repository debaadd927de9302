"""The result of a run as a folder: a head, or a draft model as transformers loads it, with its record and its card."""

import json
import shlex
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.processing_utils import ProcessorMixin

from ..errors import ConfigError
from ..eval.trials import Trial
from ..heads import head_info, load_head, method_of, model_card, read_record, save_head
from ..heads.card import acceptance_table, card, fact_list, front_matter
from ..heads.folder import CARD, RECORD, WEIGHTS
from ..runner import LoadedModel
from ..system.files import new_folder, write_text
from ..system.provenance import provenance, sha256_of
from .config import RunConfig
from .data import Answers, read_begun
from .log import read_log
from .recipe import Recipe
from .run_folder import check_same, understood

DRAFT_MODEL = "draft_model"
_LIMITS = (
    "It drafts for any model of the same tokenizer, but was trained on the answers of the target named above.",
    "It changes what decoding costs, never what the target answers, under the exact rule (`paceline check`).",
)


def save_trained(
    place: Path, recipe: Recipe, target: LoadedModel, config: RunConfig, answers: Answers, log: Path
) -> dict[str, Any]:
    """Write the trained module as a head, or a draft model; returns what its record says about data and training."""
    data = {
        "answers": len(answers),
        "answer tokens": answers.num_tokens,
        "sources": sorted({one.source for one in answers.all} - {""}),
        "temperatures": sorted({one.temperature for one in answers.all}),
        "sha256": answers.hash(),
    }
    lines, c = read_log(log), config.train
    evaluated = [line for line in lines if line["event"] == "evaluation"]
    training: dict[str, Any] = {"steps": lines[-1]["step"], "tokens seen": lines[-1]["tokens"]}
    training |= {"epochs": c.epochs, "batch columns": c.max_tokens, "learning rate": c.lr, "seed": c.seed, **c.loss}
    if evaluated:
        training["held-out agreement"] = [round(share, 4) for share in evaluated[-1]["agreement"]]
        training["estimated accepted length"] = round(evaluated[-1]["accepted_length"], 3)
        for part, what in (("acceptance", "1 - TV"), ("greedy", "greedy agreement with the target")):
            if part in evaluated[-1]["parts"]:
                training[f"held-out {what}"] = round(evaluated[-1]["parts"][part], 4)
    command = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]  # artefacts travel
    record = {
        "base_model": config.base_model or target.name,
        "licence": config.licence,
        "data": data,
        "training": training,
        "trained_for": target.fingerprint,  # of a full SPACE run not the model that its head drafts for
        "provenance": {**provenance(), "command": command},
        "config": _settings(config),
        "log": evaluated,
    }
    module, drafted_for = recipe.result(target, model_beside(place))
    if isinstance(module, PreTrainedModel):
        save_draft(place, module, target, record, recipe.processor)
        return {"data": data, "training": training}
    head = cast("Any", module)
    if drafted_for is not target:
        record["fine_tuned"] = {"of": record["base_model"], "folder": model_beside(place).name, "head": place.name}
    card = model_card(_name(place, method_of(head), drafted_for), head, drafted_for, record)
    save_head(place, head, drafted_for, record, card)
    return {"data": data, "training": training}


def model_beside(head: Path) -> Path:
    """Where a run that changes its target keeps the new one: out/model for out/head."""
    return head.with_name("model")


def _name(folder: Path, method: str, target: LoadedModel) -> str:
    """What a card calls a head: its folder's name, unless that is just `head` or `draft`."""
    return f"{target.name}-{method}" if folder.name.startswith(("head", "draft")) else folder.name


def _settings(config: RunConfig) -> dict[str, Any]:
    """The settings that a record keeps: none that names a place on this machine."""
    return {"head": dict(config.head), "prepare": asdict(config.prepare), "train": asdict(config.train)}


# Draft models


def save_draft(
    place: Path, model: PreTrainedModel, target: LoadedModel, record: Mapping[str, object],
    processor: ProcessorMixin | None = None,
) -> None:  # fmt: skip
    """Write model (in bfloat16), tokenizer or processor, record and card into a new folder, whole or not at all.

    Raises `ConfigError` for a folder that is there already and for weights that are not finite.
    """
    wrong = [name for name, tensor in model.named_parameters() if not bool(tensor.isfinite().all())]
    if wrong:
        raise ConfigError(f"the weight {wrong[0]!r} of this draft is not finite", fix="train with a lower rate")
    with new_folder(place) as made:
        dtype = model.dtype
        cast("Any", model).to(torch.bfloat16).save_pretrained(made, max_shard_size="100GB")
        cast("Any", model).to(dtype)
        reads = processor or target.tokenizer
        if reads is not None:
            reads.save_pretrained(made)
        full = {
            "method": DRAFT_MODEL,
            "target": {"name": target.name, "fingerprint": target.fingerprint, "vocab_size": target.vocab_size},
            "parameters": sum(p.numel() for p in model.parameters()),
            "sees": processor is not None,
            **record,
            "weights_sha256": sha256_of(made / WEIGHTS),
        }
        write_text(made / RECORD, json.dumps(full, indent=2) + "\n")
        write_text(made / CARD, draft_card(place.name, full))


def is_draft(record: Mapping[str, object]) -> bool:
    """Whether a training.json is that of a draft model."""
    return record.get("method") == DRAFT_MODEL


def draft_card(name: str, record: Mapping[str, object]) -> str:
    """README.md of a draft model, from the record of its training."""
    target = cast("Mapping[str, str]", record["target"])
    kind = "image-text-to-text" if record.get("sees") else "text-generation"
    front = front_matter(record, "transformers", kind, ("speculative-decoding", "draft-model"))
    facts = {
        "method": "a draft model distilled from its target (arXiv 2310.08461)",
        "target": target["name"],
        "target fingerprint": f"`{target['fingerprint']}`",
        "parameters": f"{record['parameters']:,} in bfloat16",
    }
    use = f"paceline generate {shlex.quote(target['name'])} --chat 'Hello.' --drafter model:{shlex.quote(name)}"
    introduction = f"# {name}\n\nA draft model for {target['name']}:\n\n```bash\n{use}\n```"
    return card(front, introduction, fact_list(facts), record, acceptance_table(record.get("acceptance")), _LIMITS)


# What is there already


def record_acceptance(head: Path, target: LoadedModel, trials: Seq[Trial]) -> None:
    """Put the measurements into the artefact's record and its card."""
    record = {**read_record(head), "acceptance": [trial.as_dict() for trial in trials]}
    write_text(head / RECORD, json.dumps(record, indent=2) + "\n")
    if is_draft(record):
        write_text(head / CARD, draft_card(head.name, record))
        return
    made, target = load_head(head, target), replace(target, name=head_info(head).target_name)  # not a folder's
    write_text(head / CARD, model_card(_name(head, method_of(made), target), made, target, record))


def check_same_run(head: Path, config: RunConfig, fingerprint: str) -> None:
    """Raise `ConfigError` where the artefact was made for another target, of other answers or with other settings.

    fingerprint: of the target.
    """
    log = head.with_name("train")
    asked = json.loads(json.dumps(_settings(config)))
    with understood(f"the record in {str(head)!r}", f"remove {str(head)!r}, and train again"):
        record, lines = read_record(head), read_begun(log)
        kept: Any = record["config"]
        trained_for = record["trained_for"]
        then, now = (
            {f"{part}.{key}": value for part in ("head", "train") for key, value in settings.get(part, {}).items()}
            for settings in (kept, asked)
        )
    then |= {"model": trained_for}
    now |= {"model": fingerprint}
    if config.answers and lines is not None:
        then["answers"], now["answers"] = (
            sorted(str(Path(one).resolve()) for one in names) for names in (lines, config.answers)
        )
    beside = [f"`{path.name}`" for path in (log, model_beside(head)) if path.exists() and path != head]
    fix = f"choose another out, or remove it and {' and '.join(beside) or 'what is'} beside it to begin again"
    check_same(repr(str(head)), then, now, fix)
