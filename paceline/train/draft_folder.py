"""A trained draft model as an ordinary transformers folder, with the record and the card that heads have too."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.processing_utils import ProcessorMixin

from ..errors import ConfigError
from ..heads.card import acceptance_table, fact_list
from ..heads.folder import CARD, RECORD, WEIGHTS
from ..runner import LoadedModel
from ..system.files import check_new, new_folder
from ..system.provenance import sha256_of

METHOD = "draft_model"
_LIMITS = (
    "It drafts for any model of the same tokenizer, but was trained on the answers of the target named above.",
    "It changes what decoding costs, never what the target answers, under the exact rule (`paceline check`).",
)


def save_draft(
    place: Path,
    model: PreTrainedModel,
    target: LoadedModel,
    record: Mapping[str, object],
    processor: ProcessorMixin | None = None,
) -> None:
    """Write model (in bfloat16), tokenizer or processor, record and card into a new folder, whole or not at all.

    Raises `ConfigError` for a folder that is there already and for weights that are not finite.
    """
    check_new(place)
    wrong = [name for name, tensor in model.named_parameters() if not bool(tensor.isfinite().all())]
    if wrong:
        raise ConfigError(
            f"the weight {wrong[0]!r} of this draft is not finite", fix="train again with a lower learning rate"
        )
    with new_folder(place) as made:
        dtype = model.dtype
        cast("Any", model).to(torch.bfloat16).save_pretrained(made, max_shard_size="100GB")
        cast("Any", model).to(dtype)
        if processor is not None:
            processor.save_pretrained(made)
        elif target.tokenizer is not None:
            target.tokenizer.save_pretrained(made)
        trained_for = {"name": target.name, "fingerprint": target.fingerprint, "vocab_size": target.vocab_size}
        size = sum(p.numel() for p in model.parameters())
        full = {
            "method": METHOD, "target": trained_for, "parameters": size, "sees": processor is not None, **record,
            "weights_sha256": sha256_of(made / WEIGHTS),
        }  # fmt: skip
        (made / RECORD).write_text(json.dumps(full, indent=2) + "\n", encoding="utf-8")
        (made / CARD).write_text(draft_card(place.name, full), encoding="utf-8")


def is_draft(record: Mapping[str, object]) -> bool:
    """Whether a training.json is that of a draft model."""
    return record.get("method") == METHOD


def draft_card(name: str, record: Mapping[str, object]) -> str:
    """README.md from the record of the training."""
    trained_for = cast("Mapping[str, str]", record["target"])
    front = ["---", "library_name: transformers"]
    for key, given in (("base_model", record.get("base_model")), ("license", record.get("licence"))):
        if given is not None:
            front.append(f"{key}: {json.dumps(given)}")
    kind = "image-text-to-text" if record.get("sees") else "text-generation"
    front += [f"pipeline_tag: {kind}", "tags:", "- speculative-decoding", "- draft-model", "---"]
    facts = {
        "method": "a draft model distilled from its target (arXiv 2310.08461)",
        "target": trained_for["name"],
        "target fingerprint": f"`{trained_for['fingerprint']}`",
        "parameters": f"{record['parameters']:,} in bfloat16",
    }
    use = f"paceline generate {shlex.quote(trained_for['name'])} --chat 'Hello.' --drafter model:{shlex.quote(name)}"
    sections = [
        "\n".join(front),
        f"# {name}\n\nA draft model for {trained_for['name']}:\n\n```bash\n{use}\n```",
        "## What it is\n\n" + fact_list(facts),
        *[
            f"## {title}\n\n{fact_list(cast('Mapping[str, object]', record[key]))}"
            for key, title in (("data", "Data"), ("training", "Training"))
            if isinstance(record.get(key), Mapping)
        ],
        acceptance_table(record.get("acceptance")),
        "## Use and limits\n\n" + "\n".join(f"- {line}" for line in _LIMITS),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"
