"""Runs with a model, in this process: what a kill, a full disk and a pass that fails leave of them."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from birl.learner.low_rank_run import LowRankConfig, SharedBase
from birl.models.low_rank import Factors
from birl.server.limits import Refused
from birl.server.tinker.checkpoints import Checkpoints, Sampler
from birl.server.tinker.futures import Answer, Promises
from birl.server.tinker.inputs import Reader
from birl.server.tinker.passes import Passes
from birl.server.tinker.runs import Run, Runs
from birl.server.tinker.store import Record, Store
from birl.server.tinker.tenants import Quota, Session, Sessions, Tenant, Tenants
from birl.server.tinker.work import Work
from tests.full_disk import full_disk
from tests.server.tinker_server import encoded, text
from tests.tiny import tiny_model

RUN, QUOTA = f"{'a' * 32}:train:0", Quota(sessions=9, runs=9, samplers=9, tokens=10**6, requests=99, checkpoints=9,
                                          disk=2**30)  # fmt: skip
STEP = {"adam_params": {"learning_rate": 0.01}}


@pytest.fixture(scope="module")
def base() -> SharedBase:
    return SharedBase(tiny_model(), torch.float32, 40)


@pytest.fixture
def work(base: SharedBase, tmp_path: Path) -> Iterator[Work]:
    with ThreadPoolExecutor(1) as compute:
        yield started(base, tmp_path, compute)


def started(base: SharedBase, root: Path, compute: ThreadPoolExecutor) -> Work:
    """As after a kill, with what is on disk."""
    store, promises = Store(root), Promises()
    runs, checkpoints = Runs(store, base, promises, 2**30), Checkpoints(store, base, 2**30, QUOTA, Sessions(store))
    runs.restore()
    passes = Passes(base, compute, together=False)
    return Work(runs, passes, checkpoints, Tenants({}), compute, Reader(320, 512))


def again(work: Work) -> Work:
    return started(work.passes.base, work.runs.store.root, work.compute)  # pyright: ignore


def made(work: Work) -> Run:
    config = LowRankConfig(rank=4, seed=7)
    return work.runs.create(RUN, "alice", "model", config, {}, work.runs.adapter(RUN, config))


def done(work: Work, run: Run, *asked: tuple[int, str, Any]) -> list[Answer]:
    """`asked`: numbers, kinds, and what is sent."""

    async def all_of_them() -> list[Answer]:
        promises = []
        for seq, kind, data in asked:
            body = data if isinstance(data, bytes) else json.dumps(data).encode()
            promises.append(work.runs.accept(run, Record(seq, kind, body)))
        work.start(run)
        return [await promise.wait(60) or Answer.failure("there is none") for promise in promises]

    return asyncio.run(all_of_them())


def learning(seq: int, size: int = 9) -> tuple[int, str, bytes]:
    ids = np.random.default_rng(seq).integers(3, 300, size).tolist()
    return seq, "forward_backward", encoded(RUN, seq, [text(ids)] * 3, "cross_entropy", False)


def weights(work: Work, run: Run) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in work.runs.load(run).state().items()}


def test_the_answer_to_the_request_that_brought_a_snapshot_is_in_it(work: Work) -> None:
    """It was left out, and its client heard after a kill that it was gone."""
    run = made(work)
    asked = [(1, "save_weights", {"path": "one"}), (2, "load_weights", {"path": f"tinker://{RUN}/weights/one"})]
    answers = done(work, run, *asked)
    assert run.snapshot == 2
    after = again(work).runs.by_id[RUN]
    assert [after.promises[seq].answer for seq in (1, 2)] == answers


def test_what_was_answered_before_a_run_was_unloaded_is_answered_after_a_kill(work: Work) -> None:
    run = made(work)
    answers = done(work, run, learning(1), (2, "optim_step", STEP), (3, "unload_model", {}))
    assert not any(a.failed for a in answers)
    killed = again(work)
    after = killed.runs.by_id[RUN]
    assert [after.promises[seq].answer for seq in (1, 2)] == answers[:2]
    assert after.deleted
    assert asyncio.run(restarted(killed, after, 3)) == answers[2]


async def restarted(work: Work, run: Run, seq: int) -> Answer | None:
    work.start(run)
    return await run.promises[seq].wait(60)


async def test_requests_behind_one_that_never_came_are_answered_in_the_end(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They waited, and held their tenant's quota, until their run was forgotten."""
    run = made(work)
    first = weights(work, run)
    asked = [learning(1), learning(4), (5, "optim_step", STEP), learning(6), (7, "optim_step", STEP)]
    promises = []
    for seq, kind, data in asked:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        promises.append(work.runs.accept(run, Record(seq, kind, body)))
    work.start(run)
    assert await promises[0].wait(60)
    work.skip_missing()
    assert run.done == 1 and run.working is None  # it may still come
    monkeypatch.setattr("birl.server.tinker.work.PATIENCE", 0.0)
    work.skip_missing()
    promises += [run.promises[seq] for seq in (2, 3)]
    answers = [await promise.wait(60) or Answer.failure("there is none") for promise in promises]
    assert not answers[3].failed
    fourth, step, last, *missing = [json.loads(a.body) for a in (answers[1], answers[2], answers[4], *answers[5:])]
    for seq, answer in zip((2, 3), missing, strict=True):
        assert answer["error"] == f"Request {seq} did not arrive, for which request 4 waited 0 s."
    assert "Request 3 did not arrive" in fourth["error"] and "Request 3 did not arrive" in step["error"]
    assert last["metrics"]["optimizer_steps"] == 1 and run.done == 7 and not run.waiting
    assert any(not torch.equal(t, first[name]) for name, t in weights(work, run).items() if name in first)


