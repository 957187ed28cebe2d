"""SGLang's own endpoints for new weights: its ranks join a group of torch.distributed, and receive each bucket as one
flat buffer (load_format=flattened_bucket)."""

from contextlib import suppress
from typing import Any

import torch.distributed as dist

from birl.engines.collective import NCCL, BroadcastGroup, store_address
from birl.engines.peer import QUICK
from birl.engines.transfer import Transfer
from birl.engines.wire import Invitation
from birl.errors import BirlError, EngineDown


class Group(BroadcastGroup):
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
    group = Group
    entered = ""  # name of the joined group

    async def ranks(self) -> int:
        server = await self.peer.json("GET", "/server_info", timeout=QUICK)
        if wrong := [key for key in ("pp_size", "dp_size") if server.get(key, 1) != 1]:
            raise BirlError(
                f"{self.adapter.address} runs with {wrong[0]}={server[wrong[0]]}, and SGLang takes weights without a "
                "folder under tensor parallelism alone: use weights.method=reload."
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
