"""Sessions: each is one run of a tenant's program. Ended ones make room for new ones."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from birl.errors import BirlError
from birl.regular import read_json
from birl.server.tinker.store import Store, left_out

SILENT = 600.0  # seconds without a heartbeat after which a session counts as ended


@dataclass(slots=True, kw_only=True)
class Session:
    owner: str
    metadata: dict[str, str]
    name: str = ""
    made: float = field(default_factory=time.time)
    heard: float = field(default_factory=time.monotonic)
    finished: bool = False
    reason: str = ""  # reason of the end: success | errored | interrupted

    @property
    def ended(self) -> bool:
        return self.finished or time.monotonic() - self.heard > SILENT

    @property
    def status(self) -> dict[str, Any] | None:
        """Status as in the client's `SessionSummary`; None if it ended without notice."""
        if self.finished:
            return {"type": "client_finished", "reason": {"type": self.reason or "success"}}
        return None if self.ended else {"type": "active"}

    def has(self, kind: str, reasons: Any) -> bool:
        """Whether it has a status. `reasons`: allowed reasons of the end; empty or None: any."""
        status = self.status or {}
        right = not isinstance(reasons, list) or not reasons or status.get("reason", {}).get("type") in reasons
        return status.get("type") == kind and right

    def about(self) -> dict[str, Any]:
        return {"owner": self.owner, "metadata": self.metadata, "name": self.name, "made": self.made,
                "finished": self.finished, "reason": self.reason}  # fmt: skip


@dataclass(slots=True)
class Sessions:
    store: Store
    by_id: dict[str, Session] = field(default_factory=dict)

    def restore(self) -> None:
        for id, file in self.store.files("sessions"):
            with left_out(file):
                self.by_id[id] = Session(**read_json(file))

    def of(self, owner: str) -> list[str]:
        """Session ids of an owner, the oldest first."""
        return sorted((id for id, s in self.by_id.items() if s.owner == owner), key=lambda id: self.by_id[id].made)

    def add(self, id: str, session: Session, most: int) -> None:
        """Add a session. Raises `BirlError` if the owner's quota of live ones is used up."""
        advice = "close one (ServiceClient.close), or wait until one has been silent for ten minutes"
        make_room("sessions", self.of(session.owner), most, self.ended, self.forget, advice)
        self.store.write("sessions", id, session.about())
        self.by_id[id] = session

    def keep(self, id: str) -> None:
        self.store.write("sessions", id, self.by_id[id].about())

    def ended(self, id: str) -> bool:
        """Whether a session has ended. `id`: of a session, or of a run or sampler in it."""
        session = self.by_id.get(id.partition(":")[0])
        return session is None or session.ended

    def forget(self, id: str) -> None:
        del self.by_id[id]
        self.store.remove("sessions", id)


def make_room(
    what: str, own: Iterable[str], most: int, ended: Callable[[str], bool], forget: Callable[[str], None], advice: str
) -> None:
    """Forget ended items, the first ones first, to make room for one more. Raises `BirlError` if there is none."""
    own = list(own)
    over = len(own) + 1 - most
    gone = [id for id in own if ended(id)][:over] if over > 0 else []
    for id in gone:
        forget(id)
    if over > len(gone):
        raise BirlError(f"You have {len(own) - len(gone)} {what}, which is your quota: {advice}.")
