"""vLLM's options on a command line, by the table in `vllm_options`. They are not in the help text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..integrations.vllm_options import ENGINE, SERVER, as_flag, settle, spelled
from ..schema import not_taken
from .screen import Screen

TABLE = ENGINE | SERVER


@dataclass(frozen=True)
class Others:
    """Options of vLLM with their values, which are texts, or booleans of flags; None where not given.

    As the default of a command's parameter: those that the command reads.
    """

    given: Mapping[str, object]

    def applied(self, command: str, screen: Screen, *groups: Any) -> list[Any]:
        """The command's groups of options with what these mean for them; says which of these change nothing.

        Raises one `ConfigError` for all that are refused.
        """
        unset = {option.name for group in groups for option in fields(group) if getattr(group, option.name) is None}
        settled = settle({name: _read(value) for name, value in self.given.items()}, TABLE, unset)
        if settled.refused:
            fixes = {self._shown(name): spelled(fix, is_command=True) for name, fix in settled.refused.items()}
            raise not_taken(f"paceline {command}", fixes)
        if settled.idle:
            screen.warn("These options change nothing here:", ", ".join(map(as_flag, settled.idle)) + ".")
        return [with_values(group, settled.ours) for group in groups]

    def words(self) -> list[str]:
        """The options for a command line of vLLM."""
        words = list[str]()
        for name, value in self.given.items():
            if value is False:
                words.append(as_flag(f"no_{name}"))
            elif value is not None:
                words += [as_flag(name)] if value is True else [as_flag(name), str(value)]
        return words

    def _shown(self, name: str) -> str:
        return f"{as_flag(name)} {self.given[name]}" if TABLE[name].idle else as_flag(name)


def _read(value: object) -> object:
    """A text as the JSON that it is, or as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def with_values(group: Any, values: Mapping[str, object]) -> Any:
    """A group of options with those of these values that it has."""
    own = {option.name: values[option.name] for option in fields(group) if option.name in values}
    return replace(group, **own) if own else group


LOADING, SERVING = Others(dict.fromkeys(ENGINE)), Others(dict.fromkeys(TABLE))
"""The options of commands that load a model, and that serve it."""
