"""One engine of a launched run, in a process of its own: what `birl rl WORDS` would have started as its child.

    python -m birl.launch.engine --name=EXPERIMENT/TRIAL rl WORDS

It registers under the name, so that a run with engine.attach=[EXPERIMENT/TRIAL] finds it, and ends at SIGTERM. For
other machines than this one to reach it, BIRL_HOST says where it listens, and BIRL_TOKEN must be set.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys

from birl.allocator import keep_memory
from birl.config import schema
from birl.config.decided import SERVERS
from birl.config.load import load
from birl.errors import BirlError, tell
from birl.exits import code_of
from birl.hosts import is_loopback

USAGE = "python -m birl.launch.engine --name=EXPERIMENT/TRIAL rl WORDS"


def main(argv: list[str] | None = None) -> int:
    """143 after SIGTERM, 130 after SIGINT, 1 where the server ended by itself, 2 for a mistake in the input."""
    keep_memory()
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except BirlError as error:
        tell(error)
        return 2
    except KeyboardInterrupt as interrupt:
        return code_of(interrupt)


def run(argv: list[str]) -> int:
    """Until a signal, whose exit code it gives. Raises `BirlError`."""
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
    """`birl serve`, in this process unless engine.python is another interpreter."""
    from birl.launch.prepare import prepared
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
    """A server of another kind as our child, which ends with us."""
    from birl.engines import names
    from birl.engines.kinds import child, speak
    from birl.launch.prepare import prepared
    from birl.process import free_port

    names.folder(name)
    stop, told, loop = asyncio.Event(), [], asyncio.get_running_loop()

    def signalled(number: int) -> None:
        told.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled, number)
    wanted, port, token = prepared(config), free_port(), os.environ.get("BIRL_TOKEN", "")
    address = f"http://127.0.0.1:{port}"
    remote = speak(config.engine, wanted, address, token)
    process = child(config.engine, wanted, remote, port, token, f"{socket.gethostname()}-{os.getpid()}")
    print(f"{config.engine.kind} at {address}; what it prints is in {process.log}", flush=True)
    stopped = asyncio.create_task(stop.wait())
    try:
        starting = asyncio.create_task(process.start())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 128 + told[0]
        await starting
        entry = names.register(name, address, os.getpid(), wanted.folder.name)
        beating = asyncio.create_task(names.beat(entry))
        try:
            while process.alive and not stop.is_set():
                await asyncio.wait({stopped}, timeout=0.2)
        finally:
            beating.cancel()
            names.forget(entry)
        return 128 + told[0] if told else 1
    finally:
        stopped.cancel()
        with contextlib.suppress(Exception):
            await remote.close()
        await process.terminate()


if __name__ == "__main__":
    sys.exit(main())
