"""EAGLE heads as others publish them, read and written: the repository's layout, and those of the engines.

                 EAGLE-1 (and -2)                     EAGLE-3
tensors          layers.i.*, fc                       layers.i.*, the first also midlayer.*; fc, norm, lm_head
output rows      the target's, whole                  those of the draft vocabulary
vocabulary       vLLM: all; SGLang: a file of ids     d2t: offsets, target's id minus draft id; t2d: a mask
fc.bias          vLLM: none; SGLang: always           none
states read      the last                             see below
P-EAGLE                                               mask_hidden [1, states E], and a token id: mask_token_id
                                                      (speculators), ptd_token_id or pard_token

The states an EAGLE-3 head reads are counted in three ways; s is the state as transformers counts it:

    config.json                                        state        read by
    eagle_aux_hidden_state_layer_ids, top level        s = id       vLLM, speculators
    eagle_config.eagle_aux_hidden_state_layer_ids      s = id + 1   SGLang: the output of layer id
    neither                                            (2, L//2, L-3)
    paceline_states                                    s            Paceline, where the others are not clear
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field

from ...errors import ConfigError, IncompatibleModels
from ...schema import checked, validate
from ..heads.gguf import ENGINE as LLAMA_CPP
from ..heads.parts import Count, States, Vocabulary, Width
from ..heads.published import (
    Layout,
    Published,
    TargetFacts,
    check_states,
    draft_tables,
    ids_of_drafts,
    lacks,
    owns_table,
    refuse_if,
    renamed,
    stored_weights,
    target_rows,
    vllm_command,
)
from ..heads.published_options import PublishedLayers, check_held, joined, layer_fields, layers_config, said
from ..heads.speculators import KIND, flattened, nested
from .gguf import read_file, write_file
from .head import EagleConfig, EagleHead

IDS = "eagle_aux_hidden_state_layer_ids"
HOT_TOKENS = "hot_tokens.pt"
_MASK_IDS = ("mask_token_id", "ptd_token_id", "pard_token")
_CHAIN = "vLLM drafts a chain of the most probable tokens, not a tree."
_TREE = {
    "vllm": _CHAIN,
    "speculators": _CHAIN,
    "sglang": "SGLang drafts a tree; its topk and number of tokens are options.",
}
_NORMS = "fc_norm", "norm_before_fc", "norm_output"
_READ = "layers of Llama, as EAGLE-1, -2 and -3 published them, or of Qwen3"
_Token = Annotated[int, Field(ge=0)]


@checked
class _Eagle(PublishedLayers):
    """What config.json of an EAGLE head says; absent options are as vLLM reads them."""

    _: KW_ONLY
    model_type: str = "llama"
    target_hidden_size: Width | None = None
    draft_vocab_size: Vocabulary | None = None
    tie_word_embeddings: bool = False
    bias: bool | None = None
    attention_bias: bool = False
    qkv_bias: bool | None = None
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    use_aux_hidden_state: bool = True
    eagle_aux_hidden_state_layer_ids: States | None = None
    paceline_states: States | None = None
    parallel_drafting: bool = False
    mask_token_id: _Token | None = None
    ptd_token_id: _Token | None = None
    pard_token: _Token | None = None
    paceline_num_speculative_tokens: Count | None = None
    speculators_config: Mapping[str, Any] | None = None


# ----------------------------------------------------------------------------------------------------------- reading


def read(published: Published, target: TargetFacts, engine: str | None) -> EagleHead | None:
    """An EAGLE head in any of its layouts; None for files of another method."""
    if published.file is not None:
        return read_file(published, target) if published.architecture == "eagle3" else None
    names = published.tensors
    if KIND in published.config:
        published.config = _flattened(published.config)
    elif not any(name.endswith(".hidden_norm.weight") for name in names):
        return _read(published, target, 1) if "fc.weight" in names else None
    return _read(published, target, 3, engine)


def _flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of the speculators layout as a plain EAGLE-3 config. Raises as `flattened`."""
    # An absent norm_before_residual means true in eagle3, false in peagle and in plain configs, as vLLM reads them.
    return flattened(config, ("eagle3", "peagle"), {"norm_before_residual": config[KIND] == "eagle3"})


