"""EAGLE heads as published: the repository's own layout (EAGLE-1, -2) and that of vLLM and SGLang (EAGLE-3).

The states an EAGLE-3 head reads are counted in three ways; s is the state as transformers counts it:

    config.json                                        state        read by
    eagle_aux_hidden_state_layer_ids, top level        s = id       vLLM, speculators
    eagle_config.eagle_aux_hidden_state_layer_ids      s = id + 1   SGLang: the output of layer id
    neither                                            (2, L//2, L-3)
    paceline_states                                    s            Paceline, where the others are not clear

The published d2t holds offsets: the target's id of draft token i is i + d2t[i].
"""

from dataclasses import fields
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError, IncompatibleModels
from ..modules import EagleConfig, EagleHead
from ..modules.sizes import Size, Vocabulary
from ..schema import checked, validate
from .foreign_files import Published, Target, dtype_of, is_copy

IDS = "eagle_aux_hidden_state_layer_ids"
_UNSUPPORTED = (
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "parallel_drafting",
    "quantization_config",
    "attn_output_gate",
)


def default_states(num_layers: int) -> tuple[int, int, int]:
    """What vLLM and SGLang read where config.json names nothing."""
    return 2, num_layers // 2, num_layers - 3


def read_eagle(published: Published, target: Target | None) -> EagleHead:
    """An EAGLE-1 or -2 head; it reads the last state alone."""
    states = (_known(published, target, "it reads the target's last state").num_layers,)
    return _read(published, target, 1, states)


def read_eagle3(published: Published, target: Target | None, engine: str | None = None) -> EagleHead:
    """An EAGLE-3 head. engine: whose way to count layers is taken where config.json could mean another's, too."""
    return _read(published, target, 3, _states(published, target, engine))


def _states(published: Published, target: Target | None, engine: str | None) -> tuple[int, ...]:
    config = published.config
    nested = config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state", True) is not True:
        raise _lacks(published, "an EAGLE-3 head over the last state alone (use_aux_hidden_state: false)")
    inner = [layer + 1 for layer in nested.get(IDS) or []]
    outer = [] if engine == "sglang" else config.get("paceline_states") or config.get(IDS) or []
    ids: list[int] = outer or inner
    if not ids:
        ids = list(
            default_states(_known(published, target, "config.json does not say which states it reads").num_layers)
        )
    elif not (outer or engine) and target and nested[IDS] == list(default_states(target.num_layers)):
        raise ConfigError(
            f"which states the head at {str(published.folder)!r} reads is not clear",
            got=f"{nested[IDS]} in eagle_config, which is the default if it counts states, and not if it counts layers",
            fix='add "paceline_states": [...] to config.json, counted as transformers counts hidden_states',
        )
    if target is not None and not all(0 <= state < target.num_layers for state in ids):
        raise IncompatibleModels(
            f"the head at {str(published.folder)!r} reads states that the target lacks",
            got=ids,
            expected=f"0 to {target.num_layers - 1}, below the final norm",
        )
    return tuple(ids)


