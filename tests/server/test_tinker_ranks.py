"""`birl tinker` on two ranks: the numbers of one, pictures too; and what happens when one is killed."""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil
import pytest
import torch

from birl.config.load import load
from birl.config.schema import Tinker
from birl.learner.low_rank_ranks import Copy, shared_out
from birl.learner.low_rank_run import AdamStep, LowRankConfig
from birl.models.target_logprobs import TargetRow
from birl.parallel.crew import RankGroup
from birl.parallel.ranks import Grid, Ranks
from birl.server.tinker import command, restarts, wire
from birl.server.tinker.requests import Sample
from birl.server.tinker.store import Store, read_tensors
from birl.server.tinker.tenants import read
from birl.types import SamplingParams
from tests import sights
from tests.parallel.processes import on_ranks
from tests.server.tinker_server import Client, Server, encoded, serving, text
from tests.tiny import tiny_model_folder

T = TypeVar("T")
PICTURE, TOKENS = sights.drawn("7", (24, 16)), 6
DATA = [text(list(range(5, 30))), text([9, 8, 7, 6, 9, 8, 7, 6]), text(list(range(40, 52))), text([9, 8, 7, 6, 9])]
WORDS = ("names=[model]", "model.dtype=float32", "tokens_per_pass=50")


def shown(run: str, seq: int) -> bytes:
    """A request with a picture, behind two of text."""
    chunks = wire.bytes_field(1, wire.bytes_field(2, wire.bytes_field(1, PICTURE) + wire.bytes_field(2, b"png")))
    ids = np.array([5, 6], "<i4").tobytes()
    one = wire.bytes_field(1, wire.bytes_field(1, wire.bytes_field(1, ids))) + chunks
    for name, values in {"target_tokens": [6] * 8, "weights": [0.0] * 7 + [1.0]}.items():
        entry = np.array(values, np.int64 if name == "target_tokens" else np.float32)
        one += wire.bytes_field(2, wire.bytes_field(1, name.encode()) + wire.tensor_field(2, entry))
    return encoded(run, seq, DATA[:2], "cross_entropy", False) + wire.bytes_field(3, one)


def learned(alice: Client, run: str) -> list[tuple[float, np.ndarray]]:
    result = []
    for seq in (1, 5):
        result.append(alice.loss(alice.learn(run, seq, DATA)))  # in two passes
        result.append(alice.loss(alice.http.post("forward_backward", content=shown(run, seq + 1)).json()))
        result.append((alice.wait(alice.step(run, seq + 2))["metrics"]["grad_norm"], np.zeros(1)))
        result.append(alice.loss(alice.learn(run, seq + 3, DATA, forward_only=True)))
    return result


def all_of_it(server: Server, state: Path) -> tuple[list[Any], dict[str, torch.Tensor]]:
    alice = server.client()
    run = alice.run(alice.session())
    found = learned(alice, run)
    wrong = alice.learn(run, 9, [DATA[0] | {"weights": [3e38] * 24}])
    assert "The loss is" in alice.wait(wrong)["error"]
    found.append(alice.loss(alice.learn(run, 10, DATA[:1])))  # and it goes on, with one row for two ranks
    path = alice.wait(alice.post("save_weights", model_id=run, seq_id=11, path="end"))["path"]
    store = Store(state)
    made = store.find(path)
    assert made is not None
    return found, read_tensors(store.folder(made) / "adapter.safetensors")[0]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("axis", ["ddp", "fsdp", "tp"])
