"""The options of a drafter that learns, and where it goes among the drafters of a server."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ..config import SpecConfig
from ..errors import ConfigError
from ..methods.choose import ChooseSpec
from ..methods.spec import DrafterSpec, HeadSpec
from ..methods.table import method_named
from ..schema import checked

if TYPE_CHECKING:
    from .drafter import Learned


@checked
class LearnedSpec(DrafterSpec):
    """A head that learns. head: the one that it begins with. folder: of answers and heads. max_mb: of answers."""

    folder: str
    head: HeadSpec | None = None
    max_mb: Annotated[int, Field(ge=1)] = 2048
    method = "learned"

    @property
    def name(self) -> str:
        return "learned" if self.head is None else self.head.name

    def tree_nodes(self, depth: int) -> int | None:
        return None if self.head is None else self.head.tree_nodes(depth)

    def as_dict(self) -> dict[str, object]:
        head = {} if self.head is None else {"head": {"method": self.head.method, **self.head.as_dict()}}
        return {"folder": self.folder, **head, "max_mb": self.max_mb}

    def build(self) -> "Learned":
        from .drafter import Learned
        from .folder import LearnSettings

        return Learned(self.head, self.folder, LearnSettings(max_bytes=self.max_mb << 20))


def learning(config: SpecConfig, folder: str, max_mb: int) -> SpecConfig:
    """The same drafters, of which the first trained head learns; without one, and a new head that does.

    Raises `ConfigError` without any drafter.
    """
    parts = config.drafter.parts
    if config.method == "none":
        raise ConfigError("plain decoding learns nothing", got="--drafter none", fix="--drafter lookup")
    head = next((part for part in parts if isinstance(part, HeadSpec) and part.model and _learns(part)), None)
    learned = LearnedSpec(folder=folder, head=head, max_mb=max_mb)
    members = (*parts, learned) if head is None else tuple(learned if part is head else part for part in parts)
    return replace(config, drafter=ChooseSpec(drafters=members) if len(members) > 1 else learned)


def _learns(spec: HeadSpec) -> bool:
    """Whether the table says that heads of its method are trained over the target's states."""
    row = method_named(spec.method)
    return bool(row.recipe and row.head) and row.name != "space"
