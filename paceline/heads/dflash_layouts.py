"""DFlash heads as their authors publish them (github.com/z-lab/dflash), read and written.

config.json   a Qwen3 config, block_size, and dflash_config: {mask_token_id, target_layer_ids}; id i names state i + 1
tensors       fc, hidden_norm, layers.*, norm; embeddings and output rows are the target's, whole
"""

from dataclasses import fields
from typing import Annotated

import torch
from pydantic import Field

from ..schema import Many, Positive, checked, validate
from .dflash import DFlashConfig, DFlashHead
from .parts import Count, Vocabulary, Width
from .published import CONTEXT, Layout, Published, TargetFacts, lacks, refuse_if, rope_of, stored_weights, vllm_command


@checked
class _Sizes:
    """What config.json of a head says."""

    hidden_size: Width
    intermediate_size: Width
    num_attention_heads: Width
    num_hidden_layers: Count
    vocab_size: Vocabulary
    block_size: Annotated[int, Field(ge=2)]
    mask_token_id: Annotated[int, Field(ge=0)]
    target_layer_ids: Annotated[Many[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    rms_norm_eps: Positive = 1e-6


_PLAIN = {
    "projector_type": ("dflash", None), "attention_mode": ("gqa", None), "causal": (False, None),
    "is_causal": (False, None), "attention_bias": (False, None), "hidden_act": ("silu", None),
    "input_embedding_scale": (1, None), "output_multiplier": (1, None), "final_logit_softcapping": (None,),
    "quantization_config": (None,),
}  # fmt: skip
"""Options that some heads of this family have, with the values that mean no more than the module here."""


def read_dflash(published: Published) -> DFlashHead:
    """A DFlash head. Raises `IncompatibleModels` for one of DFlash-2, Domino or DSpark, or with sliding attention."""
    given = {**published.config, **published.config["dflash_config"]}
    kinds = [str(name) for name in given.get("architectures") or ["DFlashDraftModel"]]
    features = [f"{name} {given[name]!r}" for name, plain in _PLAIN.items() if given.get(name) not in plain]
    features += [f"architecture {name}" for name in kinds if name != "DFlashDraftModel"]
    features += ["sliding attention"] * ("sliding_attention" in (given.get("layer_types") or []))
    if features:
        raise lacks(published, "DFlash", ", ".join(features), "the form of z-lab/Qwen3-8B-DFlash-b16")
    read = {field.name: given[field.name] for field in fields(_Sizes) if field.name in given}
    sizes = validate(_Sizes, read, f"config.json of the head at {str(published.folder)!r}")
    published.tensors = {name.removeprefix("model."): tensor for name, tensor in published.tensors.items()}
    config = DFlashConfig(
        hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size,
        states=tuple(layer + 1 for layer in sizes.target_layer_ids),
        draft_vocab_size=sizes.vocab_size, vocab_size=sizes.vocab_size,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads or sizes.num_attention_heads,
        head_dim=sizes.head_dim or sizes.hidden_size // sizes.num_attention_heads,
        num_hidden_layers=sizes.num_hidden_layers, rms_norm_eps=sizes.rms_norm_eps, qk_norm=True,
        mask_token_id=sizes.mask_token_id, block_size=sizes.block_size, **rope_of(published),
    )  # fmt: skip
    return published.build(DFlashHead, config, torch.arange(sizes.vocab_size))


_WRITTEN = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers",
    "vocab_size", "block_size", "rms_norm_eps", "rope_theta", "rope_scaling", "attention_bias",
)  # fmt: skip
"""Fields of `DFlashConfig` that config.json has by the same names."""


def dflash_layout(head: DFlashHead, engine: str, facts: TargetFacts) -> Layout:
    """The export of a DFlash head for vLLM or SGLang. Raises `NotExportable` for what they lack."""
    c, what = head.config, "a DFlash head"
    refuse_if(engine == "speculators", engine, what, "export it for vllm or sglang")
    is_qwen3 = c.qk_norm and not c.attention_bias
    refuse_if(not is_qwen3, engine, f"{what} whose layers are not Qwen3's", "train it with head.qk_norm=true")
    refuse_if(min(c.states) == 0, engine, f"{what} that reads the embeddings", "train one that reads later states")
    refuse_if(max(c.states) >= facts.num_layers, engine, f"state {max(c.states)}, behind the final norm here")
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **{name: getattr(c, name) for name in _WRITTEN},
        "rope_parameters": {**(c.rope_scaling or {"rope_type": "default"}), "rope_theta": c.rope_theta},
        "layer_types": ["full_attention"] * c.num_hidden_layers,
        "num_target_layers": facts.num_layers,
        "max_position_embeddings": facts.context or CONTEXT,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": c.mask_token_id, "target_layer_ids": [state - 1 for state in c.states]},
    }
    notes = [f"{engine} drafts a chain of the most probable tokens, not a tree."]
    if c.draft_vocab_size < c.vocab_size:
        notes.append(
            f"{engine} knows no draft vocabulary of DFlash heads: it drafts over all {c.vocab_size} tokens with the "
            f"target's output rows, where Paceline drafts over {c.draft_vocab_size}."
        )
    if c.window is not None:
        notes.append(f"{engine} reads all states of a text, where Paceline reads the last {c.window}.")
    serve = vllm_command("dflash", c.num_speculative_tokens)
    if engine == "sglang":
        serve = "python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        serve += "--speculative-draft-model-path {folder}"
    return Layout(config, stored_weights(head), serve, tuple(notes))
