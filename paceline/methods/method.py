"""What Paceline has to know of a method: names of what it consists of, which are imported when they are first used."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table of methods.

    Modules that begin with a dot are below `methods`; those of other packages have their full names.

    name: in JSON and in the config.json of a head.
    usage: the value of --drafter; its first word stands for the method.
    title, how, drafts, needs, papers: for help, model cards and the documentation.
    home: the module of the classes `spec`, its options, and `drafter`.
    head: "module:class" of its network, whose `Config` is the class of the configuration; empty if nothing is trained,
        or whole models are.
    recipe: "module:class" of the `train.recipe.Recipe`. trained_as: its name in `paceline train`; default: `name`.
    marks: keys of a published config.json that tell such a head, or "key=text" for values with this text in them; the
        last method of the table that has one of them counts.
    layouts: the module of `read` and `layout`, for heads of other projects (`heads.published`, `heads.exchange`).
    exports: what is different in each engine that heads are exported for.
    is_tried: whether `paceline tune` tries it unasked.
    """

    name: str
    usage: str
    title: str
    home: str
    spec: str
    drafter: str
    how: str = ""
    drafts: str = "a chain"
    needs: str = "nothing"
    papers: str = ""
    head: str = ""
    recipe: str = ""
    trained_as: str = ""
    marks: tuple[str, ...] = ()
    layouts: str = ""
    exports: Mapping[str, str] = field(default_factory=dict[str, str])
    is_tried: bool = False

    @property
    def word(self) -> str:
        """What stands for it on the command line: "model" of "model:PATH[@int4]"."""
        return self.usage.partition(":")[0].partition("[")[0]

    @property
    def summary(self) -> str:
        return f"{self.title}: {self.how}" if self.how else self.title

    def is_told_by(self, config: Mapping[str, Any]) -> bool:
        """Whether a published config.json has one of the `marks`."""
        entries = {key: value for key, value in config.items() if value is not None}
        pairs = (mark.partition("=") for mark in self.marks)
        return any(key in entries and text in str(entries[key]) for key, _, text in pairs)


def named(reference: str) -> Any:
    """What "module:name" stands for."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module, __package__), name)
