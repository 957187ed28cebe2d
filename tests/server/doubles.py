"""vLLM and SGLang as far as birl speaks with them: their requests and answers, in shapes recorded from the real
servers, over a tiny real engine. What they would refuse, these refuse."""

from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from birl.engine.engine import EmbeddedEngine
from birl.engines.vllm import plugin as vllm_plugin
from birl.models.digests import digests
from birl.text.parts import Finder
from birl.text.pictures import Pictures, is_picture
from birl.types import SamplingParams, Stop, Update
from tests.engine.test_update import weights
from tests.server.sglang_api_types import GenerateRequest, GenerateResponse


class Double:
    """What both share: weights with labels, and failures that a test asks for."""

    def __init__(self, engine: EmbeddedEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.labels = {0: "default"}
        self.calls: list[str] = []
        self.fail: dict[str, Response] = {}  # path -> what it answers instead
        self.bodies: list[Any] = []  # of the requests to generate

    @property
    def label(self) -> str:
        return self.labels[self.engine.version]

    def client(self, app: Starlette) -> httpx.AsyncClient:
        async def watched(scope: Any, receive: Any, send: Any) -> None:
            path = scope["path"] + (f"?{scope['query_string'].decode()}" if scope["query_string"] else "")
            self.calls.append(path)
            failure = self.fail.get(scope["path"])
            await (failure or app)(scope, receive, send)

        return httpx.AsyncClient(transport=httpx.ASGITransport(watched), base_url="http://engine")

    def spans(self, versions: tuple[int, ...]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for i, version in enumerate(versions):
            if not found or found[-1]["version"] != self.labels[version]:
                found.append({"version": self.labels[version], "start": i, "end": i})
            found[-1]["end"] = i + 1
        return found

    async def scored(self, ids: list[int]) -> list[float]:
        """The log-prob of each id but the first."""
        params = SamplingParams(max_tokens=len(ids) - 1, forced=tuple(ids[1:]), ignore_eos=True)
        return (await self.engine.generate((ids[0],), params)).logprobs.tolist()

    async def take(self, folder: str) -> None:
        tensors = weights(Path(folder), next(self.engine.runner.model.parameters()).dtype)
        version = self.engine.version + 1
        await self.engine.load(Update(version=version, digests=digests(tensors), tensors=tensors))
        self.labels[version] = self.labels.get(version, "")


SAMPLING = {
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "detokenize", "logprobs", "prompt_logprobs"),
}


class VLLMDouble(Double):
    def __init__(self, engine: EmbeddedEngine, folder: Path, hashes: tuple[str, ...] = ("xxh3_128", "sha256")) -> None:
        super().__init__(engine, folder)
        self.worker, self.hashes, self.mode = vllm_plugin.Weights(), hashes, "processed_logprobs"
        self.staged = ""
        self.pictures: Pictures | None = None  # of a model with a vision tower

    def app(self) -> Starlette:
        post = {
            "/inference/v1/generate": self.generate,
            "/collective_rpc": self.rpc,
            **dict.fromkeys(("/pause", "/resume", "/sleep", "/wake_up", "/abort_requests"), self.control),
            **dict.fromkeys(("/reset_prefix_cache", "/reset_encoder_cache", "/update_weight_version"), self.control),
        }
        get = {"/v1/models": self.models, "/server_info": self.server, "/metrics": self.metrics}
        get |= {"/weight_info": self.weight_info, "/is_paused": self.is_paused}
        return Starlette(
            routes=[Route(path, f, methods=["POST"]) for path, f in post.items()]
            + [Route(path, f) for path, f in get.items()]
        )

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        asked, ids = body["sampling_params"], body["token_ids"]
        fields = {"request_id", "token_ids", "sampling_params", "cache_salt"}
        fields |= {"content_parts", "return_token_ids"} if self.pictures is not None else set()
        assert set(body) <= fields and set(asked) <= SAMPLING
        if parts := body.get("content_parts"):  # its processor replaces each placeholder of the prompt
            assert self.pictures is not None and all(set(part) == {"type", "url", "uuid"} for part in parts)
            shown = [self.pictures.add(Finder().picture(part["url"])) for part in parts]
            ids = [own for t in ids for own in (shown.pop(0).ids if t == self.pictures.id else (t,))]
        assert (
            body["cache_salt"]
            and asked["logprobs"] in (0, 2 * asked["top_k"] + 8)
            and asked["include_stop_str_in_output"]
        )
        if len(ids) >= self.engine.context or len(ids) + asked["max_tokens"] > self.engine.context:
            error = {"message": "the prompt is too long", "type": "BadRequestError", "param": None, "code": 400}
            return JSONResponse({"error": error}, 400)
        prompt_logprobs = None
        if asked.get("prompt_logprobs") is not None:
            found = zip(ids[1:], await self.scored(ids), strict=True)
            prompt_logprobs = [None, *({str(t): {"logprob": p, "rank": 1, "decoded_token": None}} for t, p in found)]
        params = SamplingParams(
            **{k: asked[k] for k in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos")},
            stop=tuple(asked["stop"]),
            stop_ids=tuple(asked["stop_token_ids"]),
            support=asked["logprobs"] > 0,
        )
        answer = await self.engine.generate(tuple(ids), params, "generate-tokens-" + body["request_id"])
        content = [
            {"token_id": t, "logprob": p, "rank": 1, "top_logprobs": [{"token_id": t, "logprob": p, "rank": 1}]}
            for t, p in zip(answer.ids, answer.logprobs.tolist(), strict=True)
        ]
        if answer.support is not None:  # the others that it lists have no probability
            for row, words in zip(content, np.split(answer.support.ids, answer.support.counts.cumsum()), strict=False):
                outside = [t for t in range(self.engine.runner.model.config.vocab_size) if t not in words]  # pyright: ignore
                listed = [*((t, -1.0) for t in words.tolist()), *((t, -9999.0) for t in outside)][: asked["logprobs"]]
                row["top_logprobs"] += [
                    {"token_id": t, "logprob": p, "rank": 1} for t, p in listed if t != row["token_id"]
                ]
        choice = {
            **{"index": 0, "finish_reason": str(answer.stop), "stop_reason": None, "token_ids": answer.tokens.tolist()},
            **{"routed_experts": None, "sampling_mask": None, "weight_versions": self.spans(answer.versions.tolist())},
            "logprobs": {"content": content},
        }
        result = {"request_id": "x", "prompt_logprobs": prompt_logprobs, "choices": [choice]}
        if body.get("return_token_ids") and self.pictures is not None:
            result["prompt_token_ids"] = [self.pictures.id if is_picture(t) else t for t in ids]
        return JSONResponse(result)

    async def rpc(self, request: Request) -> Response:
        body = await request.json()
        method, keys = body["method"], body["kwargs"]
        if method == "birl_hashes":
            return JSONResponse({"results": [list(self.hashes)]})
        if method == "birl_take":
            assert self.engine.paused
            if self.worker._birl_staged is None:
                return JSONResponse({"results": [{"refused": "missing", "message": "nothing was staged"}]})
            await self.take(self.staged)
            return JSONResponse({"results": [{"seconds": 0.1, "bytes": 1}]})
        self.staged = keys.get("folder", self.staged)
        return JSONResponse({"results": [getattr(self.worker, method)(**keys)]})

    async def control(self, request: Request) -> Response:
        path, query = request.url.path, request.query_params
        if path == "/pause":
            await self.engine.pause(abort=query["mode"] == "abort")
        elif path == "/resume":
            await self.engine.resume()
        elif path == "/sleep":
            await self.engine.sleep()
        elif path == "/wake_up":
            await self.engine.wake()
            if query["tags"] == "kv_cache":  # the trap: vLLM goes on by itself
                await self.engine.resume()
        elif path == "/abort_requests":
            ids = (await request.json())["request_ids"]
            return JSONResponse({"status": "aborted", "aborted": await self.engine.abort(set(ids))})
        elif path == "/update_weight_version":
            self.labels[self.engine.version] = (await request.json())["new_version"]
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"root": str(self.folder), "max_model_len": self.engine.context}]})

    async def server(self, request: Request) -> Response:
        model = {"dtype": "torch.bfloat16", "logprobs_mode": self.mode}
        return JSONResponse({"vllm_config": {"model_config": model}})

    async def metrics(self, request: Request) -> Response:
        counters = self.engine.counters
        return PlainTextResponse(
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{engine="0"}} {counters.running}\n'
            "# TYPE vllm:num_requests_waiting gauge\n"
            f'vllm:num_requests_waiting{{engine="0"}} {counters.waiting}\n'
            "# TYPE vllm:generation_tokens counter\n"
            f'vllm:generation_tokens_total{{engine="0"}} {counters.tokens}\n'
            'vllm:generation_tokens_created{engine="0"} 1.7e+09\n'
        )

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.label})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self.engine.paused})


