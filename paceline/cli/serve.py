"""`paceline serve`: an HTTP server with the endpoints of the OpenAI API."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape

from ..methods.spec import spec_class
from .options import ModelArgument, ModelOptions, Speculation, SpeculationOptions, command, open_engine
from .others import SERVING, Others
from .screen import Screen
from .serve_vllm import EngineOptions, VllmCommand, check_engine, vllm_command
from .server_options import ServerOptions

if TYPE_CHECKING:
    pass


@command
def serve(
    model: ModelArgument,
    server: ServerOptions,
    engine: EngineOptions,
    speculation: SpeculationOptions,
    loading: ModelOptions,
    screen: Screen,
    others: Others = SERVING,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="With --engine vllm: further options of vLLM.")
    ] = None,
) -> None:
    """Serve a model over HTTP with the OpenAI API, and a chat page at /.

    With several drafters (--drafter lookup --drafter self-int4) the policy chooses, or a request names one.

    Example:  paceline serve smollm2-135m --drafter lookup

    Example:  curl localhost:8000/v1/models

    Example:  paceline serve ORG/MODEL --engine vllm --tensor-parallel-size 4 --drafter lookup -k 4 --print
    """
    joined = None if speculation.drafter is None else ["+".join(speculation.drafter)]
    speculation = replace(speculation, drafter=joined)
    if engine.engine == "vllm":
        vllm = vllm_command(model, engine, server, speculation, loading, others, more or ())
        _run(vllm, engine.only_print, screen)
        return
    settled = check_engine(engine, others, more or ()).applied("serve", screen, server, loading)
    server, loading = cast("tuple[ServerOptions, ModelOptions]", settled)
    chosen = speculation.choose("lookup")
    if server.learn is not None:
        from ..learn.spec import learning

        chosen = replace(chosen, config=learning(chosen.config, str(server.learn), server.learn_mb))
        if len(server.keys) > 1:
            screen.warn("All API keys share the head that learns:", "answer times tell a little of what others ask.")
    taken = server.bind("serve", screen)
    answering = server.answering()
    tracer = None
    if server.otlp_traces_endpoint is not None:
        from ..server.tracing import Tracer

        tracer = Tracer(server.otlp_traces_endpoint)
    llm = open_engine(model, screen, loading, _predicting(chosen), server.max_num_seqs or 8, server.seed)
    from ..async_llm import AsyncLLM
    from ..server.app import make_app
    from ..server.chats import LIMITS
    from ..server.service import Settings

    image_hosts = tuple(host.lower() for host in server.allow_image_hosts or ())
    settings = Settings(
        **server.gate(),
        model=server.name_of(model),
        allow_origins=server.allow_origin or (),
        images=replace(
            LIMITS,
            max_bytes=server.max_image_mb << 20,
            hosts=image_hosts,
            max_total_pixels=server.max_megapixels * 1_000_000,
        ),
        metric_prefix=server.metric_prefix,
        return_metrics=server.return_metrics,
        tracer=tracer,
        return_provenance=server.return_provenance,
        **answering,
    )
    served = AsyncLLM(llm, max_waiting=server.max_waiting, prefix_cache_bytes=server.prefix_cache_bytes)

    def announce(url: str) -> None:
        if screen.json:
            screen.put_json({**chosen.as_json(model), "served_model_name": settings.model, "url": url})
        screen.say(
            f"Serving [bold]{escape(settings.model)}[/bold] with {chosen.config.name} at {url} (page), {url}/v1 (API)"
        )

    try:
        server.run(make_app(served, settings), taken, announce)
    finally:
        served.shutdown()
        if tracer is not None:
            tracer.close()


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
