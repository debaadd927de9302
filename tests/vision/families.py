"""Tiny random vision-language models with their processors, built from configs: they prove shapes, not usefulness.

Weights are large enough for the answer to depend on the image and on the text; `test_families_made.py` holds them to
that. One token is one character, as in `tests.helpers`, besides the special tokens of the family.
"""

import importlib.util
from functools import cache
from pathlib import Path
from string import printable

import pytest
import torch
import transformers
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)

from paceline.hf.chats import has_images
from paceline.hf.processors import without_video
from paceline.target import LoadedModel, wrap_model
from tests.helpers import characters
from tests.vision import table
from tests.vision.table import TEXT, Family
from tests.vision.table_more import MORE, USUAL

FAMILIES = {**table.FAMILIES, **MORE}
NAMES = [name if name in (*table.FAMILIES, *USUAL) else pytest.param(name, marks=pytest.mark.more) for name in FAMILIES]
ROWS = [*table.FAMILIES, "glm4v", "aya_vision"]
"""Some that have a row in the table of `hf.vision`."""
LETTERS = ["\n", *printable[:95]]
Message = dict[str, object]


def make(name: str, seed: int = 0) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A float32 model of the named family and its processor; made once. Skips what this transformers lacks."""
    return _made(name, seed)


@cache
@torch.inference_mode(False)  # whoever asks first: others train it
def _made(name: str, seed: int) -> tuple[PreTrainedModel, ProcessorMixin]:
    family = FAMILIES[name]
    lacking = [one for one in (family.processor_class, family.image_class) if not hasattr(transformers, one)]
    if family.needs is not None and importlib.util.find_spec(family.needs) is None:
        lacking.append(family.needs)
    if lacking:
        pytest.skip(f"{name} needs {', '.join(lacking)}, which is not here")
    processor = _processor(family)
    words = processor.tokenizer.get_vocab()
    config = AutoConfig.for_model(
        family.model_type,
        text_config={**TEXT, "vocab_size": family.vocab, **family.text},
        vision_config=dict(family.tower),
        **{"tie_word_embeddings": False, **family.config},
        **{key: words[word] for key, word in family.ids.items()},
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=0.25)
    model.generation_config = GenerationConfig(pad_token_id=0)  # so that `generate` goes on past the end of text
    return model.eval().requires_grad_(False), processor


def seeing(name: str = "llava", seed: int = 0) -> LoadedModel:
    """That model as engines run it; made once."""
    return _seeing(name, seed)


@cache
def _seeing(name: str, seed: int) -> LoadedModel:
    model, processor = make(name, seed)
    return wrap_model(model, processor=processor)


def save_made(folder: Path, name: str = "llava") -> str:
    """The model and its processor as a folder."""
    for part in make(name):
        part.save_pretrained(folder)
    return str(folder)


def _processor(family: Family) -> ProcessorMixin:
    """As transformers chooses: Pillow's class, or with torchvision another, whose pixels are others."""
    pixels = getattr(transformers, family.image_class)
    if importlib.util.find_spec("torchvision") is None:
        pixels = getattr(transformers, family.image_class + "Pil", pixels)
    kind = getattr(transformers, family.processor_class)
    parts = {"image_processor": pixels(**family.pixels), "tokenizer": _tokenizer(family)}
    if family.takes_audio:
        parts["feature_extractor"] = transformers.Gemma4AudioFeatureExtractor()
    made = without_video(kind)(*map(parts.get, kind.get_attributes()), **family.processor)
    made.chat_template = _template(family.image)
    return made


def _tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """One token a character; every id of the special tokens lies below the rows of the output head."""
    made = characters(LETTERS, extra_special_tokens=dict(family.named))
    made.add_tokens(family.words, special_tokens=True)
    return made


def _template(image: str) -> str:
    """The first letter of the role, then the contents in their order."""
    part = "{% if c['type'] == 'text' %}{{ c['text'] }}{% else %}{{ '" + image + "' }}{% endif %}"
    many = "{% for c in m['content'] %}" + part + "{% endfor %}"
    content = "{% if m['content'] is string %}{{ m['content'] }}{% else %}" + many + "{% endif %}"
    return "{% for m in messages %}{{ m['role'][0] }}:" + content + ";{% endfor %}a:"


def make_image(index: int, width: int = 32, height: int = 32) -> Image.Image:
    """An image of coarse random blocks, which survive any resizing."""
    colours = torch.randint(0, 256, (4, 4, 3), generator=torch.Generator().manual_seed(index), dtype=torch.uint8)
    return Image.fromarray(colours.numpy()).resize((width, height), Image.Resampling.NEAREST)


def user(*parts: str | Image.Image) -> Message:
    """A message of the user: texts and images in their order."""
    return {"role": "user", "content": [_part(part) for part in parts]}


def assistant(text: str) -> Message:
    """What the model is made to have said."""
    return {"role": "assistant", "content": [_part(text)]}


def _part(part: str | Image.Image) -> Message:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}


def plain_inputs(processor: ProcessorMixin, chat: list[Message]):
    """What plain transformers feeds its model: all by its own processor, template, images and text."""
    if not has_images(chat) and "PaliGemma" in type(processor).__name__:  # it wants an image, its model does not
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        return processor.tokenizer(text, return_tensors="pt")
    return processor.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


@torch.inference_mode()
def plain_scored(name: str, chat: list[Message], max_tokens: int) -> tuple[list[int], list[float]]:
    """The greedy answer of plain transformers and each token's log-probability; it goes on past the end of text."""
    model, processor = make(name)
    inputs = plain_inputs(processor, chat)
    options = {"max_new_tokens": max_tokens, "do_sample": False}
    out = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    logprobs = [torch.log_softmax(logits[0].double(), -1) for logits in out.logits]
    return ids, [float(one[token]) for one, token in zip(logprobs, ids, strict=True)]


def plain_answer(name: str, chat: list[Message], max_tokens: int) -> list[int]:
    """The greedy answer of plain transformers."""
    return plain_scored(name, chat, max_tokens)[0]
