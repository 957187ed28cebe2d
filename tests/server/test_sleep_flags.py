"""Servers that are to sleep are started so that they can; other flags and variables of servers."""

from dataclasses import replace
from pathlib import Path

import pytest

from birl.config import schema
from birl.config.load import load
from birl.engines import sglang, vllm
from birl.engines.kinds import Start, Wanted

FLAGS = {vllm: "--enable-sleep-mode", sglang: "--enable-memory-saver"}
WANTED = Wanted(
    folder=Path("m"), dtype="bfloat16", device="auto", context=512, longest=512, kv_cache_gb=1.0,
    end_ids=frozenset(), logs=Path("logs"), fraction=0.4,
)  # fmt: skip


@pytest.mark.parametrize("kind", FLAGS, ids=lambda kind: kind.__name__.rpartition(".")[2])
@pytest.mark.parametrize(("sleep", "gpu"), [(True, True), (False, True), (True, False)])
def test_the_flag_comes_with_engine_sleep_on_a_gpu(kind, sleep: bool, gpu: bool) -> None:
    keys = load(schema.RL, ["data.train=x.jsonl", f"engine.kind={kind.__name__.rpartition('.')[2]}"]).engine
    one = Start(port=1, token="", number=0, threads=1, gpu=gpu, python="py")
    words, _ = kind.start(replace(keys, sleep=sleep), WANTED, one)
    assert (FLAGS[kind] in words) == (sleep and gpu)
    assert ("0.4" in words) == gpu  # of the memory, beside a learner


@pytest.mark.parametrize(
    ("method", "given", "value"), [("nccl", None, "-2"), ("nccl", "1", "1"), ("reload", None, None)]
)
def test_sglang_has_nccls_default_for_buffers(monkeypatch, method: str, given: str | None, value: str | None) -> None:
    """As the learner: SGLang sets 0 where there is nothing, and NCCL cannot map a buffer of the other kind."""
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if given is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", given)
    keys = load(schema.RL, ["data.train=x.jsonl", "engine.kind=sglang"]).engine
    one = Start(port=1, token="", number=0, threads=1, gpu=True, python="py")
    _, env = sglang.start(keys, replace(WANTED, method=method), one)
    assert env.get("NCCL_CUMEM_ENABLE") == value


def test_vllms_own_parser_takes_the_command() -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed")
    parsing = pytest.importorskip("vllm.utils.argparse_utils", reason="vLLM is not installed")
    parser = arguments.AsyncEngineArgs.add_cli_args(parsing.FlexibleArgumentParser())
    words = vllm.command(model="m", port=1, memory_fraction=0.5, max_batch=4, context=512, sleep=True)
    known, _ = parser.parse_known_args(words[3:])  # the others are the server's
    assert known.enable_sleep_mode and known.gpu_memory_utilization == 0.5
