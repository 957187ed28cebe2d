"""`birl tinker` in a process of its own, and a client of bytes: what Tinker's own sends, without its package."""

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np

from birl.server.tinker import wire
from birl.server.tinker.checkpoints import Checkpoints
from birl.server.tinker.futures import Promises
from birl.server.tinker.service import TinkerService
from birl.server.tinker.store import Store
from birl.server.tinker.tenants import Quota, Sessions, Tenants, digest
from tests.forked import Forked

KEYS = {"alice": "tml-alice-0123456789", "bob": "tml-bob-9876543210"}


@dataclass(slots=True)
class Server:
    child: Forked
    url: str
    said: list[str] = field(default_factory=list)

    def client(self, name: str = "alice") -> "Client":
        return Client(httpx.Client(base_url=f"{self.url}/api/v1", headers={"X-API-Key": KEYS[name]}, timeout=120))


@contextlib.contextmanager
def serving(model: Path, state: Path, *words: str, port: int = 0, keys: bool = True) -> Iterator[Server]:
    command = ["tinker", f"model.path={model}", f"folder={state}", f"port={port}"]
    small = ["threads=1", "kv_cache_gb=0.05"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    env |= {"BIRL_TINKER_KEYS": ", ".join(f"{name} {key}" for name, key in KEYS.items())} if keys else {}
    child = Forked([*command, *small, *words], env, both=True)
    killer = threading.Timer(1100, child.kill)  # whatever happens, it ends before the test would
    killer.start()
    said: list[str] = []
    try:
        told = None
        while told is None and (line := child.stdout.readline()):
            said.append(line)
            told = re.search(r" at (http://\S+?)(,|$)", line)
        assert told, said
        reader = threading.Thread(target=lambda: said.extend(child.stdout), daemon=True)
        reader.start()
        yield Server(child, told[1], said)
    finally:
        killer.cancel()
        if child.poll() is None:
            child.kill()
        child.wait(10)


def without_model(root: Path, **parts: Any) -> TinkerService:
    """For what needs none, in this process, with the keys of `KEYS`."""
    store, none = Store(root), cast("Any", None)
    sessions = Sessions(store)
    quota = Quota(sessions=9, runs=9, samplers=9, tokens=1000, requests=9, checkpoints=9, disk=2**20)
    given = {
        "names": ("model",), "tenants": Tenants({digest(key): name for name, key in KEYS.items()}), "quota": quota,
        "store": store, "sessions": sessions, "promises": Promises(), "runs": none, "work": none, "sampling": none,
        "checkpoints": Checkpoints(store, none, 0, quota, sessions), "most_rank": 8, "most_bytes": 10**6, "idle": 1.0,
    }  # fmt: skip
    return TinkerService(**(given | parts))


@dataclass(slots=True)
class Client:
    http: httpx.Client

    def post(self, route: str, status: int = 200, /, **data: Any) -> dict[str, Any]:
        reply = self.http.post(route, json=data)
        assert reply.status_code == status, reply.text
        return reply.json()

    def get(self, path: str, status: int = 200) -> dict[str, Any]:
        reply = self.http.get(path)
        assert reply.status_code == status, reply.text
        return reply.json()

    def session(self) -> str:
        return self.post("create_session", tags=[], sdk_version="0.38.0")["session_id"]

    def run(self, session: str, number: int = 0, **lora: Any) -> str:
        config = {"rank": 4, "seed": 7} | lora
        asked = self.post(
            "create_model", session_id=session, model_seq_id=number, base_model="model", lora_config=config
        )
        return self.wait(asked)["model_id"]

    def learn(self, run: str, seq: int, data: Sequence[Mapping[str, Any]], loss: str = "cross_entropy",
              forward_only: bool = False, status: int = 200) -> dict[str, Any]:  # fmt: skip
        reply = self.http.post("forward_backward", content=encoded(run, seq, data, loss, forward_only))
        assert reply.status_code == status, reply.text
        return reply.json()

    def step(self, run: str, seq: int, lr: float = 0.01) -> dict[str, Any]:
        return self.post("optim_step", model_id=run, seq_id=seq, adam_params={"learning_rate": lr})

    def answer(self, asked: Mapping[str, Any]) -> bytes:
        """Asked for until it is there."""
        while True:
            reply = self.http.post("retrieve_future", json={"request_id": asked["request_id"]})
            if reply.status_code != 408:
                assert reply.status_code == 200, reply.text
                return reply.content

    def wait(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        return json.loads(self.answer(asked))

    def loss(self, asked: Mapping[str, Any]) -> tuple[float, np.ndarray]:
        """The sum, and the log-probs of all data behind one another."""
        body = self.answer(asked)
        assert not body.startswith(b"{"), body
        total, logprobs = float("nan"), np.empty(0, np.float32)
        for number, value in wire.fields(body):
            if number == 3:
                total = wire.double(dict(wire.fields(wire.raw(value)))[2])
            elif number == 2:
                entries = [dict(wire.fields(wire.raw(v))) for n, v in wire.fields(wire.raw(value)) if n == 2]
                (found,) = [wire.raw(e[2]) for e in entries if e[1] == b"logprobs"]
                logprobs = wire.array(dict(wire.fields(found))[1], np.dtype("<f4"), "logprobs")
        return total, logprobs


def encoded(run: str, seq: int, data: Sequence[Mapping[str, Any]], loss: str, forward_only: bool) -> bytes:
    """A message ForwardBackwardRequest."""
    body = wire.bytes_field(1, run.encode()) + wire.number_field(2, seq) + wire.bytes_field(4, loss.encode())
    body += wire.number_field(6, int(forward_only))
    for datum in data:
        tokens = np.array(datum["tokens"], "<i4").tobytes()
        one = wire.bytes_field(1, wire.bytes_field(1, wire.bytes_field(1, tokens)))
        for name, values in datum.items():
            if name != "tokens":
                kind = np.int64 if name == "target_tokens" else np.float32
                entry = wire.bytes_field(1, name.encode()) + wire.tensor_field(2, np.array(values, kind))
                one += wire.bytes_field(2, entry)
        body += wire.bytes_field(3, one)
    return body


def text(ids: Sequence[int]) -> dict[str, Any]:
    """A datum for cross_entropy."""
    return {"tokens": ids[:-1], "target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