def test_a_save_that_is_done_again_after_a_kill_leaves_what_was_published(work: Work) -> None:
    run = made(work)
    done(work, run, (1, "save_weights", {"path": "one", "ttl_seconds": 3600}))
    checkpoint = next(work.runs.store.checkpoints(RUN))
    checkpoint.public, checkpoint.expires = True, None
    work.runs.store.change(checkpoint)
    killed = again(work)
    assert killed.runs.by_id[RUN].next is not None
    answer = asyncio.run(restarted(killed, killed.runs.by_id[RUN], 1))
    assert answer is not None and not answer.failed
    assert list(killed.runs.store.checkpoints(RUN)) == [checkpoint]


def test_a_checkpoint_that_is_overwritten_is_sampled_with_its_new_weights(work: Work) -> None:
    run, sampler = made(work), Sampler(f"{'a' * 32}:sample:0", "alice", "model", f"tinker://{RUN}/weights/one")
    done(work, run, (1, "save_weights", {"path": "one"}))
    first = work.checkpoints.weights(sampler)
    done(work, run, learning(2), (3, "optim_step", STEP), (4, "save_weights", {"path": "one", "overwrite": True}))
    second = work.checkpoints.weights(sampler)
    assert first is not None and second is not None and work.checkpoints.weights(sampler) is second
    assert any(not torch.equal(f.b, second.factors[name].b) for name, f in first.factors.items())


def test_memory_has_the_newest_unnamed_weights_of_a_run_and_older_ones_are_read(work: Work) -> None:
    run = made(work)
    for seq in (1, 4):
        (saved,) = done(work, run, (seq, "save_weights_for_sampler", {}))
        assert not saved.failed
        if seq == 1:
            first = work.checkpoints.kept[f"tinker://{RUN}/sampler_weights/session-1"]
            done(work, run, learning(2), (3, "optim_step", STEP))
    assert list(work.checkpoints.kept) == [f"tinker://{RUN}/sampler_weights/session-4"]
    older = next(s for s in work.checkpoints.samplers.values() if s.path and s.path.endswith("session-1"))
    read = work.checkpoints.weights(older)
    assert read is not None and read is not first
    assert all(torch.equal(f.b, read.factors[name].b) for name, f in first.factors.items())


