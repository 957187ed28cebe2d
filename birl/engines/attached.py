"""Running engines: `engine.attach` waits for servers registered under a name, and follows their changes."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from birl.config import schema
from birl.config.decided import ENGINES, LAUNCHED, NAME, SERVERS, kind_of
from birl.engines import names
from birl.engines.client import Client
from birl.engines.fleet import Fleet
from birl.engines.kinds import Wanted, speak
from birl.engines.wire import Info, Remote, TooLarge, fetch
from birl.errors import BirlError, EngineDown

LOOK = 1.0  # interval of look-ups of registered servers [s]
WAIT = 0.2  # the same before the first is registered


async def look_up(engine: schema.Engine, wanted: Wanted, token: str) -> list[Remote]:
    """The servers of `engine.attach`. Raises `BirlError` if no server of a name registers in time."""
    remotes: dict[str, Remote] = {}
    for word in engine.attach:
        more = await awaited(word, engine, wanted, token) if NAME.fullmatch(word) else [None]
        for remote in more:
            one = remote or speak(engine, wanted, word, token)
            remotes.setdefault(one.address, one)
    return list(remotes.values())


async def awaited(name: str, engine: schema.Engine, wanted: Wanted, token: str) -> list[Remote]:
    """Registered servers that answer, as soon as there are enough; after engine.start_timeout one is enough."""
    enough = engine.count if name.startswith(LAUNCHED) else 1
    until, known, told = time.monotonic() + engine.start_timeout, dict[str, Remote](), False
    there: list[str] = []
    try:
        while True:
            named = names.find(name)
            known |= {address: speak(engine, wanted, address, token) for address in named if address not in known}
            there = [address for address in named if await answers(known[address])]
            late = time.monotonic() >= until
            if len(there) >= enough or (there and late):
                break
            if late:
                raise BirlError(
                    f"engine.attach={name}: no server registered this name within engine.start_timeout="
                    f"{engine.start_timeout:g} s. Start one in another shell: `birl serve name={name} model=...`."
                )
            if not told:
                servers = f"{enough} server{'s' * (enough > 1)}"
                print(f"engine.attach={name}: waiting for {servers}, at most {engine.start_timeout:g} s", flush=True)
                told = True
            await asyncio.sleep(WAIT)
    except BaseException:
        there = []
        raise
    finally:
        await asyncio.gather(*(remote.close() for address, remote in known.items() if address not in there))
    if len(there) < enough:
        print(f"engine.attach={name}: {len(there)} of {enough} servers registered; others may join later", flush=True)
    return [known[address] for address in there]


async def answers(remote: Remote) -> bool:
    """Whether a server answers: a killed one stays registered for half a minute."""
    with contextlib.suppress(EngineDown):
        await remote.info()
        return True
    return False


async def other_kind(engine: schema.Engine, remotes: Sequence[Remote], token: str) -> str:
    """A sentence about an address at which a server of another kind answers; empty if there is none."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for remote in remotes:
        with contextlib.suppress(httpx.HTTPError, TooLarge, ValueError, LookupError, TypeError):
            async with httpx.AsyncClient(
                base_url=remote.address, headers=headers, timeout=5.0, trust_env=False
            ) as http:
                kind = (await fetch(http, "GET", "/v1/models", most=2**20)).json()["data"][0]["owned_by"]
            if kind in SERVERS and kind != engine.kind:
                return f". {remote.address} is a server of {kind}: set engine.kind={kind}."
    return ""


