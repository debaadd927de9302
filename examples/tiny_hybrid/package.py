"""What the card of the small hybrid says of it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import packaging

_ABOUT = packaging.About(
    module="examples.tiny_hybrid",
    description="a small hybrid that continues Python, with an MTP module: layers of gated delta nets and of attention",
    usage="'def mean(values):' --drafter mtp --policy fixed -k 3",
    tag="mtp",
    limits=(
        "It writes what looks like Python and is wrong. It is to show and to test speculative decoding of hybrids.",
        "A pass of so small a model costs less than drafting: the cost model drafts nothing, hence `--policy fixed`.",
        "The MTP module was trained on the model's own distribution, three steps deep; it fits no other model.",
        "The agreement on held-out text does not depend on what greedy answers repeat.",
    ),
)


def package(folder: Path, out: Path, record: Mapping[str, Any]) -> None:
    """Package the folder of a model. record: as in `packaging.package`, with the parameters of the MTP module."""
    config = json.loads((folder / "config.json").read_text())
    facts = {
        "architecture": f"{config['model_type']}, layers {', '.join(config['layer_types'])}, and one MTP module",
        "parameters": f"{record['parameters']:,}, of which {record['parameters_mtp']:,} in the MTP module, in bfloat16",
        "sizes": packaging.sizes(config, "hidden_size", "intermediate_size", "vocab_size"),
    }
    packaging.package(folder, out, _ABOUT, facts, record)
