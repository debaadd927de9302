"""What transformers' own forward hands to the text model of a prompt with images, for families without a row.

chat -- processor -- transformers' forward: tower, projector, positions, masks --|-- text model
                                                                  it is stopped here
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import IncompatibleModels

_DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")
_PER_LAYER = "per_layer_inputs"
_OWN = ("self", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache")
"""What a pass has of its own."""


@dataclass(frozen=True, eq=False)
class Entrance:
    """The arguments of the text model for P tokens.

    embeds: [P, E]. placeholder_ids: the tokens whose rows are not their embeddings. position_ids: [A, P].
    deepstack: the features [M, E] of all image tokens, for each of the first layers.
    blocks, windowed_blocks: as of `VisionPrompt`.
    extras: further arguments; their tensors begin with [1, P], or with [M] for M image tokens.
    """

    embeds: Tensor
    placeholder_ids: frozenset[int]
    position_ids: Tensor
    deepstack: tuple[Tensor, ...]
    blocks: tuple[tuple[int, int], ...]
    windowed_blocks: bool
    extras: Mapping[str, Any]


class _Stopped(Exception):
    """Carries the arguments of the text model out of the forward around it."""

    def __init__(self, arguments: Mapping[str, Any]):
        super().__init__()
        self.arguments = arguments


def stopping_copy(model: Any, language: nn.Module, head: nn.Module | None = None) -> nn.Module:
    """A copy over the same tensors whose forward ends where `language`, a part of it, begins.

    It has neither layers nor the output head.
    """
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    memo |= {id(part): nn.ModuleList() for part in language.children() if isinstance(part, nn.ModuleList)}
    if head is not None:
        memo[id(head)] = nn.Identity()
    copied = copy.deepcopy(model, memo)
    inner: Any = memo[id(language)]
    inner.forward = _stop(inspect.signature(type(language).forward))
    return copied


def _stop(signature: inspect.Signature) -> Callable[..., NoReturn]:
    def forward(*args: object, **options: object) -> NoReturn:
        bound = signature.bind_partial(None, *args, **options).arguments
        raise _Stopped({name: value for name, value in bound.items() if name in signature.parameters})

    return forward


@torch.inference_mode()
def enter(copied: Any, inputs: Mapping[str, Any], image_token: int) -> Entrance:
    """Run a copy from `stopping_copy` on the processor's inputs of one prompt, which hold its `input_ids` [1, P].

    Raises `IncompatibleModels` for arguments that passes here have no place for.
    """
    like = copied.get_input_embeddings().weight
    try:
        copied(**on_device(inputs, like), use_cache=False)
    except _Stopped as stopped:
        given = {name: value for name, value in stopped.arguments.items() if value is not None}
    else:
        raise _refusal("no call of its text model", "one call of it, with embeddings")
    ids: Tensor = inputs["input_ids"][0]
    length, image = len(ids), ids == image_token
    embeds = given.get("inputs_embeds")
    if embeds is None or embeds.shape[:2] != (1, length):
        raise _refusal("no embeddings of the prompt" if embeds is None else f"embeddings {list(embeds.shape)}")
    text = copied.get_input_embeddings()(ids.masked_fill(image, 0).to(like.device)).to(embeds.dtype)
    featured = image | (embeds[0] != text).any(-1).cpu()
    positions = given.get("position_ids", torch.arange(length)).reshape(-1, length).cpu()
    blocks, windowed = sight(given.get("attention_mask"), length, copied.config.get_text_config())
    extras = {name: value for name, value in given.items() if name not in _OWN and _has_tensor(value)}
    if _PER_LAYER in extras and _is_looked_up(extras[_PER_LAYER], copied, ids, image):
        del extras[_PER_LAYER]
    parts: Any = [extras.pop(name, None) for name in _DEEPSTACK]
    deepstack = () if parts[1] is None else tuple(part.reshape(-1, part.shape[-1]) for part in parts[1])
    wrong = [part.shape[0] for part in deepstack if len(part) != int(image.sum())]
    if wrong or (parts[0] is not None and not torch.equal(parts[0].reshape(-1).cpu(), image)):
        raise _refusal("features of deeper layers for other tokens than the placeholders")
    for name, value in extras.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and leaf.shape[:2] != (1, length) and leaf.shape[:1] != (int(image.sum()),):
                raise _refusal(f"{name} {list(leaf.shape)}", "arguments with a row for each token, or each image token")
    return Entrance(embeds[0], frozenset(ids[featured].tolist()), positions, deepstack, blocks, windowed, extras)


@torch.inference_mode()
def _is_looked_up(given: Tensor, copied: Any, ids: Tensor, image: Tensor) -> bool:
    """Whether inputs of each layer are those of the tokens, and of padding for images, which passes look up."""
    text = copied.get_decoder()
    text = getattr(text, "base_model", text)
    known = text.get_per_layer_inputs(ids.masked_fill(image, text.padding_idx or 0)[None].to(given.device))
    return torch.equal(given, known)


def on_device(inputs: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """The processor's inputs as a model takes them whose weights are `like`."""

    def moved(leaf: Any) -> Any:
        return leaf.to(like.device, like.dtype if leaf.is_floating_point() else None) if _has_tensor(leaf) else leaf

    return {name: tree_map(moved, value) for name, value in inputs.items()}


