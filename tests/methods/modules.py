"""Tiny checkpoints with MTP modules in the names of their families, and the slow form of what a module computes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from paceline import Coupled, Fixed, SamplingParams
from paceline.core.interfaces import DraftBudget
from paceline.engine.loop import SpeculativeDecoder
from paceline.methods import Eagle
from paceline.target import LoadedModel, ModelRunner
from tests.helpers import admit, prompt, reading_apart, sequence, tokenizer
from tests.tiny import SMALL

_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
_DEEPSEEK = {
    **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4,
}  # fmt: skip
_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1}
_QWEN = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint. one_layer: what a model of the module's layer alone has in its config.

    names: of enorm, hnorm, fc and the final norm ("": the target's) of module k, and what its layer's begin with.
    """

    model_type: str
    config: dict[str, Any]
    one_layer: dict[str, Any]
    names: tuple[str, ...]
    state_first: bool = False


def _names(root: str, *parts: str | None) -> tuple[str, ...]:
    return tuple("" if part is None else root + part for part in parts)


_MTP = _names("mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.{k}.")
_EXTRA = _names("model.layers.{n}.", "enorm", "hnorm", "eh_proj", "shared_head.norm", "")
_MIMO = _names("model.mtp_layers.{k}.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "")
_MINIMAX = _names("model.mtp_layers.{k}.", "e_norm", "h_norm", "linear_projection", None, "")
_BLOCK = _names("model.mtp_", "emb_norm.{k}", "hidden_norm.{k}", "linear_proj.{k}", None, "block.{k}.")
FAMILIES = {
    "glm4_moe": Family("glm4_moe", _DEEPSEEK, {"first_k_dense_replace": 0}, _EXTRA),
    "deepseek_v3": Family("deepseek_v3", {**_DEEPSEEK, **_MLA}, {"first_k_dense_replace": 0}, _EXTRA),
    "mimo": Family("qwen2", {}, {}, _MIMO, state_first=True),
    "minimax_m2": Family(
        "minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}, {}, _MINIMAX, state_first=True
    ),
    "ernie4_5_moe": Family(
        "ernie4_5_moe", {**_ERNIE, "moe_layer_start_index": 1}, {"moe_layer_start_index": 1}, _BLOCK
    ),
    "qwen3_5": Family("qwen3_5_text", _LINEAR, {"layer_types": ["full_attention"]}, _MTP),
    "qwen3_next": Family("qwen3_next", {**_LINEAR, **_QWEN}, {"layer_types": ["full_attention"]}, _MTP),
}  # fmt: skip


@dataclass(frozen=True)
class Module:
    """A module in the hands of transformers: a model of one layer, whose embeddings are what `fc` makes."""

    one: PreTrainedModel
    enorm: Any
    hnorm: Any
    fc: Tensor
    state_first: bool

    def step(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """What it makes of every pair of an embedding and the state before it, [T, E] each."""
        e, f = self.enorm(embeddings), self.hnorm(hidden)
        rows = torch.cat([f, e] if self.state_first else [e, f], -1) @ self.fc.T
        return self.one.base_model(inputs_embeds=rows[None]).last_hidden_state[0]


@dataclass(frozen=True)
class Oracle:
    """A target of transformers with modules, which read everything from the start for every token."""

    target: PreTrainedModel
    modules: list[Module]

    @torch.no_grad()
    def states(self, token_ids: list[int]) -> Tensor:
        """The last states of the target after the final norm, [T, E]."""
        return self.target(torch.tensor([token_ids]), output_hidden_states=True).hidden_states[-1][0]

    @torch.no_grad()
    def law(self, token_ids: list[int], path: list[int]) -> Tensor:
        """Logits [V] of the token after `path`, which was drafted after a text."""
        known, embed = len(token_ids) - 1, self.target.get_input_embeddings()
        hidden, rows = self.states(token_ids)[:known], embed(torch.tensor([*token_ids, *path]))
        for step in range(len(path) + 1):
            if len(self.modules) == 1:  # the same for each step
                out = self.modules[0].step(rows[1 : 1 + known + step], hidden)
                hidden = torch.cat([hidden, out[-1:]])
            else:
                hidden = self.modules[step].step(rows[1 + step : 1 + step + known], hidden)
        return self.target.get_output_embeddings()(hidden[-1])


def written(folder: Path, name: str, seed: int = 0, modules: int = 1) -> Oracle:
    """Write a checkpoint of this family with random modules into a folder."""
    family = FAMILIES[name]
    torch.manual_seed(seed)
    settings, kind = {**SMALL, **family.config}, family.model_type
    target = _random(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)))
    target.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    config = AutoConfig.for_model(kind, **{**settings, "num_hidden_layers": 1, **family.one_layer})
    made = [_written_module(folder, name, config, target, k) for k in range(modules)]
    return Oracle(target, made)