def _read(published: Published, target: Target | None, version: Literal[1, 3], states: tuple[int, ...]) -> EagleHead:
    published.tensors = {_plain_name(name): tensor for name, tensor in published.tensors.items()}
    _refuse_features(published)
    given = {field.name: published.config[field.name] for field in fields(_Sizes) if field.name in published.config}
    sizes = validate(_Sizes, given, f"config.json of the head at {str(published.folder)!r}")
    tensors, e, heads = published.tensors, sizes.hidden_size, sizes.num_attention_heads
    t = sizes.target_hidden_size or e
    draft_ids = _draft_ids(published, sizes) if version == 3 else torch.arange(sizes.vocab_size)
    own_head = _own(published, "lm_head.weight", len(draft_ids), target and target.lm_head)
    own_embeddings = _own(published, "embed_tokens.weight", sizes.vocab_size, target and target.embeddings)
    biased = [f"layers.0.self_attn.{x}_proj.bias" for x in "qkv"]
    config = EagleConfig(
        version=version,
        hidden_size=e,
        target_hidden_size=t,
        intermediate_size=sizes.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=sizes.num_key_value_heads or heads,
        head_dim=sizes.head_dim or e // heads,
        states=states,
        draft_vocab_size=len(draft_ids),
        vocab_size=sizes.vocab_size,
        rms_norm_eps=float(published.config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(published),
        own_lm_head=own_head,
        own_embeddings=own_embeddings,
        fc_bias="fc.bias" in tensors,
        attention_bias=any(name in tensors for name in biased),
        norm_before_residual=version == 3 and bool(published.config.get("norm_before_residual", False)),
    )
    if e != t and not own_embeddings:
        raise _lacks(published, "a head narrower or wider than its target without embeddings of its own")
    ascending = torch.argsort(draft_ids)
    with torch.device("meta"):  # shapes only
        shapes = EagleHead(config).state_dict()
    del shapes["draft_ids"]
    state = {name: published.take(name.replace("midlayer.", "layers.0."), tuple(shapes[name].shape)) for name in shapes}
    published.finish()
    if own_head:
        state["lm_head.weight"] = state["lm_head.weight"][ascending]
    state["draft_ids"] = draft_ids[ascending]
    module = EagleHead(config, draft_ids[ascending])
    module.load_state_dict(state)
    return module.to(dtype_of(state.values()))


@checked
class _Sizes:
    """Sizes as config.json has them, with the defaults of a Llama config."""

    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    vocab_size: Vocabulary
    target_hidden_size: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    draft_vocab_size: Vocabulary | None = None


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _draft_ids(published: Published, sizes: _Sizes) -> Tensor:
    """Target id of each draft token, in the file's order. [Vd]."""
    size, tensors = sizes.draft_vocab_size or sizes.vocab_size, published.tensors
    named = tensors.pop("t2d", None)
    if "d2t" not in tensors and size != sizes.vocab_size:
        published.problems.append(f"d2t is missing, and the draft vocabulary has {size} of {sizes.vocab_size} tokens")
        return torch.arange(size)
    ids = torch.arange(size)
    if "d2t" in tensors and not (offsets := published.take("d2t", (size,), floats=False)).is_meta:
        ids = ids + offsets.long()
    wrong = None
    if not bool(((ids >= 0) & (ids < sizes.vocab_size)).all()):
        wrong = "ids outside the vocabulary"
    elif len(ids.unique()) != size:
        wrong = "ids that occur twice"
    elif named is not None and (
        named.numel() != sizes.vocab_size or set(named.nonzero()[:, 0].tolist()) != set(ids.tolist())
    ):
        wrong = "ids other than t2d has"
    if wrong is not None and not published.problems:
        raise ConfigError(
            f"the draft vocabulary of the head at {str(published.folder)!r} is not sound",
            got=f"d2t gives {wrong}",
            expected="offsets: the target's id of draft token i is i + d2t[i]",
        )
    return ids


def _own(published: Published, name: str, rows: int, target: Tensor | None) -> bool:
    """True if the head brings this table; a copy of the target's is dropped, the target lends its own."""
    table = published.tensors.get(name)
    if table is None:
        return False
    if target is None or tuple(table.shape) != tuple(target.shape) or len(table) != rows or not is_copy(table, target):
        return True
    del published.tensors[name]
    return False


def _rope_theta(published: Published) -> float:
    config = published.config
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise _lacks(published, f"rotary positions of type {kind!r}")
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)


def _refuse_features(published: Published) -> None:
    config, tensors = published.config, published.tensors
    nested = config.get("eagle_config") or {}
    found = [name for name in _UNSUPPORTED if config.get(name) or nested.get(name)]
    if config.get("num_hidden_layers", 1) != 1 or any(name.startswith("layers.1.") for name in tensors):
        found.append("more than one layer")
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act {config['hidden_act']!r}")
    if config.get("logit_scale", 1.0) not in (None, 1.0):
        found.append("logit_scale")
    if config.get("model_type", "llama") not in ("llama", "eagle") or any(".q_norm." in name for name in tensors):
        found.append(f"layers of model type {config.get('model_type')!r}, where only Llama's are known")
    if "sliding_attention" in (config.get("layer_types") or []):
        found.append("sliding attention")
    bias = tensors.get("layers.0.self_attn.o_proj.bias")
    if bias is not None and not bias.any():
        del tensors["layers.0.self_attn.o_proj.bias"]
    elif bias is not None:
        found.append("a bias of o_proj")
    if found:
        raise _lacks(published, ", ".join(found))


def _lacks(published: Published, what: str) -> IncompatibleModels:
    return IncompatibleModels(
        f"the head at {str(published.folder)!r} has what Paceline's EAGLE module lacks", got=what,
        expected="one Llama layer with default rotary positions, as EAGLE-1, -2 and -3 published it",
    )  # fmt: skip


def _known(published: Published, target: Target | None, why: str) -> Target:
    if target is None:
        raise ConfigError(
            f"the head at {str(published.folder)!r} cannot be read without its target", got=why, fix="name the target"
        )
    return target
