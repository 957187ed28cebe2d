"""Where sessions are answered: the last ones that were asked for are remembered."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")
REMEMBERED = 65_536


class Sessions(Generic[T]):
    """Places of sessions by name. The empty name belongs to no session."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, T] = OrderedDict()

    def get(self, session: str) -> T | None:
        return self._places.get(session)

    def keep(self, session: str, place: T) -> None:
        if not session:
            return
        self._places[session] = place
        self._places.move_to_end(session)
        if len(self._places) > REMEMBERED:
            self._places.popitem(last=False)
