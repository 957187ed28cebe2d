"""Weights of many engines: who has which, how each gets the new ones, and what is asked of an engine that has not."""

import asyncio
from dataclasses import replace

import pytest

from birl.engines.router import Router
from birl.engines.wire import Remote
from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.types import Held, Stop, Update
from tests.server.fakes import PROMPT, Fake, Loop, digest_of, expected, fakes, params, started, states, until, update

LOOP = Loop


async def test_new_weights_reach_all_and_requests_go_on() -> None:
    engines = fakes(3)
    engines[2].slow_load = 4.0
    router = Router(engines)
    await router.start()
    asked = [asyncio.create_task(router.generate(PROMPT, params(100, seed=i))) for i in range(6)]
    await asyncio.sleep(3)
    held = await router.load(update(5))
    assert held == Held(version=5, digest=digest_of(5), seconds=4.0, bytes=30) and router.version == 5
    answers = await asyncio.gather(*asked)
    assert [a.ids for a in answers] == [expected(PROMPT, params(100, seed=i)) for i in range(6)]
    assert all(set(a.versions.tolist()) == {0, 5} for a in answers)
    assert (await router.generate(PROMPT, params(3))).versions.tolist() == [5, 5, 5]
    with pytest.raises(WeightsFailed, match="were given 4") as caught:
        await router.load(update(4))
    assert caught.value.cause == "stale" and router.version == 5
    await router.close()


async def test_a_learner_that_was_killed_goes_on_from_older_weights() -> None:
    """engine.attach: the engines have outlived it, with the weights of steps that are lost."""
    engines = fakes(2)
    before = Router(engines)
    await before.start()
    await before.load(update(5))
    await before.close()
    engines[1].crash()
    engines[1].restart()  # with version 0
    router = Router(engines, version=5)
    with pytest.raises(WeightsFailed, match="were given 4"):
        await router.load(update(4))
    assert (await router.load(replace(update(4), anew=True))).version == router.version == 4
    await until(lambda: states(router) == ["ready", "ready"])
    answers = await asyncio.gather(*(router.generate(PROMPT, params(5, seed=i)) for i in range(6)))
    assert {v for a in answers for v in a.versions.tolist()} == {4} and [e.truth for e in engines] == [4, 4]
    await router.close()


async def test_settling_does_not_wait_for_an_engine_that_has_gone_down() -> None:
    """It took the weights, proved them, and died; the others are ready."""
    engines, router = await started(fakes(2), interval=1000.0)
    await router.load(update(5))
    engines[1].crash()
    router.fleet.members[1].poke.set()
    await until(lambda: states(router) == ["ready", "down"])
    began = asyncio.get_running_loop().time()
    await router.settle(300.0)
    assert asyncio.get_running_loop().time() - began < 1
    engines[0].crash()
    router.fleet.members[0].poke.set()
    await until(lambda: states(router) == ["down", "down"])
    with pytest.raises(EngineDown, match="No engine was ready"):
        await router.settle(30.0)
    await router.close()


@pytest.mark.parametrize("way", ["refuses", "frozen", "crash"])
async def test_an_engine_that_does_not_take_the_weights_gets_no_request_until_it_has(way: str) -> None:
    engines, router = await started(fakes(2))
    bad = engines[1]
    bad.crash() if way == "crash" else bad.change(**{way: "truncated" if way == "refuses" else True})
    assert (await router.load(update(5))).bytes == 10
    assert asyncio.get_running_loop().time() < 30
    bad.log.clear()
    assert states(router) == ["ready", "stale" if way == "refuses" else "down"]
    for answer in await asyncio.gather(*(router.generate(PROMPT, params(5, seed=i)) for i in range(10))):
        assert set(answer.versions.tolist()) == {5}
    assert ("generate", "") not in bad.log
    bad.restart() if way == "crash" else bad.change(refuses="", frozen=False)
    await until(lambda: states(router) == ["ready", "ready"])
    assert bad.log[-1] == ("load", 5) and bad.truth == 5
    await router.close()


async def test_weights_that_nobody_takes_raise_and_the_old_ones_stay() -> None:
    engines, router = await started(fakes(2))
    for engine in engines:
        engine.refuses = "mismatch"
    with pytest.raises(WeightsFailed, match="engine0 refuses") as caught:
        await router.load(update(5))
    assert caught.value.cause == "mismatch" and router.version == 0
    await until(lambda: states(router) == ["ready", "ready"])  # their digests say that nothing has changed
    assert (await router.generate(PROMPT, params(2))).versions.tolist() == [0, 0]
    for engine in engines:
        engine.crash()
    with pytest.raises(WeightsFailed) as caught:
        await router.load(update(6))
    assert caught.value.cause == "unreachable"
    await router.close()


