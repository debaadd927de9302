"""Safe YAML for configurations: values of JSON's types, without aliases."""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from ..errors import ConfigError

_KINDS = ("null", "bool", "int", "float", "str", "seq", "map")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")


class _Loader(yaml.SafeLoader):
    """No dates, binaries or aliases (which could expand without limit), and no duplicate keys."""

    yaml_constructors = {  # noqa: RUF012 - as the base class has it
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in _KINDS
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.MarkedYAMLError(
                problem=f"alias *{event.anchor}; write the value out", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.MarkedYAMLError(problem="a key that is there twice", problem_mark=node.start_mark)
        return mapping


# YAML 1.2 reads 1e-3 as a number, YAML 1.1 only 1.0e-3.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse_yaml(text: str, subject: str) -> Any:
    """The value of a YAML text. Raises `ConfigError`."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{subject} is not YAML that can be read", got="too many levels") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: a number of thousands of digits
        raise ConfigError(
            f"{subject} is not YAML that can be read", got=" ".join(str(error).split()), fix="put text in quotes"
        ) from error
