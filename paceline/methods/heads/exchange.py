"""Heads of other engines and projects: read as our modules, and ours written for them.

Their config.json does not say which target they were trained for. Sizes must match; beyond that a wrong target shows
only in fewer accepted tokens, never in the answers. An export is kept only if it reads back with the same logits.
"""

import copy
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...core.interfaces import ModelFacts
from ...errors import ConfigError, NotExportable
from ...hf.checkpoint import refused
from ...hf.gguf.file import SUFFIX, read_gguf
from ...hf.gguf.writer import token_entries
from ...system.files import check_new, new_folder, write_text
from ...zoo import name_elsewhere, remark_elsewhere
from ..dflash.head import DFlashHead
from ..dflash.layouts import dflash_layout, read_dflash
from ..eagle.head import EagleHead
from ..eagle.layouts import eagle_layout, flattened, read_eagle
from ..parallel.head import MedusaHead
from ..parallel.layouts import NAMES, medusa_layout, read_medusa
from .gguf import ENGINE, FILE, gguf_layout, read_gguf_head, write_gguf_head
from .layers import attend_causally
from .parts import check_sizes, draft_index
from .published import Layout, Published, TargetFacts, facts_of, open_published

if TYPE_CHECKING:
    from .folder import Head, HeadInfo

ENGINES = {
    "vllm": "vLLM 0.32",
    "sglang": "SGLang 0.5.23",
    "speculators": "speculators 0.9",
    ENGINE: "llama.cpp, October 2026",
}
"""The engines that heads are exported for, with the version whose layout is written."""
TOLERANCE = 1e-4  # of float32 logits around 1: the weights are the same bits, only sums may be taken in another order
_BATCH, _LENGTH, _STEPS = 2, 6, 3  # of the comparison


def read_published(folder: Path, target: TargetFacts, engine: str | None = None) -> nn.Module:
    """The head at `folder`, or in a GGUF file, as one of our modules. engine: whose count of layers applies, if known.

    Raises `ConfigError` for files that do not fit their layout, `IncompatibleModels` for a feature our modules lack
    or a head of another size than the target.
    """
    is_file = folder.suffix == SUFFIX
    published = None if is_file else open_published(folder)
    with refused(f"the head at {str(folder)!r} has a config.json or tensors that do not fit"):
        module = _read(published, target, engine) if published else read_gguf_head(folder, target)
    config: Any = module.config
    hidden = getattr(config, "target_hidden_size", config.hidden_size)
    theirs = {"hidden_size": hidden, "vocab_size": config.vocab_size}
    ours = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    fix = "name the target that the head was trained for"
    check_sizes(f"the head at {str(folder)!r} is for another target", theirs, ours, fix)
    return module


def _read(published: Published, target: TargetFacts, engine: str | None) -> nn.Module:
    config, names = published.config, published.tensors
    if "speculators_model_type" in config:
        published.config = flattened(config)
        return read_eagle(published, target, 3, engine)
    if "dflash_config" in config:
        return read_dflash(published, target)
    if config.get("model_type") == "medusa" or any(NAMES.match(name) for name in names):
        return read_medusa(published, target)
    if any(name.endswith(".hidden_norm.weight") for name in names):
        return read_eagle(published, target, 3, engine)
    if "fc.weight" in names:
        return read_eagle(published, target, 1)
    raise ConfigError(
        f"the head at {str(published.folder)!r} has a layout that is not known",
        got="tensors " + ", ".join(sorted(names)[:8]),
        expected="a head of Paceline, EAGLE, EAGLE-3, speculators, DFlash or Medusa",
    )


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
    target: ModelFacts | None = None,
    target_name: str | None = None,
    num_tokens: int = 3,
) -> Exported:
    """Write the head at `folder`, ours, for an engine into the new folder `out`.

    target: needed where the layout holds the target's output rows. target_name: what the engine shall serve; default:
    the name of the target that the head was trained for. num_tokens: to draft a step, in the command that is shown.
    Raises `NotExportable` for what the engine cannot hold or what reads back as another head, `ConfigError` for
    folders, `IncompatibleModels` for another target.
    """
    from .folder import head_info, load_head, method_of

    place = Path(os.path.realpath(out)) if Path(out).is_symlink() else Path(out)  # the link stays
    check_new(place)
    info = head_info(folder)
    if engine not in ENGINES:
        raise ConfigError("an unknown engine", got=engine, expected="one of " + ", ".join(ENGINES))
    head = load_head(folder, target).cpu().float()
    own_name, of = target_name or info.target.name, info.target
    name, remark = name_elsewhere(own_name), remark_elsewhere(own_name)
    if engine == ENGINE:
        name, remark = own_name if own_name.endswith(SUFFIX) else f"{Path(own_name).name}{SUFFIX}", ""
    sizes = of.num_layers, of.hidden_size, of.vocab_size
    facts = TargetFacts(name, *sizes) if target is None else facts_of(target, name)
    if engine == ENGINE and (isinstance(head, DFlashHead) or getattr(head.config, "version", "mtp") != "mtp"):
        layout = gguf_layout(cast("Any", head), facts, _tokens(target, target_name), num_tokens)
    elif isinstance(head, EagleHead) and head.config.version != "mtp":
        layout = eagle_layout(head, engine, facts, num_tokens)
    elif isinstance(head, DFlashHead):
        layout = dflash_layout(head, engine, facts)
    elif isinstance(head, MedusaHead) and engine != ENGINE:
        layout = medusa_layout(head, engine, facts)
    else:
        what, fix = f"no other engine runs {method_of(head)} heads", "use it here, or train an eagle3 or dflash head"
        raise NotExportable(what, got=engine, fix=fix)
    if remark:
        layout = replace(layout, notes=(*layout.notes, f"{remark}."))
    with new_folder(place) as made:
        if engine == ENGINE:
            write_gguf_head(made / FILE, layout)
        else:
            write_text(made / "config.json", json.dumps(layout.config, indent=2) + "\n")
            save_file(dict(layout.tensors), made / "model.safetensors", metadata={"format": "pt"})
        for file, ids in layout.ids.items():
            torch.save(ids, made / file)
        difference = check_written(made / FILE if engine == ENGINE else made, head, facts, engine)
        write_text(made / "README.md", _card(info, engine, layout, name, place.name, difference))
    serve = _serve_line(layout.serve, name, str(place))
    return Exported(place, info.method, engine, serve, layout.notes, difference)