@dataclass(slots=True, kw_only=True)
class Following:
    """Keeps a fleet up to date with the registered servers. `remotes` by address, not wrapped; `wrap`: wraps one for
    the method of the weights; `heard`: called for each server that joins or leaves."""

    engine: schema.Engine
    wanted: Wanted
    token: str
    fleet: Fleet
    remotes: dict[str, Remote]
    wrap: Callable[[Remote], Remote]
    heard: Callable[..., None]
    told: set[str] = field(default_factory=set)  # reasons already reported for rejected servers
    leaving: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        """Poll until cancelled."""
        try:
            while True:
                await asyncio.sleep(LOOK)
                try:
                    await self.look()
                except OSError:  # of the registry folder: the next look-up may find it
                    pass
                except Exception as error:
                    if (why := f"{type(error).__name__}: {error}") not in self.told:
                        self.told.add(why)
                        self.heard("engines_not_looked_for", error=why)
        finally:
            for task in self.leaving.values():
                task.cancel()

    async def look(self) -> None:
        words = [word for word in self.engine.attach if NAME.fullmatch(word)]
        there = await asyncio.to_thread(lambda: {address for word in words for address in names.find(word)})
        if not there:  # the registry folder is more likely unreachable than all servers gone
            return
        for address in sorted(there - self.remotes.keys()):
            await self.join(address)
        for address in self.remotes.keys() - there - set(self.engine.attach) - self.leaving.keys():
            self.leaving[address] = asyncio.create_task(self.leave(address))

    async def join(self, address: str) -> None:
        """Add a server; the fleet gives it the weights before its first request."""
        remote = speak(self.engine, self.wanted, address, self.token)
        try:
            info = await remote.info()
            if why := unfit(self.engine, self.wanted, address, info):
                raise BirlError(why)
            if isinstance(remote, Client) and self.wanted.run:
                await remote.claim()
        except BaseException as error:
            await remote.close()
            if not isinstance(error, (EngineDown, BirlError)):
                raise
            if isinstance(error, BirlError) and (why := f"{address}: {error}") not in self.told:
                self.told.add(why)
                self.heard("engine_not_taken", address=address, error=str(error))
            return
        self.remotes[address] = remote
        self.fleet.add(self.wrap(remote))
        self.heard("engine_joined", address=address)

    async def leave(self, address: str) -> None:
        member = next(m for m in self.fleet.members if m.remote.address == address)
        self.heard("engine_leaves", address=address)
        await self.fleet.remove(member, "it has removed its name")
        del self.remotes[address], self.leaving[address]


async def take(engine: schema.Engine, wanted: Wanted, remotes: Sequence[Remote], infos: Sequence[Info]) -> None:
    """Check and claim running servers. Raises `BirlError` if one does not fit this model, or belongs to another run."""
    for remote, info in zip(remotes, infos, strict=True):
        if result := unfit(engine, wanted, remote.address, info):
            raise BirlError(f"engine.attach: {remote.address} has the model {info.model}, which does not fit: {result}")
    for remote, info in zip(remotes, infos, strict=True):
        if isinstance(remote, Client) and wanted.run:
            await remote.claim()
        elif info.run:
            print(f"{remote.address} is used by the run {info.run}, which may change its weights.", flush=True)


def unfit(engine: schema.Engine, wanted: Wanted, address: str, info: Info) -> str:
    """Why a server does not fit the model, and what to do; empty if it does."""
    own = ENGINES[kind_of(engine)].own
    if info.vocabulary_digest and wanted.vocabulary_digest and info.vocabulary_digest != wanted.vocabulary_digest:
        return "its vocabulary or end tokens differ. Start it with this model."
    if own and info.dtype != wanted.dtype:
        return f"it computes in {info.dtype}. Set model.dtype={info.dtype} here, or start it with {wanted.dtype}."
    if info.context < wanted.longest:
        return (
            f"its context is {info.context} tokens, but prompt and answer may have {wanted.longest}. Start it with a "
            f"larger model.max_length or engine.kv_cache_gb, or lower rollout.max_tokens or data.max_prompt_tokens."
        )
    here = urlsplit(address).hostname in ("127.0.0.1", "localhost", "::1")  # a remote path may differ
    elsewhere = info.volume != wanted.volume if here else not info.volume
    if own and wanted.volume and elsewhere:
        return (
            f"it reads new weights from {info.volume or 'no folder'}. Start it with volume={wanted.volume} (the "
            "folder as it sees it), or set weights.method=reload or direct."
        )
    if (info.asleep or info.paused) and not engine.sleep:
        return "it is paused or asleep, probably after a run was killed. Restart it."
    return ""
