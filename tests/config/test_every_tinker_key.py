"""Every key of `birl tinker` does something: changing it changes the service, or a test of a running one shows it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.config.keys import documentation
from birl.config.load import load
from birl.config.schema import Tinker
from birl.engine.engine import EmbeddedEngine
from birl.errors import BirlError
from birl.server.tinker import command
from birl.server.tinker.service import TinkerService
from birl.server.tinker.tenants import read
from tests.config.test_every_key import SIGHT


def embedded(service: TinkerService) -> EmbeddedEngine:
    assert isinstance(service.sampling.engine, EmbeddedEngine)
    return service.sampling.engine


BASE = "model.path=model model.dtype=float32 kv_cache_gb=0.01 threads=1"
CASES: dict[str, tuple[str, Callable[[TinkerService], Any]]] = {
    "model.path": ("other", lambda s: s.sampling.base.model.lm_head.weight.sum().item()),  # pyright: ignore
    "model.dtype": ("bfloat16", lambda s: (s.sampling.base.dtype, embedded(s).runner.model.dtype)),
    "model.max_length": ("100", lambda s: (s.work.reader.context, embedded(s).context)),
    "folder": ("elsewhere", lambda s: s.store.root),
    "names": ("[llama]", lambda s: s.names),
    "max_batch": ("3", lambda s: embedded(s).scheduler.max_batch),
    "kv_cache_gb": ("0.0001", lambda s: (embedded(s).scheduler.pages.total, s.work.reader.context)),
    "tokens_per_pass": ("300", lambda s: s.sampling.base.max_tokens),
    "max_rank": ("8", lambda s: s.most_rank),
    "adapters_gb": ("1", lambda s: (s.runs.memory, s.checkpoints.memory)),
    "idle_timeout": ("5", lambda s: s.idle),
    "quota_sessions": ("2", lambda s: s.quota.sessions),
    "quota_runs": ("2", lambda s: s.quota.runs),
    "quota_samplers": ("2", lambda s: s.checkpoints.quota.samplers),
    "quota_checkpoints": ("2", lambda s: s.checkpoints.quota.checkpoints),
    "quota_requests": ("2", lambda s: s.quota.requests),
    "quota_tokens": ("2", lambda s: s.quota.tokens),
    "quota_gb": ("2", lambda s: s.checkpoints.quota.disk),
    "max_request_mb": ("2", lambda s: s.most_bytes),
}
ELSEWHERE = ("host", "port", "keys", "drain_timeout", "threads")  # of the process, below
ELSEWHERE += ("parallel.ddp", "parallel.fsdp", "parallel.tp")  # tests/server/test_tinker_ranks.py
ELSEWHERE += ("engines",)  # tests/server/test_tinker_engines.py
REFUSED = {
    **{f"parallel.{key}": ("2", f"parallel.{key}=2: has no effect because each process") for key in ("cp", "ep")},
    "parallel.sequence": ("false", "parallel.sequence=false: has no effect because each process"),
    "parallel.context": ("ulysses", "parallel.context=ulysses: has no effect because each process"),
    "parallel.timeout": ("5", "there is only one process"),
    "model.chat_template": ("hermes", "clients render texts themselves"),
    "model.tool_format": ("llama", "clients render texts themselves"),
    "folder": ("", "folder is empty"),
    "host": ("", "host is empty"),
    **({} if torch.cuda.is_available() else {"model.device": ("cuda", "model.device=cuda")}),
    **{
        f"model.{key}": (value, f"model.{key}=.*: has no effect because (Tinker clients|LlamaForCausalLM sees no)")
        for key, value in SIGHT.items()  # what each bounds: tests/server/test_tinker_pictures.py
    },
}


def service(compute: ThreadPoolExecutor, *words: str) -> TinkerService:
    config = load(Tinker, [*BASE.split(), *words])
    return compute.submit(command.load, config, read(""), Path(config.folder), compute).result()


@pytest.fixture(scope="module")
def plain(compute: ThreadPoolExecutor) -> list[TinkerService]:
    return [service(compute), service(compute)]


@pytest.mark.parametrize("key", CASES)
def test_changing_it_changes_the_service(compute: ThreadPoolExecutor, plain: list[TinkerService], key: str) -> None:
    to, see = CASES[key]
    assert see(plain[0]) == see(plain[1]) != see(service(compute, f"{key}={to}"))


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_refused(compute: ThreadPoolExecutor, key: str) -> None:
    to, said = REFUSED[key]
    with pytest.raises(BirlError, match=said):
        service(compute, f"{key}={to}")


def test_no_key_is_without_a_case() -> None:
    assert {*CASES, *ELSEWHERE, *REFUSED, "model.device"} == documentation(Tinker).keys()


def test_those_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "compute_thread", lambda threads, device: pytest.exit(f"{threads}"))
    monkeypatch.setattr(command, "bind", lambda host, port: (_ for _ in ()).throw(ZeroDivisionError((host, port))))
    with pytest.raises(BirlError, match=r"host=0\.0\.0\.0: others could reach the server, so it needs keys"):
        command.run(load(Tinker, ["host=0.0.0.0"]))
    (tmp_path / "keys").write_text("alice tml-alice-0123456789\n")
    (tmp_path / "keys").chmod(0o600)
    with pytest.raises(ZeroDivisionError, match=r"0\.0\.0\.0.*7"):
        command.run(load(Tinker, ["host=0.0.0.0", "port=7", f"keys={tmp_path}/keys", f"folder={tmp_path}/state"]))
