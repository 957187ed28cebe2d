"""weights.method=ipc: each engine on this machine reads the learner's memory, one bucket at a time, and then loads all.

Lent.load -> for each bucket: lent (`handles.py`) -> POST /stage/{version} -> the engine has copied it
          -> POST /load, as after a bucket over HTTP
"""

import asyncio
from typing import cast

from birl.engines.client import Client
from birl.engines.collective import pieces
from birl.engines.handles import layouts, lent, sweep
from birl.errors import EngineDown, Malformed, WeightsFailed
from birl.types import Held, Update
from birl.weights.live import Live


class Lent:
    """A `Remote` whose engine reads new weights from this process's memory, in buckets of `bucket_mb` [MiB]."""

    def __init__(self, remote: Client, bucket_mb: float) -> None:
        self._remote, self.bucket_mb = remote, bucket_mb
        sweep()

    def __getattr__(self, name: str):
        return getattr(self._remote, name)

    async def load(self, update: Update) -> Held:
        """Send the update. Raises `WeightsFailed`, and `BirlError` if the engine cannot read this process's memory."""
        live = cast(Live, update.tensors)
        try:
            for names in pieces(live.shapes, self.bucket_mb):
                flat = await asyncio.to_thread(live.flat, names)
                async with lent(flat) as memory:
                    await self._remote.lend(update.version, memory, layouts(names, live.shapes))
            return await self._remote.receive(update)
        except OSError as error:
            raise WeightsFailed(
                "truncated",
                f"Version {update.version} of the weights: a bucket could not be put into /dev/shm: {error.strerror}. "
                f"Lower weights.bucket_mb={self.bucket_mb:g}, or make room there.",
            ) from error
        except Malformed as error:
            raise WeightsFailed("mismatch", f"Version {update.version} of the weights: {error}") from error
        except EngineDown as error:
            raise WeightsFailed("unreachable", f"Version {update.version} of the weights: {error}") from error
