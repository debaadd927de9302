"""Prefill of prompts with images: features, chunks, and the input rows of a pass."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast, final

import torch
from torch import Tensor, nn

from ..attention.kv_cache import SlotCache
from ..attention.masks import PromptRows
from ..core.vision import PromptImage, VisionPrompt
from ..hf.entrance import columns_of
from ..hf.vision import BoundedCache, Features, Vision, num_bytes
from ..quant.packed import device_of
from .loaded import LoadedModel

FEATURE_BYTES = 512 << 20


@final
class ImagePrefill:
    """Encodes images for one runner and caches their features, at most `features.max_bytes`."""

    def __init__(self) -> None:
        self.features: BoundedCache[str, Features] = BoundedCache(FEATURE_BYTES, num_bytes)

    def encode(self, vision: Vision, images: Sequence[PromptImage]) -> tuple[list[Features], float]:
        """The features of each image, and the seconds that the tower took for those that were not cached."""
        begin, own = time.perf_counter(), {image.key: self.features.get(image.key) for image in images}
        missing = {image.key: image for image in images if own[image.key] is None}
        for key, features in zip(missing, vision.encode([*missing.values()]), strict=True):
            own[key] = features
            self.features.put(key, features)
        if missing and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin if missing else 0.0
        return [cast("Features", own[image.key]) for image in images], seconds


def chunks(end: int, blocks: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """Cut columns 0 to `end` into chunks of at most `most` columns. A block is never cut, even if it is longer.

    Example: chunks(10, [(3, 7)], 4) gives (0, 3), (3, 7), (7, 10).
    """
    begin = 0
    while begin < end:
        stop = min(begin + most, end)
        cut = next((block for block in blocks if block[0] < stop < block[1]), None)
        if cut is not None:
            stop = cut[0] if cut[0] > begin else cut[1]
        yield begin, stop
        begin = stop


def chunk_ends(length: int, vision: VisionPrompt | None, most: int) -> list[int]:
    """Where the whole chunks of a prefill of `length` tokens end. No chunk spans the edge between images and text."""
    edge, blocks = (0, ()) if vision is None else (vision.edge, vision.blocks)
    return [end for _, end in chunks(edge, blocks, most)] + list(range(edge + most, length + 1, most))


def prompt_rows(
    embeddings: nn.Module, token_ids: Sequence[int], begin: int, prompt: VisionPrompt, features: Sequence[Features]
) -> PromptRows:
    """The input rows of the columns from `begin` on: embeddings of the text, and features in place of placeholders."""
    end = begin + len(token_ids)
    count: int = embeddings.num_embeddings  # type: ignore[assignment]
    known = [token if token < count else 0 for token in token_ids]  # a placeholder may have no embedding
    embeds = embeddings(torch.tensor([known], device=device_of(embeddings)))
    device = embeds.device
    is_image = torch.zeros(1, len(token_ids), dtype=torch.bool, device=device)
    deepstack: list[list[Tensor]] = []
    extras: Mapping[str, object] = {}
    if features and features[0].extras:
        seen = [sum(place < edge for image in prompt.images for place in image.places) for edge in (begin, end)]
        extras = columns_of(features[0].extras, prompt.edge + 1, slice(begin, end), slice(*seen))
    for image, seen in zip(prompt.images, features, strict=True):
        inside = [index for index, place in enumerate(image.places) if begin <= place < end]
        if not inside:
            continue
        columns = [image.places[index] - begin for index in inside]
        taken = slice(inside[0], inside[-1] + 1)
        embeds[0, columns] = seen.rows[taken].to(device, embeds.dtype)
        is_image[0, columns] = True
        deepstack.append([part[taken].to(device, embeds.dtype) for part in seen.deepstack])
    joined = tuple(torch.cat(parts) for parts in zip(*deepstack, strict=True))
    positions = None
    if prompt.position_ids is not None:  # [A, 1, N]; after the prompt each axis counts up by one
        axes, length = prompt.position_ids.shape
        places = torch.arange(begin, end)
        behind = (places + prompt.position_delta).expand(axes, -1)
        own = prompt.position_ids[:, places.clamp(max=length - 1)]
        positions = torch.where(places < length, own, behind)[:, None].to(device)
    blocks = prompt.blocks, prompt.blocks_cross_window, prompt.windowed_blocks
    return PromptRows(embeds, positions, is_image, joined, *blocks, extras)


@torch.inference_mode()
def reference_logits(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    rows: int = 1,
    vision: VisionPrompt | None = None,
    features: Sequence[Features] = (),
    dither: int | None = None,
) -> Tensor:
    """Logits [rows, V] after the last `rows` tokens of a text, computed in the simplest way, for comparisons.

        engine      [prompt][root a b c][c d e]     many passes over trees, whose accepted columns are moved
        here        [prompt a b c d e]              one pass with its own cache: no tree, no commit, no padding

    features: the features of each image of `vision`, see `encode_images`.
    dither: a seed. If given, every input of the first layer is randomly moved up or down by one unit in the last place,
        so that all later roundings change.
    """
    cache = loaded.new_cache(1, len(token_ids))
    slot, begin = cache.allocate(), 0
    if vision is not None and _ends_at_edge(loaded):
        begin = vision.edge
        _read_on(loaded, cache, slot, token_ids[:begin], vision, features, 1, dither)
        cache.lengths[slot] = begin
    rest = token_ids[begin:]
    return _read_on(loaded, cache, slot, rest, vision, features, min(rows, len(rest)), dither)


def _read_on(
    loaded: LoadedModel,
    cache: SlotCache,
    slot: int,
    token_ids: Sequence[int],
    vision: VisionPrompt | None,
    features: Sequence[Features],
    head_rows: int | None = None,
    dither: int | None = None,
) -> Tensor:
    """Logits [M, V] of tokens after those of a slot, see `reference_logits`. They are not committed."""
    cache.offsets[slot] = loaded.offset_of(vision)
    layout = loaded.begin(cache, [slot], len(token_ids), head_rows=head_rows)
    ids = torch.tensor([list(token_ids)], device=loaded.device)
    embeddings: nn.Module = loaded.model.get_input_embeddings()  # type: ignore[assignment]
    if vision is not None and not (_ends_at_edge(loaded) and layout.starts[0] >= vision.edge):
        layout.rows = prompt_rows(embeddings, token_ids, layout.starts[0], vision, features)
    if dither is not None:
        entering = layout.rows or PromptRows(embeddings(ids))
        layout.rows = replace(entering, embeds=_dithered(entering.embeds, dither))
    return loaded.forward(ids, layout, cache)[0]


def _ends_at_edge(loaded: LoadedModel) -> bool:
    """Whether rows of images and of the text behind them cannot share a pass."""
    return loaded.vision is not None and loaded.vision.family.needs_transformers


def encode_images(loaded: LoadedModel, vision: VisionPrompt | None) -> list[Features]:
    """The features of each image of a prompt."""
    if vision is None:
        return []
    assert loaded.vision is not None, "images for a model that takes text alone"
    return loaded.vision.encode(vision.images)


def _dithered(values: Tensor, seed: int) -> Tensor:
    """Each value moved up or down by one unit in the last place, at random."""
    coins = torch.randint(2, values.shape, generator=torch.Generator().manual_seed(seed))
    steps = (coins.to(values.device, values.dtype) - 0.5) * torch.finfo(values.dtype).eps
    return values + values * steps
