"""A head or draft that is there already is taken as done by the run that made it alone."""

import json
import re
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..heads import head_info, read_record
from .config import RunConfig
from .data import read_lines
from .finish import asked_for, model_beside
from .run_folder import understood


def check_same_run(head: Path, config: RunConfig, fingerprint: str) -> None:
    """Raise `ConfigError`, naming what differs, where it was made for another target, of other answers or otherwise.

    fingerprint: of the target.
    """
    asked = json.loads(json.dumps(asked_for(config)))
    with understood(f"the record in {str(head)!r}", f"remove {str(head)!r}, and train again"):
        kept = read_record(head).get("config")
        then: dict[str, Any] = kept if isinstance(kept, dict) else asked
        changed = ["model"] if _trained_for(head) not in (None, fingerprint) else []
        changed += ["answers"] if _others(head, config.answers) else []
        changed += [
            f"{part}.{key}"
            for part in ("head", "train")
            for key in {**asked[part], **then.get(part, {})}
            if asked[part].get(key) != then.get(part, {}).get(key)
        ]
    if changed:
        folders = [_log(head).name, model_beside(head).name]
        beside = " and ".join(f"`{name}`" for name in folders if (head.parent / name).exists())
        raise ConfigError(
            f"{str(head)!r} was trained with other settings", got=", ".join(changed),
            fix=f"choose another out, or remove this head and {beside or 'what is'} beside it to begin again",
        )  # fmt: skip


def _log(head: Path) -> Path:
    """Where its checkpoints are."""
    return head.with_name(re.sub("^(head|draft)", "train", head.name))


def _trained_for(head: Path) -> str | None:
    """Fingerprint of the run's target; None where the old record of a full SPACE run does not tell."""
    told = read_record(head)
    draft = told.get("target")
    known = told.get("trained_for") or (draft.get("fingerprint") if isinstance(draft, dict) else None)
    if known is None and not told.get("fine_tuned"):
        known = head_info(head).fingerprint
    return None if known is None else str(known)


def _others(head: Path, answers: tuple[str, ...]) -> bool:
    """Whether these are not the answers it was trained on; nobody knows where its checkpoints are gone."""
    then = read_lines(_log(head))
    if not answers or then is None:
        return False
    return {Path(one).resolve() for one in answers} != {Path(one).resolve() for one in then}
