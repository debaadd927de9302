"""The slow obvious pass: a whole text at once, behind nothing, in a cache of its own that is thrown away.

engine      [prompt][root a b c][c d e]     many passes, columns kept, moved and read again, rows of guesses
here        [prompt a b c d e]              one pass, no column from before it, no tree, no commit, no padding
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core.vision import VisionPrompt
from .hf_adapter import LoadedModel
from .hf_vision import Features
from .kv_cache import SlotCache
from .layout import PassLayout, PromptRows
from .reading import prompt_rows


@torch.inference_mode()
def whole_text(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    rows: int = 1,
    vision: VisionPrompt | None = None,
    features: Sequence[Features] = (),
    dither: int | None = None,
) -> Tensor:
    """Logits [rows, V] after the last `rows` tokens of a text.

    features: of each picture of `vision`, see `look`. dither: a seed; every number that enters the first layer is
    then moved up or down by its last bit, so that all later roundings fall differently.
    """
    cache, half, device = SlotCache(1, len(token_ids)), loaded.vision, loaded.device
    starts = cache.begin([cache.allocate()], len(token_ids), whole=loaded.attends_trees)
    offset = vision.position_delta if vision else half.family.text_offset if half else 0
    layout = PassLayout(
        starts, len(token_ids), None, False, device=device, head_rows=min(rows, len(token_ids)), offsets=[offset]
    )
    ids = torch.tensor([list(token_ids)], device=device)
    embeddings: nn.Module = loaded.model.get_input_embeddings()  # type: ignore[assignment]
    if vision is not None:
        layout.rows = prompt_rows(embeddings, token_ids, 0, vision, features)
    if dither is not None:
        entering = layout.rows or PromptRows(embeddings(ids))
        layout.rows = replace(entering, embeds=_dithered(entering.embeds, dither))
    return loaded.forward(ids, layout, cache)[0]


def look(loaded: LoadedModel, vision: VisionPrompt | None) -> list[Features]:
    """What the tower sees in each picture of a prompt."""
    if vision is None:
        return []
    assert loaded.vision is not None, "pictures for a model that takes text alone"
    return [loaded.vision.features(image) for image in vision.images]


def _dithered(values: Tensor, seed: int) -> Tensor:
    """Each value one unit in the last place up or down, by a coin."""
    coins = torch.randint(2, values.shape, generator=torch.Generator().manual_seed(seed))
    steps = (coins.to(values.device, values.dtype) - 0.5) * torch.finfo(values.dtype).eps
    return values + values * steps
