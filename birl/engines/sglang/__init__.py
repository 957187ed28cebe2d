"""`engine.kind=sglang`: starts SGLang and makes its client."""

import os
import sys
from collections.abc import Mapping, Sequence

from birl.config import schema
from birl.engines.kinds import Start, Wanted, common, spoken
from birl.engines.wire import Remote
from birl.process import flags


def command(
    *,
    model: str,
    port: int,
    python: str = sys.executable,
    dtype: str = "bfloat16",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    memory_fraction: float | None = None,
    max_batch: int | None = None,
    context: int | None = None,
    token: str = "",
    cpu: bool = False,
    sleep: bool = False,
    extra: Sequence[str] = (),
) -> list[str]:
    """Command that starts SGLang, with `environment`. `python`: interpreter that has SGLang; `context` [tokens]. It
    only frees memory when asleep with `sleep`, on a GPU and with the package torch_memory_saver."""
    result = [python, "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1", "--port", str(port)]
    result += ["--dtype", dtype, "--skip-server-warmup", "--log-level-http", "warning"]
    result += ["--enable-memory-saver"] if sleep else []
    options = {
        "--tp-size": tensor_parallel if tensor_parallel > 1 else None,
        "--pp-size": pipeline_parallel if pipeline_parallel > 1 else None,
        "--mem-fraction-static": memory_fraction,
        "--max-running-requests": max_batch,
        "--context-length": context,
        "--api-key": token or None,
        "--admin-api-key": token or None,
    }
    result += flags(options)
    if cpu:  # supported by the CPU build from PyPI
        result += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        result += ["--grammar-backend", "none", "--disable-overlap-schedule", "--disable-cuda-graph"]
        result += ["--disable-radix-cache"]
    return [*result, *extra]


def environment(*, cpu: bool = False, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of SGLang's process, over `base` (default: this process's own)."""
    result = dict(os.environ if base is None else base) | {"HF_HUB_OFFLINE": "1"}
    if result.get("SGLANG_RETURN_ORIGINAL_LOGPROB"):
        del result["SGLANG_RETURN_ORIGINAL_LOGPROB"]  # log-probs would ignore the temperature
    if cpu:
        result |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        result.setdefault("OMP_NUM_THREADS", "1")
    return result


def speak(engine: schema.Engine, wanted: Wanted, address: str, token: str) -> Remote:
    from birl.engines.sglang.adapter import SGLang

    return SGLang(address, token=token, **spoken(engine, wanted))


def start(engine: schema.Engine, wanted: Wanted, one: Start) -> tuple[list[str], Mapping[str, str]]:
    """Command and environment of a server."""
    env = environment(cpu=not one.gpu) | {"OMP_NUM_THREADS": str(one.threads)}
    return command(**common(engine, wanted, one), token=one.token, cpu=not one.gpu), env
