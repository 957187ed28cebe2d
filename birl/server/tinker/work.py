"""Executes the requests of each run in order."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from birl.errors import BirlError, first_line
from birl.learner.low_rank_run import AdamStep, BrokenPass, LowRankConfig
from birl.models.target_logprobs import TargetRow
from birl.server.tinker import losses, requests, wire
from birl.server.tinker.checkpoints import Checkpoints
from birl.server.tinker.futures import PROTO, Answer
from birl.server.tinker.inputs import Reader
from birl.server.tinker.passes import Passes, cut
from birl.server.tinker.requests import Datum, ForwardBackward
from birl.server.tinker.runs import Run, Runs
from birl.server.tinker.store import KILLED, Record, refusal
from birl.server.tinker.tenants import Tenants

SNAPSHOT = 30.0  # [s]: requests of at most this time are executed again after a kill
MOST_JOURNALED = 256  # requests
PATIENCE = 900.0  # seconds that requests wait for an earlier one; the client retries for five minutes
#: requests that save checkpoints, and their kinds
SAVED = {
    "save_weights": "weights",
    "save_weights_external": "external_weights",
    "save_weights_for_sampler": "sampler_weights",
}


@dataclass(slots=True)
class Work:
    """Executes requests. `reader`: parses the model's inputs."""

    runs: Runs
    passes: Passes
    checkpoints: Checkpoints
    tenants: Tenants
    compute: Executor
    reader: Reader
    ending: bool = False  # start no more requests

    def start(self, run: Run) -> None:
        """Execute the ready requests of a run, unless that is already running."""
        if run.working is None and run.next is not None and not self.ending:
            run.working = asyncio.create_task(self._run(run))

    async def _run(self, run: Run) -> None:
        try:
            while (record := run.next) is not None and not self.ending:
                answer, promise = await self._answer(run, record), run.promises[record.seq]
                del run.waiting[record.seq]
                run.done, run.used = record.seq, time.time()
                try:
                    if self._due(run, record):
                        await asyncio.to_thread(self.runs.try_to_save, run, answer)
                finally:
                    promise.settle(answer)
        finally:
            run.working = None
            self.start(run)

    def skip_missing(self) -> None:
        """Fail requests that never arrived, so that later ones do not wait forever."""
        late = time.monotonic() - PATIENCE
        for run in list(self.runs.by_id.values()):
            if run.next is None and any(run.promises[seq].made < late for seq in run.waiting):
                first = min(run.waiting)
                for seq in range(run.done + 1, first):
                    reason = f"Request {seq} did not arrive, for which request {first} waited {PATIENCE:.0f} s."
                    self.runs.accept(run, refusal(seq, reason, "missing"))
                self.start(run)

    def _due(self, run: Run, record: Record) -> bool:
        """Whether a snapshot is due."""
        behind, kind = run.done - run.snapshot, record.kind
        long = time.monotonic() - run.snapshot_time > SNAPSHOT or behind > MOST_JOURNALED
        return kind == "load_weights" or (long and kind == "optim_step") or behind > 4 * MOST_JOURNALED

    async def _answer(self, run: Run, record: Record) -> Answer:
        try:
            if run.deleted and record.kind != "unload_model":
                raise BirlError(f"{run.id} was unloaded: create a new one, or load a checkpoint.")
            if record.kind == "forward_backward":
                return await self._forward_backward(run, record)
            return await KINDS[record.kind](self, run, json.loads(record.body), record)
        except BirlError as error:
            return Answer.failure(str(error))
        except Exception as error:
            return Answer.failure(f"{type(error).__name__}: {first_line(error)}", "server")

    def fail(self, word: str, raised: bool) -> None:
        """Record the failure of the running pass, after which the process ends. At the next start its requests are
        executed again if a rank was killed for the first time in them, perhaps for another reason; else (`raised`: by
        a rank) they are answered with the error. (any thread)"""
        ended, _, log = word.partition("\nThe last collectives")[0].strip().partition(" The end of ")
        reason = f"{ended} {log.splitlines()[-1]}" if log else ended.rpartition("\n")[2]
        for run, seq in (p.request for p in self.passes.chosen if p.request[0]):
            again = raised or seq in self.runs.by_id[run].killed
            why = f"Its pass failed on a rank, and the server ended: {reason}"
            self.runs.store.append(run, refusal(seq, why) if again else Record(seq, KILLED, b""))

    async def _forward_backward(self, run: Run, record: Record) -> Answer:
        tenant = self.tenants.named(run.owner)
        async with tenant.reading:
            request = await asyncio.to_thread(requests.forward_backward, record.body, self.reader)
        losses.check(request)
        adapter = await self.runs.loaded(run)
        learns = not request.forward_only
        if learns and run.broken:
            raise BirlError(run.broken)
        if learns:
            adapter.collect()
        total, logp, values = 0.0, list[Tensor](), list[Tensor]()
        try:
            for piece in cut([len(d) for d in request.data], self.passes.base.max_tokens):
                data = request.data[piece]
                loss = partial(_summed, request, data, values) if learns else None
                rows = [TargetRow(*(torch.tensor(x, dtype=torch.int64) for x in (d.tokens, d.targets))) for d in data]
                logprobs = await self.passes(tenant, adapter.weights, rows, loss, (run.id, record.seq))
                logp += [p.cpu() for p in logprobs]
                total += float(values[-1]) if learns else float(losses.of_data(request, data, logprobs))
        except Exception as error:
            if learns and (logp or isinstance(error, BrokenPass)):  # partly accumulated
                adapter.drop_gradients()
                run.broken = (
                    f"A forward_backward since the last optim_step failed ({first_line(error)}); step on first."
                )
            raise
        return Answer(output(request.data, logp, total, request), PROTO)

    async def _optim_step(self, run: Run, data: Mapping[str, Any], record: Record) -> Answer:
        params = data.get("adam_params")
        if not isinstance(params, Mapping) or data.get("optimizer_params") is not None:
            raise BirlError("Only AdamW is offered: send AdamParams.")
        for name in (name for name, value in params.items() if value is None):
            raise BirlError(f"{name}: is null, which the client sends for NaN and infinity.")
        how = AdamStep(
            learning_rate=requests.real(params, "learning_rate", 1e-4, 0.0, 1e6),
            beta1=requests.real(params, "beta1", 0.9, 0.0, 0.9999999),
            beta2=requests.real(params, "beta2", 0.95, 0.0, 0.9999999),
            eps=requests.real(params, "eps", 1e-12, 1e-30, 1.0),  # with 0 a zero gradient would make weights NaN
            weight_decay=requests.real(params, "weight_decay", 0.0, 0.0, 1e6),
            clip=requests.real(params, "grad_clip_norm", 0.0, -1e9, 1e9),
        )
        adapter = await self.runs.loaded(run)
        broken, run.broken = run.broken, ""
        if broken:
            raise BirlError(f"Nothing was learned in this step. {broken}")
        norm = await asyncio.get_running_loop().run_in_executor(self.compute, adapter.step, how)
        return Answer.of(metrics={"grad_norm": norm, "optimizer_steps": float(adapter.steps)})

    async def _save(self, run: Run, data: Mapping[str, Any], record: Record) -> Answer:
        """Save a checkpoint. Sampling weights stay in memory; unnamed ones open a new sampling session, whose id is the
        answer."""
        kind, seq = record.kind, record.seq
        adapter = await self.runs.loaded(run)
        opens = SAVED[kind] == "sampler_weights" and data.get("path") is None
        if opens:
            self.checkpoints.room_for_sampler(run.owner)
        made = await asyncio.to_thread(self.checkpoints.save, run, adapter, SAVED[kind], data, seq)
        if opens:
            return Answer.of(path=None, sampling_session_id=self.checkpoints.open_sampler(run, made), type=kind)
        return Answer.of(path=made.path, type=kind)

    async def _load_weights(self, run: Run, data: Mapping[str, Any], record: Record) -> Answer:
        """Load a checkpoint into an existing run, or the one created for it."""
        path = requests.words(data, "path")
        tensors, about = await asyncio.to_thread(self.checkpoints.read, path, run.owner)
        config = LowRankConfig(**about["config"])
        if run.config is None:
            run.config = config
            self.runs.store.make_run(run.id, run.about())
        elif replace(config, seed=run.config.seed) != run.config:
            raise BirlError(f"{path} has rank {config.rank} and other parts than {run.id}: make a run from it instead.")
        adapter = await self.runs.loaded(run)
        adapter.drop_gradients()
        run.broken = ""
        wanted = requests.flag(data, "optimizer", False)
        if wanted and not any(name.startswith("optimizer.") for name in tensors) and about["steps"]:
            raise BirlError(f"{path} has no state of an optimizer.")
        kept = {n: t for n, t in tensors.items() if wanted or not n.startswith("optimizer.")}
        await asyncio.get_running_loop().run_in_executor(
            self.compute, adapter.load, kept, about["steps"] if wanted else 0
        )
        return Answer.of(path=path, model_id=run.id, type="load_weights")

    async def _refused(self, run: Run, data: Mapping[str, Any], record: Record) -> Answer:
        raise BirlError(data["reason"])

    async def _missing(self, run: Run, data: Mapping[str, Any], record: Record) -> Answer:
        """Fail a request that never arrived: it may have been part of the gradient, or the step."""
        (await self.runs.loaded(run)).drop_gradients()
        run.broken = f"{data['reason']} Step on first, and send the data again."
        raise BirlError(data["reason"])

    async def _unload(self, run: Run, data: Mapping[str, Any], record: Record) -> Answer:
        if not run.deleted:
            await asyncio.to_thread(self.runs.try_to_save, run)  # a client may fetch earlier answers after a kill
        run.deleted, run.adapter = True, None
        self.runs.store.make_run(run.id, run.about())
        return Answer.of(model_id=run.id, type="unload_model")


