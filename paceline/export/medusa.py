"""Medusa heads as vLLM reads them: the names are ours, the draft vocabulary is `token_map`."""

import torch

from ..modules.heads import MedusaHead
from .layout import Facts, Layout, refuse, stored


def medusa_layout(head: MedusaHead, engine: str, facts: Facts) -> Layout:
    """The export of Medusa heads. Raises `NotExportable` for what the engine lacks."""
    c = head.config
    if engine != "vllm":
        raise refuse(engine, "Medusa heads", "export them for vllm")
    if c.states != (facts.num_layers,):
        raise refuse(engine, f"Medusa heads that read states {c.states} and not the last one")
    tensors = {name: stored(tensor) for name, tensor in head.state_dict().items() if name != "draft_ids"}
    ids = head.draft_ids.cpu()
    if not c.own_lm_head:
        if facts.lm_head is None:
            raise refuse(engine, "heads that use the target's output rows, which it keeps in the file", "name --model")
        tensors["lm_head.weight"] = stored(facts.lm_head.detach().cpu()[ids])
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "num_heads": c.num_heads,
        "num_hidden_layers": c.num_layers,
        "truncated_vocab_size": c.draft_vocab_size,
        "original_lm_head": not c.own_lm_head,
        "medusa_fc_bias": c.bias,
        "max_paths": 64,
        "topk": 10,
        "torch_dtype": str(tensors["blocks.0.layers.0.weight"].dtype).removeprefix("torch."),
    }
    if c.draft_vocab_size < c.vocab_size:
        tensors["token_map"] = ids.to(torch.int64)
    return Layout(
        config,
        tensors,
        """vllm serve {target} --speculative-config '{"method": "medusa", "model": "{folder}", """
        f""""num_speculative_tokens": {c.num_heads}}}\'""",
        ("vLLM drafts a chain of each head's most probable token, not a tree.",),
    )
