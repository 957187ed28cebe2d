"""Forward and backward passes through the shared base: pieces of waiting requests of several runs, batched.

A request is cut into pieces by its own tokens, so a run's results do not depend on other runs. The tenant that was
served least comes next; pieces of other runs fill the rest of the pass.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from birl.errors import BirlError
from birl.learner.low_rank_run import BrokenPass, SharedBase
from birl.models.low_rank import AdapterWeights
from birl.models.target_logprobs import TargetRow
from birl.server.tinker.tenants import Tenant

Loss = Callable[[Sequence[Tensor]], Tensor]


@dataclass(slots=True, eq=False, kw_only=True)
class Piece:
    """Rows of one run in one pass. `loss`: function of their log-probs; None for a forward pass only."""

    tenant: Tenant
    adapter: AdapterWeights | None
    rows: Sequence[TargetRow]
    loss: Loss | None
    result: "asyncio.Future[list[Tensor]]"
    request: tuple[str, int] = ("", 0)  # run id and request number

    @property
    def tokens(self) -> int:
        return sum(len(r.tokens) for r in self.rows)


@dataclass(slots=True)
class Passes:
    """Queues and batches pieces. `together`: rows are bit-identical in every pass, so that runs may share one."""

    base: SharedBase
    compute: Executor
    together: bool
    waiting: list[Piece] = field(default_factory=list)
    running: "asyncio.Task[None] | None" = None
    chosen: Sequence[Piece] = ()  # pieces of the running pass; none while there is none
    computed: int = 0  # number of passes,
    pieces: int = 0  # and of their pieces

    async def __call__(self, tenant: Tenant, adapter: AdapterWeights | None, rows: Sequence[TargetRow],
                       loss: Loss | None, request: tuple[str, int] = ("", 0)) -> list[Tensor]:  # fmt: skip
        """Log-probs of the targets of each row, [T, K]; with a loss its gradients are accumulated in the adapter.
        Raises what the loss raises, without gradients of this piece."""
        result: asyncio.Future[list[Tensor]] = asyncio.get_running_loop().create_future()
        self.add(Piece(tenant=tenant, adapter=adapter, rows=rows, loss=loss, result=result, request=request))
        if self.running is None or self.running.done():
            self.running = asyncio.create_task(self._run())
        return await result

    def add(self, piece: Piece) -> None:
        """Queue a piece. A returning tenant starts at the level of the others: unused share is not saved up."""
        if self.waiting and all(p.tenant is not piece.tenant for p in self.waiting):
            piece.tenant.served = max(piece.tenant.served, min(p.tenant.served for p in self.waiting))
        self.waiting.append(piece)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self.waiting:
            await asyncio.sleep(0)  # lets callers add further pieces
            chosen = self.chosen = self.choose()
            results: list[Any]
            try:
                results = await loop.run_in_executor(self.compute, self._learn, chosen)
            except BrokenPass as error:
                results = [error] * len(chosen)
            except Exception as error:
                results = [error]
                if len(chosen) > 1:  # each alone, to find the one that fails
                    results = [await loop.run_in_executor(self.compute, self._alone, piece) for piece in chosen]
            self.chosen = ()
            for piece, result in zip(chosen, results, strict=True):
                if piece.result.done():
                    continue
                if isinstance(result, Exception):
                    piece.result.set_exception(result)
                else:
                    piece.result.set_result(result)

    def choose(self) -> list[Piece]:
        """Remove the pieces of the next pass from the queue and return them."""
        first = min(self.waiting, key=lambda p: p.tenant.served)
        chosen, room = [first], self.base.max_tokens - first.tokens
        for piece in sorted(self.waiting, key=lambda p: p.tenant.served) if self.together else ():
            alike = (piece.loss is None) == (first.loss is None)
            own = piece.adapter is None or all(piece.adapter is not other.adapter for other in chosen)
            if piece is not first and alike and own and piece.tokens <= room:
                chosen.append(piece)
                room -= piece.tokens
        self.waiting = [p for p in self.waiting if p not in chosen]
        for piece in chosen:
            piece.tenant.served += piece.tokens
        self.computed += 1
        self.pieces += len(chosen)
        return chosen

    def _learn(self, pieces: Sequence[Piece]) -> list[list[Tensor]]:
        """(compute thread) Compute one pass."""
        losses = [p.loss for p in pieces]
        work = [(p.adapter, p.rows) for p in pieces]
        if losses[0] is None:
            return self.base.learn(work, None)

        def loss(number: int, logp: Sequence[Tensor]) -> Tensor:
            own = losses[number]
            assert own is not None
            value = own(logp)
            if not value.isfinite():
                raise BirlError(
                    f"The loss is {value.item()}: look at the advantages, weights and log-probs sent, and at the "
                    "learning rates so far."
                )
            return value

        return self.base.learn(work, loss)

    def _alone(self, piece: Piece) -> list[Tensor] | Exception:
        try:
            return self._learn([piece])[0]
        except Exception as error:
            return error


def cut(sizes: Sequence[int], most: int) -> list[slice]:
    """Slices of neighbouring items with at most `most` tokens, or of a single longer item."""
    result, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            result.append(slice(start, i))
            start, total = i, 0
        total += size
    return [*result, slice(start, len(sizes))] if sizes else []
