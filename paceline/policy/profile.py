"""What a cost model has learnt, as a file: measured on one machine, for one model, to start the next run from."""

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ..errors import ConfigError
from ..schema import Many, checked, validate
from .constants import EDGES

VERSION = 3

_Positive = Annotated[float, Field(gt=0, lt=1e6)]
_Count = Annotated[float, Field(ge=0)]
_Column = Many[_Count]


def _check_table(table: tuple[_Column, _Column]) -> tuple[_Column, _Column]:
    hits, tries = table
    if len(hits) != len(tries) or any(hit > tried + 1e-6 for hit, tried in zip(hits, tries, strict=True)):
        raise ValueError("hits and as many tries, none of them fewer")
    return table


def _check_confidence(tables: dict[str, tuple[_Column, _Column]]) -> dict[str, tuple[_Column, _Column]]:
    sizes = {name: [len(column) for column in columns] for name, columns in tables.items()}
    buckets = len(EDGES) + 1
    if sizes != {"accepted": [buckets] * 2, "deeper": [buckets] * 2}:
        raise ValueError(f"accepted and deeper, 2 columns of {buckets} each")
    return tables


Table = Annotated[tuple[_Column, _Column], AfterValidator(_check_table)]
"""Hits and tries of each position."""
_Hint = Annotated[str, Field(pattern=r"^(-?\d{1,9})?$")]
_Confidence = Annotated[dict[str, tuple[_Column, _Column]], AfterValidator(_check_confidence)]


@checked
class Profile:
    """Costs in seconds and acceptance counts.

    pass_seconds: T(n) by the number of rows n.
    draft_seconds: (seconds per drafted token, seconds per token read first) by drafter.
    acceptance: the counts by drafter and hint, under "" for all hints together.
    nodes: the nodes and levels of its drafts by drafter, fading.
    confidence: "accepted" and "deeper" by drafter, each with hits and expected hits by bucket of the product of
        confidences (see `odds.Confidence`).
    model, dtype, threads: what it was measured with. Users of a profile compare them.
    pass_experts: of a mixture, the experts that each pass of pass_seconds read. expert_seconds: what one takes.
    novelty: the experts that nodes added, and that independent ones would have, by drafter, fading (see `experts`).
    """

    pass_seconds: dict[Annotated[int, Field(ge=1)], _Positive] = field(default_factory=dict[int, float])
    draft_seconds: dict[str, tuple[_Positive, _Positive]] = field(default_factory=dict[str, tuple[float, float]])
    acceptance: dict[str, dict[_Hint, Table]] = field(default_factory=dict[str, dict[str, Table]])
    nodes: dict[str, tuple[_Positive, _Positive]] = field(default_factory=dict[str, tuple[float, float]])
    confidence: dict[str, _Confidence] = field(default_factory=dict[str, "dict[str, Table]"])
    model: str = ""
    dtype: str = ""
    threads: Annotated[int, Field(ge=0)] = 0
    pass_experts: dict[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]] = field(default_factory=dict[int, int])
    expert_seconds: Annotated[float, Field(ge=0, lt=1e6)] = 0.0
    novelty: dict[str, tuple[_Count, _Count]] = field(default_factory=dict[str, tuple[float, float]])
    version: Literal[3] = VERSION

    def to_dict(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, object]) -> "Profile":
        """From what `json.load` gave. Raises `ConfigError` for unknown keys, another version or a broken table."""
        if given.get("version") != VERSION:
            raise ConfigError(
                "the profile is of another version", got=given.get("version"), expected=VERSION, fix="tune again"
            )
        return validate(cls, dict(given), "the profile")
