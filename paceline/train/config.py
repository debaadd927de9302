"""The configuration of a training run: a YAML file and dotted overrides, read into validated dataclasses.

    model: smollm2-135m                 paceline train eagle --config run.yaml train.lr=1e-3 prepare.limit=100
    prompts: [train.jsonl]
    out: runs/eagle

Everything else has a default. `head` and `train.loss` depend on the method; their classes are in its recipe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, Strict

from ..errors import ConfigError
from ..schema import Text, checked, validate
from ..system.files import read_text
from ..system.yaml_values import parse_yaml

_T = TypeVar("_T")
_MAX_BYTES = 1 << 20  # of a configuration

Name = Annotated[Text, Field(min_length=1, pattern="^[^\\x00]*$")]
"""A name or a path."""
Several = Annotated[tuple[_T, ...], Strict(False), BeforeValidator(lambda v: v if isinstance(v, list | tuple) else [v])]
"""A list of values; a single one needs no brackets."""
AtLeast1 = Annotated[int, Field(ge=1, lt=2**31)]
Few = Annotated[int, Field(ge=1, le=256)]
"""A number of modules or of steps in depth."""
Tokens = Annotated[int, Field(ge=1, le=2**20)]
"""Length of a text."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Temperatures = Annotated[Several[AtLeast0], Field(min_length=1)]


@checked
class PrepareSection:
    """The stage `prepare`: which answers to generate.

    limit: the number of answers. max_tokens: of an answer. temperatures: used in turn. mix: the weight of each source
    of prompts; empty: all prompts, shuffled. seed: the seed of the first answer is 1,000,003 times this. states:
    "store" stores the hidden states that the method reads; "online" computes them again while training. part: (i, n)
    answers every n-th prompt only, for n parallel processes. prompt_tokens: longer prompts are skipped. batch: answers
    decoded at the same time.
    """

    limit: Annotated[int, Field(ge=1)] = 10_000
    max_tokens: Tokens = 256
    temperatures: Temperatures = (0.0, 1.0)
    mix: Mapping[Text, Annotated[float, Field(gt=0, le=1e6)]] = field(default_factory=dict[str, float])
    seed: Annotated[int, Field(ge=0, lt=2**43)] = 0
    states: Literal["store", "online"] = "store"
    part: Annotated[tuple[int, int], Strict(False)] = (0, 1)
    prompt_tokens: Tokens = 512
    batch: Annotated[int, Field(ge=1, le=4096)] = 16

    def __post_init__(self) -> None:
        if not 0 <= self.part[0] < self.part[1]:
            raise ConfigError("prepare.part is out of range", got=list(self.part), expected="[i, n] with 0 <= i < n")


@checked
class LoopConfig:
    """The optimizer and its schedule. lr: the peak, after a share `warmup` of the steps; a cosine decays it to a tenth.

    optimizer: "muon" makes the steps of matrices orthogonal (see `muon`). evaluate_every, log_every: in steps;
    evaluate_every None: after each epoch.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: Above0 = 6e-4
    warmup: Share = 0.03
    clip: Above0 = 0.5
    weight_decay: AtLeast0 = 0.0
    seed: Seed = 0
    evaluate_every: AtLeast1 | None = None
    checkpoint_seconds: AtLeast0 = 300.0
    log_every: AtLeast1 = 20
    tensorboard: bool = False


@checked
class TrainConfig(LoopConfig):
    """How to train on answers.

    max_tokens: of a batch, rows x longest row; also the limit of an answer. accumulate: batches per step and device.
    held_out: share of the prompts for evaluation. limit: answers to train on, None: all. prompts: whether heads over
    the target's states also learn from the tokens of prompts.
    """

    epochs: Annotated[int, Field(ge=1, le=100_000)] = 5
    max_tokens: Annotated[int, Field(ge=8, lt=2**31)] = 2048
    accumulate: AtLeast1 = 1
    limit: Annotated[int, Field(ge=1)] | None = None
    held_out: Share = 0.03
    prompts: bool = False
    loss: Mapping[str, object] = field(default_factory=dict[str, object])


@checked
class EvalSection:
    """The stage `eval`: decoding with the trained head. prompts: files; empty: the built-in prompts. limit: per file.

    depth, nodes: of a draft, None: the method's default. drafter: its other JSON keys, such as tree and top_k.
    """

    prompts: Several[Name] = ()
    limit: Annotated[int, Field(ge=1)] = 40
    max_tokens: Tokens = 128
    temperatures: Temperatures = (0.0, 1.0)
    depth: Few | None = None
    nodes: AtLeast1 | None = None
    drafter: Mapping[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        fixed = [key for key in ("method", "model") if key in self.drafter]
        if fixed:
            raise ConfigError(
                f"eval.drafter cannot set the {fixed[0]}", fix="leave it out: the trained drafter is used"
            )


@checked
class RunConfig:
    """A whole run.

    prompts: files, see `measure.prompts`; `qat` and `distill` read the images of chats, and heads do through stored
    states; `prepare.mix` uses the key "source" of each line. out: the run's folder. start: a head to continue from, for
    this model or another one of the same sizes; its shape is kept, and also its draft vocabulary unless
    `head.draft_vocab_size` is given; None: a new head with the shape in `head`. answers: folders of an earlier
    `prepare`; empty: the run's own. head: the shape of the trained module. base_model, licence: for the model card, a
    hub id and the head's licence.
    """

    model: Name
    out: Name
    prompts: Several[Name] = ()
    answers: Several[Name] = ()
    dtype: Name | None = None
    device: Name | None = None
    base_model: Text | None = None
    licence: Text | None = None
    start: Name | None = None
    head: Mapping[str, object] = field(default_factory=dict[str, object])
    prepare: PrepareSection = field(default_factory=PrepareSection)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalSection = field(default_factory=EvalSection)


def read_config(path: Path | str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The file with overrides `a.b=value`, whose values are YAML. Raises `ConfigError` for invalid settings.

    Prompt files in the configuration file are relative to it, those of an override to the working directory.
    """
    return validate(RunConfig, read_mapping(path, overrides), "the configuration")


def read_mapping(path: Path | str | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The same as plain values, not validated."""
    mapping: Any = {}
    if path is not None:
        mapping = parse_yaml(read_text(path, "the configuration", _MAX_BYTES), f"the configuration {str(path)!r}")
        if not isinstance(mapping, dict):
            raise ConfigError(f"{str(path)!r} is not a YAML mapping", got=type(mapping).__name__)
        for section in (mapping, mapping.get("eval")):
            if isinstance(section, dict) and "prompts" in section:
                section["prompts"] = _beside(Path(path).parent, section["prompts"])
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(
                "an override cannot be read", got=repr(override), expected="key=value, as in train.lr=1e-3"
            )
        *parents, last = key.split(".")
        at = mapping
        for parent in parents:
            at = at.setdefault(parent, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{key!r} goes below {parent!r}, which is a value", got=repr(at))
        at[last] = parse_yaml(text, f"the value of {key!r}")
    return mapping


def _beside(folder: Path, value: Any) -> Any:
    """Paths relative to `folder`; other values are left to the validation."""
    if isinstance(value, list):
        return [_beside(folder, path) for path in value]
    return str(folder / value) if isinstance(value, str) else value
