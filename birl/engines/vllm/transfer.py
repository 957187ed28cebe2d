"""vLLM's own weight transfer engines, started with --weight-transfer-config '{"backend": "nccl"}': its workers enter a
NCCL communicator by its unique id, and take each bucket as one packed buffer."""

from base64 import b64decode, b64encode
from contextlib import suppress
from typing import Any

from birl.engines.collective import BroadcastGroup, pieces, shapes_in
from birl.engines.nccl import Communicator, unique_id
from birl.engines.peer import QUICK
from birl.engines.transfer import Transfer
from birl.engines.wire import Invitation
from birl.errors import BirlError, EngineDown
from birl.models.released import nbytes


class Group(BroadcastGroup):
    """`store` of its invitation is the unique id, base64."""

    called_back = False  # a worker waits inside NCCL

    @staticmethod
    def host(address: str, timeout: float) -> tuple[Any, str]:
        return None, b64encode(unique_id()).decode()

    def _open(self) -> None:
        given = self.invitation
        self._group = Communicator(b64decode(given.store), given.size, self.device)


class VLLMTransfer(Transfer):
    group = Group

    async def ranks(self) -> int:
        await self.check("nccl")
        return int((await self.peer.json("GET", "/get_world_size", timeout=QUICK))["world_size"])

    async def check(self, backend: str) -> None:
        """Raises `BirlError` where it was started for another way."""
        result = await self.peer.json("GET", "/server_info?config_format=json", timeout=QUICK)
        has = (result["vllm_config"].get("weight_transfer_config") or {}).get("backend")
        if has != backend:
            raise BirlError(
                f"weights.method={backend}: {self.adapter.address} was started with {has or 'no'} weight transfer "
                f'engine: start vLLM with --weight-transfer-config \'{{"backend": "{backend}"}}\'.'
            )

    async def enter(self, invitation: Invitation) -> None:
        with suppress(EngineDown, BirlError):  # an earlier group
            await self.call("/shutdown_weight_transfer_engine")
        shapes = shapes_in(invitation)
        largest = max(nbytes(names, shapes) for names in pieces(shapes, invitation.bucket_mb))
        info = {
            **{"nccl_unique_id_b64": invitation.store, "rank_offset": invitation.rank, "world_size": invitation.size},
            **{"packed": True, "packed_buffer_size_bytes": largest, "packed_num_buffers": 1},
        }
        await self.call("/init_weight_transfer_engine", {"init_info": info})

    async def call(self, path: str, body: dict[str, Any] | None = None) -> None:
        await self.peer.call("POST", path, timeout=self.seconds, json=body or {})

    async def begin(self) -> None:
        try:
            await self.call("/start_weight_update")
        except EngineDown:  # an update that was cut off is open
            with suppress(EngineDown, BirlError):
                await self.finish()
            await self.call("/start_weight_update")

    async def bucket(self, rows: dict[str, Any], last: str) -> None:
        info = {"names": rows["names"], "dtype_names": rows["dtypes"], "shapes": rows["shapes"]}
        await self.call("/update_weights", {"update_info": info})

    async def finish(self) -> None:
        await self.call("/finish_weight_update")
