"""`paceline serve`: an HTTP server with the endpoints of the OpenAI API and of others."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape

from ..errors import ConfigError
from ..methods.spec import spec_class
from .options import ModelOptions, Speculation, SpeculationOptions, command, open_engine
from .others import SERVING, Others, with_values
from .screen import Screen
from .serve_vllm import EngineOptions, VllmCommand, check_engine, vllm_command
from .server_options import ServerOptions

if TYPE_CHECKING:
    from ..async_llm import AsyncLLM
    from ..server.models import Models
    from ..server.service import About
    from ..server.tracing import Tracer


@command
def serve(
    server: ServerOptions,
    engine: EngineOptions,
    speculation: SpeculationOptions,
    loading: ModelOptions,
    screen: Screen,
    model: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Folders, GGUF files, hub ids or names that `paceline models` lists. With --engine vllm one, and then "
            "-- and further options of vLLM.",
        ),
    ] = None,
    others: Others = SERVING,
) -> None:
    """Serve models over HTTP with the APIs of OpenAI, Anthropic and Ollama, and a chat page at /.

    Of several models, the one that a request names is loaded if need be, and others are unloaded to make room. Options
    hold for all of them; --config gives each its own. With several drafters (--drafter lookup --drafter self-int4) the
    policy chooses, or a request names one.

    Example:  paceline serve smollm2-135m --drafter lookup

    Example:  curl localhost:8000/v1/models

    Example:  paceline serve ORG/MODEL --engine vllm --tensor-parallel-size 4 --drafter lookup -k 4 --print
    """
    words = model or []
    if not (words or server.entries):
        raise typer.BadParameter("there is no MODEL: name one or several")
    speculation = _joined(speculation)
    if others.given.get("lora_modules"):  # which takes several words
        named = list(takewhile(lambda word: not word.startswith("-"), words))
        pairs = [word for word in named if "=" in word and not Path(word).exists()]
        words = [word for word in named if word not in pairs] + words[len(named) :]
        given = others.given["lora_modules"]
        others = Others({**others.given, "lora_modules": None})
        server = replace(server, adapter=[*(server.adapter or ()), cast("str", given), *pairs])
    if engine.engine == "vllm":
        if words[1:] and not words[1].startswith("-"):
            raise ConfigError("vLLM serves one model", got=words[1], fix="start one server for each model")
        vllm = vllm_command(words[0] if words else "", engine, server, speculation, loading, others, words[1:])
        _run(vllm, engine.only_print, screen)
        return
    others = check_engine(engine, others, [word for word in words if word.startswith("-")])
    settled = others.applied("serve", screen, server, loading)
    server, loading = cast("tuple[ServerOptions, ModelOptions]", settled)
    chosen = _each_model(words, server, speculation, loading)
    if server.learn is not None and len(server.keys) > 1:
        screen.warn("All API keys share the head that learns:", "answer times tell a little of what others ask.")
    taken, tracer = server.bind("serve", screen), None
    if server.otlp_traces_endpoint is not None:
        from ..server.tracing import Tracer

        tracer = Tracer(server.otlp_traces_endpoint)
    models = _models(chosen, server, loading, screen, tracer)
    from ..server.app import make_app

    names = ", ".join(model.name for model in models.models)

    def announce(url: str) -> None:
        first = chosen[0]
        if screen.json:
            told = {**first.speculation.as_json(first.model), "served_model_name": first.name, "url": url}
            screen.put_json({**told, "models": [one.name for one in chosen]})
        drafters = dict.fromkeys(one.speculation.config.name for one in chosen)
        with_drafters = " and ".join(drafters)
        screen.say(f"Serving [bold]{escape(names)}[/bold] with {with_drafters} at {url} (page), {url}/v1 (API)")

    try:
        server.run(make_app(models), taken, announce)
    finally:
        models.shutdown()
        if tracer is not None:
            tracer.close()
        if models.is_loading:  # which Python would wait for
            sys.stdout.flush()
            os._exit(0)


@dataclass(frozen=True)
class _Chosen:
    """A model with its options."""

    model: str
    name: str
    server: ServerOptions
    loading: ModelOptions
    speculation: Speculation
    adapters: dict[str, str]


def _each_model(
    words: list[str], server: ServerOptions, speculation: SpeculationOptions, loading: ModelOptions
) -> list[_Chosen]:
    """The models with the options of each. Raises `ConfigError`."""
    entries: list[dict[str, Any]] = [*({"model": word, "adapters": {}} for word in words), *server.entries]
    if len(entries) > 1 and server.served_model_name is not None:
        fix = "models: [{model: ..., name: ...}, ...] in --config"
        raise ConfigError("--served-model-name names one model", got=f"{len(entries)} models", fix=fix)
    if len(entries) > 1 and server.learn is not None:
        raise ConfigError("--learn is for one model", got=f"{len(entries)} models", fix="serve that one by itself")
    made = list[_Chosen]()
    for entry in entries:
        own_server = with_values(server, entry)
        is_own = entry.keys() & {"drafter", "speculative_config", "profile"}
        cleared = dict.fromkeys(("drafter", "speculative_config", "profile") if is_own else ())
        drafts = _joined(with_values(replace(speculation, **cleared), entry)).choose("lookup")
        if server.learn is not None:
            from ..learn.spec import learning

            drafts = replace(drafts, config=learning(drafts.config, str(server.learn), server.learn_mb))
        name = own_server.name_of(entry["model"])
        made.append(_Chosen(entry["model"], name, own_server, with_values(loading, entry), drafts, entry["adapters"]))
    for name, adapters in server.adapters([one.name for one in made]).items():
        next(one for one in made if one.name == name).adapters.update(adapters)
    for folder in [folder for one in made for folder in one.adapters.values()]:
        if not Path(folder).is_dir():
            raise ConfigError("an adapter is not there", got=folder, expected="a folder with adapter_config.json")
    return made


def _models(
    chosen: list[_Chosen], server: ServerOptions, loading: ModelOptions, screen: Screen, tracer: "Tracer | None"
) -> "Models":
    """The models, of which the first is loaded, or all with --preload. Raises what loading raises."""
    answering = [one.server.answering() for one in chosen]
    with screen.spinner("starting"):
        from ..server.models import Model, Models
        from ..server.service import Settings
        from ..zoo import resolve
    places = [Path(one.model) for one in chosen]
    if len(chosen) > 1:  # so that a wrong name is an error now
        with screen.pulling() as progress:
            places = [Path(resolve(one.model, progress=progress)) for one in chosen]
    models = list[Model]()
    for one, more, place in zip(chosen, answering, places, strict=True):
        settings = Settings(**server.gate(), **one.server.settings(), **more, model=one.name, tracer=tracer)
        tell = _teller(one, place, settings)
        models.append(Model(settings, _opener(one, screen), _file_bytes(place), one.model, one.adapters, tell))
    budget = _budget(server, loading) if len(models) > 1 else None
    is_strict = server.memory_budget is not None
    made = Models(models, budget, is_strict, server.max_loaded_models, server.max_waiting)
    for model in models if server.preload else models[:1]:
        made.load(model)
    screen.progress = False
    return made


def _opener(one: _Chosen, screen: Screen) -> Any:
    def opened(adapters: Mapping[str, str]) -> "AsyncLLM":
        options, slots = one.server, one.server.max_num_seqs or 8
        more: dict[str, Any] = {} if options.max_loras is None else {"max_loras": options.max_loras}
        llm = open_engine(
            one.model, screen, one.loading, _predicting(one.speculation), slots, options.seed, adapters=adapters, **more
        )
        from ..async_llm import AsyncLLM

        return AsyncLLM(llm, max_waiting=options.max_waiting, prefix_cache_bytes=options.prefix_cache_bytes)

    return opened


def _teller(one: _Chosen, place: Path, settings: Any) -> Any:
    """Reads what a model's files tell; None where they are not here, or need more than to be read."""
    loading = one.loading
    if loading.mmproj or loading.trust_remote_code or not place.exists():
        return None

    @cache
    def tell() -> "About":
        from ..hf.load import context_of
        from ..hf.model_files import read_files
        from ..server.service import About
        from ..zoo import resolve

        other = None if loading.tokenizer is None else str(resolve(loading.tokenizer))
        files = read_files(place, loading.dtype, loading.device, other)
        for owner in (files.processor, files.tokenizer):
            if owner is not None and (template := loading.template()) is not None:
                owner.chat_template = template
        length = context_of(files.config.get_text_config())
        return About(files, settings, min(length, loading.max_model_len or length), one.server.max_num_seqs or 8)

    return tell


