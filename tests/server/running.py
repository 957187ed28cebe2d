"""A real server: in a thread of this process, where a test can look at its engine, or in a process of its own."""

import asyncio
import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from birl.config.schema import Engine, Model, Serve
from birl.parallel.machine import compute_thread
from birl.server.connections import Patient
from birl.server.serve import app, load
from birl.server.service import Service
from tests.forked import Forked


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    service: Service
    url: str
    http: httpx.Client

    def generate(self, prompt: list[int] | tuple[int, ...], **params: object) -> dict:
        reply = self.http.post("/generate", json={"prompt_ids": list(prompt), "params": params})
        assert reply.status_code == 200, reply.text
        return reply.json()


def config(folder: Path, **keys) -> Serve:
    model = Model(path=str(folder), **{"dtype": "bfloat16"} | keys.pop("model", {}))
    return Serve(model=model, engine=keys.pop("engine", Engine(kv_cache_gb=0.01, draft_rows=0)), threads=1, **keys)


@contextlib.contextmanager
def running(folder: Path, token: str = "", **keys) -> Iterator[Running]:
    """In a thread."""
    started = threading.Event()
    found: list[Service] = []
    with socket.socket() as sock, compute_thread(1) as compute:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        servers: list[uvicorn.Server] = []

        async def main() -> None:
            service = await asyncio.get_running_loop().run_in_executor(
                compute, load, config(folder, **keys), token, compute
            )
            found.append(service)
            await service.start()
            watching = asyncio.create_task(service.watch())
            servers.append(
                uvicorn.Server(
                    uvicorn.Config(
                        app(service), http=Patient, lifespan="off", log_level="warning", timeout_graceful_shutdown=1
                    )
                )
            )
            serving = asyncio.create_task(servers[0].serve(sockets=[sock]))
            while not servers[0].started:
                await asyncio.sleep(0.01)
            started.set()
            await serving
            watching.cancel()
            await service.engine.close()

        thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
        thread.start()
        assert started.wait(60), "the server did not start"
        url = f"http://127.0.0.1:{port}"
        headers = {"authorization": f"Bearer {token}"} if token else {}
        try:
            with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
                yield Running(service=found[0], url=url, http=http)
        finally:
            servers[0].should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@contextlib.contextmanager
def process(folder: Path, *words: str, **env: str) -> Iterator[tuple[Forked, str]]:
    """`birl serve`, and its address."""
    command = ["serve", f"model.path={folder}", "threads=1", "engine.kv_cache_gb=0.05"]
    child = Forked([*command, *words], {**os.environ, **env})
    killer = threading.Timer(500, child.kill)  # whatever happens, it ends before the test would
    killer.start()
    try:
        line = child.stdout.readline()
        told = re.fullmatch(r"birl serve: (\S+) at (http://\S+) \(version 0\)\n", line)
        assert told, line
        yield child, told[2]
    finally:
        killer.cancel()
        if child.poll() is None:
            child.kill()
        child.wait(10)


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def slowed(monkeypatch, service: Service, seconds: float) -> None:
    """Each step of the engine takes so much longer."""
    step = service.engine.steps.step

    def slow() -> list:
        time.sleep(seconds)
        return step()

    monkeypatch.setattr(service.engine.steps, "step", slow)
