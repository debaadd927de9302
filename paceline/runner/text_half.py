"""The text half of a vision-language model as a causal language model, where transformers has no class for it."""

from typing import Any, final

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .kv_cache import SlotCache
from .layout import PassLayout


@final
class TextHalf(PreTrainedModel):
    """The language model and the output head of another model, over the same tensors."""

    base_model_prefix = "model"
    # What the language model was given stands in its config; here it is only not to be refused.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True

    def __init__(self, language_model: PreTrainedModel, lm_head: nn.Module):
        super().__init__(language_model.config)
        self.model: Any = language_model
        self.lm_head = lm_head

    def get_output_embeddings(self) -> nn.Module:
        """The output head."""
        return self.lm_head

    def set_attn_implementation(self, attn_implementation: str | dict[str, str], allow_all_kernels: bool = False):
        """That of the language model."""
        self.model.set_attn_implementation(attn_implementation, allow_all_kernels)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: SlotCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        paceline_pass: PassLayout | None = None,
        logits_to_keep: int = 0,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: list[Tensor] | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits [B, N, V]; options that are None do not reach the language model, which may not know them."""
        options = {
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "output_hidden_states": output_hidden_states,
            "paceline_pass": paceline_pass,
            "visual_pos_masks": visual_pos_masks,
            "deepstack_visual_embeds": deepstack_visual_embeds,
        }
        given = {name: value for name, value in options.items() if value is not None}
        out = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds, **given)
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values, hidden_states=out.hidden_states)
