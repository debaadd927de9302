"""The model card of a head (README.md): YAML for hubs, then what a reader must know before using it."""

import json
import shlex
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict
from typing import Any, cast

from ..core.interfaces import ModelFacts
from .folder import Head, method_of

_PAPERS = {
    "eagle": "EAGLE-1 and -2, one layer over the target's last hidden state (arXiv 2401.15077, 2406.16858)",
    "eagle3": "EAGLE-3, one layer over three of the target's hidden states (arXiv 2503.01840)",
    "medusa": "Medusa, one small head for each position ahead (arXiv 2401.10774)",
    "blockwise": "blockwise parallel decoding (Stern et al. 2018, arXiv 1811.03115)",
    "mtp": "multi-token prediction, one module after another (arXiv 2404.19737, 2412.19437)",
    "space": "SPACE, mask tokens that predict the next tokens in the target's own pass (arXiv 2402.11809)",
    "self_int4": "the target's own layers in a few bits, trained as they are rounded (QAT)",
}
_TAGS = ("speculative-decoding", "draft-head")
_LIMITS = (
    "It fits the target named above and no other: with a fine-tune of it, fewer drafts are accepted.",
    "It changes what decoding costs, never what the target answers, under the exact rule (`paceline check`).",
    "Speed depends on the machine; the acceptance below does not, up to rounding (`paceline check-draft`).",
)


def model_card(name: str, head: Head, target: ModelFacts, record: Mapping[str, object]) -> str:
    """Markdown from the record of the training; what is not in the record is left out.

    record: base_model (hub id), licence, data, training and provenance (mappings), acceptance (a list of measurements,
    see `eval.trials`), limits (a list of sentences), fine_tuned (of a run that made its own target: of which model,
    and the names of the folders that hold the target and the head, side by side).
    """
    method, made = method_of(head), cast("Mapping[str, str] | None", record.get("fine_tuned"))
    kind = "self-int4" if method == "self_int4" else "head"
    used, own = (target.name, f"{kind}:{name}") if made is None else (made["folder"], f"head:{made['head']}")
    of = "" if made is None else f", a fine-tune of {made['of']} in the folder `{used}` beside this one"
    facts: dict[str, object] = {
        "method": f"{method}: {_PAPERS[method]}",
        "target": f"{target.name}: {target.num_layers} layers, hidden size {target.hidden_size}, "
        f"vocabulary {target.vocab_size}",
        "target fingerprint": f"`{target.fingerprint}`",
        "parameters": _size(head),
    }
    introduction = (
        f"# {name}\n\nA draft head for {target.name}{of}, to be used with Paceline:\n\n"
        f"```bash\npaceline generate {shlex.quote(used)} --chat 'Hello.' --drafter {own}\n```"
    )
    about = fact_list(facts) + "\n\nSizes: " + _inline(asdict(cast("Any", head.config)))
    limits = (*_LIMITS, *cast("Seq[str]", record.get("limits") or ()))
    front = front_matter(record, "paceline", "text-generation", (*_TAGS, method))
    return card(front, introduction, about, record, acceptance_table(record.get("acceptance")), limits)


def card(
    front: str, introduction: str, about: str, record: Mapping[str, object], measured: str, limits: Seq[str]
) -> str:
    """A model card of these sections, with what the record says of data, training and provenance.

    front: see `front_matter`. measured: the section with the measurements, or nothing.
    """
    sections = [front, introduction, "## What it is\n\n" + about]
    for key in ("data", "training"):
        if isinstance(record.get(key), Mapping):
            sections.append(f"## {key.title()}\n\n{fact_list(cast('Mapping[str, object]', record[key]))}")
    sections += [measured, "## Use and limits\n\n" + "\n".join(f"- {line}" for line in limits)]
    sections.append(_made(record.get("provenance")))
    return "\n\n".join(filter(None, sections)) + "\n"


def _size(head: Head) -> str:
    count = sum(p.numel() for p in head.parameters())
    if count:
        return f"{count:,} in bfloat16"
    return f"{sum(b.nbytes for b in head.buffers()) / 1e6:,.1f} MB of codes, scales and zero points"


def front_matter(record: Mapping[str, object], library: str, pipeline: str, tags: Seq[str]) -> str:
    """The YAML at the top of a card."""
    lines = ["---", f"library_name: {library}"]
    for key, given in (("base_model", record.get("base_model")), ("license", record.get("licence"))):
        if given is not None:
            lines.append(f"{key}: {json.dumps(given)}")  # a JSON string is a YAML string
    return "\n".join([*lines, f"pipeline_tag: {pipeline}", "tags:", *(f"- {tag}" for tag in tags), "---"])


def acceptance_table(rows: object) -> str:
    """The acceptance table; empty where nothing was measured."""
    if not isinstance(rows, list) or not rows:
        return ""
    table = [
        "| measured on | temperature | drafted a round | mean acceptance length | acceptance by position |",
        "|---|---|---|---|---|",
    ]
    for row in cast("list[Mapping[str, Mapping[str, object]]]", rows):
        budget, result = row["budget"], row["result"]
        positions = ", ".join(f"{rate:.2f}" for rate in cast("list[float]", result["per_position"]))
        mean = cast("float", result["mean_acceptance_length"])
        size = f"{budget['nodes']} nodes, depth {budget['depth']}"
        what = f"{row['name']} ({len(cast('list[object]', result['answers']))} prompts)"
        table.append(f"| {what} | {row['params']['temperature']:g} | {size} | {mean:.2f} | {positions} |")
    note = "Tokens emitted per target pass, the target's own token counted, and how often each position was accepted."
    return f"## Acceptance\n\n{note}\n\n" + "\n".join(table)


def _made(provenance: object) -> str:
    if not isinstance(provenance, Mapping):
        return ""
    given = cast("Mapping[str, object]", provenance)
    known = ("paceline", "git_commit", "python", "torch", "transformers", "cpu", "gpu", "time")
    facts = {key.replace("_", " "): given[key] for key in known if given.get(key) is not None}
    command = given.get("command")
    if isinstance(command, list):
        facts["command"] = "`" + shlex.join(map(str, cast("list[object]", command))) + "`"
    return "## How it was made\n\n" + fact_list(facts)


def fact_list(facts: Mapping[str, object]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {key.replace('_', ' ')}: {_inline(value)}" for key, value in facts.items())


def _inline(value: object) -> str:
    if isinstance(value, Mapping):
        each = cast("Mapping[str, object]", value)
        return ", ".join(f"{key} {_inline(one)}" for key, one in each.items())
    if isinstance(value, list | tuple):
        return ", ".join(_inline(one) for one in cast("Seq[object]", value))
    return str(value)
