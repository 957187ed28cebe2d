"""Sends new weights to a server of another project through its own endpoints, without a folder: in buckets from the
learner's memory into the model, while the server is paused.

    nccl   join: its ranks join the learner's group      receive: a request for each bucket, which waits for a broadcast

Such a server reports no digest of its weights, so the canary proves them. A failure half-way leaves it broken, without
the old or the new weights, until an update succeeds.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, ClassVar, TypeVar

from birl.engines.collective import BroadcastGroup, pieces, shapes_in
from birl.engines.peer import Adapter
from birl.engines.wire import Invitation
from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.models.released import Shapes, nbytes
from birl.types import Held, Update

T = TypeVar("T")


class Transfer(ABC):
    """Common part of the transfers; a server's own requests are in its folder. `group`: class of rank 0 for its ranks.
    `seconds`: deadline of each request."""

    group: ClassVar[type[BroadcastGroup]]

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.peer = adapter, adapter.peer
        self.seconds = adapter.timeout
        self._invited: Invitation | None = None
        self._left: asyncio.Future[None] | None = None  # done when the group was left

    @abstractmethod
    async def ranks(self) -> int:
        """Number of GPUs with parts of its model. Raises `EngineDown`, and `BirlError` if it is unsupported."""

    @abstractmethod
    async def enter(self, invitation: Invitation) -> None: ...
    @abstractmethod
    async def begin(self) -> None: ...
    @abstractmethod
    async def bucket(self, rows: dict[str, Any], last: str) -> None:
        """Load one bucket; returns when it is in the model. `rows`: lists of names, dtypes and shapes; `last`: label of
        the weights for the last bucket, else empty."""

    @abstractmethod
    async def finish(self) -> None: ...

    async def join(self, invitation: Invitation) -> None:
        """Join a group; returns when all its ranks have joined. Raises `EngineDown`, `BirlError`."""
        self._invited, self.seconds = invitation, invitation.timeout
        try:
            await self._unless_left(self.enter(invitation))
        except EngineDown as error:
            raise lost(
                error,
                f"{error} It should join the learner's group of {invitation.size} ranks from rank {invitation.rank} "
                "on: check the number of ranks and the network between them.",
            ) from error

    async def receive(self, update: Update, group: str = "") -> Held:
        """Receive an update. Raises `EngineDown` if the server fails, `WeightsFailed` "unreachable" after `leave`."""
        invited = self._invited
        if invited is None or invited.group != group:
            raise WeightsFailed("unreachable", f"{self.adapter.address} is not in the group {group!r}.")
        shapes = shapes_in(invited)

        async def change() -> None:
            await self.begin()
            buckets = pieces(shapes, invited.bucket_mb)
            for names in buckets:
                await self.bucket(rows(names, shapes), str(update.version) if names is buckets[-1] else "")
            await self.finish()

        return await self._taken(update, lambda: self._unless_left(change()), nbytes(shapes, shapes))

    async def leave(self) -> None:
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    async def _taken(self, update: Update, change: Callable[[], Awaitable[None]], size: int) -> Held:
        try:
            return await self.adapter.replaced(update, change, size)
        except WeightsFailed as failed:
            if isinstance(failed.__cause__, EngineDown):
                raise lost(failed.__cause__, str(failed)) from failed
            if isinstance(failed.__cause__, BirlError) and not isinstance(failed.__cause__, WeightsFailed):
                raise WeightsFailed("mismatch", str(failed)) from failed  # rejected, as a retry would be
            raise

    async def _unless_left(self, work: Coroutine[Any, Any, T]) -> T:
        task, self._left = asyncio.create_task(work), asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait({task, self._left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise WeightsFailed("unreachable", "the learner or another engine has left the group")
            return task.result()
        finally:
            task.cancel()
            self._left.cancel()


def lost(error: EngineDown, why: str) -> Exception:
    """`EngineDown` if the engine gave no answer; an error that it answers with may be due to another rank."""
    return WeightsFailed("unreachable", why) if error.__cause__ is None else EngineDown(why)


def rows(names: Sequence[str], shapes: Shapes) -> dict[str, Any]:
    """Names, dtypes and shapes of a bucket, in order."""
    kinds = [str(shapes[name][1]).removeprefix("torch.") for name in names]
    return {"names": list(names), "dtypes": kinds, "shapes": [list(shapes[name][0]) for name in names]}
