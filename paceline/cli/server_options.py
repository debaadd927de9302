"""The options of servers: where they listen, whom they serve, and how much."""

import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import typer

from ..errors import ConfigError
from ..integrations.other_names import OPTIONS
from ..integrations.vllm_options import as_flag
from ..schema import brief, meant, validate
from ..system.files import parse_json, read_text
from .options import opt
from .screen import Screen

if TYPE_CHECKING:
    from fastapi import FastAPI

SERVER, _ACCESS, _LIMITS, _OUTPUT = "Server", "Access", "Limits", "Answers and logs"
LOCAL = ("127.0.0.1", "localhost", "::1")
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")  # of this machine, in a Host header
KEY_VARIABLE = "PACELINE_API_KEY"


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a YAML file the defaults of the options, as vLLM's `--config`. Raises `ConfigError`.

    Names may have - or _. A repeatable option takes a list or one value; an object is passed as its JSON.
    """
    if path is None:
        return None
    from ..system.yaml_values import parse_yaml

    values = parse_yaml(read_text(path, "the config file"), str(path))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{path} has no options", got=type(values).__name__, expected="lines such as port: 8000")
    options = {str(param.name): param for param in ctx.command.params if param.name not in ("config", "help")}
    shown = sorted(name for name, param in options.items() if not getattr(param, "hidden", False))
    ctx.default_map = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in options:
            message = f"{path} has an option that {ctx.command.name} does not have"
            fix = OPTIONS.get(as_flag(name)) or meant(name, list(options))
            raise ConfigError(message, got=key, expected=", ".join(shown), fix=fix)
        is_many = getattr(options[name], "multiple", False) or options[name].nargs == -1
        if isinstance(value, list) and not is_many:
            raise ConfigError(f"{path} gives {key} more than once", got=value, expected="one value")
        if value is not None:
            words = [_as_word(item) for item in (value if isinstance(value, list) else [value])]
            ctx.default_map[name] = words if is_many else words[0]
    return path


def _as_word(value: object) -> object:
    """The value as on the command line."""
    return value if isinstance(value, bool) else json.dumps(value) if isinstance(value, dict) else str(value)


def _object(text: str | None, option: str) -> dict[str, Any]:
    """The JSON object of an option. Raises `ConfigError`."""
    return {} if text is None else validate(dict[str, Any], parse_json(text, option), option)


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Where a server listens, which clients may use it, and how much."""

    host: str = opt("127.0.0.1", "Address to listen at; 0.0.0.0: all interfaces.", SERVER)
    port: int = opt(8000, "Port to listen at; 0: any free one.", SERVER, min=0, max=65535)
    drain_timeout: float = opt(
        30.0, "Seconds to complete the answers in progress after SIGTERM or Ctrl-C.", SERVER, min=0
    )
    api_key: list[str] | None = opt(
        None, f"Key that clients must send; repeatable. Safer: {KEY_VARIABLE}, since others can see options.", _ACCESS
    )
    allowed_hosts: list[str] | None = opt(
        None,
        "Host header to accept; repeatable, * for any. Default: local names for a local --host, else any.",
        _ACCESS,
        "",
        "HOST",
    )
    max_connections: int = opt(512, "Open connections; further ones are refused with 503.", _LIMITS, min=1)
    max_body_mb: int = opt(32, "Largest request.", _LIMITS, min=1)
    request_timeout: float = opt(
        600.0, "Seconds for an answer, from the first byte of its request; waiting included.", _LIMITS, min=0.001
    )
    log_format: Literal["text", "json"] = opt("text", "Format of the log on stderr.", _OUTPUT)

    @property
    def keys(self) -> list[str]:
        """The API keys of clients: those given, or the environment's. Raises `ConfigError` for an empty one."""
        keys = self.api_key or ([os.environ[KEY_VARIABLE]] if KEY_VARIABLE in os.environ else [])
        if not all(key.strip() for key in keys):
            raise ConfigError("an API key is empty", fix=f"give --api-key a text, or unset {KEY_VARIABLE}")
        return keys

    def gate(self) -> dict[str, Any]:
        """Fields of `GateSettings`."""
        names = [host.lower() for host in self.allowed_hosts or ()]
        is_open = "*" in names or (not names and self.host not in LOCAL)
        return {
            "api_keys": self.keys,
            "allowed_hosts": () if is_open else (*LOCAL_NAMES, *names),
            "max_body_bytes": self.max_body_mb << 20,
            "request_timeout_s": self.request_timeout,
        }

    def bind(self, command: str, screen: Screen) -> socket.socket:
        """Bind the socket before anything slow. Raises `ConfigError`, also for a missing package or an empty key."""
        keys = self.keys
        try:
            from ..server.run import bind
        except ImportError as error:
            raise ConfigError(f"paceline {command} needs {error.name}", fix="pip install 'paceline[serve]'") from error
        taken = bind(self.host, self.port)
        if self.host not in LOCAL and not keys:
            screen.warn(f"Anyone who can reach {self.host} can use this server:", "there is no --api-key.")
        return taken

    def run(self, app: "FastAPI", taken: socket.socket, announce: Callable[[str], None]) -> None:
        """Serve until SIGTERM or Ctrl-C. announce: see `Server`."""
        from ..server.run import Server, set_up_logs

        set_up_logs(self.log_format)
        Server(app, self.drain_timeout, announce, self.max_connections).run(sockets=[taken])


