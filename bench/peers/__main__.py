"""`python -m bench.peers`: `paceline bench` with other systems among the sides, see the package."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from rich.markup import escape

from paceline.cli import main as paceline
from paceline.errors import PacelineError

from . import PEERS, PeerOptions, open_peer
from . import __doc__ as about_peers

_BY_NAME = ("--peer-model", "--peer-draft-model")


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The options that speak of peers, and the others, which are `paceline bench`'s. Exits with 2 for wrong ones."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=about_peers, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON_OR_URL", help=", ".join(PEERS))
    parser.add_argument("--peer-model", action="append", default=[], metavar="NAME=PATH",
                        help="the same weights in a peer's own format; default: a GGUF file MODEL")  # fmt: skip
    parser.add_argument("--peer-draft-model", action="append", default=[], metavar="NAME=PATH",
                        help="the draft model in a peer's own format")  # fmt: skip
    parser.add_argument("--num-speculative-tokens", type=int, help="drafted a round, by us and by the peers")
    given, others = parser.parse_known_args(arguments)
    names = [spec.partition("=")[0].strip() for spec in given.peer]
    if not names:
        parser.error("there is no --peer; `paceline bench` measures without")
    for name in names:
        if name not in PEERS:
            parser.error(f"there is no peer {name!r}: choose from {', '.join(PEERS)}")
    if len(set(names)) < len(names):
        parser.error("the same --peer is given twice")
    for option in _BY_NAME:
        key, found = option[2:].replace("-", "_"), dict[str, str]()
        for one in getattr(given, key):
            name, equals, path = one.partition("=")
            if not (name and equals and path):
                parser.error(f"{option} takes NAME=PATH, not {one!r}")
            if name not in names:
                parser.error(f"there is no --peer {name}, of which a model is given")
            found[name] = path
        setattr(given, key, found)
    if given.num_speculative_tokens is not None:
        others += ["--num-speculative-tokens", str(given.num_speculative_tokens)]
    return given, others


def opener(given: argparse.Namespace) -> Any:
    """For `paceline.measure.run.OPEN_PEERS`: the peers that can be started, and what they say of themselves."""
    import torch

    from paceline.hf.gguf.file import SUFFIX
    from paceline.zoo import resolve

    from .side import PeerSide

    @contextmanager
    def open_peers(
        configs: Sequence[Any], llm: Any, model: str, screen: Any, missing: dict[str, str]
    ) -> Iterator[tuple[list[PeerSide], Mapping[str, dict[str, str]]]]:
        draft = next((model for config in configs for model in config.models), None)
        common = PeerOptions(
            draft_model=None if draft is None else str(resolve(draft)),
            num_speculative_tokens=given.num_speculative_tokens,
            threads=torch.get_num_threads(),
            dtype=str(llm.loaded.dtype).removeprefix("torch."),
        )
        sides, about = list[PeerSide](), dict[str, dict[str, str]]()
        with ExitStack() as stack:
            for spec in given.peer:
                name = spec.partition("=")[0].strip()
                own = given.peer_model.get(name, model if model.endswith(SUFFIX) else None)
                options = replace(common, peer_model=own, peer_draft_model=given.peer_draft_model.get(name))
                try:
                    with screen.spinner(f"starting {name}"):
                        one = open_peer(spec, str(resolve(model)), options)
                        stack.callback(one.close)
                        one.start()
                except (PacelineError, OSError) as error:
                    missing[name] = str(error)
                    screen.say(f"[yellow]without {escape(name)}:[/yellow] {escape(str(error))}")
                else:
                    about[name] = one.describe()
                    sides += [PeerSide(one, mode, llm.loaded.eos_ids) for mode in one.modes]
            yield sides, about

    return open_peers


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and exit as `paceline bench` does."""
    given, others = parse(arguments)
    from paceline.measure.run import OPEN_PEERS

    OPEN_PEERS.set(opener(given))
    paceline(["bench", *others])


if __name__ == "__main__":
    main()
