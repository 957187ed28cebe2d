"""Tenants: authentication, quotas, sessions, and fair scheduling.

A key is compared by its digest, in constant time, and neither stored nor printed. Without any key everyone on this
machine is the tenant `local`. Of the waiting tenants the one that was served least is next, so that one with many
requests does not delay another with few. A session is one run of a tenant's program; ended ones make room for new ones.
"""

import asyncio
import hashlib
import hmac
import os
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from birl.errors import BirlError
from birl.regular import read_json, read_text
from birl.server.limits import Refused
from birl.server.tinker.store import Store, left_out

VARIABLE = "BIRL_TINKER_KEYS"
LOCAL = "local"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
SHORTEST = 16  # minimum characters of a key
SILENT = 600.0  # seconds without a heartbeat after which a session counts as ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Quota of a tenant: live sessions, runs and sampling sessions, tokens in waiting or running requests, waiting
    requests, checkpoints, and their bytes on disk."""

    sessions: int
    runs: int
    samplers: int
    tokens: int
    requests: int
    checkpoints: int
    disk: int


@dataclass(slots=True, kw_only=True)
class Tenant:
    """A tenant and its load. `bodies`: bytes of requests being received. `served`, `sampled`: tokens computed for it in
    training and in sampling, for fair scheduling. `reading`: allows one of its requests at a time to be parsed, and its
    images decoded, so that threads are left for others."""

    name: str
    tokens: int = 0
    requests: int = 0
    bodies: int = 0
    served: float = 0.0
    sampled: float = 0.0
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def urn(self) -> str:
        return f"urn:birl:user:{self.name}"

    @contextmanager
    def taking(self, size: int, most: int) -> Iterator[None]:
        """Count a body, which is in memory before the quota applies; one is always allowed. Raises `Refused` (429)."""
        if self.bodies and self.bodies + size > most:
            raise Refused(429, f"Requests of yours with {self.bodies} bytes are on their way.", "overloaded", 1)
        self.bodies += size
        try:
            yield
        finally:
            self.bodies -= size

    @contextmanager
    def holding(self, quota: Quota, tokens: int) -> Iterator[None]:
        """Count a request. Raises `Refused`: 429 while other requests of this tenant use the quota, which the client
        retries; 400 if it exceeds the quota alone."""
        if tokens > quota.tokens:
            raise Refused(400, f"The request has {tokens} tokens, and a tenant may have {quota.tokens} at once.")
        if self.tokens + tokens > quota.tokens or self.requests >= quota.requests:
            raise Refused(
                429, f"{self.requests} requests with {self.tokens} tokens of yours wait; the limits are "
                f"{quota.requests} and {quota.tokens}.", "overloaded", 1,
            )  # fmt: skip
        self.tokens += tokens
        self.requests += 1
        try:
            yield
        finally:
            self.tokens -= tokens
            self.requests -= 1


@dataclass(slots=True)
class Tenants:
    """All tenants, by the digests of their keys."""

    keys: dict[bytes, str]
    by_name: dict[str, Tenant] = field(default_factory=dict)

    def named(self, name: str) -> Tenant:
        return self.by_name.setdefault(name, Tenant(name=name))

    def of(self, headers: Mapping[str, str]) -> Tenant:
        """The tenant of a request. Raises `Refused` (401) for an unknown key."""
        if not self.keys:
            return self.named(LOCAL)
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = digest(headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else ""))
        result = ""
        for known, name in self.keys.items():
            if hmac.compare_digest(known, given):
                result = name
        if not result:
            raise Refused(401, "The key is missing or wrong: set TINKER_API_KEY to one that this server knows.", "user")
        return self.named(result)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def read(path: str) -> Tenants:
    """Read keys from a file with a name and a key in each line, and from BIRL_TINKER_KEYS: "name key" pairs, separated
    by commas. Raises `BirlError` with the place of a wrong line, never its content."""
    lines = [(f"{VARIABLE}, entry {i}", line) for i, line in enumerate(os.environ.get(VARIABLE, "").split(","), 1)]
    if path:
        file = Path(path).expanduser()
        try:
            if file.stat().st_mode & 0o077:
                raise BirlError(f"keys={path}: others may read the file; run `chmod 600 {path}`.")
            written = read_text(file).splitlines()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise BirlError(f"keys={path}: cannot be read ({reason}).") from None
        lines += [(f"keys={path}, line {i}", line.partition("#")[0]) for i, line in enumerate(written, 1)]
    keys: dict[bytes, str] = {}
    for where, line in lines:
        name, *rest = line.split() or ("",)
        if not name:
            continue
        if len(rest) != 1 or not NAME.fullmatch(name) or len(rest[0]) < SHORTEST or not rest[0].isascii():
            raise BirlError(
                f"{where}: must be a name of small letters, digits, _ and -, and a key of at least {SHORTEST} ASCII "
                "characters; Tinker's client wants keys to begin with tml-."
            )
        if digest(rest[0]) in keys:
            raise BirlError(f"{where}: this key is {keys[digest(rest[0])]}'s already.")
        keys[digest(rest[0])] = name
    if not keys and (path or os.environ.get(VARIABLE)):  # without keys every local process is the same tenant
        raise BirlError(f"{f'keys={path}' if path else VARIABLE}: has no key; write a name and a key in each line.")
    return Tenants(keys)


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
                self.by_id[id] = TypeAdapter(Session).validate_python(read_json(file))

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


@dataclass(slots=True)
class Turns:
    """Fair scheduling of answers. `free`: number of free slots, the last `reserve` of them for tenants without running
    answers, counted in `running`. `waiting`: waiting answers by tenant."""

    free: int
    reserve: int = 0
    running: "Counter[str]" = field(default_factory=Counter)
    waiting: dict[str, tuple[Tenant, "deque[asyncio.Future[None]]"]] = field(default_factory=dict)

    @asynccontextmanager
    async def turn(self, tenant: Tenant) -> AsyncIterator[None]:
        """A slot for one answer of this tenant."""
        await self._wait(tenant)
        try:
            yield
        finally:
            self._end(tenant)

    async def _wait(self, tenant: Tenant) -> None:
        """Wait for a slot. A returning tenant starts at the level of the others: unused share is not saved up."""
        if tenant.name not in self.waiting:
            least = min((other.sampled for other, _ in self.waiting.values()), default=0.0)
            tenant.sampled = max(tenant.sampled, least)
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(tenant.name, (tenant, deque()))[1].append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # given, but not taken
                self._end(tenant)
            raise

    def _end(self, tenant: Tenant) -> None:
        self.free += 1
        self.running[tenant.name] -= 1
        self._give()

    def _give(self) -> None:
        while allowed := [each for each in self.waiting.values() if self._may(each[0])]:
            tenant, own = min(allowed, key=lambda each: each[0].sampled)
            turn = own.popleft()
            if not own:
                del self.waiting[tenant.name]
            if not turn.done():  # else cancelled
                turn.set_result(None)
                self.free -= 1
                self.running[tenant.name] += 1

    def _may(self, tenant: Tenant) -> bool:
        return self.free > self.reserve or (self.free > 0 and not self.running[tenant.name])
