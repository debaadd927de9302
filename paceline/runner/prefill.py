"""Reads prompts with pictures: the tower once for each image, and nothing twice.

    columns     0 ................ edge | edge ......... P-2 | P-1
    holds       pictures, text between  | text               | root, fed by the first pass
    computed    in chunks cut at edge   | as any text

What stands before the edge is kept for the next prompt that begins with the same tokens and the same pictures. Both
then compute what follows in the same chunks on the same keys, so a hit and a miss have the same bits.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, final

import torch
from torch import Tensor, nn

from ..attention.kv_cache import SlotCache
from ..attention.masks import PassLayout, PromptRows
from ..core.vision import PromptImage, VisionPrompt
from ..errors import ConfigError
from ..hf.vision import Bounded, Features, Vision
from .loaded import LoadedModel

if TYPE_CHECKING:
    from .model_runner import ModelRunner

FEATURE_BYTES = 512 << 20
PREFIX_BYTES = 1 << 30

FeatureCache: TypeAlias = Bounded[str, Features]
"""By what is in an image."""
PrefixKey: TypeAlias = tuple[tuple[int, ...], tuple[str, ...]]
"""Token ids up to the edge, and what is in each image."""
PrefixCache: TypeAlias = "Bounded[PrefixKey, Prefix]"


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys and values of the first columns, [H, S, d] for each layer, and their states, [S, E], where watched."""

    layers: list[tuple[Tensor, Tensor]]
    states: dict[int, Tensor]

    @property
    def num_columns(self) -> int:
        """S: one less than the edge where the prompt ended there, its last token being the root."""
        return self.layers[0][0].shape[-2]

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(t.nbytes for pair in self.layers for t in pair) + sum(t.nbytes for t in self.states.values())


@final
class PromptReader:
    """Reads the prompts of one runner. features, prefixes: what it has seen; their `max_bytes` may be changed."""

    def __init__(self, feature_bytes: int = FEATURE_BYTES, prefix_bytes: int = PREFIX_BYTES):
        self.features: FeatureCache = Bounded(feature_bytes, lambda features: features.num_bytes)
        self.prefixes: PrefixCache = Bounded(prefix_bytes, lambda prefix: prefix.num_bytes)

    def read(
        self, runner: "ModelRunner", slot: int, token_ids: Sequence[int], prompt: VisionPrompt
    ) -> tuple[int, float]:
        """Cache an empty slot's columns up to the edge; returns how many, and the seconds in the tower.

        A block may hold the last token: it is computed with its block, and once more as the root of the first pass.
        """
        kept = min(prompt.edge, len(token_ids) - 1)
        key, seconds = prefix_key(token_ids, prompt), 0.0
        found = self.prefixes.get(key)
        watched = runner.asked() or {}
        if found is not None and found.num_columns == kept and set(watched) <= set(found.states):
            runner.cache.restore(slot, found.layers)
            if watched:
                given = {layer: found.states[layer][None] for layer in watched}
                runner.states.write([slot], [0], given, runner.cache.capacity)
            return kept, seconds
        vision = vision_of(runner)
        features, seconds = self.look(vision, prompt.images)
        embeddings: nn.Module = runner.loaded.model.get_input_embeddings()  # type: ignore[assignment]
        for begin, end in chunks(prompt.edge, prompt.blocks, runner.chunk):
            ids = token_ids[begin:end]
            runner.read_chunk(slot, ids, prompt_rows(embeddings, ids, begin, prompt, features))
        runner.cache.truncate(slot, kept)
        if kept:
            states = {layer: runner.states.read(slot, 0, kept, (layer,)).clone() for layer in watched}
            self.prefixes.put(key, Prefix(runner.cache.copy_of(slot, kept), states))
        return kept, seconds

    def forget(self) -> None:
        """Drop all that was seen."""
        self.features.clear()
        self.prefixes.clear()

    def look(self, vision: Vision, images: Sequence[PromptImage]) -> tuple[list[Features], float]:
        """Features of each image, and the seconds that the tower took for those that were not at hand."""
        begin, own = time.perf_counter(), dict[str, Features]()
        ran = False
        for image in images:
            if image.key in own:
                continue
            found = self.features.get(image.key)
            if found is None:
                found, ran = vision.features(image), True
                self.features.put(image.key, found)
            own[image.key] = found
        if ran and next(iter(own.values())).rows.is_cuda:
            torch.cuda.synchronize()
        return [own[image.key] for image in images], time.perf_counter() - begin if ran else 0.0


def vision_of(runner: "ModelRunner") -> Vision:
    """The vision half of a runner's model. Raises `ConfigError` where it has none."""
    if runner.loaded.vision is None:
        raise ConfigError(
            "this model takes text alone", got="a prompt with pictures", fix="load a vision-language model"
        )
    return runner.loaded.vision


def prefix_key(token_ids: Sequence[int], prompt: VisionPrompt) -> PrefixKey:
    """What two prompts must share to share their columns before the edge."""
    return tuple(token_ids[: prompt.edge]), prompt.keys


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


def prompt_rows(
    embeddings: nn.Module,
    token_ids: Sequence[int],
    begin: int,
    prompt: VisionPrompt,
    features: Sequence[Features],
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
    return PromptRows(
        embeds, _positions(prompt, begin, end, device), is_image, joined, prompt.blocks, prompt.blocks_cross_window
    )


def _positions(prompt: VisionPrompt, begin: int, end: int, device: torch.device) -> Tensor | None:
    """Of columns begin to end on each axis, [A, 1, N]; behind the prompt they count on."""
    if prompt.position_ids is None:
        return None
    axes, length = prompt.position_ids.shape
    columns = torch.arange(begin, end)
    behind = (columns + prompt.position_delta).expand(axes, -1)
    own = prompt.position_ids[:, columns.clamp(max=length - 1)]
    return torch.where(columns < length, own, behind)[:, None].to(device)


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
