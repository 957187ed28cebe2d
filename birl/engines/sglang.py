"""`engine.kind=sglang`: the command that starts SGLang, and its client, in which new weights arrive in the middle of an
answer.

    generate   POST /generate with input_ids; SGLang refuses keys of sampling_params that it does not know
    load       POST /update_weights_from_disk while it is paused; birl checks the folder first
    transfer   without a folder (`SGLangTransfer`)
    pause      "retract" requeues running requests without their KV cache; "in_place" keeps it

With `recompute_kv` a pause retracts: the log-prob of a token of version v is exactly what version v gives it. Without,
the KV cache of the older tokens is kept.
"""

import asyncio
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from birl.config import schema
from birl.engines.collective import NCCL, BroadcastGroup, store_address
from birl.engines.kinds import Start, Wanted, common, spoken
from birl.engines.peer import QUICK, STOPS, Adapter, check_folder, size, versions
from birl.engines.transfer import Transfer
from birl.engines.wire import Invitation, Remote
from birl.errors import BirlError, EngineDown
from birl.process import flags
from birl.types import Completion, Held, SamplingParams, Update


class SGLang(Adapter):
    name = "SGLang"

    def __init__(self, address: str, **options: Any) -> None:
        """Options of `Adapter`."""
        super().__init__(address, **options)
        self.transfer = SGLangTransfer(self)
        self._going = asyncio.Event()  # SGLang cannot abort requests that arrive during a pause: they are held here
        self._going.set()
        self._held: dict[asyncio.Future[None], str] = {}  # -> session

    async def reported(self) -> tuple[str, dict[str, Any]]:
        # not /health: it samples a token, and so waits until a pause ends
        model = await self.peer.json("GET", "/model_info", timeout=QUICK)
        server = await self.peer.json("GET", "/server_info", timeout=QUICK)
        card = (await self.peer.json("GET", "/v1/models", timeout=QUICK))["data"][0]
        ranks = (await self.peer.json("GET", "/v1/loads?include=core", timeout=QUICK))["loads"]
        return model["weight_version"], {
            **{"engine": "sglang", "model": model["model_path"], "dtype": str(server.get("dtype", ""))},
            **{"context": int(card["max_model_len"]), "paused": self.paused},
            "running": sum(int(rank["num_running_reqs"]) for rank in ranks),
            "waiting": sum(int(rank["num_waiting_reqs"]) for rank in ranks) + len(self._held),
        }

    async def let_in(self, params: SamplingParams, session: str) -> bool:
        if params.top_p < 1 or params.top_k or params.min_p:
            raise BirlError(
                "SGLang reports log-probs before top_p, top_k and min_p, not those of the distribution that it samples "
                "from: sample without them (temperature is accounted for)."
            )
        if self._going.is_set():
            return True
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._held[future] = session
        going = asyncio.create_task(self._going.wait())
        try:
            await asyncio.wait({future, going}, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
            if not future.done() and not going.done():
                raise EngineDown(f"{self.address} was paused for {self.timeout:.0f} s.")
            return not future.done()
        finally:
            going.cancel()
            del self._held[future]

    async def ask(
        self, token_ids: tuple[int, ...], params: SamplingParams, count: int, session: str, scored: int = 0
    ) -> Any:
        sampling: dict[str, Any] = {
            **{"max_new_tokens": count, "temperature": params.temperature, "ignore_eos": params.ignore_eos},
            **{"stop": list(params.stop), "stop_token_ids": self.ends(params), "skip_special_tokens": False},
            "no_stop_trim": True,
        }
        if params.seed is not None:
            sampling["sampling_seed"] = params.seed  # only used by SGLang with --enable-deterministic-inference
        with self.peer.request(session) as name:
            body: dict[str, Any] = {"rid": name, "input_ids": token_ids, "sampling_params": sampling}
            body |= {"return_logprob": True, "logprob_start_len": len(token_ids) - scored - 1 if scored else -1}
            # The key separates prefix cache entries of different versions of the weights.
            body["extra_key"] = f"weights-{self.version}"
            return await self.peer.json("POST", "/generate", json=body)

    def parse(self, answer: Any, count: int) -> Completion:
        try:
            meta = answer["meta_info"]
            reason = meta["finish_reason"]
            if reason["type"] == "abort" and (reason.get("status_code") or 0) >= 400:
                raise EngineDown(f"{self.address}/generate: {reason.get('message')}")
            tokens = tuple(answer["output_ids"])
            rows = meta.get("output_token_logprobs") or []
            if tuple(row[1] for row in rows) != tokens or len(tokens) > count:
                raise ValueError("log-probs of other tokens")
            return Completion.of(
                tokens,
                [float(row[0]) for row in rows],
                versions([s for s in meta.get("weight_versions") or [] if s["end"]], len(tokens)),
                STOPS[reason["type"]],
            ).possible()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self.peer.strange("/generate", f"{error!r} in {answer}", error)

    def scores(self, answer: Any, given: tuple[int, ...]) -> tuple[float, ...]:
        try:
            rows = answer["meta_info"]["input_token_logprobs"][-len(given) :]
            if tuple(row[1] for row in rows) != given:
                raise ValueError("log-probs of other tokens")
            return tuple(float(row[0]) for row in rows)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self.peer.strange("/generate", f"{error!r} in its input_token_logprobs", error)

    @property
    def mode(self) -> str:
        return "retract" if self.recompute_kv else "in_place"

    async def load(self, update: Update) -> Held:
        """Load new weights from `update.folder`; running requests continue. Raises `WeightsFailed`: the old ones are
        kept, unless the message says that the engine is broken; then `generate` fails until a load succeeds."""
        async with self._control:
            await asyncio.to_thread(check_folder, update, self.version)
            return await self._replaced(update, lambda: self.put(update), size(update.folder))

    async def put(self, update: Update) -> None:
        body: dict[str, Any] = {
            "model_path": str(Path(update.folder).absolute()),
            "weight_version": str(update.version),
        }
        body |= {"flush_cache": self.recompute_kv, "abort_all_requests": False}
        answer = await self.peer.json("POST", "/update_weights_from_disk", json=body)
        if answer.get("success") is not True:
            raise BirlError(str(answer.get("message", answer)))

    async def halt(self) -> None:
        self._going.clear()
        if not self.paused:
            await self.peer.call("POST", "/pause_generation", json={"mode": self.mode}, timeout=QUICK)

    async def relabelled(self, label: str) -> str:
        return (await self.peer.json("GET", "/model_info", timeout=QUICK))["weight_version"]

    async def release(self) -> None:
        self._going.set()
        await self.peer.call("POST", "/pause_generation", json={"mode": "abort"}, timeout=QUICK)
        await self.peer.call("POST", "/continue_generation", json={}, timeout=QUICK)

    async def go_on(self) -> None:
        await self.peer.call("POST", "/continue_generation", json={}, timeout=QUICK)
        self._going.set()

    async def pause(self, abort: bool = False) -> None:
        """Stop between two tokens. Running requests are kept, or ended as they are with `abort`. New ones wait."""
        async with self._control:
            self._going.clear()
            mode = "abort" if abort else self.mode
            await self.peer.call("POST", "/pause_generation", json={"mode": mode}, timeout=QUICK)
            self.paused = True

    async def occupy(self, what: str) -> None:
        await self.peer.call("POST", "/resume_memory_occupation", json={"tags": [what]}, timeout=QUICK)

    async def abort(self, sessions: Collection[str] | None = None) -> int:
        """End the requests of these sessions, or all of this client, as they are; returns their number."""
        waiting = [future for future, session in self._held.items() if sessions is None or session in sessions]
        for future in waiting:
            if not future.done():
                future.set_result(None)

        async def tell(names: list[str]) -> None:
            for name in names:
                await self.peer.call("POST", "/abort_request", json={"rid": name}, timeout=QUICK)

        return len(waiting) + await self.peer.end(sessions, tell)

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache, if SGLang runs with --enable-memory-saver. Running requests are
        kept, and recomputed after `resume`."""
        async with self._control:
            self._going.clear()
            await self.peer.call("POST", "/pause_generation", json={"mode": "retract"}, timeout=QUICK)
            await self.peer.call(
                "POST", "/release_memory_occupation", json={"tags": ["kv_cache", "weights"]}, timeout=QUICK
            )
            self.paused = self.asleep = self.empty = self.cacheless = True


class SGLangGroup(BroadcastGroup):
    """Group as made by SGLang's `init_custom_process_group` with torch's `_new_process_group_helper`."""

    called_back = False  # a rank waits inside a broadcast

    def _named(self, store: Any) -> Any:
        device = "cuda" if self.invitation.backend == NCCL else "cpu"
        for name in (self.name, f"{self.name}/", f"{device}/"):
            store = dist.PrefixStore(name, store)
        return store

    def _greet(self) -> None:
        return  # its ranks only broadcast weights


class SGLangTransfer(Transfer):
    """SGLang's own endpoints for new weights: its ranks join a group of torch.distributed and receive each bucket as
    one flat buffer (load_format=flattened_bucket)."""

    group = SGLangGroup
    entered = ""  # name of the joined group

    async def ranks(self) -> int:
        server = await self.peer.json("GET", "/server_info", timeout=QUICK)
        if wrong := [key for key in ("pp_size", "dp_size") if server.get(key, 1) != 1]:
            raise BirlError(
                f"{self.adapter.address} runs with {wrong[0]}={server[wrong[0]]}, but without a folder SGLang "
                "takes weights under tensor parallelism only: use weights.method=reload."
            )
        return int(server.get("tp_size", 1))

    async def enter(self, invitation: Invitation) -> None:
        if self.entered:
            with suppress(EngineDown, BirlError):
                await self.call("/destroy_weights_update_group", {"group_name": self.entered})
        host, port = store_address(invitation.store)
        body = {"master_address": host, "master_port": port, "rank_offset": invitation.rank}
        body |= {"world_size": invitation.size, "group_name": invitation.group, "backend": invitation.backend}
        await self.call("/init_weights_update_group", body)
        self.entered = invitation.group

    async def call(self, path: str, body: dict[str, Any]) -> None:
        answer = await self.peer.json("POST", path, json=body, timeout=self.seconds)
        if answer.get("success") is not True:
            raise BirlError(f"{self.adapter.address}{path}: {answer.get('message', answer)}")

    async def begin(self) -> None:
        try:
            await self.call("/begin_weight_update", {})
        except BirlError:  # an interrupted update is open
            with suppress(EngineDown, BirlError):
                await self.finish()
            await self.call("/begin_weight_update", {})

    async def bucket(self, rows: dict[str, Any], last: str) -> None:
        await self.call("/update_weights_from_distributed", rows | {"group_name": self.entered} | self.format(last))

    def format(self, last: str) -> dict[str, Any]:
        flush = bool(last) and self.adapter.recompute_kv
        return {"load_format": "flattened_bucket", "flush_cache": flush} | ({"weight_version": last} if last else {})

    async def finish(self) -> None:
        await self.call("/end_weight_update", {})


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
    return SGLang(address, token=token, **spoken(engine, wanted))


def start(engine: schema.Engine, wanted: Wanted, one: Start) -> tuple[list[str], Mapping[str, str]]:
    """Command and environment of a server."""
    env = environment(cpu=not one.gpu) | {"OMP_NUM_THREADS": str(one.threads)}
    if wanted.method == NCCL:  # on one machine NCCL's ranks must agree: -2 is its own default, SGLang's is 0
        env.setdefault("NCCL_CUMEM_ENABLE", "-2")
    return command(**common(engine, wanted, one), token=one.token, cpu=not one.gpu), env