class SGLangDouble(Double):
    def app(self) -> Starlette:
        post = {"/generate": self.generate, "/update_weights_from_disk": self.update, "/abort_request": self.abort}
        post |= dict.fromkeys(("/pause_generation", "/continue_generation"), self.control)
        post |= dict.fromkeys(("/release_memory_occupation", "/resume_memory_occupation"), self.control)
        get = dict.fromkeys(("/model_info", "/server_info", "/v1/models", "/v1/loads"), self.told)
        return Starlette(
            routes=[Route(path, f, methods=["POST"]) for path, f in post.items()]
            + [Route(path, f) for path, f in get.items()]
        )

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        try:
            asked = GenerateRequest.from_json_value(body)
        except msgspec.ValidationError as error:
            return JSONResponse({"error": str(error)}, 400)
        sampling, ids = asked.sampling_params, asked.input_ids
        assert asked.return_logprob and sampling.top_p == 1 and sampling.min_p == 0 and sampling.no_stop_trim
        start = asked.logprob_start_len
        given: list[Any] = []
        if start >= 0:
            scores = [None, *await self.scored(ids)]
            given = [[None if i == start else scores[i], ids[i], None] for i in range(start, len(ids))]
        params = SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            stop=tuple(sampling.stop),
            stop_ids=tuple(sampling.stop_token_ids),
            ignore_eos=bool(sampling.ignore_eos),
            seed=sampling.sampling_seed,
        )
        answer = await self.engine.generate(tuple(ids), params, asked.rid)
        reasons: dict[Stop, Any] = {
            Stop.STOP: {"type": "stop", "matched": 2},
            Stop.LENGTH: {"type": "length", "length": len(answer.ids)},
            Stop.ABORT: {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
        }
        meta = {
            **{"id": asked.rid, "prompt_tokens": len(ids), "completion_tokens": len(answer.ids), "cached_tokens": 0},
            **{"finish_reason": reasons[answer.stop], "weight_version": self.label, "e2e_latency": 0.1},
            "output_token_logprobs": [[p, t, None] for t, p in zip(answer.ids, answer.logprobs.tolist(), strict=True)],
            "input_token_logprobs": given,
            "weight_versions": self.spans(answer.versions.tolist()) or [{"version": self.label, "start": 0, "end": 0}],
        }
        told = {"text": "", "output_ids": answer.tokens.tolist(), "meta_info": meta}
        GenerateResponse.from_json_value(told)
        return JSONResponse(told)

    async def update(self, request: Request) -> Response:
        body = await request.json()
        assert set(body) == {"model_path", "weight_version", "flush_cache", "abort_all_requests"} and self.engine.paused
        await self.take(body["model_path"])
        self.labels[self.engine.version] = body["weight_version"]
        message = f"Succeeded to update model weights. Weight version updated to {body['weight_version']}."
        return JSONResponse({"success": True, "message": message, "num_paused_requests": 0})

    async def abort(self, request: Request) -> Response:
        await self.engine.abort({(await request.json())["rid"]})
        return Response()

    async def control(self, request: Request) -> Response:
        path, body = request.url.path, await request.json()
        if path == "/pause_generation":
            assert body["mode"] in ("abort", "retract", "in_place")
            await self.engine.pause(abort=body["mode"] == "abort")
        elif path == "/continue_generation":
            await self.engine.resume()
        elif path == "/release_memory_occupation":
            await self.engine.sleep()
        elif body["tags"] == ["weights"]:
            await self.engine.wake()
        return JSONResponse({"message": "successfully.", "status": "ok"})

    async def told(self, request: Request) -> Response:
        counters = self.engine.counters
        answers: dict[str, Any] = {
            "/model_info": {"model_path": str(self.folder), "weight_version": self.label, "is_generation": True},
            "/server_info": {"dtype": "bfloat16", "internal_states": [{}], "version": "0.5.23"},
            "/v1/models": {"data": [{"id": "m", "root": "m", "max_model_len": self.engine.context}]},
            "/v1/loads": {"loads": [{"num_running_reqs": counters.running, "num_waiting_reqs": counters.waiting}]},
        }
        return JSONResponse(answers[request.url.path])