KINDS = {
    "optim_step": Work._optim_step,
    **dict.fromkeys(SAVED, Work._save),
    "load_weights": Work._load_weights,
    "unload_model": Work._unload,
    "refused": Work._refused,
    "missing": Work._missing,
}


def _summed(request: ForwardBackward, data: Sequence[Datum], values: list[Tensor], logp: Sequence[Tensor]) -> Tensor:
    result = losses.of_data(request, data, logp)
    values.append(result.detach())
    return result


def output(data: Sequence[Datum], logp: Sequence[Tensor], total: float, request: ForwardBackward) -> bytes:
    """A ForwardBackwardOutput message: for each datum its log-probs in the targets' shape, and for cross_entropy the
    loss of each position."""
    columns: dict[str, list[np.ndarray]] = {"logprobs": []}
    for datum, own in zip(data, logp, strict=True):
        columns["logprobs"].append(own.numpy().astype(np.float32))
        if request.loss == "cross_entropy":
            weights = datum.inputs.get("weights")
            given = np.ones(own.shape, np.float32) if weights is None else weights.reshape(own.shape)
            columns.setdefault("elementwise_loss", []).append((-own.numpy() * given).astype(np.float32))
    body = wire.bytes_field(1, b"ArrayRecord")
    flat = [d.inputs["target_tokens"].ndim == 1 for d in data]
    start = 0
    while start < len(data):  # neighbours with equally many targets form one record
        stop = start
        while stop < len(data) and (flat[stop], logp[stop].shape[1]) == (flat[start], logp[start].shape[1]):
            stop += 1
        entries = b""
        for name, values in columns.items():
            column = _batched(values[start:stop], flat[start])
            entries += wire.bytes_field(2, wire.bytes_field(1, name.encode()) + column)
        record = wire.bytes_field(1, b"ArrayRecord") + entries + wire.number_field(3, stop - start)
        body += wire.bytes_field(2, record)
        start = stop
    metric = wire.bytes_field(1, b"loss:sum") + wire.double_field(2, total)
    return body + wire.bytes_field(3, metric)


def _batched(values: Sequence[np.ndarray], flat: bool) -> bytes:
    offsets = np.cumsum([0, *(v.nbytes for v in values)]).astype("<i8")
    data = b"".join(v.astype("<f4").tobytes() for v in values)
    body = wire.bytes_field(1, data) + wire.bytes_field(2, offsets.tobytes()) + wire.number_field(3, wire.FLOAT32)
    if not flat:
        body += wire.bytes_field(4, wire.encoded(values[0].shape[1]))
    return wire.bytes_field(2, body)