def test_a_step_with_eps_0_is_refused(work: Work) -> None:
    """It made weights NaN, whose first gradient is 0, and every later request of the run failed."""
    run, params = made(work), STEP["adam_params"] | {"eps": 0.0}
    _, step = done(work, run, learning(1), (2, "optim_step", {"adam_params": params}))
    assert step.failed and b"eps: must be a number from 1e-30" in step.body
    assert not done(work, run, (3, "optim_step", STEP))[0].failed
    assert all(w.isfinite().all() for w in weights(work, run).values())


def test_a_checkpoint_with_a_name_is_never_taken_for_one_without(work: Work) -> None:
    """Sampling with weights named session-final made them expire a day later."""
    run = made(work)
    asked = [(1, "save_weights_for_sampler", {"path": "session-final"}), (2, "save_weights", {"path": "session-3"}),
             (3, "save_weights_for_sampler", {})]  # fmt: skip
    _, taken, unnamed = done(work, run, *asked)
    assert b"reserved" in taken.body and not unnamed.failed
    for name in ("session-final", "session-3"):
        sampler = Sampler(f"{'a' * 32}:sample:0", "alice", "model", f"tinker://{RUN}/sampler_weights/{name}")
        assert work.checkpoints.weights(sampler) is not None
    expires = {c.name: c.expires for c in work.runs.store.checkpoints(RUN)}
    assert expires["session-final"] is None and expires["session-3"] is not None


def test_a_full_disk_leaves_no_part_of_a_checkpoint_and_counts_no_session(work: Work) -> None:
    run = made(work)
    with full_disk(3000):
        (answer,) = done(work, run, (1, "save_weights", {"path": "one"}))
    assert answer.failed
    assert not list(work.runs.store.root.rglob("*.partial"))
    sessions = Sessions(work.runs.store)
    with full_disk(1), pytest.raises(OSError, match="too large"):
        sessions.add("b" * 32, Session(owner="alice", metadata={}), 9)
    assert not sessions.by_id and not list(work.runs.store.root.rglob("*.partial"))
    assert not done(work, run, (2, "save_weights", {"path": "one"}))[0].failed


def test_files_beside_the_services_own_stay(work: Work) -> None:
    """folder= may be one that has other files, of a browser's downloads, say."""
    other = work.runs.store.root / "downloads" / "film.partial"
    other.parent.mkdir()
    other.write_text("half")
    left = work.runs.store.root / "runs" / "x.partial"
    left.mkdir()
    Store(work.runs.store.root)
    assert other.exists() and not left.exists()


def test_a_damaged_record_takes_nothing_with_it_unsaid(work: Work, caplog: pytest.LogCaptureFixture) -> None:
    made(work)
    store = work.runs.store
    for seq in (1, 2, 3):
        store.append(RUN, Record(seq, "optim_step", json.dumps(STEP).encode()))
    file = store.run(RUN) / "journal"
    written = file.read_bytes()
    place = written.index(b"learning", written.index(b'"seq": 2'))
    file.write_bytes(written[:place] + b"x" + written[place + 1 :])
    assert [r.seq for r in store.journal(RUN)] == [1]
    assert "is damaged at byte" in caplog.text
    assert file.with_name("journal.damaged").read_bytes().endswith(written[place + 1 :])
    file.write_bytes(written[:-7])  # as a kill leaves it
    file.with_name("journal.damaged").unlink()
    assert [r.seq for r in store.journal(RUN)] == [1, 2] and not file.with_name("journal.damaged").exists()


class Lost(Runs):
    def try_to_save(self, *_: Any) -> None:
        raise RuntimeError("the GPU is lost")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_snapshot_that_fails_keeps_no_answer(work: Work) -> None:
    run = made(work)
    work.runs = Lost(work.runs.store, work.runs.shared, work.runs.promises, 2**30, work.runs.by_id)
    asked = [(1, "save_weights", {"path": "one"}), (2, "load_weights", {"path": f"tinker://{RUN}/weights/one"})]
    assert not any(a.failed for a in done(work, run, *asked))


