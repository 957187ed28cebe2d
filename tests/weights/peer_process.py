"""What vLLM 0.32.0 and SGLang 0.5.23 do with new weights that come without a folder, in a process of its own and over
Gloo: `python tests/weights/peer_process.py RANKS` prints its port. It holds what it was sent and nothing else.

From vLLM (distributed/weight_transfer/nccl_common.py, nccl_engine.py, packed_tensor.py), without streams:
`NCCLWeightTransferInitInfo`, `NCCLWeightTransferUpdateInfo`, `consume`. From SGLang (srt/utils/common.py,
srt/weight_sync/tensor_bucket.py): `init_custom_process_group`, `reconstruct`.

SPDX-License-Identifier: Apache-2.0, Copyright contributors to the vLLM project, 2023-2024 SGLang Team
"""

import base64
import contextlib
import hashlib
import json
import math
import os
import sys
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
import torch.distributed as dist

SPAN = timedelta(seconds=20)


@dataclass(kw_only=True)
class NCCLWeightTransferInitInfo:
    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int
    world_size: int
    nccl_unique_id_b64: str | None = field(default=None, repr=False)
    packed: bool = False
    packed_buffer_size_bytes: int = 1024 * 1024 * 1024
    packed_num_buffers: int = 2

    def __post_init__(self) -> None:
        if self.nccl_unique_id_b64 and (self.master_address is not None or self.master_port is not None):
            raise ValueError("pass nccl_unique_id_b64 OR master_address/master_port, not both")
        self.unique_id = base64.b64decode(self.nccl_unique_id_b64 or "", validate=True)
        if len(self.unique_id) != 128:
            raise ValueError(f"nccl_unique_id_b64 must decode to 128 bytes, got {len(self.unique_id)}")


@dataclass
class NCCLWeightTransferUpdateInfo:
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError("`dtype_names` and `shapes` should be of the same size as `names`")


def consume(info: NCCLWeightTransferUpdateInfo, group: Any, target: int) -> dict[str, torch.Tensor]:
    """vLLM cuts its buffers behind the tensor that fills one."""
    found: dict[str, torch.Tensor] = {}
    waiting: list[tuple[str, list[int], torch.dtype, int]] = []
    rest = len(info.names)
    for name, kind, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
        dtype: torch.dtype = getattr(torch, kind)
        waiting.append((name, shape, dtype, math.prod(shape) * dtype.itemsize))
        rest -= 1
        if sum(row[3] for row in waiting) > target or not rest:
            packed = torch.empty(sum(row[3] for row in waiting), dtype=torch.uint8)
            group.broadcast(packed, 0).wait()
            parts = packed.split([row[3] for row in waiting])
            found |= {
                n: p.contiguous().view(d).view(*s) if s else p.view(d)[0]
                for (n, s, d, _), p in zip(waiting, parts, strict=True)
            }
            waiting = []
    return found


def init_custom_process_group(backend: str, init_method: str, world_size: int, rank: int, group_name: str) -> Any:
    from torch.distributed import distributed_c10d as c10d

    store, rank, world_size = next(c10d.rendezvous(init_method, rank, world_size, timeout=SPAN))
    store.set_timeout(SPAN)
    store = c10d.PrefixStore(group_name, store)
    pg, _ = c10d._new_process_group_helper(
        *(world_size, rank, [], c10d.Backend(backend), store),
        group_name=group_name, backend_options=None, timeout=SPAN, device_id=None,
    )  # fmt: skip
    c10d._world.pg_group_ranks[pg] = {i: i for i in range(world_size)}
    return pg


