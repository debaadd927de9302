"""What a calibration remembers of its prompts: a hash of them and of the content of their images."""

import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from os import PathLike
from typing import cast

from PIL import Image

from ..errors import ConfigError
from ..eval.prompt_files import is_address, names_file
from ..hf.prompts import Prompt
from ..system.provenance import hash_prompts, sha256_of


def hash_of(prompts: Seq[Prompt]) -> str:
    """Hash prompts and the content of their images, addresses apart, in hexadecimal.

    Raises `ConfigError` for an image file that cannot be read.
    """
    return hash_prompts([json.dumps(_with_contents(one), sort_keys=True) for one in prompts])


def text_of(prompt: Prompt) -> str:
    """The words of a prompt, for people."""
    if isinstance(prompt, str):
        return prompt
    if not prompt or not isinstance(prompt[0], Mapping):
        return " ".join(map(str, prompt))
    told: list[str] = []
    for message in cast("list[Mapping[str, object]]", prompt):
        content = message["content"]
        words = [content] if isinstance(content, str) else [str(p.get("text", "")) for p in _parts(content)]
        told.append(" ".join(filter(None, words)))
    return "\n".join(told)


def _parts(content: object) -> list[dict[str, object]]:
    return cast("list[dict[str, object]]", content) if isinstance(content, list) else []


def _with_contents(value: object) -> object:
    """The prompt with every image that is no address replaced by its hash."""
    if isinstance(value, Mapping):
        return {
            key: _content(one) if names_file(value, key, one) else _with_contents(one) for key, one in value.items()
        }
    if isinstance(value, bytes | bytearray | memoryview | PathLike | Image.Image):
        return _content(value)
    return [_with_contents(one) for one in value] if isinstance(value, list | tuple) else value


def _content(source: object) -> object:
    """Of an image as `open_image` takes it."""
    if isinstance(source, Image.Image):
        told = f"{source.mode} {source.size} {source.getpalette()} ".encode()
        return {"sha256": hashlib.sha256(told + source.tobytes()).hexdigest()}
    if isinstance(source, bytes | bytearray | memoryview):
        return {"sha256": hashlib.sha256(source).hexdigest()}
    if is_address(str(source)):
        return str(source)
    try:
        return {"sha256": sha256_of(str(source))}
    except OSError as error:
        raise ConfigError(f"the image {str(source)!r} cannot be read", got=error.strerror) from error
