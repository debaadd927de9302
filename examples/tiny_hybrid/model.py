"""The architecture: Qwen3.5's decoder, small, with its multi-token-prediction (MTP) module in the same file."""

from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm


def make_config(vocab_size: int, **changes: Any) -> Qwen3_5TextConfig:
    """Three layers of gated delta nets, then one of attention; token 0 begins and ends a file."""
    options: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
        "mtp_num_hidden_layers": 1,
    }  # fmt: skip
    return Qwen3_5TextConfig(vocab_size=vocab_size, **(options | changes))


@final
class Mtp(nn.Module):
    """One step of drafting: x = layer(fc[norm e; norm h]), whose norm is the next h and goes through the model's head.

    e: the embedding of the token after the one that h was computed from. h: the model's last state, after its final
    norm, or this module's own output, for deeper steps. The names of the weights are Qwen3.5's.
    """

    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        self.config = Qwen3_5TextConfig(
            **(config.to_dict() | {"layer_types": ["full_attention"], "num_hidden_layers": 1})
        )
        self.config._attn_implementation = "sdpa"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps), Qwen3_5RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(self.config, 0)])
        self.norm = Qwen3_5RMSNorm(size, eps)
        for linear in self.modules():
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=config.initializer_range)

    def forward(self, embeds: Tensor, hidden: Tensor, **attention: Any) -> Tensor:
        """[batch, length, hidden] of both, to the same. attention: as the decoder layer takes it."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], -1))
        return self.norm(self.layers[0](x, **attention))


@final
class Chains:
    """Drafts from every position at once: a step sees the model's states up to where its chain began, then its own.

    states: [batch, length, hidden], of the model; chain t begins after token t + 1.
    """

    def __init__(self, model: Qwen3_5ForCausalLM, mtp: Mtp, states: Tensor):
        self._rotary, self._mtp, self._states, self._depth = model.model.rotary_emb, mtp, states, 0
        self._cache = DynamicCache(config=mtp.config)

    def step(self, embeds: Tensor) -> Tensor:
        """The states that predict the next token of each chain, after its last one: embeds, [batch, length, hidden]."""
        length = embeds.shape[1]
        before, own = torch.ones(length, length, dtype=torch.bool).tril(), torch.eye(length, dtype=torch.bool)
        mask = torch.cat([before, *[own] * self._depth], -1)[None, None]
        rotary = self._rotary(embeds, torch.arange(length)[None] + self._depth)
        attention = {"position_embeddings": rotary, "attention_mask": mask, "cache": self._cache}
        self._states, self._depth = self._mtp(embeds, self._states, **attention), self._depth + 1
        return self._states


def save(model: Qwen3_5ForCausalLM, mtp: Mtp, folder: Path) -> None:
    """Write config.json and model.safetensors in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    named = dict(model.state_dict()) | {f"mtp.{name}": weight for name, weight in mtp.state_dict().items()}
    del named["lm_head.weight"]  # tied
    weights = {name: weight.bfloat16().contiguous() for name, weight in named.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["Qwen3_5ForCausalLM"]
    model.config.dtype = torch.bfloat16
    model.config.save_pretrained(folder)


def load(folder: Path) -> tuple[Qwen3_5ForCausalLM, Mtp]:
    """Both parts of a folder, in float32, ready to decode."""
    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    mtp, weights = Mtp(model.config).eval(), load_file(folder / "model.safetensors")
    mtp.load_state_dict({name[4:]: weight.float() for name, weight in weights.items() if name.startswith("mtp.")})
    return model, mtp
