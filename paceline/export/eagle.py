"""EAGLE heads as vLLM, SGLang and speculators read them.

                 EAGLE-1                              EAGLE-3
tensors          layers.0.*, fc                       midlayer.* (speculators: layers.0.*), fc, norm, lm_head
output rows      the target's, whole                  those of the draft vocabulary
vocabulary       vLLM: all; SGLang: a file of ids     d2t: offsets, target's id minus draft id; t2d: a mask
fc.bias          vLLM: none; SGLang: always           none
states read      the last                             vLLM: ids at the top level, counting states
                                                      SGLang: ids in eagle_config, counting layers (state - 1)
"""

import torch
from torch import Tensor

from ..heads.foreign_eagle import IDS
from ..modules import EagleConfig, EagleHead
from .layout import Facts, Json, Layout, refuse, stored

HOT_TOKENS = "hot_tokens.pt"
SPECULATORS_VERSION = "0.9.0"
_CONTEXT = 131072  # where the target is not loaded: rotary tables reach as far, and engines cut to the target's


def eagle_layout(head: EagleHead, engine: str, facts: Facts, num_tokens: int) -> Layout:
    """The export of an EAGLE head. num_tokens: drafted a step where the engine takes one number.

    Raises `NotExportable` for what the engine lacks.
    """
    if head.config.version == 1:
        if engine == "speculators":
            raise refuse(engine, "an EAGLE-1 head", "export it for vllm or sglang, or train an EAGLE-3 head")
        return _eagle1(head, engine, facts, num_tokens)
    return _eagle3(head, engine, facts, num_tokens)


def _eagle1(head: EagleHead, engine: str, facts: Facts, num_tokens: int) -> Layout:
    c, notes = head.config, list[str]()
    tensors = {_name(name, "layers.0."): tensor for name, tensor in _weights(head).items()}
    whole = _is_whole(head)
    if c.states != (facts.num_layers,):
        raise refuse(engine, f"an EAGLE-1 head that reads states {c.states} and not the last one")
    if c.own_lm_head and (engine == "sglang" or not whole):
        raise refuse(engine, "an EAGLE-1 head with output rows of its own", "train it with the target's output rows")
    if engine == "sglang" and (c.own_embeddings or c.attention_bias):
        raise refuse(engine, "an EAGLE-1 head with " + ("embeddings of its own" if c.own_embeddings else "biases"))
    ids: dict[str, list[int]] = {}
    if engine == "sglang":
        # Its fc has a bias in any case, which a file without one leaves at a random value.
        tensors.setdefault("fc.bias", torch.zeros(c.hidden_size, dtype=tensors["fc.weight"].dtype))
        if not whole:
            ids[HOT_TOKENS] = [int(token) for token in head.draft_ids]
        serve = _sglang("EAGLE", num_tokens) + (f" --speculative-token-map {{folder}}/{HOT_TOKENS}" if ids else "")
    else:
        bias = tensors.pop("fc.bias", None)
        if bias is not None and bool(bias.any()):
            raise refuse(engine, "an fc with a bias that is not zero", "train it with fc_bias=False")
        if not whole:
            notes.append(
                f"vLLM knows no draft vocabulary for EAGLE-1: it drafts over all {c.vocab_size} tokens with the "
                f"target's output rows, where Paceline drafts over {c.draft_vocab_size}."
            )
        serve = _vllm("eagle", num_tokens)
    architecture = "LlamaForCausalLM" if engine == "vllm" else "LlamaForCausalLMEagle"
    config = {"architectures": [architecture], **_layer(c, facts), "attention_bias": False}
    if engine == "vllm":
        config["qkv_bias"] = c.attention_bias
    return Layout(config, tensors, serve, (*notes, _chain(engine)), ids)