async def test_wrong_bytes_are_found_by_the_digest_even_if_the_engine_is_content() -> None:
    engines, router = await started(fakes(2))
    load = engines[1].load

    async def careless(update: Update) -> Held:
        held = await load(update)
        engines[1].truth = 99  # the version is right and the weights are not
        return Held(version=held.version, digest=digest_of(99))

    engines[1].load = careless  # type: ignore[method-assign]
    asked = [asyncio.create_task(router.generate(PROMPT, params(60, seed=i))) for i in range(8)]
    await asyncio.sleep(1)
    await router.load(update(5))
    assert states(router) == ["ready", "stale"] and "differ from those sent" in router.table()[1].error
    for answer in await asyncio.gather(*asked):
        assert set(answer.versions.tolist()) <= {0, 5}
    await router.close()


async def test_an_engine_without_a_digest_needs_a_proof() -> None:
    engines, proven = fakes(2, digest=False), []

    async def prove(remote: Remote) -> None:
        proven.append(remote.address)
        if remote is engines[1] and len(proven) < 4:
            raise WeightsFailed("numbers", "other log-probs than it should")

    bare = Router(engines)
    with pytest.raises(WeightsFailed, match="`prove` is not set"):
        await bare.load(update(1))
    await bare.close()
    router = Router(engines, prove=prove, version=1)
    await router.start()
    await router.load(update(2))
    assert sorted(proven) == ["engine0", "engine1"] and states(router) == ["ready", "stale"]
    await until(lambda: states(router) == ["ready", "ready"])
    assert proven.count("engine1") == 3  # after each load once more
    await router.close()


async def test_an_answer_of_weights_that_are_not_proven_yet_waits_for_the_proof() -> None:
    engines, events = fakes(2, digest=False), []

    async def prove(remote: Remote) -> None:
        await asyncio.sleep(5)
        if remote is engines[1]:
            raise WeightsFailed("numbers", "other log-probs than it should")

    router = Router(engines, prove=prove, on_event=lambda name, **fields: events.append((name, fields["address"])))
    await router.start()
    asked = [asyncio.create_task(router.generate(PROMPT, params(20, seed=i))) for i in range(6)]
    await asyncio.sleep(0.5)
    await router.load(update(5))
    answers = await asyncio.gather(*asked)
    assert all(5 in a.versions.tolist() for a in answers)
    assert [row.served for row in router.table()] == [6, 0] and events.count(("retry", "engine1")) == 3
    assert events.count(("engine_stale", "engine1")) == 1 and ("engine_stale", "engine0") not in events
    await router.close()


async def test_a_look_that_is_overtaken_says_nothing() -> None:
    engines, events = fakes(2), []
    for engine in engines:
        engine.slow_info = 0.9
    router = Router(engines, interval=0.1, on_event=lambda name, **fields: events.append(name))
    await router.start()
    for version in range(1, 8):
        await router.load(update(version))
        await asyncio.sleep(0.31 * version)
        await router.pause()
        await asyncio.sleep(0.23 * version)
        await router.resume()
    assert events == ["engine_ready", "engine_ready"]
    await router.close()


async def test_a_restarted_engine_is_brought_up_to_date_before_it_serves() -> None:
    engines, router = await started(fakes(2), interval=5.0)
    await router.load(update(5))
    await asyncio.sleep(1)
    engines[0].log.clear()
    engines[0].restart()  # between two looks: nobody has noticed
    answers = await asyncio.gather(*(router.generate(PROMPT, params(5, seed=i)) for i in range(20)))
    assert all(set(a.versions.tolist()) == {5} for a in answers)
    await until(lambda: states(router) == ["ready", "ready"])
    assert ("load", 5) in engines[0].log
    engines[0].restart(version=5)  # says that it has them: that is not enough
    engines[0].log.clear()
    await until(lambda: engines[0].log)
    assert engines[0].log[0] == ("load", 5)
    await router.close()


async def test_somebody_elses_weights_make_an_engine_stale() -> None:
    events = []
    engines, router = await started(
        fakes(2), on_event=lambda name, **fields: events.append((name, fields.get("error")))
    )
    await router.load(update(5))
    engines[0].version = engines[0].truth = 8
    answers = await asyncio.gather(*(router.generate(PROMPT, params(5, seed=i)) for i in range(8)))
    assert all(set(a.versions.tolist()) == {5} for a in answers)
    assert states(router) == ["stale", "ready"] and any("version 8" in (e or "") for _, e in events)
    engines[1].truth = 77  # same version, other weights: only the digest tells
    await until(lambda: states(router)[1] == "stale")
    assert any(name == "engine_stale" and "the digest is now" in (e or "") for name, e in events)
    await router.close()


async def test_engines_that_do_not_start_with_the_same_weights_are_told() -> None:
    engines = fakes(2)
    engines[1].truth = 3
    router = Router(engines)
    with pytest.raises(EngineDown, match="engine1 is stale"):
        await router.start(5.0)
    await router.close()
    given = Router(engines, update=update(4))
    await given.start(10.0)
    assert given.version == 4 and [e.truth for e in engines] == [4, 4]
    await given.close()
    again = Router(engines, update=update(4))
    for engine in engines:
        engine.log.clear()
    await again.start()
    assert engines[0].log == engines[1].log == []  # they have it already, and their digests say so
    await again.close()


