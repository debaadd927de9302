"""Write an export, read it again as a stranger would, and keep it only if both heads say the same."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..errors import ConfigError, NotExportable
from ..heads import Head, head_info, load_head, method_of
from ..heads.foreign import read_for, target_of
from ..modules import EagleHead
from ..modules.heads import MedusaHead
from ..runner import LoadedModel
from .card import export_card
from .compare import largest_difference
from .eagle import eagle_layout
from .layout import Facts, Layout, serve_line
from .medusa import medusa_layout

ENGINES = ("vllm", "sglang", "speculators")
TOLERANCE = 1e-4  # of float32 logits around 1: the weights are the same bits, only sums may be taken in another order


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
    the name of the target that the head was trained for. num_tokens: to draft a step, in the command that is told.
    Raises `NotExportable` for what the engine cannot hold or what reads back as another head, `ConfigError` for
    folders, `IncompatibleModels` for another target.
    """
    place = Path(out)
    if place.is_symlink():
        place = Path(os.path.realpath(place))  # the link stays
    check_new(place)
    info = head_info(folder)
    if engine not in ENGINES:
        raise ConfigError("an unknown engine", got=engine, expected="one of " + ", ".join(ENGINES))
    head = load_head(folder, target).cpu().float()
    name = target_name or info.target_name
    facts = Facts(name, info.num_layers, info.hidden_size, info.vocab_size)
    if target is not None:
        facts = _loaded_facts(name, target)
    layout = layout_of(head, engine, facts, num_tokens)
    card = export_card(info, engine, layout, name, place.name)
    difference = write(place, layout, head, facts, engine, card)
    return Exported(place, info.method, engine, serve_line(layout.serve, name, str(place)), layout.notes, difference)


def layout_of(head: Head, engine: str, facts: Facts, num_tokens: int = 3) -> Layout:
    """The export of a head, not yet written. Raises `NotExportable`."""
    if isinstance(head, EagleHead):
        return eagle_layout(head, engine, facts, num_tokens)
    if isinstance(head, MedusaHead):
        return medusa_layout(head, engine, facts)
    raise NotExportable(
        f"no other engine runs {method_of(head)} heads",
        got=engine,
        fix="use it here, or train an eagle3 or medusa head",
    )


def check_new(place: Path) -> None:
    """Raise `ConfigError` where something is already."""
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(f"{str(place)!r} exists already", expected="a new folder", fix="name another, or remove it")


def write(place: Path, layout: Layout, head: Head, facts: Facts, engine: str, card: str) -> float:
    """Write, read back, compare; the folder appears only if the two heads agree. Returns the largest difference."""
    check_new(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        made.chmod(0o755)  # mkdtemp's are for their owner only
        (made / "config.json").write_text(json.dumps(layout.config, indent=2) + "\n", encoding="utf-8")
        save_file(dict(layout.tensors), made / "model.safetensors", metadata={"format": "pt"})
        for name, ids in layout.ids.items():
            torch.save(ids, made / name)
        difference = check_written(made, head, facts, engine)
        (made / "README.md").write_text(card.replace("{difference}", f"{difference:g}"), encoding="utf-8")
        made.rename(place)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return difference


def check_written(folder: Path, head: Head, facts: Facts, engine: str) -> float:
    """Read an export as `engine` counts and compare it with its head. Raises `NotExportable` if they differ."""
    again: Any = read_for(folder, facts.as_target, engine)
    ours: Any = head
    if again.config.states != ours.config.states:
        raise NotExportable("the export reads other states", got=again.config.states, expected=ours.config.states)
    difference = largest_difference(ours, again, facts)
    if not difference <= TOLERANCE:
        raise NotExportable(
            "the export reads back as another head",
            got=f"logits that differ by {difference:g}",
            expected=f"at most {TOLERANCE:g}",
        )
    return difference


def _loaded_facts(name: str, target: LoadedModel) -> Facts:
    shape, config = target_of(target), target.model.config
    return Facts(
        name,
        shape.num_layers,
        shape.hidden_size,
        shape.vocab_size,
        tuple(getattr(config, "architectures", None) or (type(target.model).__name__,)),
        target.context,
        shape.lm_head,
        shape.embeddings,
    )
