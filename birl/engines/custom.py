"""A user-defined engine: a class that `engine.kind` names. Its objects live in the process of the run.

    generate(prompt_ids, params, session)   -> Completion       needed
    load(update)                            new weights         needed for training; returns None or `Held`
    sleep(), wake()                         memory of weights   needed for engine.sleep=true
    close()                                 at the end of the run

Methods are coroutines, or plain functions, which run in a thread. The constructor gets what it names of `OFFERED`.
"""

import asyncio
import inspect
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from birl.engines.client import checked_completion
from birl.engines.wire import Info
from birl.envs.calls import Threads, called
from birl.errors import BirlError, EngineDown, Malformed, WeightsFailed
from birl.foreign import described
from birl.named import load
from birl.types import Completion, Held, SamplingParams, Stop, Update

THREADS = Threads(64, "birl-engine")  # for methods that are not coroutines
OFFERED = ("model", "address", "number", "dtype", "device", "context", "end_ids", "arguments")


class Custom:
    """Implements `Remote` with an object of the class. `offered`: values for `OFFERED`; `timeout` of an answer,
    `load_timeout` of new weights, sleep and wake [s]."""

    def __init__(self, engine: Any, kind: str, offered: Mapping[str, Any], timeout: float, load_timeout: float) -> None:
        self.engine, self.kind, self.offered = engine, kind, offered
        self.address = offered["address"] or f"{kind}/{offered['number']}"
        self.timeout, self.load_timeout = timeout, load_timeout
        self.version = self.running = 0
        self.asleep = False

    async def info(self) -> Info:
        return Info(
            engine=self.kind,
            model=str(self.offered["model"]),
            version=self.version,
            digest="",
            dtype=self.offered["dtype"],
            context=self.offered["context"],
            vocabulary=0,
            running=self.running,
            waiting=0,
            paused=False,
            asleep=self.asleep,
            pid=os.getpid(),
        )

    async def generate(self, prompt_ids: tuple[int, ...], params: SamplingParams, session: str = "") -> Completion:
        self.running += 1
        try:
            result = await self._call("generate", self.timeout, prompt_ids, params, session)
        finally:
            self.running -= 1
        if not isinstance(result, Completion):
            raise BirlError(f"engine.kind={self.kind}: generate returned {result!r:.200}, not a birl.types.Completion.")
        try:
            return checked_completion(replace(result, stop=Stop(result.stop)), params)
        except (TypeError, ValueError) as error:
            raise Malformed(f"{self.address}: generate returned an invalid answer: {error}") from error

    async def load(self, update: Update) -> Held:
        try:
            result = await self._call("load", self.load_timeout, update)
        except EngineDown as error:
            raise WeightsFailed("unreachable", f"Version {update.version} of the weights: {error}") from error
        self.version, self.asleep = update.version, False
        return result if isinstance(result, Held) else Held(version=update.version)

    async def pause(self, abort: bool = False) -> None:
        raise BirlError(f"engine.kind={self.kind} cannot be paused.")

    async def resume(self) -> None:
        return

    async def abort(self, sessions: Collection[str] | None = None) -> int:
        return 0

    async def sleep(self) -> None:
        await self._call("sleep", self.load_timeout)
        self.asleep = True

    async def wake(self) -> None:
        await self._call("wake", self.load_timeout)

    async def close(self) -> None:
        if hasattr(self.engine, "close"):
            await self._call("close", self.load_timeout)

    async def _call(self, name: str, timeout: float, *words: Any) -> Any:
        """Call a method. Raises `EngineDown` after the timeout. Other errors of `generate` may be temporary, so they
        are `EngineDown` too; those of other methods are `BirlError`."""
        try:
            async with asyncio.timeout(timeout) as limit:
                return await called(getattr(self.engine, name), *words, threads=THREADS)
        except (BirlError, EngineDown, WeightsFailed):
            raise
        except Exception as error:
            if limit.expired():
                raise EngineDown(f"{self.address}: {name} took longer than {timeout:g} s") from error
            told = f"{self.address}: {name}: {described(error)}"
            raise (EngineDown(told) if name == "generate" else BirlError(told)) from error


def named(kind: str, known: Mapping[str, Any], needed: Collection[str]) -> type:
    """The class that `engine.kind` names. Raises `BirlError` if there is none with the `needed` methods. `known`: kinds
    that have a name."""
    result = load("engine.kind", kind, known)
    if not inspect.isclass(result):
        raise BirlError(f"engine.kind={kind}: is a function, and must be a class with {' and '.join(needed)}.")
    if lacking := [name for name in needed if not callable(getattr(result, name, None))]:
        words = " and ".join(needed)
        raise BirlError(f"engine.kind={kind}: {result.__name__} has no method {lacking[0]}; it needs {words}.")
    parameters = inspect.signature(result).parameters.values()
    asked = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if unknown := [name for name in asked if name not in OFFERED]:
        raise BirlError(
            f"engine.kind={kind}: {result.__name__}.__init__ takes {unknown[0]!r}; supported: {', '.join(OFFERED)}."
        )
    return result


def custom(kind: str, known: Mapping[str, Any], offered: Mapping[str, Any], **timeouts: float) -> Custom:
    """An engine of this kind. Raises `BirlError`."""
    made = named(kind, known, ("generate",))
    takes = [name for name in inspect.signature(made).parameters if name in OFFERED]
    try:
        return Custom(made(**{name: offered[name] for name in takes}), kind, offered, **timeouts)
    except BirlError:
        raise
    except Exception as error:
        raise BirlError(f"engine.kind={kind}: {made.__name__}: {described(error)}") from error
