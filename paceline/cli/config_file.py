"""A YAML file with the options of a command, as vLLM's `--config`: `port: 8000` is `--port 8000`."""

import json
from pathlib import Path
from typing import Any

import typer

from ..errors import ConfigError
from ..system.files import read_text


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a file the defaults of the command's options. Raises `ConfigError`.

    A name has - or _, a repeatable option a list or one value, and an object stands for its JSON.
    """
    if path is None:
        return None
    from ..system.yaml_values import parse_yaml

    read = parse_yaml(read_text(path, "the config file"), str(path))
    given = {} if read is None else read
    if not isinstance(given, dict):
        raise ConfigError(f"{path} has no options", got=type(given).__name__, expected="lines such as port: 8000")
    options = {one.name: one for one in ctx.command.params if one.name not in ("config", "help")}
    defaults = dict[str, Any]()
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in options:
            known = ", ".join(sorted(str(one) for one in options))
            raise ConfigError(f"{path} has an option that {ctx.command.name} has not", got=key, expected=known)
        is_many = getattr(options[name], "multiple", False)
        if isinstance(value, list) and not is_many:
            raise ConfigError(f"{path} gives {key} more than once", got=value, expected="one value")
        if value is not None:
            defaults[name] = [_text(one) for one in (value if isinstance(value, list) else [value])]
            defaults[name] = defaults[name] if is_many else defaults[name][0]
    ctx.default_map = defaults
    return path


def _text(value: object) -> object:
    """As the command line would have it."""
    return value if isinstance(value, bool) else json.dumps(value) if isinstance(value, dict) else str(value)
