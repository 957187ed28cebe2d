"""Checkpoints: adapters on disk, to continue training, to sample with, or to export in PEFT's format."""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from birl.errors import BirlError
from birl.learner.export import peft_names, peft_targets
from birl.learner.low_rank_run import ALPHA, LowRankConfig, LowRankRun, SharedBase
from birl.models.low_rank import HEAD, AdapterWeights
from birl.regular import read_json
from birl.server.tinker import requests
from birl.server.tinker.runs import Run
from birl.server.tinker.store import UNNAMED, Checkpoint, Store, left_out, named, parsed, read_tensors
from birl.server.tinker.tenants import Quota, Sessions, make_room

SHORTEST, LONGEST = 3600, 10 * 366 * 24 * 3600  # limits of a checkpoint's time to live [s]
EPHEMERAL = 24 * 3600.0  # time to live of unnamed sampling weights after their last use [s],
NEWEST, QUIET = 8, 600.0  # but only QUIET [s] for a run's older ones, all except the last NEWEST
MOST_SAVED = 10**6  # maximum saves of one run


@dataclass(slots=True)
class Sampler:
    """A sampling session: base weights, or a checkpoint's. `clients`: number of its copies."""

    id: str
    owner: str
    base: str
    path: str | None
    clients: int = 0


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of a service. `memory`: bytes of weights cached for sampling."""

    store: Store
    shared: SharedBase
    memory: int
    quota: Quota
    sessions: Sessions
    kept: "OrderedDict[str, AdapterWeights]" = field(default_factory=OrderedDict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)  # last use of a session's weights
    began: float = field(default_factory=time.monotonic)
    changing: threading.Lock = field(default_factory=threading.Lock)  # lock of files, and of `kept` loaded from them

    def restore(self) -> None:
        for id, file in self.store.files("samplers"):
            with left_out(file):
                self.samplers[id] = TypeAdapter(Sampler).validate_python({"id": id, **read_json(file)})

    def save(self, run: Run, adapter: LowRankRun, kind: str, data: Mapping[str, Any], seq: int) -> Checkpoint:
        """Save a checkpoint. Raises `BirlError` for an invalid or existing name, and over the quota."""
        name, seconds = data.get("path"), data.get("ttl_seconds")
        if seconds is not None:
            seconds = requests.whole(data, "ttl_seconds", 0, SHORTEST, LONGEST)
        elif name is None:
            seconds = EPHEMERAL
        if data.get("age_encryption_recipients"):
            raise BirlError(
                "age_encryption_recipients: encrypted exports are not offered by this server, and the cookbook's "
                "weights.download of a training checkpoint asks for one: call save_weights_external, and download that."
            )
        made = Checkpoint(
            run=run.id, kind=kind, name=f"session-{seq}" if name is None else named(requests.words(data, "path")),
            owner=run.owner, made=time.time(), expires=None if seconds is None else time.time() + seconds,
            metadata=requests.metadata(data), info={"base": run.base, "config": run.config and asdict(run.config)},
        )  # fmt: skip
        again = name is None or requests.flag(data, "overwrite", False)
        if (old := self.store.find(made.path)) is not None and old.info.get("seq") == seq:
            return old  # saved by this request before a kill; it may have been published since
        made.info |= {"seq": seq, "steps": adapter.steps}
        files = self._files(adapter, kind, made)
        with self.changing:
            sizes = (len(f) if isinstance(f, bytes) else sum(t.nbytes for t in f[0].values()) for f in files.values())
            self._count(made, sum(sizes))
            result = self.store.save(made, files, again)
            self.kept.pop(result.path, None)  # may have had other weights before
            if kind == "sampler_weights":
                for path in list(self.kept) if name is None else ():  # older ones are rarely used, and read again
                    of_run, _, other = parsed(path)
                    if of_run == run.id and UNNAMED.fullmatch(other):
                        self.kept.pop(path, None)
                self.remember(result, adapter.weights)
        if name is None:
            self.prune(run)
        return result

    def _count(self, made: Checkpoint, size: int) -> None:
        """Raise `BirlError` if the owner's quota has no room for a checkpoint, which may replace one of its name."""
        own = [c for c in self.store.of(made.owner) if c.path != made.path]
        if len(own) >= self.quota.checkpoints:
            raise BirlError(f"You have {len(own)} checkpoints, which is your quota: delete some.")
        used = sum(c.size for c in own)
        if used + size > self.quota.disk:
            raise BirlError(
                f"The checkpoint has {size / 2**20:.1f} MiB, your others have {used / 2**20:.1f}, and the quota is "
                f"{self.quota.disk / 2**20:.1f}: delete some."
            )

    def prune(self, run: Run) -> None:
        """Remove unnamed sampling weights that were not used for a while, except the newest."""
        old = [c for c in self.store.checkpoints(run.id) if c.kind == "sampler_weights" and UNNAMED.fullmatch(c.name)]
        for checkpoint in sorted(old, key=lambda c: c.made)[:-NEWEST]:
            if time.monotonic() - self.used.get(checkpoint.path, self.began) > QUIET:
                self.kept.pop(checkpoint.path, None)
                self.used.pop(checkpoint.path, None)
                for sampler in [s.id for s in list(self.samplers.values()) if s.path == checkpoint.path]:
                    self.forget_sampler(sampler)
                self.store.delete(checkpoint)

    def _files(self, adapter: LowRankRun, kind: str, made: Checkpoint) -> dict[str, Any]:
        if kind == "external_weights":
            tensors, config = peft(adapter, str(made.info["base"]), self.shared.model)
            return {"adapter_model.safetensors": (tensors, {}), "adapter_config.json": config}
        about = {"config": made.info["config"], "steps": adapter.steps, "base": made.info["base"]}
        return {"adapter.safetensors": (adapter.state(optimizer=kind == "weights"), about)}

    def read(self, path: str, owner: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and metadata of a checkpoint. Raises `BirlError` if it is neither the owner's nor published."""
        result = self.readable(path, owner)
        if result.kind == "external_weights":
            raise BirlError(f"{path} is an export; load tinker://.../weights/... or .../sampler_weights/... instead.")
        return read_tensors(self.store.folder(result) / "adapter.safetensors")

    def readable(self, path: str, owner: str) -> Checkpoint:
        result = self.store.find(path)
        if result is None or (result.owner != owner and not result.public):
            raise BirlError(f"There is no checkpoint {path}.")
        return result

    def own(self, path: str, owner: str) -> Checkpoint:
        result = self.readable(path, owner)
        if result.owner != owner:
            raise BirlError(f"There is no checkpoint {path} of yours.")
        return result

    def open_sampler(self, run: Run, made: Checkpoint) -> str:
        """A sampling session for unnamed weights; the same id for the same request."""
        session, _, number = run.id.partition(":train:")
        id = f"{session}:sample:{(int(number) + 1) * MOST_SAVED + made.info['seq']}"  # ids chosen by clients start at 0
        return self.add_sampler(Sampler(id, run.owner, run.base, made.path)).id

    def room_for_sampler(self, owner: str) -> None:
        """Raise `BirlError` if the owner's quota of sampling sessions is used up."""
        own = [s.id for s in list(self.samplers.values()) if s.owner == owner]
        advice = "use those that you have, or close their session (ServiceClient.close)"
        make_room("sampling sessions", own, self.quota.samplers, self.sessions.ended, self.forget_sampler, advice)

    def forget_sampler(self, id: str) -> None:
        self.samplers.pop(id, None)
        self.store.remove("samplers", id)

    def add_sampler(self, sampler: Sampler) -> Sampler:
        """Add a sampling session, or return the existing one. Raises `BirlError`."""
        if sampler.id not in self.samplers:
            self.room_for_sampler(sampler.owner)
        result = self.samplers.setdefault(sampler.id, sampler)
        about = {"owner": result.owner, "base": result.base, "path": result.path, "clients": result.clients}
        self.store.write("samplers", result.id, about)
        return result

    def remember(self, made: Checkpoint, weights: AdapterWeights) -> None:
        """Cache weights for sampling, evicted in LRU order."""
        self.kept[made.path] = weights
        self.kept.move_to_end(made.path)
        while len(self.kept) > 1 and sum(w.nbytes for w in list(self.kept.values())) > self.memory:
            self.kept.popitem(last=False)

    def weights(self, sampler: Sampler) -> AdapterWeights | None:
        """The adapter of a sampling session; None for the base. Raises `BirlError` if the checkpoint is gone."""
        if sampler.path is None:
            return None
        result = self.readable(sampler.path, sampler.owner)
        self.used[result.path] = time.monotonic()
        if UNNAMED.fullmatch(result.name) and (result.expires or 0) < time.time() + EPHEMERAL / 2:
            result.expires = time.time() + EPHEMERAL
            self.store.change(result)
        if (weights := self.kept.get(sampler.path)) is None:
            with self.changing:  # concurrent requests for it wait until it is read
                weights = self.kept.get(sampler.path) or self._weights(sampler)
                self.remember(result, weights)
        with suppress(KeyError):  # evicted meanwhile
            self.kept.move_to_end(sampler.path)
        return weights

    def _weights(self, sampler: Sampler) -> AdapterWeights:
        tensors, about = self.read(str(sampler.path), sampler.owner)
        adapter = self.shared.run(LowRankConfig(**about["config"]))
        adapter.load(tensors)
        return adapter.weights


def peft(adapter: LowRankRun, base: str, model: nn.Module) -> tuple[dict[str, Tensor], bytes]:
    """Files for peft's `PeftModel.from_pretrained`, and vLLM."""
    names = [name for name in adapter.names if name != HEAD]
    own, targets, tensors = peft_names(names, model) | {HEAD: HEAD}, peft_targets(names, model), {}
    for name, tensor in adapter.masters.items():
        layer, _, key = name.rpartition(".")
        tensors[f"base_model.model.{own[layer]}.{key}.weight"] = tensor.detach().to(torch.float32)
    targets["target_modules"] = (targets["target_modules"] or []) + [HEAD] * (HEAD in adapter.names)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": adapter.config.rank,
        "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "inference_mode": True, **targets,
    }  # fmt: skip
    return tensors, json.dumps(config, indent=2).encode()
