"""`engine.kind=vllm`: starts vLLM, makes its client, and writes the plugin for its workers."""

import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from birl.config import schema
from birl.engines.kinds import Start, Wanted, common, cores_of, spoken
from birl.engines.vllm import plugin as vllm_plugin
from birl.engines.wire import Remote
from birl.errors import BirlError
from birl.process import flags
from birl.regular import read_json
from birl.samples import LISTED


def write_plugin(folder: Path | None = None) -> Path:
    """A folder for vLLM's PYTHONPATH that only contains `birl_vllm_plugin.py`. Default: in the system's folder for
    temporary files, the same for the same birl and user."""
    source = Path(vllm_plugin.__file__)
    mark = hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    folder = folder or Path(tempfile.gettempdir()) / f"birl-vllm-plugin-{os.getuid()}-{mark}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if folder.stat().st_uid != os.getuid():
        raise BirlError(f"{folder} belongs to another user, and vLLM would run its code: remove it.")
    shutil.copyfile(source, folder / "birl_vllm_plugin.py")
    return folder


def listed(top_k: int) -> int:
    """Number of log-probs to request per token, so that at least one is outside of the kept ones: vLLM keeps all that
    tie with the last of top_k."""
    return 2 * top_k + 8


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
    sleep: bool = False,
    transfer: str = "",
    extra: Sequence[str] = (),
) -> list[str]:
    """Command that starts vLLM, with `environment`. `python`: interpreter that has vLLM; `context` [tokens]. It only
    frees memory when asleep with `sleep`, on a GPU, and only takes weights without a folder with `transfer`, the name
    of one of vLLM's weight transfer backends."""
    host = "127.0.0.1"  # the endpoints for new weights are not protected by a token
    # not `vllm serve`: the CPU build has no metadata of that name, and its command fails
    result = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", host, "--port", str(port)]
    result += ["--dtype", dtype, "--enable-scale-out", "--logprobs-mode", "processed_logprobs"]
    result += ["--max-logprobs", str(listed(LISTED)), "--no-enable-log-requests", "--disable-uvicorn-access-log"]
    result += ["--enable-sleep-mode"] if sleep else []
    options = {
        "--tensor-parallel-size": tensor_parallel if tensor_parallel > 1 else None,
        "--pipeline-parallel-size": pipeline_parallel if pipeline_parallel > 1 else None,
        "--gpu-memory-utilization": memory_fraction,
        "--max-num-seqs": max_batch,
        "--max-model-len": context,
        "--weight-transfer-config": json.dumps({"backend": transfer}) if transfer else None,
        "--worker-extension-cls": "birl_vllm_plugin.Weights",
    }
    return [*result, *flags(options), *extra]


def environment(
    *, cpu: bool = False, kv_cache_gb: float = 1.0, threads: str = "", base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of vLLM's process, over `base` (default: this process's own). On a CPU: memory of the KV cache [GiB]
    and the cores of the worker ("0", "0-3"; vLLM's own choice leaves one free for its front-end)."""
    result = dict(os.environ if base is None else base)
    result |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [str(write_plugin()), result.get("PYTHONPATH")]))
    if cpu:
        result["VLLM_CPU_KVCACHE_SPACE"] = str(max(math.ceil(kv_cache_gb), 1))  # whole GiB only
        if threads:
            result["VLLM_CPU_OMP_THREADS_BIND"] = threads
    return result


def speak(engine: schema.Engine, wanted: Wanted, address: str, token: str) -> Remote:
    from birl.engines.vllm.adapter import VLLM

    if wanted.pictures is not None:
        check_normalized(wanted.folder)
    token = token if engine.attach else ""  # its token does not protect its control endpoints
    result = VLLM(address, token=token, **spoken(engine, wanted))
    result.pictures = wanted.pictures
    return result


def check_normalized(folder: Path) -> None:
    """Raises `BirlError` for a model folder without the mean and deviation of pixels: vLLM would not normalize them,
    where transformers uses its class's values (`_load_norm_params` of vLLM's mm_input_norm.py)."""
    from birl.models.vision import PROCESSORS

    files = [folder / name for name in PROCESSORS]
    found = [read_json(file) for file in files if file.is_file()]
    found = [each.get("image_processor", each) for each in found]
    if not any({"image_mean", "image_std"} <= each.keys() or each.get("do_normalize") is False for each in found):
        raise BirlError(
            f"{files[-1]} has no image_mean and image_std, without which vLLM computes with pixels from 0 to 255. "
            f"Write them: `AutoImageProcessor.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})`."
        )


def start(engine: schema.Engine, wanted: Wanted, one: Start) -> tuple[list[str], Mapping[str, str]]:
    """Command and environment of a server."""
    own = cores_of(one.number, one.threads, sorted(os.sched_getaffinity(0)))
    bind = ",".join(map(str, own))
    env = environment(cpu=not one.gpu, kv_cache_gb=wanted.kv_cache_gb, threads=bind)
    transfer = wanted.method if wanted.method in ("nccl", "ipc") else ""
    return command(**common(engine, wanted, one), transfer=transfer), env