def test_two_ranks_have_the_numbers_of_one_and_go_on_after_a_kill(tmp_path: Path, axis: str) -> None:
    ranks = f"parallel.{axis}=2"
    model = sights.folder(tmp_path / "model")
    with serving(model, tmp_path / "one", *WORDS) as server:
        expected, adapter = all_of_it(server, tmp_path / "one")
        alice = server.client()
        run = alice.run(alice.session())
        twice = [alice.loss(alice.learn(run, seq, DATA))[0] for seq in (1, 2)]
        twice.append(alice.wait(alice.step(run, 3))["metrics"]["grad_norm"])
    with serving(model, tmp_path / "two", *WORDS, ranks) as server:
        found, other = all_of_it(server, tmp_path / "two")
        for (total, rows), (own, mine) in zip(expected, found, strict=True):
            assert own == pytest.approx(total, rel=1e-5, abs=1e-5)
            np.testing.assert_allclose(mine, rows, atol=2e-5, rtol=0)
        assert adapter.keys() == other.keys()
        for name, value in adapter.items():
            torch.testing.assert_close(other[name], value, atol=1e-4 if "optimizer" in name else 1e-5, rtol=1e-4)
        alice = server.client()
        run = alice.run(alice.session())
        alice.loss(alice.learn(run, 1, DATA))
        asked = killed(server, lambda: alice.learn(run, 2, DATA))
        assert patient(server, lambda again: again.loss(asked))[0] == pytest.approx(twice[1], rel=1e-5)
        assert alice.wait(alice.step(run, 3))["metrics"]["grad_norm"] == pytest.approx(twice[2], rel=1e-5)
        server.child.send_signal(signal.SIGTERM)
        assert server.child.wait(60) == 128 + signal.SIGTERM
    said = "".join(server.said)
    assert "a rank of the learner is gone" in said and "rank 1 was ended by SIGKILL" in said, said
    assert "it ended (exit code 2) and is started again from its folder, restart 1 of 5" in said, said
    assert "Traceback" not in said, said


def killed(server: Server, ask: Callable[[], T]) -> T:
    """What is asked and journaled, and waits for rank 1, which is killed."""
    (rank,) = [p for p in psutil.Process(server.child.pid).children(recursive=True) if "RANK=1" in words(p)]
    os.kill(rank.pid, signal.SIGSTOP)
    asked = ask()
    os.kill(rank.pid, signal.SIGKILL)
    return asked


def patient(server: Server, ask: Callable[[Client], T]) -> T:
    """What is asked for again where the service ended meanwhile."""
    for _ in range(6000):
        with contextlib.suppress(httpx.TransportError):
            return ask(server.client())
        time.sleep(0.1)
    raise AssertionError("".join(server.said))


@pytest.mark.timeout(1200)
def test_a_request_for_which_a_rank_of_a_split_base_has_no_memory_is_the_only_one_that_is_lost(tmp_path: Path) -> None:
    """The service ended, and again at each start, as it was done again; then it had to be started by hand."""
    model = tiny_model_folder(tmp_path / "model")
    ranks, many = ("names=[model]", "model.dtype=float32", "parallel.fsdp=2"), [text([5, 6, 7] * 160)] * 8
    with serving(model, tmp_path / "state", *ranks) as server:
        alice = server.client()
        run = alice.run(alice.session())
        before = alice.loss(alice.learn(run, 1, DATA))[0]
        (rank,) = [p for p in psutil.Process(server.child.pid).children(recursive=True) if "RANK=1" in words(p)]
        rank.rlimit(psutil.RLIMIT_AS, (rank.memory_info().vms, -1))
        asked = alice.learn(run, 2, many)
        error = patient(server, lambda again: again.wait(asked))["error"]
        assert "Its pass failed on a rank, and the server ended" in error and "memory" in error, error
        assert alice.wait(alice.step(run, 3))["metrics"]["optimizer_steps"] == 1
        assert alice.loss(alice.learn(run, 4, DATA))[0] < before


@pytest.mark.timeout(600)
def test_a_request_is_done_again_after_a_kill_of_a_rank_in_its_pass_and_another_after_the_next(tmp_path: Path) -> None:
    """Two kills in passes of one request refuse it (test_tinker_kept.py); these are of two."""
    model = tiny_model_folder(tmp_path / "model")
    with serving(model, tmp_path / "state", *WORDS[:2], "parallel.ddp=2") as server:
        alice = server.client()
        run = alice.run(alice.session())
        for seq in (1, 2):
            asked = killed(server, lambda seq=seq: server.client().learn(run, seq, DATA))
            assert patient(server, lambda again, asked=asked: again.loss(asked))[0] > 0
        assert server.client().wait(server.client().step(run, 3))["metrics"]["grad_norm"] > 0
        server.child.send_signal(signal.SIGTERM)
        server.child.wait(60)
    assert "restart 2 of 5" in "".join(server.said), server.said


