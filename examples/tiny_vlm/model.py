"""The small vision-language model: LLaVA's architecture, as plain transformers loads it."""

from pathlib import Path
from typing import Annotated, Any, cast

import torch
from pydantic import Field
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    SiglipVisionConfig,
)

from paceline.errors import ConfigError
from paceline.methods.draft_model.recipe import fewer_layers
from paceline.schema import checked
from paceline.train.config import Few
from paceline.train.models import USUAL_LINEARS
from paceline.train.run_folder import need

from .scene import SIZE

IMAGE_TOKEN = "<empty_output>"
"""An unused special token of the language model's own vocabulary, so that the tokenizer stays the same file."""
PATCH = 16
GRID = SIZE // PATCH
"""Patches in width and height; each is an image token."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}" + IMAGE_TOKEN + "{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Images first, whatever their place in the message; no system message, which would be a third of a short prompt."""


def make_processor(language_model: Path) -> LlavaProcessor:
    """Tokenizer of the language model, images resized to SIZE x SIZE and scaled to [-1, 1]."""
    images = CLIPImageProcessorPil(
        do_resize=True,
        size={"height": SIZE, "width": SIZE},
        do_center_crop=False,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return LlavaProcessor(
        images,
        AutoTokenizer.from_pretrained(language_model, trust_remote_code=False),
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE,
        image_token=IMAGE_TOKEN,
        num_additional_image_tokens=0,
    )


@checked
class TowerShape:
    """Of a vision tower. mlp: times its width."""

    width: Annotated[int, Field(ge=1, le=1 << 16)] = 192
    layers: Few = 6
    heads: Few = 3
    mlp: Few = 4

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ConfigError("tower.width cannot be shared among tower.heads", got=f"{self.width} and {self.heads}")

    def config(self) -> SiglipVisionConfig:
        return SiglipVisionConfig(
            hidden_size=self.width,
            intermediate_size=self.mlp * self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            image_size=SIZE,
            patch_size=PATCH,
            vision_use_head=False,
        )


def make_model(
    language_model: Path, num_layers: int | None = None, seed: int = 0, tower: TowerShape | None = None
) -> LlavaForConditionalGeneration:
    """A new vision tower and projector before the language model, float32.

    num_layers: keep so many of its decoder layers, evenly spaced, the first and the last among them; None: all.
    Raises `ConfigError` where the vocabulary has no token for images.
    """
    tower = tower or TowerShape()
    language = AutoModelForCausalLM.from_pretrained(language_model, dtype=torch.float32, trust_remote_code=False)
    if num_layers is not None:
        language = fewer_layers(language, num_layers, "spaced")
    text = language.config
    config = LlavaConfig(
        vision_config=tower.config(),
        text_config=text,
        image_token_index=image_token(language_model),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=(SIZE // PATCH) ** 2,
        tie_word_embeddings=bool(text.tie_word_embeddings),
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config).float()
    model.model.language_model.load_state_dict(language.model.state_dict())
    model.tie_weights()
    assert torch.equal(model.lm_head.weight, cast("Any", language.get_output_embeddings()).weight)
    model.generation_config.eos_token_id = language.generation_config.eos_token_id
    model.generation_config.pad_token_id = language.generation_config.pad_token_id
    return model


def evenly_spaced(count: int, num_layers: int) -> list[int]:
    """Layers of `count` to keep, the first and the last among them. Raises `ConfigError` for too few or too many."""
    if not 2 <= num_layers <= count:
        raise ConfigError("these layers cannot be kept", got=num_layers, expected=f"2 to {count}")
    return [round(i * (count - 1) / (num_layers - 1)) for i in range(num_layers)]


def kept_layers(language_model: Path, num_layers: int | None) -> list[int]:
    """Decoder layers of the language model that `make_model` keeps."""
    count = int(AutoConfig.from_pretrained(language_model, trust_remote_code=False).num_hidden_layers)
    return list(range(count)) if num_layers is None else evenly_spaced(count, num_layers)


def image_token(language_model: Path) -> int:
    """The token that stands for images. Raises `ConfigError` where the vocabulary has none."""
    known = AutoTokenizer.from_pretrained(language_model, trust_remote_code=False).get_vocab()
    if IMAGE_TOKEN not in known:
        raise ConfigError(
            "the language model has no unused token to stand for images", got=f"no {IMAGE_TOKEN} in its vocabulary",
            expected="a model of the SmolLM2 family",
        )  # fmt: skip
    return int(known[IMAGE_TOKEN])


def add_lora(model: LlavaForConditionalGeneration, rank: int, seed: int) -> dict[str, torch.nn.Parameter]:
    """Put low-rank layers of peft into every linear layer of the language model; scale 2. Returns them by name."""
    peft = need("peft", "training a vision-language model", "pip install peft")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(USUAL_LINEARS), lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.model.language_model = peft.get_peft_model(model.model.language_model, config)  # type: ignore[assignment, arg-type]
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


def vision_parts(model: LlavaForConditionalGeneration) -> torch.nn.ModuleDict:
    """Tower and projector; the names of their state are those in the model."""
    inner = model.model
    parts = {"vision_tower": inner.vision_tower, "multi_modal_projector": inner.multi_modal_projector}
    return torch.nn.ModuleDict(parts)  # type: ignore[arg-type]
