"""Our heads written for other engines. An export is kept only if it reads back with the same logits."""

import copy
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ...errors import ConfigError, NotExportable
from ...hf.gguf.file import SUFFIX, read_gguf
from ...hf.gguf.writer import token_entries
from ...system.files import check_new, exists, new_folder, write_text
from ...target.loaded import LoadedModel
from ...zoo import name_elsewhere, remark_elsewhere
from ..method import named
from ..table import method_named, rows
from .card import acceptance_table
from .folder import load_head
from .gguf import ENGINE as LLAMA_CPP
from .gguf import FILE, write_gguf_head
from .info import RECORD, Head, HeadInfo, head_info, method_of, read_record
from .parts import draft_index
from .published import Layout, TargetFacts, facts_of, read_published

ENGINES = {
    "vllm": "vLLM 0.32",
    "sglang": "SGLang 0.5.23",
    "speculators": "speculators 0.9",
    LLAMA_CPP: "llama.cpp, October 2026",
}
"""The engines that heads are exported for, with the version whose layout is written."""
TOLERANCE = 1e-4  # of float32 logits around 1: the weights are the same bits, only sums may be taken in another order
_BATCH, _LENGTH, _STEPS = 2, 6, 3  # of the comparison


@dataclass(frozen=True)
class Exported:
    """What was written. largest_difference: of the logits of the head and of what was read back, in float32."""

    folder: Path
    method: str
    engine: str
    serve: str
    notes: tuple[str, ...]
    largest_difference: float


def export_head(
    folder: Path | str,
    engine: str,
    out: Path | str,
    target: LoadedModel | None = None,
    target_name: str | None = None,
    num_tokens: int = 3,
) -> Exported:
    """Write the head at `folder`, ours, for an engine into the new folder `out`.

    target: needed where the layout holds the target's output rows. target_name: what the engine shall serve; default:
    the name of the target that the head was trained for. num_tokens: to draft a step, in the command that is shown.
    Raises `NotExportable` for what the engine cannot hold or what reads back as another head, `ConfigError` for
    folders, `IncompatibleModels` for another target.
    """
    place = Path(os.path.realpath(out)) if Path(out).is_symlink() else Path(out)  # the link stays
    check_new(place)
    info = head_info(folder)
    if engine not in ENGINES:
        raise ConfigError("an unknown engine", got=engine, expected="one of " + ", ".join(ENGINES))
    head, of = load_head(folder, target).cpu().float(), info.target
    name, remark = _served(target_name or of.name, engine)
    sizes = of.num_layers, of.hidden_size, of.vocab_size
    facts = TargetFacts(name, *sizes) if target is None else facts_of(target, name)
    if engine == LLAMA_CPP:
        facts = replace(facts, tokens=_tokens(target, target_name))
    layout = _layout(head, engine, facts, num_tokens)
    if remark:
        layout = replace(layout, notes=(*layout.notes, f"{remark}."))
    with new_folder(place) as written:
        if engine == LLAMA_CPP:
            write_gguf_head(written / FILE, layout)
        else:
            write_text(written / "config.json", json.dumps(layout.config, indent=2) + "\n")
            save_file(dict(layout.tensors), written / "model.safetensors", metadata={"format": "pt"})
        for file, ids in layout.ids.items():
            torch.save(ids, written / file)
        difference = check_written(written / FILE if engine == LLAMA_CPP else written, head, facts, engine)
        write_text(written / "README.md", _card(info, engine, layout, name, place.name, difference))
    serve = _serve_line(layout.serve, name, str(place))
    return Exported(place, info.method, engine, serve, layout.notes, difference)


def _layout(head: Head, engine: str, facts: TargetFacts, num_tokens: int) -> Layout:
    """The files of a head for an engine. Raises `NotExportable`."""
    row = method_named(method_of(head))
    if engine not in row.exports:
        others = [method.name for method in rows() if engine in method.exports]
        fix = f"export it for {' or '.join(row.exports)}" if row.exports else "use it here"
        message = f"{engine} cannot hold this head"
        raise NotExportable(message, got=f"a head of {row.title}", fix=f"{fix}, or train one of {', '.join(others)}")
    return named(f"{row.layouts}:layout")(head, engine, facts, num_tokens)


