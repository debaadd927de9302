"""`paceline route`: one address for two servers; the small model answers where it is confident."""

import os
from dataclasses import MISSING
from pathlib import Path
from typing import Literal

from rich.markup import escape

from ..errors import ConfigError, LossyNotAllowed
from .options import command, opt
from .screen import Screen
from .serve import LOCAL, read_keys

_ROUTER, _PROMISE = "Router", "Promise"


@command
def route(
    screen: Screen,
    small: str = opt(MISSING, "Address of the server of the small model, of vLLM or ours.", _ROUTER, metavar="URL"),
    large: str = opt(MISSING, "Address of the server of the large model.", _ROUTER, metavar="URL"),
    calibration: Path = opt(MISSING, "What `paceline calibrate` measured of these models.", _PROMISE, metavar="FILE"),
    allow_lossy: bool = opt(False, "Permit answers of the small model alone, which may differ.", _PROMISE),
    max_disagreement: float | None = opt(
        None, "Share of all chats that may differ; default: the calibration's.", _PROMISE
    ),
    audit_share: float = opt(
        0.05, "Share of the chats for which the large model checks the small one.", _PROMISE, min=0, max=1
    ),
    served_model_name: str = opt("cascade", "Name of the model in requests.", _ROUTER, metavar="NAME"),
    host: str = opt("127.0.0.1", "Address to listen at.", _ROUTER),
    port: int = opt(8000, "0: any free one.", _ROUTER, min=0, max=65535),
    drain_timeout: float = opt(30.0, "After SIGTERM, seconds to finish what is being answered.", _ROUTER),
    request_timeout: float = opt(600.0, "Seconds for an answer.", _ROUTER, min=0.001),
    log_format: Literal["text", "json"] = opt("text", "Form of the lines on stderr.", _ROUTER),
) -> None:
    """Answer chats of the OpenAI API with a small model where it is confident, and with a large one otherwise.

    Lossy: an answer of the small model may differ from the large one's, as rarely as the calibration promises. Clients
    send the key in PACELINE_API_KEY, if it is set; the router sends those in PACELINE_SMALL_API_KEY and
    PACELINE_LARGE_API_KEY.

    Example:  paceline route --small http://a:8000 --large http://b:8000 --calibration calib.json --allow-lossy
    """
    if not allow_lossy:
        raise LossyNotAllowed(
            "a router lets the small model answer alone, which may change the answer", fix="pass --allow-lossy"
        )
    keys = read_keys()
    with screen.spinner("starting"):
        try:
            from ..server.run import Server, bind, set_up_logs
            from ..server.upstream import Upstream
        except ImportError as error:
            raise ConfigError(f"paceline route needs {error.name}", fix="pip install 'paceline[serve]'") from error
        from ..cascade import load_calibration
        from ..server.gate import LOCAL_NAMES
        from ..server.route import Router, RouteSettings, make_router_app

        made, taken = load_calibration(calibration), bind(host, port)
        settings = RouteSettings(
            model=served_model_name,
            max_disagreement=max_disagreement,
            audit_share=audit_share,
            api_keys=keys,
            allowed_hosts=LOCAL_NAMES if host in LOCAL else (),
            request_timeout_s=request_timeout,
        )
        asked = Upstream.open(small, os.environ.get("PACELINE_SMALL_API_KEY"))
        router = Router(asked, Upstream.open(large, os.environ.get("PACELINE_LARGE_API_KEY")), made, settings)
    for role, measured, server in (("small", made.small, router.small), ("large", made.large, router.large)):
        if Path(measured.name).name != Path(server.model).name:
            what = f"The {role} model is {server.model} there and {measured.name} in the calibration:"
            screen.warn(what, "the promise holds only if they are the same.")
    set_up_logs(log_format)

    def announce(url: str) -> None:
        choice = router.choice
        if screen.json:
            screen.put_json({"served_model_name": served_model_name, "url": url, "threshold": choice.threshold,
                             "small": router.small.model, "large": router.large.model})  # fmt: skip
        screen.say(
            f"Serving [bold]{escape(served_model_name)}[/bold] at {url}/v1: {escape(router.small.model)} where "
            f"{choice.signal} >= {choice.threshold:.5g}, else {escape(router.large.model)}"
        )

    Server(make_router_app(router), router, drain_timeout, announce).run_at(taken)
