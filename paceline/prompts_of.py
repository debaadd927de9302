"""From what a user asks, a string, a chat or token ids, to token ids and what its pictures are to the engine."""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import TypeAlias, cast

from transformers import PreTrainedTokenizerBase

from .chats import has_images, split_chat, text_chat
from .core.vision import VisionPrompt
from .errors import ConfigError
from .runner import LoadedModel, ModelRunner
from .runner.hf_pictures import read_chat, text_prompt

Chat: TypeAlias = Seq[Mapping[str, object]]
"""Messages with "role" and "content": a text, or a list of parts, each a text or an image."""
Prompt: TypeAlias = str | Chat | Seq[int]


def as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """A single prompt becomes a list of one."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def tokenizer_of(loaded: LoadedModel) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises `ConfigError` where it has none."""
    if loaded.tokenizer is None:
        raise ConfigError("this model has no tokenizer", fix="pass tokenizer=..., or prompts as token ids")
    return loaded.tokenizer


def has_chat_template(loaded: LoadedModel) -> bool:
    """Whether the model was made for chats."""
    processor = None if loaded.vision is None else loaded.vision.processor
    return any(getattr(one, "chat_template", None) for one in (loaded.tokenizer, processor))


def read_prompt(runner: ModelRunner, prompt: Prompt) -> tuple[list[int], VisionPrompt | None]:
    """Token ids of a prompt, and its pictures; a chat goes through the model's template.

    Raises `ConfigError` for a prompt that is empty or cannot be read, `CacheFull` for one that fills the context.
    """
    loaded, vision = runner.loaded, None
    if isinstance(prompt, str):
        ids = tokenizer_of(loaded).encode(prompt)
    elif prompt and isinstance(prompt[0], Mapping):
        ids, vision = _chat(loaded, cast("Chat", prompt))
    else:
        ids = list(cast("Seq[int]", prompt))
        _check_ids(ids, runner.vocab_size)
    if not ids:
        raise ConfigError("the prompt is empty", expected="at least one token")
    if loaded.vision is not None and not (vision and vision.images):
        _check_pictures(ids, loaded.vision.placeholder_ids)
    if vision is None and loaded.vision is not None:
        vision = text_prompt(loaded.vision, len(ids))
    if len(ids) >= runner.max_length:
        runner.admit(ids, vision)  # raises, with the numbers
    return ids, vision


def _chat(loaded: LoadedModel, chat: Chat) -> tuple[list[int], VisionPrompt | None]:
    if loaded.vision is not None and loaded.vision.processor is not None:
        return read_chat(loaded.vision, *split_chat(chat))
    if loaded.vision is not None and has_images(chat):
        raise ConfigError("this vision-language model has no processor", fix="pass processor=...")
    tokenizer = tokenizer_of(loaded)
    messages = text_chat(chat)
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("this model has no chat template", fix="give the prompt as a string")
    ids = tokenizer.apply_chat_template(
        cast("list[dict[str, str]]", messages), add_generation_prompt=True, return_dict=False
    )
    return list(cast("list[int]", ids)), None


def _check_ids(ids: list[int], vocab_size: int) -> None:
    bad = [i for i in ids if not isinstance(i, int) or not 0 <= i < vocab_size]
    if bad:
        raise ConfigError("a prompt holds what is no token id", got=repr(bad[0]), expected=f"0 to {vocab_size - 1}")


def _check_pictures(ids: list[int], placeholder_ids: Collection[int]) -> None:
    """A placeholder without a picture would be read as whatever its own embedding says."""
    bad = next((i for i in ids if i in placeholder_ids), None)
    if bad is not None:
        raise ConfigError(
            "a prompt without pictures holds a token that stands for one",
            got=f"token {bad}",
            expected="a chat with the picture",
            fix='put the picture in a chat part: {"type": "image", "image": ...}',
        )