def reconstruct(names: list[str], dtypes: list[str], shapes: list[list[int]], group: Any) -> dict[str, torch.Tensor]:
    """SGLang's `FlattenedTensorBucket`: received, and cut."""
    rows, offset = [], 0
    for name, kind, shape in zip(names, dtypes, shapes, strict=True):
        dtype: torch.dtype = getattr(torch, kind)
        if offset % dtype.itemsize:
            raise ValueError(f"Unaligned received tensor {name}: byte offset {offset}, dtype {dtype}")
        rows.append((name, dtype, shape, offset))
        offset += math.prod(shape) * dtype.itemsize
    flat = torch.empty(offset, dtype=torch.uint8)
    dist.broadcast(flat, src=0, group=group)
    return {
        n: flat[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
        for n, dtype, shape, start in rows
    }


class Server:
    """`ranks` of vLLM are threads. A path in `fail` answers with its status, or ends the process where that is 0."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.label, self.paused, self.open = ranks, "default", False, False
        self.fail: dict[str, int] = {}
        self.calls: list[str] = []
        self.held: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
        self.groups: dict[Any, Any] = {}
        self.backend: str | None = "nccl"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.calls.append(path)
        if (status := self.fail.get(path)) is not None:
            if not status:
                os._exit(1)
            return status, {"success": False, "message": "it is out of order"}
        plain = path.partition("?")[0]
        if plain in ("/pause", "/pause_generation"):
            self.paused = True
        elif plain in ("/resume", "/continue_generation"):
            self.paused = False
        elif plain == "/update_weight_version":
            self.label = body["new_version"]
        elif handler := getattr(self, plain[1:].replace("/", "_"), None):
            return handler(body)
        elif plain not in ("/reset_prefix_cache",):
            return 404, {"message": f"there is no {path}"}
        return 200, {}

    # what tests ask for

    def test_fail(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.fail, self.backend = body.get("fail", {}), body.get("backend", self.backend)
        return 200, {}

    def test_held(self, body: dict[str, Any]) -> tuple[int, Any]:
        def digest(tensor: torch.Tensor) -> str:
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"

        calls, self.calls = self.calls, []
        return 200, {"held": [{n: digest(t) for n, t in held.items()} for held in self.held], "calls": calls}

    # vLLM

    def weight_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"weight_version": self.label}

    def get_world_size(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"world_size": self.ranks}

    def server_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        transfer = {"backend": self.backend} if self.backend else None
        return 200, {"vllm_config": {"weight_transfer_config": transfer}, "tp_size": self.ranks, "pp_size": 1}

    def init_weight_transfer_engine(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert set(body) == {"init_info"}
        self.info = info = NCCLWeightTransferInitInfo(**body["init_info"])
        host, port = info.unique_id.rstrip(b"\0").decode().split(":")

        def enter(rank: int) -> None:
            store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=SPAN)
            group = dist.ProcessGroupGloo(store, rank + info.rank_offset, info.world_size, SPAN)
            group.allreduce([torch.zeros(1)]).wait()  # pyright: ignore
            self.groups[rank] = group

        self.each(enter)
        return 200, {}

    def shutdown_weight_transfer_engine(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert not self.open
        self.groups.clear()
        return 200, {}

    def start_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert self.paused
        if self.open:
            return 500, "Internal Server Error"
        self.open = True
        return 200, {}

    def update_weights(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert self.paused and self.open and set(body) == {"update_info"} and self.info.packed
        info, target = NCCLWeightTransferUpdateInfo(**body["update_info"]), self.info.packed_buffer_size_bytes
        self.each(lambda rank: self.held[rank].update(consume(info, self.groups[rank], target)))
        return 200, {}

    def finish_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert self.open and set(body) <= {"weight_version"}
        self.open = False
        return 200, {}

    def each(self, work: Any) -> None:
        failures: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                work(rank)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    # SGLang

    def model_info(self, body: dict[str, Any]) -> tuple[int, Any]:
        return 200, {"weight_version": self.label}

    def init_weights_update_group(self, body: dict[str, Any]) -> tuple[int, Any]:
        keys = {"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"}
        assert set(body) == keys and self.ranks == 1
        place = f"tcp://{body['master_address']}:{body['master_port']}"
        size, rank, name = body["world_size"], body["rank_offset"], body["group_name"]
        self.groups[name] = init_custom_process_group(body["backend"], place, size, rank, name)
        return 200, {"success": True, "message": "Succeeded to initialize custom process group."}

    def destroy_weights_update_group(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.groups.pop(body["group_name"])
        return 200, {"success": True, "message": ""}

    def begin_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.open:
            return 400, {"success": False, "message": "a weight-update session is already open"}
        self.open = True
        return 200, {"success": True, "message": "Success"}

    def update_weights_from_distributed(self, body: dict[str, Any]) -> tuple[int, Any]:
        keys = {"names", "dtypes", "shapes", "group_name", "flush_cache", "load_format"}
        assert keys <= set(body) <= keys | {"weight_version"} and body["load_format"] == "flattened_bucket"
        if not self.open:
            return 400, {"success": False, "message": "must run between begin_weight_update() and end_weight_update()"}
        group = self.groups[body["group_name"]]
        self.held[0].update(reconstruct(body["names"], body["dtypes"], body["shapes"], group))
        self.label = body.get("weight_version", self.label)
        return 200, {"success": True, "message": "Succeeded to update parameter online."}

    def end_weight_update(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.open = False
        return 200, {"success": True, "message": "Success"}


def main() -> None:
    server = Server(int(sys.argv[1]))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                status, result = server.answer(self.path, json.loads(body or b"{}"))
            except Exception as error:  # as both do
                status, result = 500, f"{type(error).__name__}: {error}"
            data = json.dumps(result).encode()
            with contextlib.suppress(ConnectionError):  # the learner asks no more
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *words: object) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(http.server_address[1], flush=True)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    sys.stdin.read()  # until the test is over


if __name__ == "__main__":
    main()
