"""Which model gave an answer: the checkpoint, and what rounding did to it, since both decide what it says."""

import hashlib
from dataclasses import asdict, dataclass, fields

from torch import nn

from ..errors import ConfigError
from ..hf.fingerprint import fingerprint
from ..llm import LLM
from ..quant import Fp8Linear, Int4Linear, Int8Linear

_SAMPLE = 256


@dataclass(frozen=True)
class ModelId:
    """A model as a calibration remembers it; `name` is for people and not compared.

    fingerprint: of the checkpoint, see `hf.fingerprint`, the same before and after rounding. weights: formats of
    rounded layers and a hash of their scales, "" where there are none. dtype: of everything else. vision: fingerprint
    of the vision half, "" where there is none.
    """

    name: str
    fingerprint: str
    weights: str
    dtype: str
    vision: str = ""

    def difference(self, other: "ModelId") -> str | None:
        """What tells the other apart from this one, in words; None for the same model."""
        for what in ("fingerprint", "vision", "weights", "dtype"):
            then, now = getattr(self, what), getattr(other, what)
            if then != now:
                return f"{what} {then[:18] or 'none'} there ({self.name}), {now[:18] or 'none'} here ({other.name})"
        return None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: dict[str, object]) -> "ModelId":
        """The reverse. Raises `ConfigError` for other keys."""
        names = [one.name for one in fields(cls)]
        if sorted(given) != sorted(names) or not all(isinstance(value, str) for value in given.values()):
            raise ConfigError("a model is not described as expected", got=", ".join(given), expected=", ".join(names))
        return cls(**given)  # type: ignore[arg-type]


def identity(llm: LLM) -> ModelId:
    """Of the model as it is loaded now."""
    loaded = llm.loaded
    dtype = str(loaded.dtype).removeprefix("torch.")
    vision = "" if loaded.vision is None else fingerprint(loaded.vision.tower)
    return ModelId(loaded.name, loaded.fingerprint, _rounding(loaded.model), dtype, vision)


def _rounding(model: nn.Module) -> str:
    """Formats of the rounded layers and a hash of their scales, which are the same in every layout of the kernels."""
    formats, digest = set[str](), hashlib.sha256()
    for path, module in sorted(model.named_modules()):
        if not isinstance(module, Int4Linear | Int8Linear | Fp8Linear):
            continue
        formats.add(type(module).__name__.removesuffix("Linear").lower())
        name, held = ("params", module.params) if isinstance(module, Int4Linear) else ("scales", module.scales)
        digest.update(f"{path}.{name}{tuple(held.shape)}".encode())
        digest.update(held.flatten()[:_SAMPLE].float().cpu().numpy().tobytes())
    return f"{'+'.join(sorted(formats))} {digest.hexdigest()[:12]}" if formats else ""
