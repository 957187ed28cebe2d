"""vLLM as an engine: tokens in, tokens, log-probs and versions out, and new weights in the middle of an answer.

    generate   POST /inference/v1/generate (--enable-scale-out)
    load       by birl's plugin in vLLM's workers (`plugin.py`)
    transfer   without a folder (`transfer.py`)
    pictures   as files beside the prompt, which vLLM's own processor expands to the same tokens: compared
    pause ...  the endpoints of VLLM_SERVER_DEV_MODE=1, not protected by a token: such a server belongs on loopback

With `recompute_kv` a running request loses its KV cache when the weights change, and vLLM recomputes it: the log-prob
of a token of version v is exactly what version v gives it. Without, that of older tokens is kept.
"""

import asyncio
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from birl.engines.peer import QUICK, STOPS, Adapter, check_folder, fresh, refusal, size, versions
from birl.engines.vllm import listed
from birl.engines.vllm import plugin as vllm_plugin
from birl.engines.vllm.transfer import VLLMTransfer
from birl.errors import BirlError, EngineDown, WeightsFailed
from birl.samples import Support
from birl.text.pictures import is_picture
from birl.types import Completion, Held, SamplingParams, Update

KEEP = "/pause?mode=keep&clear_cache=false"  # without clear_cache=false vLLM drops the KV cache of running requests
NOTHING = -9999.0  # vLLM's encoding of NaN and -inf
COUNTED = ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:num_preemptions", "vllm:request_success")