def columns_of(extras: Mapping[str, Any], length: int, columns: slice, image_tokens: slice) -> dict[str, Any]:
    """Extras of P = `length` tokens for some columns, and the image tokens that these hold."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf[:, columns] if leaf.shape[:2] == (1, length) else leaf[image_tokens]

    return {name: tree_map(cut, value) for name, value in extras.items()}


def sight(mask: Any, length: int, config: Any) -> tuple[tuple[tuple[int, int], ...], bool]:
    """The blocks of a mask of transformers, and whether only layers with a window have them, see `VisionPrompt`.

    Raises `IncompatibleModels` for a mask that is not causal besides.
    """
    masks = mask if isinstance(mask, Mapping) else {"full_attention": mask}
    full, sliding = (_seen(masks.get(kind), length) for kind in ("full_attention", "sliding_attention"))
    if full is None and sliding is None:
        return (), False
    blocks, only = _blocks(full), _blocks(sliding)
    windowed = bool(only) and not blocks
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    inside = causal.clone()
    for first, last in blocks or only:
        inside[first:last, first:last] = True
    near = torch.arange(length)[:, None] - torch.arange(length) < (getattr(config, "sliding_window", None) or length)
    for found, form in ((full, causal if windowed else inside), (sliding, inside & near)):
        if found is not None and not torch.equal(found, form):
            raise _refusal("a mask that is neither causal nor blocks of neighbours")
    return blocks or only, windowed


def _seen(mask: Any, length: int) -> Tensor | None:
    """Which columns each row sees, [P, P]; None: those before it."""
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
        return None
    if not isinstance(mask, Tensor) or mask.shape[-2:] != (length, length):
        raise _refusal(f"a mask {list(getattr(mask, 'shape', ())) or type(mask).__name__}")
    one = mask.reshape(-1, length, length)[0].cpu()
    return one if one.dtype is torch.bool else one > torch.finfo(one.dtype).min / 2


def _blocks(seen: Tensor | None) -> tuple[tuple[int, int], ...]:
    blocks, row = list[tuple[int, int]](), 0
    while seen is not None and row < len(seen):
        end = int(seen[row].nonzero().max()) + 1
        if end > row + 1:
            blocks.append((row, end))
        row = max(end, row + 1)
    return tuple(blocks)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _refusal(
    got: str, expected: str = "embeddings, positions and masks that a text alone could have"
) -> IncompatibleModels:
    return IncompatibleModels(
        "this family hands its text model what passes here have no place for", got=got, expected=expected,
        fix="decode it with plain transformers",
    )  # fmt: skip
