"""Extension of vLLM's workers (`--worker-extension-cls birl_vllm_plugin.Weights`): loads new weights from a folder, and
compares them with the sent digests before the model takes them. This file runs inside vLLM's processes, in vLLM's
environment: it imports nothing of birl, and vLLM only to change the model. `write_plugin` puts a copy of it on vLLM's
path. Called by POST /collective_rpc, with one result for each worker:

    birl_hashes   available hashes
    birl_stage    read and compare the folder in a thread, during generation, without changing the model
    birl_staged   whether that is done
    birl_take     after all workers have staged it and the engine is paused: load it into the model

A refusal is a result, not an exception: vLLM answers those with 500 and resets the connection, which loses the reason.
It is not one of vLLM's weight transfer backends for the same reason: these can say no more than that they failed.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

try:
    import xxhash
except ImportError:  # not a dependency of vLLM
    xxhash = None

HASHES: dict[str, Callable[[bytes], Any]] = {
    **({"xxh3_128": xxhash.xxh3_128} if xxhash else {}),
    "sha256": hashlib.sha256,
}
PIECE = 2**16  # bytes


class Refused(Exception):
    """A refusal with its `cause`, see `birl.errors.WeightsFailed`."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def fingerprint(tensor: Tensor, hash: str) -> str:
    """Hash of type, shape and bytes; with xxh3_128 the same as `birl.models.digests.digest`, of pieces' hashes."""
    result = HASHES[hash](f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".encode())
    data = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # pyright: ignore
    whole = 0
    if xxhash and hash == "xxh3_128":
        whole = len(data) // PIECE * PIECE
        for i in range(0, whole, PIECE):
            result.update(xxhash.xxh3_64_intdigest(data[i : i + PIECE]).to_bytes(8, "little"))
    result.update(data[whole:])
    return result.hexdigest()


def read(folder: Path, digests: Mapping[str, str], hash: str) -> dict[str, Tensor]:
    """The tensors of a Hugging Face folder. Raises `Refused` unless they are exactly those of `digests` (if given)."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise Refused("missing", f"{folder} has no .safetensors file on the engine's machine")
    result: dict[str, Tensor] = {}
    try:
        with ExitStack() as stack:
            for file in files:
                if not file.is_file():  # reading a pipe would block
                    raise OSError(f"{file.name} is not a regular file")
                opened = stack.enter_context(safe_open(file, framework="pt"))
                result |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise Refused("truncated", f"{folder}: {str(error).splitlines()[0]}") from error
    if digests:
        if odd := sorted(digests.keys() ^ result.keys()):
            raise Refused("missing", f"{folder}: {odd[0]} is {'missing' if odd[0] in digests else 'not in the model'}")
        for name, tensor in result.items():
            if fingerprint(tensor, hash) != digests[name]:
                raise Refused("mismatch", f"{folder}: {name} has other bytes than were sent")
    return result


def refusal(error: Exception) -> dict[str, Any]:
    cause = error.cause if isinstance(error, Refused) else "unreachable"
    return {"refused": cause, "message": str(error) if isinstance(error, Refused) else repr(error)[:1000]}


class Weights:
    """The methods of a worker that birl calls. `model_runner`, `model_config` and `vllm_config` are the worker's."""

    _birl_staged: dict[str, Tensor] | None = None
    _birl_problem: dict[str, Any] | None = None
    _birl_thread: threading.Thread | None = None
    _birl_number = 0  # number of the request: a late thread does not overwrite later results

    def birl_hashes(self) -> list[str]:
        return list(HASHES)

    def birl_stage(self, folder: str, hash: str, digests: dict[str, str]) -> dict[str, Any]:
        self._birl_staged, self._birl_problem = None, None
        self._birl_number += 1

        def stage(number: int) -> None:
            staged, problem = None, None
            try:
                staged = read(Path(folder), digests, hash)
            except Exception as error:  # any exception is reported to the caller
                problem = refusal(error)
            if number == self._birl_number:
                self._birl_staged, self._birl_problem = staged, problem

        self._birl_thread = threading.Thread(target=stage, args=(self._birl_number,), name="birl-stage", daemon=True)
        self._birl_thread.start()
        return {}

    def birl_staged(self) -> dict[str, Any]:
        if self._birl_thread is not None and self._birl_thread.is_alive():
            return {"done": False}
        return {"done": True, **(self._birl_problem or {})}

    def birl_take(self) -> dict[str, Any]:
        staged, self._birl_staged = self._birl_staged, None
        if staged is None:
            return {"refused": "missing", "message": "nothing was staged"}
        began = time.perf_counter()
        try:
            take(self, staged)
        except Exception as error:  # any exception is reported to the caller
            return refusal(error)
        return {"seconds": time.perf_counter() - began, "bytes": sum(t.nbytes for t in staged.values())}


def take(worker: Any, tensors: Mapping[str, Tensor]) -> None:
    """As vLLM's own reload_weights, but raises an error for parameters without weights instead of a line in the log.
    vLLM has another layout (packed, fused, sharded), so weights are loaded, not copied."""
    from vllm.config import set_current_vllm_config  # type: ignore[import-not-found]
    from vllm.model_executor.model_loader.reload.layerwise import (  # type: ignore[import-not-found]
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    model = worker.model_runner.get_model()
    with set_current_vllm_config(worker.vllm_config), torch.inference_mode():
        wanted = {name for name, _ in model.named_parameters()}  # before tied ones are separated
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(iter(tensors.items()))
        finally:
            finalize_layerwise_reload(model, worker.model_config)
        repack(model)
    worker.model_runner.reset_lora_state()
    worker.model_runner.reset_encoder_cache()
    worker.model_runner.reset_mm_cache()
    if loaded is not None and (absent := sorted(wanted - set(loaded))):
        raise Refused("missing", f"vLLM's {absent[0]} got no weights")


def repack(model: Any) -> None:
    """Repack tied layers on a CPU, where vLLM computes with a packed copy of a layer's weights and only renews those of
    loaded layers. A tied output layer is not loaded and would keep the old copy."""
    owners: dict[int, list[Any]] = {}
    for module in model.modules():
        if isinstance(weight := getattr(module, "weight", None), Tensor):
            owners.setdefault(id(weight), []).append(module)
    for module in (m for tied in owners.values() if len(tied) > 1 for m in tied):
        if hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
