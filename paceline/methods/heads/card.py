"""The model card (README.md) of a head or a draft model: YAML for hubs, then what one must know before using it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from huggingface_hub import ModelCardData

from ..table import method_named
from .info import HeadInfo

_LIMITS = (
    "It changes what decoding costs, never what the target answers, under the exact rule (`paceline check`).",
    "Speed depends on the machine; the acceptance does not, up to rounding (`paceline check-draft`).",
)


def model_card(folder: str, info: HeadInfo, size: int, record: Mapping[str, Any]) -> str:
    """Markdown from the record of the training; what is not in the record is left out.

    folder: its name. size: bytes of the weights. record: base_model (hub id), licence, data, training and provenance
    (mappings), acceptance (a list of measurements, see `measure.trials`), limits (a list of sentences), sees (whether a
    draft model reads images), fine_tuned (of a run that made its own target: of which model, and the names of the
    folders that hold the target and the head, side by side).
    """
    method, target, row = info.method, info.target, method_named(info.method)
    is_model, fine_tuned = info.config is None, record.get("fine_tuned")
    name = f"{target.name}-{method}" if folder in ("head", "draft") and not is_model else folder
    used, head_name = (target.name, name) if fine_tuned is None else (fine_tuned["folder"], fine_tuned["head"])
    of = "" if fine_tuned is None else f", a fine-tune of {fine_tuned['of']} in the folder `{used}` beside this one"
    facts: dict[str, object] = {
        "method": f"{method}: {row.title}, {row.how}" + f" ({row.papers})" * bool(row.papers),
        "target": f"{target.name}: {target.num_layers} layers, hidden size {target.hidden_size}, "
        f"vocabulary {target.vocab_size}",
        "target fingerprint": f"`{target.fingerprint}`",
        "weights": f"{size / 1e6:,.1f} MB",
    }
    drafter = f"{row.word}:{shlex.quote(head_name)}"
    introduction = (
        f"# {name}\n\nA draft {'model' if is_model else 'head'} for {target.name}{of}, to be used with Paceline:\n\n"
        f"```bash\npaceline generate {shlex.quote(used)} --chat 'Hello.' --drafter {drafter}\n```"
    )
    fits = "It fits the target named above and no other: with a fine-tune of it, fewer drafts are accepted."
    if is_model:
        fits = "It drafts for any model of the same tokenizer, but learned from the answers of the target named above."
    sizes = {} if is_model else {k: v for k, v in asdict(info.config).items() if v is not None}
    about = fact_list(facts if is_model else facts | {"sizes": sizes})
    kind = "image-text-to-text" if record.get("sees") else "text-generation"
    front = front_matter(record, "transformers" if is_model else "paceline", kind, method)
    limits = (fits, *_LIMITS, *(record.get("limits") or ()))
    return card(front, introduction, about, record, acceptance_table(record.get("acceptance")), limits)


def card(
    front: str, introduction: str, about: str, record: Mapping[str, Any], measured: str, limits: Sequence[str]
) -> str:
    """A model card of these sections, with what the record says of data, training and provenance.

    front: see `front_matter`. measured: the section with the measurements, or nothing.
    """
    sections = [front, introduction, "## What it is\n\n" + about]
    for key in ("data", "training"):
        if isinstance(record.get(key), Mapping):
            sections.append(f"## {key.title()}\n\n{fact_list(record[key])}")
    sections += [measured, "## Use and limits\n\n" + "\n".join(f"- {line}" for line in limits)]
    sections.append(_made(record.get("provenance")))
    return "\n\n".join(filter(None, sections)) + "\n"


def front_matter(record: Mapping[str, Any], library: str, pipeline: str, *tags: str) -> str:
    """The YAML at the top of a card."""
    data = ModelCardData(
        library_name=library, base_model=record.get("base_model"), license=record.get("licence"), pipeline_tag=pipeline,
        tags=["speculative-decoding", *tags],
    )  # fmt: skip
    return f"---\n{data.to_yaml()}\n---"


def acceptance_table(rows: Sequence[Mapping[str, Any]] | None) -> str:
    """The acceptance table; empty where nothing was measured."""
    if not rows:
        return ""
    table = [
        "| measured on | temperature | drafted a round | mean acceptance length | acceptance by position |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        budget, result = row["budget"], row["result"]
        positions = ", ".join(f"{rate:.2f}" for rate in result["per_position"])
        mean, temperature = f"{result['mean_acceptance_length']:.2f}", f"{row['params']['temperature']:g}"
        size = f"{budget['nodes']} nodes, depth {budget['depth']}"
        table.append(
            f"| {row['name']} ({len(result['answers'])} prompts) | {temperature} | {size} | {mean} | {positions} |"
        )
    note = "Tokens emitted per target pass, the target's own token counted, and how often each position was accepted."
    return f"## Acceptance\n\n{note}\n\n" + "\n".join(table)


def _made(provenance: Any) -> str:
    if not isinstance(provenance, Mapping):
        return ""
    known = ("paceline", "git_commit", "python", "torch", "transformers", "cpu", "gpu", "time")
    facts = {key: provenance[key] for key in known if provenance.get(key) is not None}
    if isinstance(command := provenance.get("command"), list):
        facts["command"] = "`" + shlex.join(map(str, command)) + "`"
    return "## How it was made\n\n" + fact_list(facts)


def fact_list(facts: Mapping[str, object]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {key.replace('_', ' ')}: {_inline(value)}" for key, value in facts.items())


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(entry)}" for key, entry in value.items())
    return ", ".join(map(_inline, value)) if isinstance(value, list | tuple) else str(value)