def _written_module(folder: Path, name: str, config: Any, target: PreTrainedModel, k: int) -> Module:
    family, one = FAMILIES[name], _random(AutoModelForCausalLM.from_config(config))
    width, norm = int(config.hidden_size), type(one.base_model.norm)
    enorm, hnorm = (_random(norm(width, config.rms_norm_eps)) for _ in range(2))
    fc = torch.randn(width, 2 * width) * 0.2
    one.save_pretrained(folder / "one")
    *parts, last, begin = (part.format(k=k, n=2 + k) for part in family.names)
    tensors = {f"{part}.weight": held for part, held in zip(parts, (enorm.weight, hnorm.weight, fc), strict=True)}
    layer, block = load_file(folder / "one" / "model.safetensors"), "model.layers.0."
    tensors |= {begin + key.removeprefix(block): held for key, held in layer.items() if key.startswith(block)}
    _separate(tensors, begin, ("block_sparse_moe", "w1", "w3", "w2") if name == "minimax_m2" else _EXPERT_NAMES)
    if last:
        tensors[f"{last}.weight"] = one.base_model.norm.weight
    else:
        one.base_model.norm.weight.data = target.base_model.norm.weight.data
    change(folder, lambda state: state.update(tensors))
    return Module(one, enorm, hnorm, fc, family.state_first)


_EXPERT_NAMES = "mlp", "gate_proj", "up_proj", "down_proj"


def _separate(tensors: dict[str, Tensor], begin: str, names: tuple[str, ...]) -> None:
    """Experts one by one, as published files have them."""
    both, down = (tensors.pop(f"{begin}mlp.experts.{part}", ()) for part in ("gate_up_proj", "down_proj"))
    block, *parts = names
    for expert, (first, last) in enumerate(zip(both, down, strict=True)):
        for part, held in zip(parts, (*first.chunk(2), last), strict=True):
            tensors[f"{begin}{block}.experts.{expert}.{part}.weight"] = held


def change(folder: Path, how: Any) -> None:
    """Change the tensors of a checkpoint in place."""
    file = folder / "model.safetensors"
    state = load_file(file)
    how(state)
    save_file({key: tensor.detach().contiguous() for key, tensor in state.items()}, file, metadata={"format": "pt"})


def _random(module: Any) -> Any:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.25)
    return module.eval()


def mistaken(on: LoadedModel, oracle: Oracle, drafter: Eagle, rounds: int = 4, depth: int = 4) -> list[str]:
    """The nodes of some rounds, with rejections in between, whose confidence is not the oracle's.

    depth: how deep the drafts become.
    """
    decoder = SpeculativeDecoder(reading_apart(ModelRunner(on, 3)), drafter, Coupled(), Fixed(4, 14))
    seqs = [sequence(on, prompt(n, n), SamplingParams(max_tokens=60), seed=n) for n in (20, 2)]
    for seq in seqs:
        admit(decoder, seq)
    wrong, deepest = list[str](), 0
    for count in range(rounds):
        batch = seqs if count % 3 else seqs[:1]
        with torch.inference_mode():
            draft = drafter.propose(batch, [DraftBudget(4, 14)] * len(batch))
        for row, seq in enumerate(batch):
            for node in range(1, draft.tree.num_nodes):
                if bool(draft.tree.is_probe[row, node]):
                    continue
                *path, token = draft.tree.token_ids[row, draft.tree.rows[row].path_to(node)].tolist()
                deepest = max(deepest, len(path) + 1)
                law = oracle.law(seq.token_ids, path).softmax(-1)
                want, got = float(law[token]), float(draft.confidence[row, node])
                is_best = drafter.tree != "chain" or want >= float(law.max()) - 1e-6
                if not is_best or not math.isclose(want, got, rel_tol=5e-3, abs_tol=1e-5):
                    wrong.append(f"round {count} row {row} node {node} {[*path, token]}: {got}, not {want}; {is_best=}")
        decoder.step(batch)
    for seq in seqs:
        decoder.release(seq)
    return wrong if deepest == depth else [*wrong, f"drafts are {deepest} deep"]