def _states(
    published: Published, options: _Eagle, inner: Sequence[int], target: TargetFacts, engine: str | None
) -> tuple[int, ...]:
    """Those that an EAGLE-3 head reads. inner: the layers that eagle_config names."""
    outer = () if engine == "sglang" else options.paceline_states or options.eagle_aux_hidden_state_layer_ids or ()
    ids = list(outer or [layer + 1 for layer in inner])
    if not ids:
        ids = _default_states(target)
    elif not (outer or engine) and list(inner) == _default_states(target):
        raise ConfigError(
            f"which states the head at {str(published.folder)!r} reads is not clear",
            got=f"{list(inner)} in eagle_config, which is the default if it counts states, and not if it counts layers",
            fix='add "paceline_states": [...] to config.json, counted as transformers counts hidden_states',
        )
    check_states(published, ids, target)
    return tuple(ids)


def _default_states(target: TargetFacts) -> list[int]:
    """What vLLM and SGLang read where config.json names nothing."""
    return [2, target.num_layers // 2, target.num_layers - 3]


def _read(published: Published, target: TargetFacts, version: Literal[1, 3], engine: str | None = None) -> EagleHead:
    """A head of EAGLE-1 (or -2), which reads the last state alone, or EAGLE-3.

    engine: whose way to count layers applies where config.json could mean another's, too.
    """
    published.tensors = renamed(published.tensors, lambda name: name.removeprefix("model."), published.folder)
    within = dict(published.config.get("eagle_config") or {})  # engines read it first
    inner = within.pop(IDS, None) or ()
    if inner:
        inner = validate(cast("type[tuple[int, ...]]", States), inner, f"eagle_config.{IDS}")
    outer = {key: value for key, value in published.config.items() if key != "eagle_config"}
    published.config = joined(published.name, outer, within, "eagle_config")
    options = said(published, _Eagle, "EAGLE", _READ)
    states = (target.num_layers,) if version == 1 else _states(published, options, inner, target, engine)
    _refuse_features(published, options, version)
    tensors, e = published.tensors, options.hidden_size
    sizes = options.draft_vocab_size or options.vocab_size, options.vocab_size
    draft_ids = ids_of_drafts(published, *sizes) if version == 3 else torch.arange(options.vocab_size)
    config = EagleConfig(
        version=version,
        target_hidden_size=options.target_hidden_size or e,
        states=states,
        draft_vocab_size=len(draft_ids),
        **layer_fields(published, options, "EAGLE"),
        own_lm_head=owns_table(published, "lm_head.weight", len(draft_ids), target.lm_head),
        own_embeddings=owns_table(published, "embed_tokens.weight", options.vocab_size, target.embeddings),
        fc_bias="fc.bias" in tensors,
        attention_bias=_has_biases(published),
        qk_norm=options.model_type == "qwen3",
        norm_before_residual=options.norm_before_residual,
        **{name: getattr(options, name) for name in _NORMS},
        **_mask(published, options),
    )
    if e != config.target_hidden_size and not config.own_embeddings:
        raise _lacks(published, "a head narrower or wider than its target without embeddings of its own")
    if options.tie_word_embeddings and config.own_embeddings and not config.own_lm_head:
        raise _lacks(published, "tie_word_embeddings with embeddings of its own")
    return published.build(EagleHead, config, draft_ids)


def _mask(published: Published, options: _Eagle) -> dict[str, Any]:
    """The fields of `EagleConfig` that a P-EAGLE head has. Where its files do not say so, it drafts 4 tokens."""
    mask_ids = {token for name in _MASK_IDS if (token := getattr(options, name)) is not None}
    if "mask_hidden" not in published.tensors:
        if mask_ids or options.parallel_drafting:
            raise _lacks(published, "parallel_drafting without mask_hidden, or a mask token without it")
        return {}
    published.tensors["mask_hidden"] = published.tensors["mask_hidden"].reshape(1, -1)
    if len(mask_ids) != 1:
        message = f"the head at {str(published.folder)!r} has mask_hidden and no mask token, or several"
        raise ConfigError(message, got=sorted(mask_ids) or None, expected="one of " + " or ".join(_MASK_IDS))
    methods = (options.speculators_config or {}).get("proposal_methods") or [{}]
    told = options.paceline_num_speculative_tokens, methods[0].get("speculative_tokens"), 4
    count = next(count for count in told if count is not None)
    return {"mask_token_id": mask_ids.pop(), "num_speculative_tokens": count}


def _has_biases(published: Published) -> bool:
    return any(f"layers.0.self_attn.{letter}_proj.bias" in published.tensors for letter in "qkv")


def _refuse_features(published: Published, options: _Eagle, version: Literal[1, 3]) -> None:
    tensors, kind = published.tensors, options.model_type
    biases = [tensors.pop(name) for name in list(tensors) if name.endswith("self_attn.o_proj.bias")]
    part = options.draft_vocab_size not in (None, options.vocab_size)
    features: dict[str, bool] = {
        "an EAGLE-3 head over the last state alone (use_aux_hidden_state: false)": version == 3
        and not options.use_aux_hidden_state,
        "an EAGLE-1 head with norm_before_residual": version == 1 and options.norm_before_residual,
        f"an EAGLE-1 head with draft_vocab_size {options.draft_vocab_size}": version == 1 and part,
        f"layers of model type {kind!r}, where only Llama's and Qwen3's are known": kind
        not in ("llama", "eagle", "qwen3"),
        "a bias of o_proj": any(bool(bias.any()) for bias in biases),
    }
    if any(features.values()):
        raise _lacks(published, ", ".join(name for name, has in features.items() if has))
    qkv = "attention_bias" if options.qkv_bias is None else "qkv_bias"
    fc = options.bias, "fc.bias" in tensors  # as EAGLE's repository means it
    check_held(published, {"bias": fc, qkv: (getattr(options, qkv), _has_biases(published))})


def _lacks(published: Published, feature: str) -> IncompatibleModels:
    return lacks(published, "EAGLE", feature, _READ)


# ----------------------------------------------------------------------------------------------------------- writing


def layout(head: EagleHead, engine: str, facts: TargetFacts, num_tokens: int) -> Layout:
    """The export of an EAGLE head. num_tokens: drafted a step where the engine takes one number.

    Raises `NotExportable` for what the engine lacks.
    """
    if engine == LLAMA_CPP:
        return write_file(head, facts, num_tokens)
    refuse_if(head.config.qk_norm, engine, "layers of Qwen3's form")
    return (_eagle1 if head.config.version == 1 else _eagle3)(head, engine, facts, num_tokens)


def _eagle1(head: EagleHead, engine: str, facts: TargetFacts, num_tokens: int) -> Layout:
    c, tensors = head.config, stored_weights(head)
    kind, whole, is_sglang = "an EAGLE-1 head", c.draft_vocab_size == c.vocab_size, engine == "sglang"
    refuse_if(c.states != (facts.num_layers,), engine, f"{kind} that reads states {c.states} and not the last one")
    has_rows = c.own_lm_head and (is_sglang or not whole)
    refuse_if(has_rows, engine, f"{kind} with output rows of its own", "train it with the target's output rows")
    refuse_if(is_sglang and c.own_embeddings, engine, f"{kind} with embeddings of its own")
    refuse_if(is_sglang and c.attention_bias, engine, f"{kind} with biases")
    layer = _layer_config(c, facts)
    if is_sglang:
        # Its fc has a bias in any case, which a file without one leaves at a random value.
        tensors.setdefault("fc.bias", torch.zeros(c.hidden_size, dtype=tensors["fc.weight"].dtype))
        config, serve = {"architectures": ["LlamaForCausalLMEagle"], **layer}, _sglang_command("EAGLE", num_tokens)
        if whole:
            return Layout(config, tensors, serve, (_TREE[engine],))
        serve += f" --speculative-token-map {{folder}}/{HOT_TOKENS}"
        return Layout(config, tensors, serve, (_TREE[engine],), {HOT_TOKENS: head.draft_ids.tolist()})
    bias = tensors.pop("fc.bias", torch.zeros(1))
    refuse_if(bool(bias.any()), engine, "an fc with a bias that is not zero", "train it with fc_bias=False")
    note = (
        f"vLLM knows no draft vocabulary for EAGLE-1: it drafts over all {c.vocab_size} tokens with the target's "
        f"output rows, where Paceline drafts over {c.draft_vocab_size}."
    )
    config = {"architectures": ["LlamaForCausalLM"], **layer, "qkv_bias": c.attention_bias}
    notes = (_TREE[engine],) if whole else (note, _TREE[engine])
    return Layout(config, tensors, vllm_command("eagle", num_tokens), notes)


def _eagle3(head: EagleHead, engine: str, facts: TargetFacts, num_tokens: int) -> Layout:
    c, kind, last, is_sglang = head.config, "an EAGLE-3 head", max(head.config.states), engine == "sglang"
    refuse_if(len(c.states) != 3, engine, f"{kind} that reads {len(c.states)} states", "train one that reads three")
    refuse_if(last >= facts.num_layers, engine, f"state {last}, behind the final norm in Paceline and before it there")
    refuse_if(c.fc_bias or c.attention_bias, engine, f"{kind} with biases", "train it without")
    refuse_if(is_sglang and c.norm_before_residual, engine, f"{kind} with norm_before_residual")
    refuse_if(is_sglang and c.norm_before_fc, engine, f"{kind} with norm_before_fc", "train it with fc_norm")
    refuse_if(is_sglang and c.num_hidden_layers > 1, engine, f"{kind} of {c.num_hidden_layers} layers")
    refuse_if(is_sglang and c.own_embeddings, engine, f"{kind} with its own embeddings")
    refuse_if(is_sglang and 0 in c.states, engine, "state 0, the embeddings: SGLang counts the outputs of layers")
    parallel: dict[str, Any] = {}
    if c.num_speculative_tokens is not None:
        num_tokens = min(num_tokens, c.num_speculative_tokens)
        parallel = {"mask_token_id": c.mask_token_id, "paceline_num_speculative_tokens": c.num_speculative_tokens}
    first = "layers.0." if engine == "speculators" else "midlayer."  # which SGLang and EAGLE's repository call it
    tensors = {name.replace("layers.0.", first): tensor for name, tensor in stored_weights(head).items()}
    ids = head.draft_ids.cpu()
    if not c.own_lm_head:
        tensors["lm_head.weight"] = target_rows(engine, facts, ids)
    tensors |= draft_tables(ids, c.vocab_size)
    layer = _layer_config(c, facts)
    config: dict[str, Any] = {
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "norm_before_residual": c.norm_before_residual,
        **{name: getattr(c, name) for name in _NORMS},
        IDS: list(c.states),
        **parallel,
    }
    if engine == "speculators":
        config["target_hidden_size"] = None if c.target_hidden_size == c.hidden_size else c.target_hidden_size
        kind = "PEagleSpeculator" if c.method == "peagle" else "Eagle3Speculator"
        config = nested(c.method, kind, layer, config, facts, num_tokens)
        return Layout(config, tensors, "vllm serve {folder}", (_TREE[engine],))
    # Each engine reads one of the two places of IDS and counts its own way, so this folder serves both.
    inner: dict[str, Any] = {"use_aux_hidden_state": True}
    if 0 not in c.states:
        inner[IDS] = [state - 1 for state in c.states]
    config = {"architectures": ["LlamaForCausalLMEagle3"], **layer, **config, "eagle_config": inner}
    serve = _sglang_command("EAGLE3", num_tokens) if is_sglang else vllm_command("eagle3", num_tokens)
    if parallel:
        serve = serve.replace("}'", ', "parallel_drafting": true}\'')
    return Layout(config, tensors, serve, (_TREE[engine],))


def _layer_config(c: EagleConfig, facts: TargetFacts) -> dict[str, Any]:
    """The draft layer as a Llama config."""
    return {"model_type": "llama", **layers_config(c, facts), "attention_bias": False, "mlp_bias": False}


def _sglang_command(algorithm: str, num_tokens: int) -> str:
    return (
        f"python -m sglang.launch_server --model-path {{target}} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {{folder}} --speculative-num-steps {num_tokens} --speculative-eagle-topk 4 "
        f"--speculative-num-draft-tokens {4 * num_tokens}"
    )