async def test_pause_holds_and_resume_goes_on_even_where_an_engine_missed_it() -> None:
    engines, router = await started(fakes(2))
    running = [asyncio.create_task(router.generate(PROMPT, params(50, seed=i))) for i in range(2)]
    await asyncio.sleep(2)
    await router.pause()
    late = asyncio.create_task(router.generate(PROMPT, params(5)))
    await asyncio.sleep(60)
    assert not any(t.done() for t in (*running, late)) and states(router) == ["ready", "ready"]
    assert len(engines[0].running) + len(engines[1].running) == 2
    engines[1].change(frozen=True)
    await router.resume()
    assert [a.ids for a in await asyncio.gather(*running)] == [expected(PROMPT, params(50, seed=i)) for i in (0, 1)]
    await late
    engines[1].change(frozen=False)
    await until(lambda: states(router) == ["ready", "ready"])
    assert not engines[1].paused
    task = asyncio.create_task(router.generate(PROMPT, params(50)))
    await asyncio.sleep(1)
    await router.pause(abort=True)
    assert (await task).stop is Stop.ABORT and len((await task).ids) < 50
    await router.close()


async def test_an_engine_that_slept_is_given_its_weights_again() -> None:
    engines, router = await started(fakes(2))
    await router.load(update(5))
    await engines[0].sleep()
    await until(lambda: states(router)[0] == "draining")
    engines[0].log.clear()
    await engines[0].wake()
    await until(lambda: engines[0].log)
    assert engines[0].log == [("load", 5)]
    await engines[0].resume()
    await until(lambda: states(router) == ["ready", "ready"])
    await router.close()


async def test_a_lost_process_is_started_again_and_gets_the_weights() -> None:
    engines, spare, tries = fakes(2), Fake("spare"), []

    async def restart(remote: Remote) -> Remote:
        tries.append(remote.address)
        if len(tries) == 1:
            raise BirlError("out of memory")
        await asyncio.sleep(3)
        return spare

    router = Router(engines, restart=restart)
    await router.start()
    await router.load(update(5))
    engines[0].crash()
    await until(lambda: "could not be started again: out of memory" in router.table()[0].error)
    await until(lambda: states(router) == ["ready", "ready"])
    assert [r.address for r in router.table()] == ["spare", "engine1"] and spare.truth == 5
    assert engines[0].closed and tries == ["engine0", "engine0"]
    await router.close()


async def test_an_engine_that_joins_gets_the_weights_before_its_first_request() -> None:
    first, second = fakes(2)
    second.restart(version=0)
    router = Router([first])
    await router.start()
    await router.load(update(1))
    router.fleet.add(second)
    answers = await asyncio.gather(*(router.generate(PROMPT, params(seed=i)) for i in range(20)))
    await until(lambda: states(router) == ["ready", "ready"])
    answers += await asyncio.gather(*(router.generate(PROMPT, params(seed=i)) for i in range(20)))
    assert [a.ids for a in answers] == [expected(PROMPT, params(seed=i)) for i in range(20)] * 2
    assert second.log[0] == ("load", 1) and second.most == 10
    assert all(set(a.versions.tolist()) == {1} for a in answers)
    await router.close()


async def test_an_engine_that_leaves_answers_what_it_has() -> None:
    first, second = fakes(2)
    router = Router([first, second])
    await router.start()
    work = [asyncio.create_task(router.generate(PROMPT, params(seed=i), f"s{i}")) for i in range(8)]
    await until(lambda: len(second.running) == 4)
    await router.fleet.remove(router.fleet.members[1], "it was told to")
    assert len(router.table()) == 1 and second.closed
    answers = await asyncio.gather(*work)
    answers += await asyncio.gather(*(router.generate(PROMPT, params(seed=i), f"s{i}") for i in range(8)))
    assert [a.ids for a in answers] == [expected(PROMPT, params(seed=i)) for i in range(8)] * 2
    assert sum(what == "generate" for what, _ in second.log) == 4, "nothing was asked twice, or of one that leaves"
    await router.load(update(1))
    await router.settle(10.0)
    assert router.version == 1 and second.version == 0
    await router.close()


async def test_an_engine_that_dies_while_it_leaves_is_forgotten() -> None:
    first, second = fakes(2)
    router = Router([first, second])
    await router.start()
    work = [asyncio.create_task(router.generate(PROMPT, params(seed=i))) for i in range(8)]
    await until(lambda: len(second.running) == 4)
    second.crash()
    await router.fleet.remove(router.fleet.members[1], "it was told to")
    answers = await asyncio.gather(*work)
    assert [a.ids for a in answers] == [expected(PROMPT, params(seed=i)) for i in range(8)]
    assert [row.address for row in router.table()] == ["engine0"]
    await router.close()
