"""What the card of the small mixture says of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Qwen3MoeConfig

from examples.tiny_hybrid import packaging

_ABOUT = packaging.About(
    module="examples.tiny_mixture",
    description="a small mixture of experts that continues Python: a token takes two of eight in each layer",
    usage="'def mean(values):' --drafter lookup+self-top1 --policy fixed -k 3",
    tag="moe",
    limits=(
        "It writes what looks like Python and is wrong. It is to show and to test speculative decoding of mixtures.",
        "A pass of so small a model costs less than drafting: the cost model drafts nothing, hence `--policy fixed`.",
    ),
)


def package(folder: Path, out: Path, record: Mapping[str, Any]) -> None:
    """Package the folder of a model. record: as in `packaging.package`, with the parameters that a token uses."""
    config = Qwen3MoeConfig.from_pretrained(folder)
    experts = f"{config.num_experts_per_tok} of {config.num_experts} experts a token"
    facts = {
        "architecture": f"{config.model_type}, {config.num_hidden_layers} layers, {experts}",
        "parameters": f"{record['parameters']:,}, of which a token uses {record['parameters_active']:,}, in bfloat16",
        "sizes": packaging.sizes(config.to_dict(), "hidden_size", "moe_intermediate_size", "vocab_size"),
    }
    packaging.package(folder, out, _ABOUT, facts, record)
