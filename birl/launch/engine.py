"""One engine of a launched run, as a separate process: what `birl rl WORDS` would have started as its child.

    python -m birl.launch.engine --name=EXPERIMENT/TRIAL rl WORDS

It registers under the name, so that a run with engine.attach=[EXPERIMENT/TRIAL] finds it, and ends at SIGTERM. For
access from other machines, BIRL_HOST is the address to listen at, and BIRL_TOKEN must be set.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from birl.allocator import keep_memory
from birl.config import schema
from birl.config.decided import SERVERS
from birl.config.load import load
from birl.errors import BirlError, code_of, tell
from birl.hosts import is_loopback

if TYPE_CHECKING:
    from birl.engines.kinds import Wanted

USAGE = "python -m birl.launch.engine --name=EXPERIMENT/TRIAL rl WORDS"


def main(argv: list[str] | None = None) -> int:
    """Returns 143 after SIGTERM, 130 after SIGINT, 1 if the server ended by itself, 2 for invalid input."""
    keep_memory()
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except BirlError as error:
        tell(error)
        return 2
    except KeyboardInterrupt as interrupt:
        return code_of(interrupt)


def run(argv: list[str]) -> int:
    """Run until a signal; returns its exit code. Raises `BirlError`."""
    flag, command, *words = [*argv, "", ""]
    if not flag.startswith("--name=") or command != "rl":
        raise BirlError(f"{USAGE}: got {' '.join(argv) or 'nothing'}")
    name, host = flag.removeprefix("--name="), os.environ.get("BIRL_HOST", "") or "127.0.0.1"
    config = load(schema.RL, [word for word in words if word])
    if config.engine.kind not in SERVERS:
        raise BirlError(
            f"engine.kind={config.engine.kind}: samples in the learner's process, so there is no engine to start"
        )
    if not is_loopback(host) and not os.environ.get("BIRL_TOKEN"):
        raise BirlError(f"BIRL_HOST={host}: others could reach the engine, so it needs a token: set BIRL_TOKEN")
    if config.engine.kind == "birl":
        return own(config, name, host)
    if not is_loopback(host):
        raise BirlError(
            f"BIRL_HOST={host}: no token guards the endpoints by which {config.engine.kind} takes weights, so it stays "
            "on 127.0.0.1. Start the learner on the same machine, or set engine.kind=birl."
        )
    return asyncio.run(other(config, name))


def own(config: schema.RL, name: str, host: str) -> int:
    """Run `birl serve`, in this process unless engine.python is another interpreter."""
    from birl.named import module
    from birl.server import serve

    kind = module("engine.kind=birl", "birl.engines.birl")
    words = [
        *kind.serve_words(config.engine, prepared(config)),
        f"name={name}",
        f"host={host}",
        *config.engine.arguments,
    ]
    if config.engine.python:
        sys.stdout.flush()
        os.execv(config.engine.python, [config.engine.python, "-m", "birl", "serve", *words])
    return serve.run(load(schema.Serve, words))


async def other(config: schema.RL, name: str) -> int:
    """Run another kind of server as a child process, which ends with this one."""
    from birl.engines import names
    from birl.engines.kinds import child, speak
    from birl.process import free_port

    names.folder(name)
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()  # exit code of the received signal

    def signalled(number: int) -> None:
        if not stop.done():
            stop.set_result(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled, number)
    wanted, port, token = prepared(config), free_port(), os.environ.get("BIRL_TOKEN", "")
    address = f"http://127.0.0.1:{port}"
    remote = speak(config.engine, wanted, address, token)
    process = child(config.engine, wanted, remote, port, token, f"{socket.gethostname()}-{os.getpid()}")
    print(f"{config.engine.kind} at {address}; what it prints is in {process.log}", flush=True)
    try:
        starting = asyncio.create_task(process.start())
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return stop.result()
        await starting
        entry = names.register(name, address, os.getpid(), wanted.folder.name)
        beating = asyncio.create_task(names.beat(entry))
        try:
            while process.alive and not stop.done():
                await asyncio.wait({stop}, timeout=0.2)
        finally:
            beating.cancel()
            names.forget(entry)
        return stop.result() if stop.done() else 1
    finally:
        with contextlib.suppress(Exception):
            await remote.close()
        await process.terminate()


def prepared(config: schema.RL) -> "Wanted":
    """Settings of the engine, as the run itself computes them from the model's files and the data, without weights.
    Raises `BirlError`."""
    from birl.engines.servers import wanted
    from birl.envs.open import World
    from birl.envs.single_turn import SingleTurn
    from birl.learner.export import resolved
    from birl.learner.policy import Policy, load_reader
    from birl.models.load import skeleton
    from birl.rollout.tasks import lengths, load_data

    reader, folder = load_reader(config.model), resolved(config.model.path)
    policy = Policy(
        folder=folder, model=skeleton(folder), tokenizer=reader.chat.tokenizer, chat=reader.chat,
        compute=ThreadPoolExecutor(1),
    )  # fmt: skip
    context = min(config.model.max_length or reader.context, reader.context)
    asked = [(context, 0)]
    single = config.env.kind == "single_turn" and not config.env.mcp
    if single and not config.engine.kv_cache_gb:  # bounds the memory of the KV cache
        world = World(kind="single_turn", open=SingleTurn, turns=False)
        train, validation = load_data(config, world, policy.chat, context)
        asked = lengths(config, world, policy, train, validation, context)
    return wanted(config, policy, context, asked, Path(config.run))


if __name__ == "__main__":
    sys.exit(main())
