"""p and q at one node, in float64 on the host.

Only visited nodes are read: a rejected branch may lead where no token is allowed, and that is no fault.
"""

from jaxtyping import Float64
from torch import Tensor

from ..core.draft import Draft
from ..core.outputs import TargetDistribution
from ..errors import DraftError


def p_at(law: TargetDistribution, row: int, node: int) -> Float64[Tensor, " V"] | None:
    """The target's law after a node; None where the scores give none."""
    scores = law.at([row], [node])
    if not bool(scores.max().isfinite()):  # NaN passes through max
        return None
    return TargetDistribution(scores.unsqueeze(0), law.is_greedy[row : row + 1]).probs()[0, 0].cpu()


def q_at(draft: Draft, row: int, node: int) -> Float64[Tensor, " V"]:
    """The law the children of a node were drawn from, renormalised: rows rounded to half precision sum near 1 only.

    Errors: DraftError where the row is not a law.
    """
    assert draft.q is not None
    q = draft.q[row, node].double().cpu()
    mass = float(q.sum())
    if not (abs(mass - 1) < 0.01 and float(q.min()) >= 0):
        raise DraftError(
            f"q of drafter {draft.source!r} is not a law at row {row}, node {node}",
            got=f"sum {mass:.6g}, least {float(q.min()):.6g}",
            expected="probabilities that sum to 1",
            fix="pass softmax(logits), with the temperature and the filters the tokens were drawn with",
        )
    return q / mass


def check_draft_probs(draft: Draft, law: TargetDistribution) -> None:
    """Refuse a draft whose q is missing, unexpected, or of another shape than the target's scores."""
    if not draft.has_law:
        raise DraftError(
            f"drafter {draft.source!r} must give q exactly when its tokens were drawn from a known law",
            got=f"{draft.law.name} {'with' if draft.q is not None else 'without'} q",
            fix="pass q with IID or WITHOUT_REPLACEMENT; use POINT_MASS, without q, for anything else",
        )
    if draft.q is not None and draft.q.shape != law.scores.shape:
        raise DraftError(
            f"q of drafter {draft.source!r} does not fit the target's scores",
            got=tuple(draft.q.shape),
            expected=tuple(law.scores.shape),
        )
