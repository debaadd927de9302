"""Gemma 4 assistants draft with layers that attend to the target's own keys and values.

x  = pre[emb; f]       emb: the target's embedding of the last token; f: its last state before that token
h  = norm layers(x)    queries alone: a layer reads the columns of the target's last layer of its kind that makes keys
f' = post h            in the place of f, where the next token is drafted; logits = lm_head(h), or those of the tokens
                       whose centroids are the nearest ("ordered embeddings")

Every token of a draft has the root's position and sees the committed columns. So levels have nothing to cache, and any
tree is drafted like a chain. The network is transformers' `gemma4_assistant`, in torch.
"""

import copy
from collections.abc import Sequence
from os import PathLike
from types import SimpleNamespace
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from ..attention.kv_cache import SlotCache
from ..core.interfaces import Target
from ..errors import ConfigError, IncompatibleModels
from ..hf.describe import config_of, key_layers_of
from ..hf.load import ASSISTANTS, open_checkpoint
from ..schema import checked
from .eagle.drafter import Eagle, EagleSpec
from .heads.draft_layer import Level
from .heads.parts import check_sizes

_TARGETS = ("gemma4_text", "gemma4_unified_text")


@final
class AssistantPass:
    """An assistant attached to its target. The cache holds no columns; its lengths count the tokens that were read."""

    is_native: ClassVar[bool] = False

    def __init__(self, head: "AssistantHead", target: Target):
        self.head, self._target = head, target
        self.cache = SlotCache(target.num_slots, target.max_length, 0)

    def extend_cache(
        self,
        slots: Sequence[int],
        tokens: Sequence[Sequence[int]],
        states: Sequence[Tensor],
        most: int = 0,
        noise: Tensor | None = None,
        masks: int = 0,
    ) -> Level:
        """The first level, [B, 1, ...], from the last token of each row and the last of its states; see `EaglePass`."""
        cache = self._target.cache
        for slot, row in zip(slots, tokens, strict=True):
            self.cache.lengths[slot] += len(row)
        device = states[0].device
        ends = torch.tensor([max(cache.lengths[slot], 1) for slot in slots], device=device)
        offsets = torch.tensor([cache.offsets[slot] for slot in slots], device=device)
        self._positions, width = (ends + offsets)[:, None], int(ends.max())
        columns, window = torch.arange(width, device=device), self.head.window
        seen = columns < ends[:, None]
        near = seen & (columns >= ends[:, None] - window - 1)  # transformers' window does not count the root
        self._seen = {"full_attention": seen[:, None, None], "sliding_attention": near[:, None, None]}
        where = slice(slots[0], slots[0] + 1) if len(slots) == 1 else list(slots)
        self._cached = {
            kind: (cache.keys[layer][where, :, :width], cache.values[layer][where, :, :width])
            for kind, layer in self.head.layers.items()
        }
        last = torch.tensor([[row[-1]] for row in tokens], device=device)
        return self._pass(last, torch.stack([row[-1:] for row in states]))

    def step(
        self, tokens: Tensor, hidden: Tensor, parents: Tensor, most: int = 0, noise: Tensor | None = None
    ) -> Level:
        """The next level, of nodes [B, F]; see `EaglePass`."""
        rows = torch.arange(len(hidden), device=hidden.device)[:, None]
        return self._pass(tokens.to(hidden.device), hidden[rows, parents.to(hidden.device)])

    def _pass(self, ids: Tensor, states: Tensor) -> Level:
        """Tokens [B, N] and the states before them [B, N, E]."""
        module, count = self.head.module, ids.shape[1]
        embeddings = self._target.loaded.model.get_input_embeddings()(ids)
        inputs = torch.cat([embeddings, states.to(embeddings.dtype)], -1)
        hidden = module.model(
            inputs_embeds=module.pre_projection(inputs),
            attention_mask={kind: seen.expand(-1, -1, count, -1) for kind, seen in self._seen.items()},
            position_ids=self._positions.expand(-1, count),
            shared_kv_states=self._cached,
            use_cache=False,
            logits_to_keep=torch.arange(count),  # a number would have transformers cut rows
        ).last_hidden_state
        ordered = module.masked_embedding
        logits = module.lm_head(hidden) if ordered is None else ordered(hidden, module.lm_head.weight)
        return Level(module.post_projection(hidden), logits)


