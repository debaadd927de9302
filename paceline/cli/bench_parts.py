"""What `paceline bench` measures: engines of ours on one set of weights, and peers."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from .engine import EngineOptions, open_engine
from .screen import Screen

if TYPE_CHECKING:
    from ..eval.sides import PeerSide
    from ..llm import LLM
    from ..spec_config import SpecConfig


def open_engines(options: EngineOptions, configs: "list[SpecConfig]", screen: Screen) -> "list[LLM]":
    """One engine for each drafter, all on the same weights."""
    first = open_engine(options, screen)
    from ..llm import LLM
    from ..zoo import resolve

    llms = [first]
    for config in configs[1:]:
        with screen.pulling() as progress:
            for name in config.models:
                resolve(name, progress=progress)
        with screen.spinner(f"preparing {config.name}"):
            drafter, policy, verifier = config.build(options.allow_lossy, options.profile)
            llms.append(
                LLM(
                    first.loaded,
                    drafter=drafter,
                    policy=policy,
                    verifier=verifier,
                    numerics=options.numerics.value if options.numerics else None,
                    max_batch_size=options.max_batch_size,
                    max_model_len=options.max_model_len,
                    allow_lossy=options.allow_lossy,
                )
            )
    return llms


@dataclass(frozen=True)
class PeerWishes:
    """The options that speak of peers. models, drafts: weights in a peer's own format, by its name."""

    specs: tuple[str, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict[str, str])
    drafts: Mapping[str, str] = field(default_factory=dict[str, str])
    num_tokens: int | None = None

    @classmethod
    def parse(
        cls, specs: list[str] | None, models: list[str] | None, drafts: list[str] | None, num_tokens: int | None
    ) -> "PeerWishes":
        """Read them before anything is loaded; what cannot be meant is a usage error."""
        from ..eval.peers import PEERS

        names = [spec.partition("=")[0].strip() for spec in specs or ()]
        for name in names:
            if name not in PEERS:
                raise typer.BadParameter(f"there is no peer {name!r}: choose from {', '.join(PEERS)}")
        if len(set(names)) < len(names):
            raise typer.BadParameter("the same --peer is given twice")
        of_model, of_draft = _by_name(models, "--peer-model"), _by_name(drafts, "--peer-draft-model")
        for name in (*of_model, *of_draft):
            if name not in names:
                raise typer.BadParameter(f"there is no --peer {name}, of which a model is given")
        return cls(tuple(specs or ()), of_model, of_draft, num_tokens)


@contextmanager
def open_peers(
    wishes: PeerWishes, configs: "list[SpecConfig]", llm: "LLM", model: str, screen: Screen, missing: dict[str, str]
) -> "Iterator[tuple[list[PeerSide], dict[str, dict[str, str]]]]":
    """The peers that could be started, and what they say of themselves; fills `missing` with those that could not."""
    if not wishes.specs:
        yield [], {}
        return
    import torch

    from ..errors import PacelineError
    from ..eval.peers import PeerOptions, open_peer
    from ..eval.sides import PeerSide
    from ..zoo import resolve

    draft = next((config.model for config in configs if config.model is not None), None)
    common = PeerOptions(
        draft_model=None if draft is None else str(resolve(draft)),
        num_speculative_tokens=wishes.num_tokens,
        threads=torch.get_num_threads(),
        dtype=str(llm.loaded.dtype).removeprefix("torch."),
    )
    sides: list[PeerSide] = []
    about: dict[str, dict[str, str]] = {}
    with ExitStack() as stack:
        for spec in wishes.specs:
            name = spec.partition("=")[0].strip()
            given = replace(common, peer_model=wishes.models.get(name), peer_draft_model=wishes.drafts.get(name))
            try:
                with screen.spinner(f"starting {name}"):
                    one = open_peer(spec, str(resolve(model)), given)
                    stack.callback(one.close)
                    one.start()
            except (PacelineError, OSError) as error:
                missing[name] = str(error)
                screen.say(f"[yellow]without {escape(name)}:[/yellow] {escape(str(error))}")
            else:
                about[name] = one.describe()
                sides += [PeerSide(one, mode) for mode in one.modes]
        yield sides, about


def _by_name(given: list[str] | None, option: str) -> dict[str, str]:
    """NAME=PATH options as a mapping; anything else is a usage error."""
    found: dict[str, str] = {}
    for one in given or ():
        name, equals, path = one.partition("=")
        if not (name and equals and path):
            raise typer.BadParameter(f"{option} takes NAME=PATH, not {one!r}")
        found[name] = path
    return found