def _file_bytes(place: Path) -> int:
    """The bytes of a model's weights in its files; 0 where they are not here."""
    files = place.glob("*.safetensors") if place.is_dir() else [place] if place.is_file() else []
    return sum(file.stat().st_size for file in files)


def _budget(server: ServerOptions, loading: ModelOptions) -> int:
    """The bytes that the loaded models may take."""
    if server.memory_budget is not None:
        return int(server.memory_budget * 1e9)
    from ..hf.load import chosen_device
    from ..system.hardware import free_memory

    return free_memory(chosen_device(loading.device)) * 9 // 10


def _joined(speculation: SpeculationOptions) -> SpeculationOptions:
    """Several drafters as one, which chooses."""
    return replace(speculation, drafter=speculation.drafter and ["+".join(speculation.drafter)])


def _predicting(chosen: Speculation) -> Speculation:
    """The same with a drafter for the predictions of requests, unless drafting is off."""
    config, parts = chosen.config, chosen.config.drafter.parts
    if any(part.method in ("none", "prediction") for part in parts):
        return chosen
    choose = cast("Any", spec_class("choose"))(drafters=(spec_class("prediction")(), *parts))
    return replace(chosen, config=replace(config, drafter=choose))


def _run(vllm: VllmCommand, only_print: bool, screen: Screen) -> None:
    """Print the command that starts vLLM, and replace this process by it unless `only_print`."""
    if screen.json:
        screen.put_json({"command": vllm.words, "ray": vllm.ray, "remarks": vllm.remarks})
    for line in vllm.remarks:
        screen.warn(line)
    if vllm.ray:
        screen.say(f"First, on this host: [bold]{vllm.ray[0]}[/bold]; on each other: [bold]{vllm.ray[1]}[/bold]")
    if not screen.json:
        screen.out.print(vllm.shell(), soft_wrap=True, markup=False, highlight=False)
    if not only_print:
        vllm.run()