def without_copy(ranks: Ranks, folder: str, state: str) -> dict[str, Any]:
    """Bytes of weights in this process, an adapter's gradient, and scores of a prompt with it."""
    words = [f"model.path={folder}", f"folder={state}", "model.dtype=float32", "kv_cache_gb=0.01", "threads=1"]
    config = load(Tinker, words if ranks.alone else [*words, "engines=1", f"parallel.fsdp={ranks.grid.fsdp}"])
    crew, known = RankGroup(ranks), read("")
    with ThreadPoolExecutor(1) as compute:
        if not crew.leads:
            base = compute.submit(
                lambda: command.base_of(config, command.loaded(config, compute, ranks), crew)
            ).result()
            crew.follow(Copy(base, ranks), compute)
            return {}
        service = compute.submit(command.load, config, known, Path(state), compute, crew).result()
        base, ids = service.sampling.base, torch.arange(5, 30, dtype=torch.int64)
        run, work = base.run(LowRankConfig(rank=4, seed=1)), TargetRow(ids[:-1], ids[1:, None])
        run.collect()
        compute.submit(base.learn, [(run.weights, [work])], lambda number, rows: -rows[0].sum()).result()
        norm = run.step(AdamStep(learning_rate=0.05))
        sample = Sample(prompt=tuple(ids.tolist()), count=1, params=SamplingParams(max_tokens=1), scored_from=1)
        scores = compute.submit(service.sampling.scores, sample, run.weights, 0).result()
        crew.close()
    size = sum(p.nbytes for p in base.model.parameters() if not p.is_meta)
    return {"bytes": size, "norm": norm, "scores": scores.logprobs, "context": service.work.reader.context}


def test_rank_0_of_a_split_base_has_no_copy_of_it_where_engines_sample(tmp_path: Path) -> None:
    model = str(tiny_model_folder(tmp_path / "model"))
    alone = without_copy(Ranks(), model, str(tmp_path / "one"))
    found = on_ranks(Grid(fsdp=2), without_copy, model, str(tmp_path / "two"), timeout=300)[0]
    assert alone["bytes"] > 0 and found["bytes"] == 0 and found["context"] == alone["context"]
    assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5)
    np.testing.assert_allclose(found["scores"], alone["scores"], atol=1e-5, rtol=0)


CHILD = """import os, socket, sys
with open("starts", "a") as file: file.write(f"{sys.stdin.read()}, ")
if sys.argv[1] == "listens": socket.socket(fileno=int(os.environ["BIRL_TINKER_SOCKET"])).listen()
sys.exit(2)"""


@pytest.mark.parametrize(("how", "starts"), [("listens", "the keys, the keys, the keys, "), ("", "the keys, ")])
def test_a_service_that_ends_is_started_again_so_often_and_one_that_never_began_is_not(
    how: str, starts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(restarts, "MOST", 2)
    monkeypatch.setattr(restarts.signal, "signal", lambda *_: None)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        assert restarts.supervise([sys.executable, "-c", CHILD, how], "the keys", sock) == 2
    assert (tmp_path / "starts").read_text() == starts
    assert ("started again 2 times within 60 minutes, and not once more" in capfd.readouterr().err) == bool(how)


def words(process: psutil.Process) -> list[str]:
    return [f"RANK={process.environ().get('RANK')}"]


def test_an_error_that_follows_a_kill_of_another_rank_does_not_count_as_its_cause() -> None:
    """With three ranks or more a request was refused for the first kill."""
    crew = RankGroup(Ranks())
    crew._store = torch.distributed.HashStore()  # pyright: ignore[reportAttributeAccessIssue]
    crew.report(RuntimeError("Connection closed by peer"))
    assert crew.told() and "Connection closed" in crew.failure()
    crew.killed = lambda: "rank 1 was ended by SIGKILL"
    assert not crew.told() and crew.failure() == "rank 1 was ended by SIGKILL"


def test_neighbours_are_shared_out_by_their_tokens() -> None:
    def rows(*sizes: int) -> list[TargetRow]:
        each = [torch.zeros(n, dtype=torch.int64) for n in sizes]
        return [TargetRow(ids, ids[:, None]) for ids in each]

    assert shared_out(rows(10, 10, 20), 2) == [slice(0, 2), slice(2, 3)]
    assert [s.stop - s.start for s in shared_out(rows(5), 3)] == [0, 0, 1]
    assert [s.stop - s.start for s in shared_out(rows(1, 1, 1, 100), 2)] == [3, 1]
