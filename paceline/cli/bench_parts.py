"""What `paceline bench` measures: engines of ours on one set of weights."""

from typing import TYPE_CHECKING

from .engine import EngineOptions, open_engine
from .screen import Screen

if TYPE_CHECKING:
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