def test_a_backward_pass_that_fails_leaves_no_part_of_a_gradient(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory ran out half-way, the next step took what there was."""
    run, count, real = made(work), [0], Factors.absorb

    def absorb(self: Factors, *given: Any) -> None:
        real(self, *given)
        count[0] += 1
        if count[0] == 3:
            raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Factors, "absorb", absorb)
        (failed,) = done(work, run, learning(1))
    assert failed.failed and b"no memory" in failed.body
    refused, right, step = done(work, run, (2, "optim_step", STEP), learning(3), (4, "optim_step", STEP))
    assert b"Nothing was learned" in refused.body and not right.failed
    work.runs.store.root = work.runs.store.root / "alone"
    for kept in (work.runs.by_id, work.runs.promises.by_id):
        kept.clear()
    alone = made(work)
    assert done(work, alone, (1, *learning(3)[1:]), (2, "optim_step", STEP))[1].body == step.body
    expected = weights(work, alone)
    assert all(torch.equal(expected[name], value) for name, value in weights(work, run).items())


def test_a_request_whose_pass_failed_in_a_rank_is_answered_at_the_next_start_and_not_done(work: Work) -> None:
    """It was done again, and the service ended again, for ever."""
    run = made(work)
    done(work, run, learning(1))
    work.fail("rank 1 ended between two passes", True)  # what was answered stays
    failing(work, run, 2)
    work.runs.accept(run, Record(3, "optim_step", json.dumps(STEP).encode()))
    work.fail(
        "rank 1 of 2: Traceback\n  File x\ntorch.OutOfMemoryError: no memory\n\nThe last collectives of rank 1:\nx",
        True,
    )
    killed = again(work)
    after = killed.runs.by_id[RUN]
    answer = asyncio.run(restarted(killed, after, 3))
    refused = after.promises[2].answer
    assert refused is not None and refused.failed and b"ended: torch.OutOfMemoryError: no memory" in refused.body
    assert answer is not None and not answer.failed
    assert after.promises[1].answer is not None and not after.promises[1].answer.failed


def failing(work: Work, run: Run, seq: int) -> None:
    """A request in whose pass the service ends."""
    work.runs.accept(run, Record(*learning(seq)))
    chosen: Any = [SimpleNamespace(request=(RUN, seq))]
    work.passes.chosen = chosen


def test_a_request_is_refused_for_two_kills_of_its_own_pass_alone(work: Work) -> None:
    """Any restart within the last five counted as the first, however long ago: a month later, too."""
    run, word = made(work), "rank 1 was ended by SIGKILL. The end of rank-1.log:\n(empty)"
    failing(work, run, 1)
    work.fail(word, False)
    work = again(work)
    run = work.runs.by_id[RUN]
    answer = asyncio.run(restarted(work, run, 1))
    assert answer is not None and not answer.failed
    failing(work, run, 2)  # another request: its first
    work.fail(word, False)
    work = again(work)
    failing(work, work.runs.by_id[RUN], 2)
    work.fail(word, False)
    work = again(work)
    run = work.runs.by_id[RUN]
    answer = asyncio.run(restarted(work, run, 2))
    assert answer is not None and answer.failed and b"SIGKILL" in answer.body
    assert run.promises[1].answer is not None and not run.promises[1].answer.failed


def test_bodies_on_their_way_are_bounded_for_a_tenant() -> None:
    tenant = Tenant(name="alice")
    late = pytest.raises(Refused, match="500 bytes are on their way")
    with tenant.taking(500, 100), late as error, tenant.taking(1, 100):  # one alone
        pass
    assert error.value.status == 429 and tenant.bodies == 0
    with tenant.taking(50, 100), tenant.taking(50, 100):
        assert tenant.bodies == 100