_OF_ALL = frozenset({"models", "memory_budget", "max_loaded_models", "preload", "config", "adapter", "adapter_dir"}) | {
    "learn", "learn_mb", "allow_origin", "metric_prefix", "otlp_traces_endpoint", "threads", "engine", "only_print",
    "json", "debug", "no_progress", "help", "model", *(option.name for option in fields(ListenOptions)),
}  # fmt: skip
"""Options that a model cannot have for itself."""


def _read_models(ctx: typer.Context, given: list[str] | None) -> list[dict[str, Any]] | None:
    """Models with options of their own, which become those of the command. Raises `ConfigError` and usage errors."""
    return None if given is None else [_read_model(ctx, parse_json(text, "an entry of models")) for text in given]


def _read_model(ctx: typer.Context, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("model"), str):
        raise ConfigError("an entry of models names no model", got=brief(entry), expected="model: MODEL")
    model, adapters = entry.pop("model"), entry.pop("adapters", None) or {}
    made = {"model": model, "adapters": validate(dict[str, str], adapters, f"the adapters of {model}")}
    own = [param for param in ctx.command.params if param.name not in _OF_ALL and not getattr(param, "hidden", False)]
    options: dict[str, Any] = {str(param.name): param for param in own}
    words, named = list[str](), list[str]()
    for key, value in entry.items():
        name = str(key).replace("-", "_")
        option = options.get("served_model_name" if name == "name" else name)
        if option is None:
            message = f"the entry of {model} in models has an option that a model does not have"
            raise ConfigError(message, got=key, expected=", ".join(["name", "adapters", *sorted(options)]))
        is_flag, many = getattr(option, "is_flag", False), value if isinstance(value, list) else [value]
        if is_flag != isinstance(value, bool) or (len(many) != 1 and not getattr(option, "multiple", False)):
            expected = "true or false" if is_flag else "one value"
            raise ConfigError(f"the entry of {model} in models has a wrong {key}", got=brief(value), expected=expected)
        if is_flag:
            made[option.name] = value
        elif value is not None:
            named.append(option.name)
            words += [word for item in many for word in (option.opts[0], str(_as_word(item)))]
    params = ctx.command.make_context(f"the entry of {model}", words, parent=ctx.parent).params
    return made | {name: params[name] for name in named}


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ListenOptions):
    """Options of a server with a model."""

    config: Path | None = opt(
        None,
        "YAML file of options, MODEL as model; the command line takes precedence.",
        SERVER,
        metavar="FILE",
        callback=_read_config,
        is_eager=True,
    )
    models: list[str] | None = opt(
        None,
        'A model with options of its own: {"model": MODEL, "name": NAME, ...}; in FILE a list.',
        SERVER,
        metavar="JSON",
        callback=_read_models,
    )
    memory_budget: float | None = opt(
        None, "Of all loaded models, in GB; default: nine tenths of what is free.", SERVER, min=0.001, metavar="GB"
    )
    max_loaded_models: int | None = opt(None, "Models that are loaded at the same time; default: all.", SERVER, min=1)
    preload: bool = opt(False, "Load all models at the start, not only the first.", SERVER)
    adapter: list[str] | None = opt(
        None, "LoRA adapter (peft); requests name it as their model; repeatable.", SERVER, metavar="NAME=DIR"
    )
    adapter_dir: Path | None = opt(
        None, "Let clients load adapters of this folder and unload them, by vLLM's endpoints.", _ACCESS, metavar="DIR"
    )
    max_loras: int | None = opt(None, "Adapters of a model; default: 16.", _LIMITS, min=1)
    served_model_name: str | None = opt(None, "Name of the model in requests; default: MODEL.", SERVER, metavar="NAME")
    max_num_seqs: int | None = opt(None, "Answers decoded at the same time; default: 8.", SERVER, min=1)
    prefix_cache_bytes: int | None = opt(
        None, "Memory of the prefix cache; default: 1 GiB; 0: off.", SERVER, min=0, metavar="N"
    )
    seed: int | None = opt(None, "For the seeds of requests that have none; random by default.", _OUTPUT)
    generation_config: Literal["auto", "vllm"] = opt(
        "auto", "vllm: do not take sampling defaults from generation_config.json.", _OUTPUT
    )
    override_generation_config: str | None = opt(
        None, 'Sampling defaults of requests: {"temperature": 0.5}.', _OUTPUT, metavar="JSON"
    )
    default_chat_template_kwargs: str | None = opt(
        None, 'Variables of the template: {"enable_thinking": false}.', _OUTPUT, metavar="JSON"
    )
    tool_call_parser: str | None = opt(
        None, "How the model writes tool calls, by vLLM's names; default: its template tells; none: as text.", _OUTPUT
    )
    reasoning_parser: str | None = opt(
        None, "How it writes thoughts, by vLLM's names; default: its template tells; none: as text.", _OUTPUT
    )
    allow_origin: list[str] | None = opt(
        None, "Origin whose pages may call the server from a browser; repeatable.", _ACCESS, metavar="URL"
    )
    allow_image_hosts: list[str] | None = opt(
        None, "Host from which image URLs may be fetched; repeatable. Default: only data URIs.", _ACCESS, metavar="HOST"
    )
    learn: Path | None = opt(
        None,
        "Let the drafter learn from the answers, which are recorded in this folder; see docs/learning.md.",
        SERVER,
        metavar="DIR",
    )
    learn_mb: int = opt(2048, "Recorded answers at most, in MB; the oldest go first.", _LIMITS, min=1)
    max_waiting: int = opt(256, "Requests that may wait for a slot; further ones are refused with 429.", _LIMITS, min=0)
    max_image_mb: int = opt(20, "Largest image.", _LIMITS, min=1)
    max_megapixels: int = opt(100, "Million pixels of all images of a request.", _LIMITS, min=1)
    return_metrics: bool = opt(False, "Report with every answer how it was decoded.", _OUTPUT)
    return_provenance: bool = opt(
        False, "Also report where each token came from, unless a request decides otherwise.", _OUTPUT
    )
    metric_prefix: Literal["paceline", "vllm"] = opt(
        "paceline", "vllm: metrics have the names that vLLM's dashboards expect.", _OUTPUT
    )
    otlp_traces_endpoint: str | None = opt(
        None, "OpenTelemetry collector for a span per request: http://localhost:4318/v1/traces.", _OUTPUT, metavar="URL"
    )

    def answering(self) -> dict[str, Any]:
        """Fields of `Settings`: the defaults of requests. Raises `ConfigError`."""
        from ..core.request import SamplingParams
        from ..server.service import DEFAULTS
        from ..server.tools.families import format_of

        sampling = _object(self.override_generation_config, "--override-generation-config")
        if unknown := [name for name in sampling if name not in DEFAULTS]:
            expected = ", ".join(DEFAULTS)
            raise ConfigError("--override-generation-config has other keys", got=", ".join(unknown), expected=expected)
        SamplingParams(**sampling)
        format_of("", None, self.tool_call_parser, self.reasoning_parser)
        return {
            "tool_call_parser": self.tool_call_parser,
            "reasoning_parser": self.reasoning_parser,
            "takes_model_defaults": self.generation_config == "auto",
            "defaults": sampling,
            "chat_template_kwargs": _object(self.default_chat_template_kwargs, "--default-chat-template-kwargs"),
        }

    def settings(self) -> dict[str, Any]:
        """Further fields of `Settings`, apart from those of the gate and of `answering`."""
        from ..server.chats import LIMITS

        hosts = tuple(host.lower() for host in self.allow_image_hosts or ())
        most = {"max_bytes": self.max_image_mb << 20, "max_total_pixels": self.max_megapixels * 1_000_000}
        return {
            "allow_origins": self.allow_origin or (),
            "adapter_dir": self.adapter_dir,
            "images": replace(LIMITS, hosts=hosts, **most),
            "metric_prefix": self.metric_prefix,
            "return_metrics": self.return_metrics,
            "return_provenance": self.return_provenance,
        }

    def name_of(self, model: str) -> str:
        """The name of the model in requests."""
        return self.served_model_name or (Path(model).name if Path(model).is_dir() else model)

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The models with options of their own."""
        return cast("Any", self.models or [])

    def adapters(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """The adapters that were given, as folders by name, for the models of these names. Raises `ConfigError`."""
        found: dict[str, dict[str, str]] = {name: {} for name in names}
        for one in self.adapter or ():
            facts = _object(one, "--adapter") if one.startswith("{") else {}
            facts = facts or dict[str, str](zip(("name", "path"), one.split("=", 1), strict=False))
            name, folder = str(facts.get("name", "")), str(facts.get("path", ""))
            base = facts.get("base_model_name") or (names[0] if len(names) == 1 else None)
            if not (name and folder):
                raise ConfigError("--adapter names no adapter", got=brief(one), expected="NAME=DIR")
            if base not in found:
                fix = '--adapter \'{"name": ..., "path": ..., "base_model_name": ...}\', or `adapters` in --config'
                message = f"the adapter {name} is of none of the models"
                raise ConfigError(message, got=base, expected=" or ".join(names), fix=fix)
            if any(name in (known, *found[known]) for known in found):
                raise ConfigError("two models or adapters have the same name", got=name, fix="give one another name")
            found[base][name] = folder
        return found