class VLLM(Adapter):
    name = "vLLM"

    def __init__(self, address: str, **options: Any) -> None:
        """`options`: those of `Adapter`."""
        super().__init__(address, **options)
        self.transfer = VLLMTransfer(self)
        self.hash = ""  # hash of the plugin, once known
        self.dtype = ""  # once known

    async def reported(self) -> tuple[str, dict[str, Any]]:
        try:
            model = (await self.peer.json("GET", "/v1/models", timeout=QUICK))["data"][0]
            label = (await self.peer.json("GET", "/weight_info", timeout=QUICK))["weight_version"]
            paused = (await self.peer.json("GET", "/is_paused", timeout=QUICK))["is_paused"]
            if not self.dtype:
                await self.look()
            figures = gauges((await self.peer.call("GET", "/metrics", timeout=QUICK)).text)
        except BirlError as error:
            hint = ". Was vLLM started with VLLM_SERVER_DEV_MODE=1?" if ": 404: " in str(error) else ""
            raise BirlError(f"{error}{hint}") from error
        fields = {"engine": "vllm", "model": model["root"], "context": int(model["max_model_len"]), "dtype": self.dtype}
        fields |= {name: int(figures.pop(name)) for name in ("running", "waiting")}
        return label, fields | {"paused": paused, "counters": figures}

    async def look(self) -> None:
        """Read what does not change while the server runs. Raises `BirlError` if its options make it report log-probs
        that are not those of the sampling distribution."""
        result = await self.peer.json("GET", "/server_info?config_format=json", timeout=QUICK)
        model = result["vllm_config"]["model_config"]
        if model["logprobs_mode"] != "processed_logprobs":
            raise BirlError(
                f"{self.address} reports {model['logprobs_mode']}, not the log-probs that it samples from: start vLLM "
                "with --logprobs-mode processed_logprobs."
            )
        self.dtype = model["dtype"].removeprefix("torch.")

    @property
    def anew(self) -> bool:
        return self.recompute_kv

    async def ask(
        self, token_ids: tuple[int, ...], params: SamplingParams, count: int, session: str, scored: int = 0
    ) -> Any:
        sampling: dict[str, Any] = {
            **{"max_tokens": count, "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k},
            **{"min_p": params.min_p, "seed": params.seed, "stop": list(params.stop), "ignore_eos": params.ignore_eos},
            **{"stop_token_ids": self.ends(params), "include_stop_str_in_output": True},
            "logprobs": listed(params.top_k) if params.told else 0,
            **{"skip_special_tokens": False, "detokenize": bool(params.stop)},
        }
        if scored:
            sampling["prompt_logprobs"] = 0
        with self.peer.request(session) as name:
            # The salt separates prefix cache entries of different versions of the weights.
            salt = f"weights-{self.version}"
            body = {"request_id": name, "token_ids": token_ids, "sampling_params": sampling, "cache_salt": salt}
            if self.pictures is not None and is_picture(max(token_ids)):
                return await self.look_at(token_ids, body)
            return await self.peer.json("POST", "/inference/v1/generate", json=body)

    async def look_at(self, token_ids: tuple[int, ...], body: dict[str, Any]) -> Any:
        """The response to a request with pictures. Raises `BirlError` if vLLM expanded them to other tokens."""
        pictures = self.pictures
        assert pictures is not None

        def files() -> dict[str, Any]:
            ids, digests = pictures.folded(token_ids)
            urls = {digest: f"data:image/png;base64,{pictures.png(digest)}" for digest in set(digests)}
            parts = [{"type": "image_url", "url": urls[digest], "uuid": digest} for digest in digests]
            return {"token_ids": ids, "content_parts": parts, "return_token_ids": True}

        body |= await asyncio.to_thread(files)
        answer = await self.peer.json("POST", "/inference/v1/generate", json=body)
        own = answer.get("prompt_token_ids") if isinstance(answer, dict) else None
        if own != [pictures.id if is_picture(token) else token for token in token_ids]:
            raise BirlError(
                f"{self.address} computes other tokens for a prompt with pictures ({len(own or ())} instead of "
                f"{len(token_ids)}): its vLLM is older than 0.32, or expands pictures of this model in another way. "
                "Set engine.kind=embedded or birl."
            )
        return answer

    def parse(self, answer: Any, count: int) -> Completion:
        try:
            choice = answer["choices"][0]
            tokens = tuple(choice["token_ids"])
            content = (choice["logprobs"] or {}).get("content") or []
            if tuple(c["token_id"] for c in content) != tokens or len(tokens) > count:
                raise ValueError("log-probs of other tokens")
            logprobs = tuple(float(c["logprob"]) for c in content)
            if any(p <= NOTHING for p in logprobs):
                raise ValueError("a log-prob that is no number")
            made = versions(choice["weight_versions"] or [], len(tokens))
            return Completion.of(tokens, logprobs, made, STOPS[choice["finish_reason"]]).possible()
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self.peer.strange("/inference/v1/generate", f"{error!r} in {answer}", error)

    def kept(self, answer: Any) -> Support:
        """The support that each token was sampled from: tokens whose processed log-probs are numbers. Raises
        `BirlError` if there may have been more."""
        try:
            rows: list[Any] = []
            for place in (answer["choices"][0]["logprobs"] or {}).get("content") or []:
                top = {int(one["token_id"]): float(one["logprob"]) for one in place["top_logprobs"]}
                rows.append(np.array(sorted(t for t, p in top.items() if p > NOTHING), np.int32))
                if len(rows[-1]) == len(top):
                    raise BirlError(
                        f"{self.address}: {len(top)} tokens or more tie with the last of top_k, which vLLM keeps all. "
                        "Set a smaller rollout.top_k, or engine.kind=embedded."
                    )
            return Support.of(rows)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            self.peer.strange("/inference/v1/generate", f"{error!r} in its top_logprobs", error)

    def scores(self, answer: Any, given: tuple[int, ...]) -> tuple[float, ...]:
        try:
            rows = answer["prompt_logprobs"][-len(given) :]
            return tuple(float(row[str(token)]["logprob"]) for row, token in zip(rows, given, strict=True))
        except (KeyError, TypeError, ValueError) as error:
            self.peer.strange("/inference/v1/generate", f"{error!r} in its prompt_logprobs", error)

    async def load(self, update: Update) -> Held:
        """Load new weights from `update.folder`; running requests continue. Raises `WeightsFailed`: the old ones are
        kept, unless the message says that the engine is broken; then `generate` fails until a load succeeds."""
        async with self._control:
            fresh(update, self.version)
            await self.stage(update)
            return await self._replaced(update, lambda: self.workers("birl_take"), size(update.folder))

    async def stage(self, update: Update) -> None:
        """Let vLLM's workers read and compare the folder while they sample. Nothing is changed."""
        try:
            if not self.hash:
                shared = set.intersection(*(set(reply) for reply in await self.workers("birl_hashes")))
                self.hash = "xxh3_128" if "xxh3_128" in shared else "sha256"
            digests = dict(update.digests)
            if self.hash != "xxh3_128" and digests:
                digests = await asyncio.to_thread(self.rehash, update)
            where = {"folder": str(Path(update.folder).absolute()), "hash": self.hash, "digests": digests}
            await self.workers("birl_stage", **where)
            deadline = time.monotonic() + self.peer.timeout
            while not all(reply["done"] for reply in await self.workers("birl_staged")):
                if time.monotonic() > deadline:
                    raise EngineDown(f"its workers did not read the folder within {self.peer.timeout:.0f} s")
                await asyncio.sleep(0.02)
        except (EngineDown, BirlError) as error:
            raise refusal(update, error) from error

    async def workers(self, method: str, **keys: Any) -> list[Any]:
        """Call a method of every worker. Raises `WeightsFailed` for a refusal."""
        body = {"method": method, "kwargs": keys}
        answer = await self.peer.json("POST", "/collective_rpc", json=body)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not results or not all(isinstance(reply, dict | list) for reply in results):
            self.peer.strange("/collective_rpc", answer)
        for result in results:
            if isinstance(result, dict) and "refused" in result:
                raise WeightsFailed(str(result["refused"]), str(result.get("message")))
        return results

    def rehash(self, update: Update) -> dict[str, str]:
        """Compare the folder here, and return hashes for a vLLM environment without xxhash."""
        tensors = check_folder(update, self.version)
        return {name: vllm_plugin.fingerprint(tensor, self.hash) for name, tensor in tensors.items()}

    async def halt(self) -> None:
        if not self.paused:
            await self.peer.call("POST", KEEP, timeout=QUICK)

    async def relabelled(self, label: str) -> str:
        await self.peer.call("POST", "/update_weight_version", json={"new_version": label})
        reset = f"/reset_prefix_cache?reset_running_requests={str(self.recompute_kv).lower()}"
        await self.peer.call("POST", reset, timeout=QUICK)
        if self.pictures is not None:  # the vision tower's rows, which vLLM caches by picture
            await self.peer.call("POST", "/reset_encoder_cache", timeout=QUICK)
        return (await self.peer.json("GET", "/weight_info", timeout=QUICK))["weight_version"]

    async def release(self) -> None:
        await self.peer.call("POST", "/pause?mode=abort", timeout=QUICK)

    async def go_on(self) -> None:
        await self.peer.call("POST", "/resume", timeout=QUICK)

    async def occupy(self, what: str) -> None:
        await self.peer.call("POST", f"/wake_up?tags={what}", timeout=QUICK)

    async def pause(self, abort: bool = False) -> None:
        """Stop between two tokens. Running requests are kept, or ended as they are with `abort`. New ones wait."""
        async with self._control:
            await self.peer.call("POST", "/pause?mode=abort" if abort else KEEP, timeout=QUICK)
            self.paused = True

    async def abort(self, sessions: Collection[str] | None = None) -> int:
        """End the requests of these sessions, or all of this client, as they are; returns their number."""

        async def tell(names: list[str]) -> None:
            body = {"request_ids": [f"generate-tokens-{name}" for name in names]}
            await self.peer.call("POST", "/abort_requests", json=body, timeout=QUICK)

        return await self.peer.end(sessions, tell)

    async def sleep(self) -> None:
        """Free the memory of weights and KV cache, if vLLM runs with --enable-sleep-mode. Running requests are kept."""
        async with self._control:
            await self.peer.call("POST", "/sleep?level=2&mode=keep", timeout=QUICK)
            self.paused = self.asleep = self.empty = self.cacheless = True


def gauges(text: str) -> dict[str, float]:
    """Parse vLLM's metrics: number of running and waiting requests, and the counters, summed over their labels."""
    result = {"running": 0.0, "waiting": 0.0}
    for family in text_string_to_metric_families(text):
        total = sum(s.value for s in family.samples if not s.name.endswith("_created"))
        if family.name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            result[family.name.rsplit("_", 1)[1]] = total
        elif family.name in COUNTED:
            result[family.name.removeprefix("vllm:")] = total
    return result
