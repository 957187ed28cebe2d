"""An engine in another process, as everything that uses one sees it: `client.Client` speaks to `birl serve`, and the
adapters of vLLM and SGLang have the same methods."""

from collections.abc import Collection
from typing import Protocol

from birl.engines.wire import Info
from birl.types import Completion, Held, SamplingParams, Update


class Remote(Protocol):
    """`version` is the last that is known. Every method ends within a deadline of its own.

    `EngineDown`: the engine does not answer, or not as it should; another one may. `BirlError` from `generate`: the
    request itself is wrong, and would be anywhere. Cancelling `generate` ends the request in the engine too.
    """

    address: str
    version: int

    async def info(self) -> Info: ...  # raises EngineDown
    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion: ...
    async def load(self, update: Update) -> Held: ...  # raises WeightsFailed; "unreachable" without an answer
    async def pause(self, abort: bool = False) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self, sessions: Collection[str] | None = None) -> int: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def close(self) -> None: ...  # of the connection; the engine goes on