@final
class AssistantHead:
    """A network that fits a target.

    layers: the target's layer of each kind whose keys and values it reads. window: of its sliding layers.
    """

    def __init__(self, module: Any, target: Any):
        self.module = module
        text, of = module.config.get_text_config(), target.model.config.get_text_config()
        if of.model_type not in _TARGETS:
            raise IncompatibleModels(
                "a Gemma 4 assistant drafts for Gemma 4 alone", got=of.model_type, expected=" or ".join(_TARGETS)
            )
        if target.kv_dtype is not None:
            raise ConfigError(
                "a Gemma 4 assistant reads the target's keys and values as they are",
                got=f"{target.name}, which rounds them",
                fix="leave kv_cache_dtype out, or take another drafter",
            )
        own = [layer for layer, other in enumerate(key_layers_of(of)) if layer == other]
        last = {of.layer_types[layer]: layer for layer in own}
        self.layers = {kind: last[kind] for kind in sorted({*text.layer_types})}
        needs, has = self._sizes(text, module.config.backbone_hidden_size), self._sizes(of, target.hidden_size)
        fix = "load the target that it was trained for"
        check_sizes(f"this assistant does not fit {target.name}", needs, has, fix)
        self.window, self.draft_ids = int(text.sliding_window), torch.arange(text.vocab_size, device=target.device)
        self.config = SimpleNamespace(
            method="gemma4_assistant", states=(target.num_layers,), window=1, num_speculative_tokens=None,
            target_hidden_size=target.hidden_size,
        )  # fmt: skip

    def _sizes(self, config: Any, hidden_size: int) -> dict[str, object]:
        """What target and assistant have in common, the heads of keys among them."""
        kinds = {kind: config_of(config, kind) for kind in self.layers}
        heads = {kind: f"{own.num_key_value_heads} heads of {own.head_dim}" for kind, own in kinds.items()}
        return {"hidden_size": hidden_size, "vocab_size": config.vocab_size, **heads}


@final
class Gemma4Assistant(Eagle):
    """Draft with a Gemma 4 assistant: a folder, or transformers' module. Options are those of `Eagle`."""

    name: ClassVar[str] = "gemma4_assistant"
    _pass: ClassVar[Any] = AssistantPass

    def _attach(self, target: Target) -> AssistantHead:
        given: Any = self._given
        return AssistantHead(_module_of(given, target), target.loaded)


def _module_of(given: str | PathLike[str] | nn.Module, target: Target) -> nn.Module:
    """A copy in the dtype and on the device of the target. Raises `ConfigError` for what is no assistant."""
    loaded = target.loaded
    module: Any = given
    if not isinstance(given, nn.Module):
        module = open_checkpoint(str(given), loaded.dtype, loaded.device, False, loaded.tokenizer)[0]
    kind = getattr(getattr(module, "config", None), "model_type", type(module).__name__)
    if kind not in ASSISTANTS:
        raise ConfigError("this is no Gemma 4 assistant", got=kind, expected=" or ".join(ASSISTANTS))
    module = copy.deepcopy(module) if module is given else module
    module.set_attn_implementation("sdpa")
    return module.to(loaded.device, loaded.dtype).eval().requires_grad_(False)


@checked
class Gemma4AssistantSpec(EagleSpec):
    """Options of `Gemma4Assistant`."""

    method = "gemma4_assistant"
    drafter = Gemma4Assistant

    def elsewhere(self, tokens: int) -> dict[str, tuple[str, str]]:
        return dict.fromkeys(("vLLM", "SGLang", "llama.cpp"), ("", "Gemma 4 assistants were not tried there"))
