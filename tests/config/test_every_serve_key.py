"""Every key of `birl serve` does something: changing it changes the service, or a test of a running one shows it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.config.help import render
from birl.config.keys import documentation
from birl.config.load import load
from birl.config.schema import Serve
from birl.errors import BirlError
from birl.server import serve
from birl.server.service import Service
from birl.types import Message, SamplingParams
from tests.config.test_every_key import SIGHT

BASE = "model.path=model model.dtype=float32 engine.kv_cache_gb=0.01 threads=1"


def prompt(service: Service) -> str:
    return service.chat.decode(service.chat.render((Message(role="user", content="Hi"),)))


CASES: dict[str, tuple[str, Callable[[Service], Any]]] = {
    "model.path": ("other", lambda s: s.engine.weights.digests()),  # pyright: ignore[reportOptionalMemberAccess]
    "model.dtype": ("bfloat16", lambda s: (s.dtype, s.engine.runner.model.dtype)),
    "model.chat_template": ("shout.jinja", prompt),
    "model.tool_format": ("llama", lambda s: s.chat.fences(tools=True)),
    "model.max_length": ("100", lambda s: s.engine.context),
    "engine.max_batch": ("3", lambda s: s.engine.scheduler.max_batch),
    "engine.draft_rows": ("0", lambda s: s.engine.scheduler.drafts.rows),
    "engine.kv_cache_gb": ("0.0001", lambda s: (s.engine.scheduler.pages.total, s.engine.context)),
    "engine.recompute_kv": ("false", lambda s: s.engine.recompute_kv),
    "served_name": ("gpt", lambda s: s.name),
    "max_request_mb": ("0.5", lambda s: s.most_bytes),
    "max_waiting": ("7", lambda s: s.gate.most),
    "request_timeout": ("3", lambda s: s.timeout),
    "seed": ("4", lambda s: s.seeded(sampling())[0].seed),
}
ELSEWHERE = {  # by what is in a test of a whole server
    "host": "host=0.0.0.0",
    "port": "port={port}",
    "name": "name=exp/0",
    "volume": "volume={tmp_path}",
    "drain_timeout": "drain_timeout=0.3",
}
REFUSED = {"model.device": ("cuda", "model.device=cuda")} if not torch.cuda.is_available() else {}
REFUSED["engine.weights"] = ("int8", "needs weights in bfloat16")  # what it does: tests/models/test_int8.py
REFUSED |= {f"model.{key}": (value, f"model.{key}=.* has no effect because") for key, value in SIGHT.items()}


def sampling() -> SamplingParams:
    return SamplingParams(max_tokens=1)


def service(compute: ThreadPoolExecutor, *words: str) -> Service:
    return compute.submit(serve.load, load(Serve, [*BASE.split(), *words]), "", compute).result()


@pytest.fixture(scope="module")
def plain(compute: ThreadPoolExecutor) -> list[Service]:
    return [service(compute), service(compute)]


@pytest.mark.parametrize("key", CASES)
def test_changing_it_changes_the_service(compute: ThreadPoolExecutor, plain: list[Service], key: str) -> None:
    to, see = CASES[key]
    assert see(plain[0]) == see(plain[1]) != see(service(compute, f"{key}={to}"))


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_refused(compute: ThreadPoolExecutor, key: str) -> None:
    to, said = REFUSED[key]
    with pytest.raises(BirlError, match=said):
        service(compute, f"{key}={to}")


def test_no_key_is_without_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    tests = "".join(path.read_text() for path in (Path(__file__).parents[1] / "server").glob("test_server*.py"))
    assert all(text in tests for text in ELSEWHERE.values())
    keys = {*CASES, *ELSEWHERE, *REFUSED, "model.device", "threads"}
    assert keys == documentation(Serve).keys()
    asked: list[int] = []
    monkeypatch.setattr(serve, "compute_thread", lambda threads, device: asked.append(threads) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        serve.run(load(Serve, ["threads=3"]))
    assert asked == [3]


def test_the_page_of_help() -> None:
    page = render("serve", Serve, 100, ("all",))
    assert all(f"{key}=" in page for key in documentation(Serve)) and all(d.text for d in documentation(Serve).values())
