"""Where the prompt of `paceline generate` comes from."""

from dataclasses import dataclass

import typer

from ..errors import ConfigError
from ..schema import brief
from ..system.files import read_stdin, read_text

MAX_PROMPT_BYTES = 1 << 26
"""More than any context holds."""


@dataclass(frozen=True)
class PromptSource:
    """The four ways to give a prompt, of which exactly one must be used; anything else is a usage error.

    images: files, URLs or data URLs, which stand before the text; the two go through the model's chat template.
    """

    prompt: str | None = None
    chat: str | None = None
    file: str | None = None
    token_ids: str | None = None
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given = [value for value in (self.prompt, self.chat, self.file, self.token_ids) if value is not None]
        if len(given) != 1:
            trouble = "there is no prompt" if not given else "there is more than one prompt"
            raise typer.BadParameter(f"{trouble}: give one of --prompt, --chat, --prompt-file and --token-ids")
        if self.images and self.token_ids is not None:
            raise typer.BadParameter("--image goes with --prompt, --chat or --prompt-file, not with --token-ids")

    def read(self) -> "str | list[dict[str, object]] | list[int]":
        """The prompt as `LLM.generate` takes it. Raises `ConfigError` for what cannot be read or is empty."""
        if self.token_ids is not None:
            return _ids(self.token_ids)
        text = _read(self.file) if self.file is not None else self.prompt if self.prompt is not None else self.chat
        assert text is not None
        if not text.strip():
            raise ConfigError("the prompt is empty", expected="at least one character that is not a space")
        if self.images:
            from ..hf.images import OWN_CHOICE, open_image

            parts: list[object] = [{"type": "image", "image": open_image(source, OWN_CHOICE)} for source in self.images]
            return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        return text if self.chat is None else [{"role": "user", "content": text}]


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(
            "--token-ids cannot be read", got=brief(text), expected="numbers, for example 1,2,3"
        ) from error


def _read(name: str) -> str:
    if name == "-":
        return read_stdin("the prompt in the standard input", MAX_PROMPT_BYTES)
    return read_text(name, "the prompt in", MAX_PROMPT_BYTES)
