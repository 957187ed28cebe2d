"""Engines in other processes with an adapter for each request: `birl serve`, its client, `birl tinker engines=2`."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from birl.engines.client import Client
from birl.engines.wire import AdapterParams
from birl.errors import BirlError
from birl.learner.low_rank_run import LowRankConfig, SharedBase
from birl.learner.policy import DTYPES
from birl.models.low_rank import AdapterWeights
from birl.types import Completion, SamplingParams
from tests.server.app import tiny_engine
from tests.server.running import running
from tests.server.test_tinker_service import DATA, SAMPLING, prompt
from tests.server.tinker_server import Client as Tenant
from tests.server.tinker_server import serving
from tests.tiny import tiny_model_folder

PROMPT = (1, 9, 4, 45, 7)


def adapters(base: SharedBase, count: int) -> dict[str, AdapterWeights]:
    runs = [base.run(LowRankConfig(rank=4, seed=seed)) for seed in range(count)]
    for run in runs:
        for name, master in run.masters.items():
            if name.endswith("lora_B"):
                master.data.fill_(0.02)
        run.round()
    return {f"a{n}": run.weights for n, run in enumerate(runs)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_an_adapter_is_sent_once_and_again_to_an_engine_that_lost_it(tmp_path: Path, dtype: str) -> None:
    folder = tiny_model_folder(tmp_path / "model", heads=2 if dtype == "bfloat16" else 4)
    own = tiny_engine(folder, DTYPES[dtype])
    base = SharedBase(own.runner.model, own.runner.model.lm_head.weight.dtype)  # pyright: ignore
    known = adapters(base, 2)
    with running(folder, model={"dtype": dtype}) as server:
        client, held = Client(server.url), server.service.adapters
        client.adapters = known

        def asked(name: str, seed: int = 3) -> AdapterParams:
            return AdapterParams(max_tokens=12, seed=seed, ignore_eos=True, adapter=name)

        def same(one: Completion, other: Completion) -> None:
            assert one.ids == other.ids and one.logprobs.tolist() == pytest.approx(other.logprobs, abs=1e-5)

        answers = await asyncio.gather(*(client.generate(PROMPT, asked(n, s)) for s in (1, 2) for n in known))
        expected = [
            await own.generate(PROMPT, SamplingParams(max_tokens=12, seed=s, ignore_eos=True), adapter=a)
            for s in (1, 2) for a in known.values()
        ]  # fmt: skip
        for one, other in zip(answers, expected, strict=True):
            same(one, other)
        plain = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
        same(await client.generate(PROMPT, plain), await own.generate(PROMPT, plain))
        puts = server.service.metrics.requests.labels("/adapters/{name}", "200")
        assert held.held.keys() == known.keys() and puts._value.get() == 2
        held.held.clear()  # as after a restart
        for one, other in zip([await client.generate(PROMPT, asked(n, 1)) for n in known], expected, strict=False):
            same(one, other)
        assert puts._value.get() == 4
        client.adapters = {"other": AdapterWeights(0, {"lm_head": known["a0"].factors["model.layers.0.mlp.up_proj"]})}
        with pytest.raises(BirlError, match=r"adapters/other: lm_head has other shapes"):
            await client.generate(PROMPT, asked("other"))
        await client.close()
    await own.close()


def answers(alice: Tenant) -> list[bytes]:
    """Of the base and two runs, with several answers each, and what is asked of the prompt."""
    session, samplers = alice.session(), []
    sampler = alice.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="model")
    samplers.append(sampler["sampling_session_id"])
    for number in range(2):
        run = alice.run(session, number, seed=number)
        alice.learn(run, 1, DATA)
        alice.step(run, 2, 0.05)
        saved = alice.wait(alice.post("save_weights_for_sampler", model_id=run, seq_id=3, sampling_session_seq_id=1))
        samplers.append(saved["sampling_session_id"])
    asked = {"prompt": prompt(5, 6, 7), "sampling_params": SAMPLING, "num_samples": 4, "prompt_logprobs": True}
    waiting = [alice.post("asample", sampling_session_id=id, seq_id=0, **asked) for id in samplers]
    return [alice.answer(one) for one in waiting]


@pytest.mark.timeout(300)
def test_two_engines_answer_as_one_process_does_and_one_may_be_killed(tmp_path: Path) -> None:
    model = tiny_model_folder(tmp_path / "model")
    with serving(model, tmp_path / "one", "names=[model]") as server:
        expected = answers(server.client())
    with serving(model, tmp_path / "two", "names=[model]", "engines=2") as server:
        assert answers(server.client()) == expected  # in bfloat16 on birl's kernels bit for bit
        engines = [p for p in psutil.Process(server.child.pid).children(recursive=True) if "serve" in p.cmdline()]
        assert len(engines) == 2
        os.kill(engines[0].pid, signal.SIGKILL)
        assert answers(server.client()) == expected
        server.child.send_signal(signal.SIGTERM)
        assert server.child.wait(60) == 128 + signal.SIGTERM
    assert not any(p.is_running() for p in engines)
