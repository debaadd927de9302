"""What drafters keep from one request to the next, apart for each tenant.

Whether a draft is accepted shows in the time of an answer, so a draft of another's text would tell what it was.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, final

from ..core.request import TokenSequence

MOST_TENANTS = 64
"""Of more tenants the least recently used one is forgotten."""
_T = TypeVar("_T")


@final
class PerTenant(Generic[_T]):
    """A pool for each tenant (`SamplingParams.tenant`), made when it is first asked for.

    A private request has one of its own, which `release` drops.
    """

    def __init__(self, make: Callable[[], _T]):
        self._make, self._kept, self._private = make, OrderedDict[str, _T](), dict[int, _T]()

    def of(self, seq: TokenSequence) -> _T:
        """The pool of a sequence."""
        if seq.params.is_private:
            if seq.slot not in self._private:
                self._private[seq.slot] = self._make()
            return self._private[seq.slot]
        return self.of_tenant(seq.params.tenant)

    def of_tenant(self, tenant: str) -> _T:
        """The pool of a tenant, who is now the most recently used one."""
        if tenant not in self._kept:
            self._kept[tenant] = self._make()
            if len(self._kept) > MOST_TENANTS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(tenant)
        return self._kept[tenant]

    def release(self, slots: Sequence[int]) -> None:
        """Drop what private requests in these slots had."""
        for slot in slots:
            self._private.pop(slot, None)
