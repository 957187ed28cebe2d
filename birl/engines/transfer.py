"""New weights to a server of another project through its own endpoints, without a folder: bucket by bucket from the
learner's memory into the model, while the server is paused.

    nccl   join: its ranks enter the learner's group     receive: a request for each bucket, which waits for a broadcast

Such a server tells no digest of what it holds, so the canary proves it. What fails half-way leaves it broken, without
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
    """What is common; a server's own requests are in its folder. `group`: rank 0 as its ranks want it. `seconds`: the
    deadline of each request."""

    group: ClassVar[type[BroadcastGroup]]

    def __init__(self, adapter: Adapter) -> None:
        self.adapter, self.peer = adapter, adapter.peer
        self.seconds = adapter.timeout
        self._invited: Invitation | None = None
        self._left: asyncio.Future[None] | None = None  # done when nothing comes any more

    @abstractmethod
    async def ranks(self) -> int:
        """GPUs that have parts of its model. Raises `EngineDown`, and `BirlError` where it takes no weights so."""

    @abstractmethod
    async def enter(self, invitation: Invitation) -> None: ...
    @abstractmethod
    async def begin(self) -> None: ...
    @abstractmethod
    async def bucket(self, rows: dict[str, Any], last: str) -> None:
        """Returns when it is in the model. `rows`: lists of names, dtypes and shapes; `last`: with the last one the
        label of the weights, else empty."""

    @abstractmethod
    async def finish(self) -> None: ...

    async def join(self, invitation: Invitation) -> None:
        """Returns when all its ranks have come. Raises `EngineDown`, `BirlError`."""
        self._invited, self.seconds = invitation, invitation.timeout
        try:
            await self._unless_left(self.enter(invitation))
        except EngineDown as error:
            raise lost(
                error,
                f"{error} It was to join the learner's group of {invitation.size} ranks from rank {invitation.rank} "
                "on: are there so many, and can they reach each other?",
            ) from error

    async def receive(self, update: Update, group: str = "") -> Held:
        """Raises `EngineDown` where it does not go on, `WeightsFailed` "unreachable" where the group was left."""
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
                raise WeightsFailed("mismatch", str(failed)) from failed  # it refuses, and would again
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
    """`EngineDown` where the engine gave no answer. One that answers with an error may tell of another rank."""
    return WeightsFailed("unreachable", why) if error.__cause__ is None else EngineDown(why)


def rows(names: Sequence[str], shapes: Shapes) -> dict[str, Any]:
    """What a bucket has, in its order."""
    kinds = [str(shapes[name][1]).removeprefix("torch.") for name in names]
    return {"names": list(names), "dtypes": kinds, "shapes": [list(shapes[name][0]) for name in names]}
