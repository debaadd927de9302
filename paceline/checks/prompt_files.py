"""Read prompts from the files people have: Spec-Bench, HumanEval, GSM8K, chats, or plain lines; .gz as well."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from ..errors import ConfigError

Prompt: TypeAlias = str | list[Mapping[str, str]]
_EXPECTED = '"turns", "prompt", "question", "instruction" or "messages"'


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, one a line.

    A question or an instruction is put as a user's message, of several turns only the first, since the later ones
    answer an answer; a "prompt" and a plain line stay the text they are. Raises `ConfigError` where there are none.
    """
    path = Path(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = raw.decode("utf-8").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the prompts in {str(path)!r} cannot be read", got=getattr(error, "strerror", None) or error
        ) from error
    is_json = ".json" in path.name
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(_prompt_of(line, f"{path.name}, line {number}") if is_json else line)
    if not prompts:
        raise ConfigError(f"{str(path)!r} holds no prompts", expected="one prompt a line")
    return prompts


def _prompt_of(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON ({where})", got=error.msg, expected="one JSON object a line") from error
    if isinstance(row, str):
        return row
    if not isinstance(row, dict):
        raise ConfigError(f"not a JSON object ({where})", got=type(row).__name__)
    if isinstance(row.get("messages"), list):
        return row["messages"]
    if isinstance(row.get("turns"), list) and row["turns"]:
        return _user(row["turns"][0])
    for key in ("question", "instruction"):
        if isinstance(row.get(key), str):
            return _user(row[key])
    if isinstance(row.get("prompt"), str):
        return row["prompt"]
    raise ConfigError(f"no prompt ({where})", got="the keys " + ", ".join(map(str, row)), expected=_EXPECTED)


def _user(text: str) -> Prompt:
    return [{"role": "user", "content": text}]