def _served(own_name: str, engine: str) -> tuple[str, str | None]:
    """What an engine is to serve, and a remark on it."""
    if engine == LLAMA_CPP:
        return own_name if own_name.endswith(SUFFIX) else f"{Path(own_name).name}{SUFFIX}", None
    return name_elsewhere(own_name), remark_elsewhere(own_name)


def _tokens(target: LoadedModel | None, name: str | None) -> dict[str, Any] | None:
    """The entries of the target's tokenizer in a GGUF file; of a target in such a file, its own.

    name: of the target, if it was given: the one that a head was trained for may lie elsewhere.
    """
    if name is not None and name.endswith(SUFFIX):
        return {key: value for key, value in read_gguf(Path(name)).metadata.items() if key.startswith("tokenizer.")}
    return None if target is None or target.tokenizer is None else token_entries(target.tokenizer, target.model)


def check_written(folder: Path, head: Head, facts: TargetFacts, engine: str) -> float:
    """Read an export as `engine` counts and compare it with its head. Raises `NotExportable` if they differ.

    Returns the largest difference of their logits.
    """
    again: Any = read_published(folder, facts, engine)
    ours: Any = head
    if again.config.states != ours.config.states:
        raise NotExportable("the export reads other states", got=again.config.states, expected=ours.config.states)
    difference = largest_difference(ours, again, facts)
    if not difference <= TOLERANCE:
        got, expected = f"logits that differ by {difference:g}", f"at most {TOLERANCE:g}"
        raise NotExportable("the export reads back as another head", got=got, expected=expected)
    return difference


@torch.inference_mode()
def largest_difference(ours: Head, again: Head, facts: TargetFacts) -> float:
    """Largest absolute difference of the logits of the tokens that `ours` can draft, on random states, in float32.

    See `DraftHead.all_logits`.
    """
    config: Any = ours.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random = [torch.randn(facts.vocab_size, facts.hidden_size) for _ in range(2)]
        states = torch.randn(_BATCH, _LENGTH, len(config.states) * facts.hidden_size)
        tokens = torch.randint(facts.vocab_size, (_STEPS, _BATCH, _LENGTH))
    pairs = zip((facts.embeddings, facts.lm_head), random, strict=True)
    tables = [stand_in if table is None else table.detach().cpu().float() for table, stand_in in pairs]
    places = draft_index(again.draft_ids.cpu(), facts.vocab_size)[ours.draft_ids.cpu()]  # type: ignore[union-attr, operator]
    if bool((places < 0).any()):
        raise NotExportable("the export cannot draft every token", got=f"{int((places < 0).sum())} tokens missing")
    copies: list[Any] = [copy.deepcopy(head).cpu().float() for head in (ours, again)]
    our_logits, their_logits = (copied.attach(*tables).all_logits(states, tokens) for copied in copies)
    return max(float((a - b[..., places]).abs().max()) for a, b in zip(our_logits, their_logits, strict=True))


def _serve_line(template: str, target: str, folder: str) -> str:
    """The command with its places filled in; they hold JSON, so `format` cannot do it."""
    return template.replace("{target}", target).replace("{folder}", folder)


def _card(info: HeadInfo, engine: str, layout: Layout, target: str, folder: str, difference: float) -> str:
    """README.md: what the export is, how it is served, what it should draft, what differs there."""
    notes, of = "".join(f"- {note}\n" for note in layout.notes), info.target
    record: Any = read_record(info.folder) if exists(info.folder / RECORD) else {}
    table = acceptance_table(record.get("acceptance"))
    measured = f"{table}\n\nMeasured with Paceline, before the export.\n\n" if table else ""
    return f"""---
tags: [speculative-decoding, {info.method}]
---

# {folder}

The {info.method} head {info.folder.name!r} for {info.target.name}, trained with Paceline, in the layout of
{ENGINES[engine]}.

```bash
{_serve_line(layout.serve, target, folder)}
```

{measured}{notes}- Target: {of.num_layers} layers, hidden size {of.hidden_size}, vocabulary {of.vocab_size}, fingerprint
  `{of.fingerprint}`. Other engines do not check it.
- Read back and compared with the original on random states: logits differ by at most {difference:g} (float32).
"""
