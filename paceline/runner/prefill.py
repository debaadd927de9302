"""What is needed to read prompts with images: features, chunks, and the rows of a pass over a prompt."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast, final

import torch
from torch import Tensor, nn

from ..attention.kv_cache import SlotCache
from ..attention.masks import PromptRows
from ..core.vision import PromptImage, VisionPrompt
from ..hf.vision import BoundedCache, Features, Vision, num_bytes
from .loaded import LoadedModel

FEATURE_BYTES = 512 << 20


@final
class ImagePrefill:
    """Features of images that one runner has computed; their `max_bytes` may be changed."""

    def __init__(self) -> None:
        self.features: BoundedCache[str, Features] = BoundedCache(FEATURE_BYTES, num_bytes)

    def look(self, vision: Vision, images: Sequence[PromptImage]) -> tuple[list[Features], float]:
        """Features of each image, and the seconds that the tower took for those that were not at hand."""
        begin, own = time.perf_counter(), {image.key: self.features.get(image.key) for image in images}
        missing = {image.key: image for image in images if own[image.key] is None}
        for key, image in missing.items():
            own[key] = made = vision.features(image)
            self.features.put(key, made)
        if missing and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin if missing else 0.0
        return [cast("Features", own[image.key]) for image in images], seconds


def chunks(end: int, blocks: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """Cut columns 0 to `end` into chunks of at most `most`, save where a block, which is never cut, is longer.

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
    """Where whole chunks end when so many tokens are read: images and text are cut apart."""
    edge, blocks = (0, ()) if vision is None else (vision.edge, vision.blocks)
    return [end for _, end in chunks(edge, blocks, most)] + list(range(edge + most, length + 1, most))


def prompt_rows(
    embeddings: nn.Module, token_ids: Sequence[int], begin: int, prompt: VisionPrompt, features: Sequence[Features]
) -> PromptRows:
    """What columns from `begin` on read: embeddings of the text, features in the place of the placeholders."""
    like: Tensor = embeddings.weight  # type: ignore[assignment]
    end, device = begin + len(token_ids), like.device
    known = [token if token < like.shape[0] else 0 for token in token_ids]  # placeholders may have no embedding
    embeds = embeddings(torch.tensor([known], device=device))
    is_image = torch.zeros(1, len(token_ids), dtype=torch.bool, device=device)
    deep: list[list[Tensor]] = []
    for image, seen in zip(prompt.images, features, strict=True):
        inside = [index for index, place in enumerate(image.places) if begin <= place < end]
        if not inside:
            continue
        columns = [image.places[index] - begin for index in inside]
        taken = slice(inside[0], inside[-1] + 1)
        embeds[0, columns] = seen.rows[taken].to(device, embeds.dtype)
        is_image[0, columns] = True
        deep.append([part[taken].to(device, embeds.dtype) for part in seen.deep])
    joined = tuple(torch.cat(parts) for parts in zip(*deep, strict=True))
    positions = None
    if prompt.position_ids is not None:  # on each axis, [A, 1, N]; behind the prompt they count on
        axes, length = prompt.position_ids.shape
        places = torch.arange(begin, end)
        behind = (places + prompt.position_delta).expand(axes, -1)
        own = prompt.position_ids[:, places.clamp(max=length - 1)]
        positions = torch.where(places < length, own, behind)[:, None].to(device)
    return PromptRows(embeds, positions, is_image, joined, prompt.blocks, prompt.blocks_cross_window)


@torch.inference_mode()
def whole_text(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    rows: int = 1,
    vision: VisionPrompt | None = None,
    features: Sequence[Features] = (),
    dither: int | None = None,
) -> Tensor:
    """Logits [rows, V] after the last `rows` tokens of a text: the slow, obvious pass that others are compared with.

        engine      [prompt][root a b c][c d e]     many passes, columns kept, moved and read again, rows of guesses
        here        [prompt a b c d e]              one pass in a cache of its own: no tree, no commit, no padding

    features: the features of each image of `vision`, see `look`.
    dither: a seed. Every number that enters the first layer is then moved up or down by its last bit, so that all later
        roundings fall differently.
    """
    cache = SlotCache(1, len(token_ids))
    return _read_on(loaded, cache, cache.allocate(), token_ids, vision, features, min(rows, len(token_ids)), dither)


@torch.inference_mode()
def text_logits(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    vision: VisionPrompt | None = None,
    features: Sequence[Features] = (),
    most: int = 512,
) -> Iterator[Tensor]:
    """Logits [M, V] after each token of a text, in chunks of at most `most` tokens, in a cache of its own."""
    cache = SlotCache(1, len(token_ids))
    slot = cache.allocate()
    for begin, end in chunks(len(token_ids), vision.blocks if vision else (), most):
        yield _read_on(loaded, cache, slot, token_ids[begin:end], vision, features)
        cache.lengths[slot] = end


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
    """Logits [M, V] of tokens behind what a slot holds, see `whole_text`; they are not committed."""
    cache.offsets[slot] = loaded.offset_of(vision)
    layout = loaded.begin(cache, [slot], len(token_ids), head_rows=head_rows)
    ids = torch.tensor([list(token_ids)], device=loaded.device)
    embeddings: nn.Module = loaded.model.get_input_embeddings()  # type: ignore[assignment]
    if vision is not None:
        layout.rows = prompt_rows(embeddings, token_ids, layout.starts[0], vision, features)
    if dither is not None:
        entering = layout.rows or PromptRows(embeddings(ids))
        layout.rows = replace(entering, embeds=_dithered(entering.embeds, dither))
    return loaded.forward(ids, layout, cache)[0]


def look(loaded: LoadedModel, vision: VisionPrompt | None) -> list[Features]:
    """What the tower sees in each image of a prompt."""
    if vision is None:
        return []
    assert loaded.vision is not None, "images for a model that takes text alone"
    return [loaded.vision.features(image) for image in vision.images]


def _dithered(values: Tensor, seed: int) -> Tensor:
    """Each value one unit in the last place up or down, by a coin."""
    coins = torch.randint(2, values.shape, generator=torch.Generator().manual_seed(seed))
    steps = (coins.to(values.device, values.dtype) - 0.5) * torch.finfo(values.dtype).eps
    return values + values * steps
