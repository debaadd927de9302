"""`paceline route`: a cascade of two servers; the small model answers where it is confident."""

import os
from dataclasses import MISSING
from pathlib import Path

from rich.markup import escape

from ..errors import LossyNotAllowed
from .options import command, opt
from .screen import Screen
from .server_options import SERVER, ListenOptions

_GUARANTEE = "Guarantee"


@command
def route(
    server: ListenOptions,
    screen: Screen,
    small: str = opt(MISSING, "Address of the small model's server, Paceline's or vLLM's.", SERVER, metavar="URL"),
    large: str = opt(MISSING, "Address of the large model's server.", SERVER, metavar="URL"),
    calibration: Path = opt(MISSING, "A file of `paceline calibrate` for these models.", _GUARANTEE, metavar="FILE"),
    allow_lossy: bool = opt(False, "Permit answers of the small model alone, which may differ.", _GUARANTEE),
    max_disagreement: float | None = opt(
        None, "Share of all chats whose answers may differ; default: the calibration's.", _GUARANTEE
    ),
    audit_share: float = opt(
        0.05, "Share of the chats in which the large model checks the small one.", _GUARANTEE, min=0, max=1
    ),
    served_model_name: str = opt("cascade", "Name of the model in requests.", SERVER, metavar="NAME"),
) -> None:
    """Answer chats of the OpenAI API with a small model where it is confident, and with a large one otherwise.

    Lossy: an answer of the small model may differ from the large one's; the calibration bounds how often. Clients must
    send the key in PACELINE_API_KEY, if it is set; the router sends those in PACELINE_SMALL_API_KEY and
    PACELINE_LARGE_API_KEY to the servers.

    Example:  paceline route --small http://a:8000 --large http://b:8000 --calibration calib.json --allow-lossy
    """
    if not allow_lossy:
        raise LossyNotAllowed(
            "a router lets the small model answer alone, which may change the answer", fix="pass --allow-lossy"
        )
    taken = server.bind("route", screen)
    with screen.spinner("starting"):
        from ..cascade import load_calibration
        from ..server.route import Router, RouteSettings, make_router_app
        from ..server.upstream import Upstream

        loaded = load_calibration(calibration)
        settings = RouteSettings(
            **server.gate(), model=served_model_name, max_disagreement=max_disagreement, audit_share=audit_share
        )
        asked = Upstream.open(small, os.environ.get("PACELINE_SMALL_API_KEY"))
        router = Router(asked, Upstream.open(large, os.environ.get("PACELINE_LARGE_API_KEY")), loaded, settings)
    for role, measured, there in (("small", loaded.small, router.small), ("large", loaded.large, router.large)):
        if Path(measured.name).name != Path(there.model).name:
            message = f"The {role} model is {there.model} there and {measured.name} in the calibration:"
            screen.warn(message, "the guarantee holds only if they are the same.")

    def announce(url: str) -> None:
        choice = router.choice
        if screen.json:
            screen.put_json({"served_model_name": served_model_name, "url": url, "threshold": choice.threshold,
                             "small": router.small.model, "large": router.large.model})  # fmt: skip
        screen.say(
            f"Serving [bold]{escape(served_model_name)}[/bold] at {url}/v1: {escape(router.small.model)} where "
            f"{choice.signal} >= {choice.threshold:.5g}, else {escape(router.large.model)}"
        )

    server.run(make_router_app(router), taken, announce)
