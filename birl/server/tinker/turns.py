"""Who samples next: the engine has room for so many answers at once, and of the tenants that wait the one that was
served least has the next. A part of the room is only for tenants that have no answer under way. So one that asks for
very much does not hold up another that asks for little."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from birl.server.tinker.tenants import Tenant


@dataclass(slots=True)
class Turns:
    """`free`: answers for which there is room; the last `reserve` of them for tenants that have none under way, which
    `running` counts. `waiting`: by tenant, those that wait."""

    free: int
    reserve: int = 0
    running: "Counter[str]" = field(default_factory=Counter)
    waiting: dict[str, tuple[Tenant, "deque[asyncio.Future[None]]"]] = field(default_factory=dict)

    @asynccontextmanager
    async def turn(self, tenant: Tenant) -> AsyncIterator[None]:
        """Within, an answer of this tenant has room."""
        await self._wait(tenant)
        try:
            yield
        finally:
            self._end(tenant)

    async def _wait(self, tenant: Tenant) -> None:
        """A tenant that comes back begins where the others are: what it did not use is not saved up."""
        if tenant.name not in self.waiting:
            least = min((other.sampled for other, _ in self.waiting.values()), default=0.0)
            tenant.sampled = max(tenant.sampled, least)
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(tenant.name, (tenant, deque()))[1].append(turn)
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given, and is not taken
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
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                self.free -= 1
                self.running[tenant.name] += 1

    def _may(self, tenant: Tenant) -> bool:
        return self.free > self.reserve or (self.free > 0 and not self.running[tenant.name])