def _tokens(target: ModelFacts | None, name: str | None) -> dict[str, Any] | None:
    """The entries of the target's tokenizer in a GGUF file; of a target in such a file, its own.

    name: of the target, if it was given: the one that a head was trained for may lie elsewhere.
    """
    if name is not None and name.endswith(SUFFIX):
        return {key: one for key, one in read_gguf(Path(name)).metadata.items() if key.startswith("tokenizer.")}
    return None if target is None or target.tokenizer is None else token_entries(target.tokenizer, target.model)


def check_written(folder: Path, head: "Head", facts: TargetFacts, engine: str) -> float:
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
def largest_difference(ours: "Head", theirs: "Head", facts: TargetFacts) -> float:
    """Largest absolute difference of the logits of the tokens that `ours` can draft, on random states, in float32.

    An EAGLE head is run for several steps, since the input of a later step is the output of the one before.
    """
    config: Any = ours.config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random = [torch.randn(facts.vocab_size, facts.hidden_size) for _ in range(2)]
        states = torch.randn(_BATCH, _LENGTH, len(config.states) * facts.hidden_size)
        tokens = torch.randint(facts.vocab_size, (_STEPS, _BATCH, _LENGTH))
    pairs = zip((facts.embeddings, facts.lm_head), random, strict=True)
    tables = [made if table is None else table.detach().cpu().float() for table, made in pairs]
    places = draft_index(theirs.draft_ids.cpu(), facts.vocab_size)[ours.draft_ids.cpu()]  # type: ignore[union-attr, operator]
    if bool((places < 0).any()):
        raise NotExportable("the export cannot draft every token", got=f"{int((places < 0).sum())} tokens missing")
    mine, other = (_logits(head, tables, states, tokens) for head in (ours, theirs))
    return max(float((a - b[..., places]).abs().max()) for a, b in zip(mine, other, strict=True))


def _logits(head: "Head", tables: list[Tensor], states: Tensor, tokens: Tensor) -> list[Tensor]:
    """Of every step (EAGLE), of every head (Medusa), or of a block (DFlash). [B, T, Vd] each."""
    head = copy.deepcopy(head).cpu().float()
    assert isinstance(head, MedusaHead | EagleHead | DFlashHead)
    head.attach(*tables)
    if isinstance(head, DFlashHead):
        return [head.logits(head.whole(states, tokens[0, :, -1]))]
    if isinstance(head, MedusaHead):
        return [head.logits(head.hidden(states, one), one) for one in range(head.num_heads)]
    positions = torch.arange(_LENGTH).expand(_BATCH, -1)
    hidden, found = head.begin(states), list[Tensor]()
    for step in tokens:
        hidden = head(step, hidden, positions, attend_causally)
        found.append(head.logits(hidden))
    return found


def _serve_line(template: str, target: str, folder: str) -> str:
    """The command with its places filled in; they hold JSON, so `format` cannot do it."""
    return template.replace("{target}", target).replace("{folder}", folder)


def _card(info: "HeadInfo", engine: str, layout: Layout, target: str, folder: str, difference: float) -> str:
    """README.md: what the export is, how it is served, what differs there."""
    notes, of = "".join(f"- {note}\n" for note in layout.notes), info.target
    return f"""---
tags: [speculative-decoding, {info.method}]
---

# {folder}

The {info.method} head {info.folder.name!r} for {info.target.name}, trained with Paceline, in the layout of
{ENGINES[engine]}.

```bash
{_serve_line(layout.serve, target, folder)}
```

{notes}- Target: {of.num_layers} layers, hidden size {of.hidden_size}, vocabulary {of.vocab_size}, fingerprint
  `{of.fingerprint}`. Other engines do not check it.
- Read back and compared with the original on random states: logits differ by at most {difference:g} (float32).
"""