def _eagle3(head: EagleHead, engine: str, facts: Facts, num_tokens: int) -> Layout:
    c = head.config
    if len(c.states) != 3:
        raise refuse(engine, f"an EAGLE-3 head that reads {len(c.states)} states", "train one that reads three")
    if max(c.states) >= facts.num_layers:
        raise refuse(engine, f"state {max(c.states)}, which is behind the final norm in Paceline and before it there")
    if c.fc_bias or c.attention_bias:
        raise refuse(engine, "an EAGLE-3 head with biases", "train it without")
    if engine == "sglang":
        for what, there in (("norm_before_residual", c.norm_before_residual), ("its own embeddings", c.own_embeddings)):
            if there:
                raise refuse(engine, f"an EAGLE-3 head with {what}")
        if 0 in c.states:
            raise refuse(engine, "state 0, the embeddings: SGLang counts the outputs of layers")
    tensors = {
        _name(name, "layers.0." if engine == "speculators" else "midlayer."): tensor
        for name, tensor in _weights(head).items()
    }
    if not c.own_lm_head:
        tensors["lm_head.weight"] = _rows(head, engine, facts)
    ids = head.draft_ids.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    if engine == "speculators":
        return Layout(_speculators(c, facts, num_tokens), tensors, "vllm serve {folder}", (_chain(engine),))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer(c, facts),
        "attention_bias": False,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.target_hidden_size,
        "norm_before_residual": c.norm_before_residual,
        # Each engine reads one of the two places and counts its own way, so this folder serves both.
        IDS: list(c.states),
        "eagle_config": {"use_aux_hidden_state": True, IDS: [state - 1 for state in c.states]},
    }
    if 0 in c.states:
        del config["eagle_config"][IDS]
    serve = _vllm("eagle3", num_tokens) if engine == "vllm" else _sglang("EAGLE3", num_tokens)
    return Layout(config, tensors, serve, (_chain(engine),))


def _speculators(c: EagleConfig, facts: Facts, num_tokens: int) -> Json:
    if not facts.architectures:
        raise refuse("speculators", "no architecture of the target", "name the target with --model")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": None if c.target_hidden_size == c.hidden_size else c.target_hidden_size,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": False,
        IDS: list(c.states),
        "transformer_layer_config": {**_layer(c, facts), "attention_bias": False},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "verifier": {"name_or_path": facts.name, "architectures": list(facts.architectures)},
        },
    }


def _layer(c: EagleConfig, facts: Facts) -> Json:
    """The draft layer as a Llama config, nothing left to a default: libraries have different ones."""
    return {
        "model_type": "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "max_position_embeddings": facts.context or _CONTEXT,
        "vocab_size": c.vocab_size,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _weights(head: EagleHead) -> dict[str, Tensor]:
    return {name: stored(tensor) for name, tensor in head.state_dict().items() if name != "draft_ids"}


def _rows(head: EagleHead, engine: str, facts: Facts) -> Tensor:
    if facts.lm_head is None:
        raise refuse(engine, "a head that stores only which of the target's output rows it uses", "name --model")
    return stored(facts.lm_head[head.draft_ids.to(facts.lm_head.device)])


def _is_whole(head: EagleHead) -> bool:
    return head.config.draft_vocab_size == head.config.vocab_size


def _name(name: str, layer: str) -> str:
    return name.replace("midlayer.", layer, 1)


def _vllm(method: str, num_tokens: int) -> str:
    spec = f'{{"method": "{method}", "model": "{{folder}}", "num_speculative_tokens": {num_tokens}}}'
    return f"vllm serve {{target}} --speculative-config '{spec}'"


def _sglang(algorithm: str, num_tokens: int) -> str:
    return (
        f"python -m sglang.launch_server --model-path {{target}} --speculative-algorithm {algorithm} "
        f"--speculative-draft-model-path {{folder}} --speculative-num-steps {num_tokens} --speculative-eagle-topk 4 "
        f"--speculative-num-draft-tokens {4 * num_tokens}"
    )


def _chain(engine: str) -> str:
    if engine == "sglang":
        return "SGLang drafts a tree; its topk and number of tokens are options."
    return "vLLM drafts a chain of the most probable tokens, not a tree."
