"""A training step on a card that is not there: how often the host waits for a value of it, and that nothing that it
sends there is waited for. A wait within a step leaves the card without work until the host has launched some."""

import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from birl.config import schema
from birl.config.keys import presets
from birl.config.load import load
from birl.data.pack import Batch, pack
from birl.engine.engine import EmbeddedEngine
from birl.learner import learner as learning
from birl.learner.learner import Learner, Stats
from birl.learner.outputs import padded
from birl.parallel.context import split
from birl.parallel.ranks import Grid
from birl.train.build_worker import objective_of
from birl.train.objective import LossInputs, surrogate_of
from tests.data.test_pack import drawn, groups
from tests.families import FAMILIES, family
from tests.gpu.card import CUDA, card
from tests.gpu.test_ranks_memory import first_of
from tests.gpu.test_refill import request
from tests.gpu.test_states import made
from tests.parallel.test_learner import reinforce

META = torch.device("meta")  # PyTorch's engine of gradients asks for the streams of a card, and this has none
SAMPLES = groups(30)
WORK = 2 * pack(SAMPLES, [1.0] * len(SAMPLES), 40)
#: distill and echo need a teacher and an environment, and add nothing here; online_dpo looks for its pairs, and waits
PRESETS = sorted({*presets(schema.RL)["algorithm"]} - {"distill", "echo", "online_dpo"})
MODELS = dict.fromkeys(FAMILIES, 0.0) | {"qwen3_moe": 0.01}  # the weight of the balance of experts


class Waits(TorchDispatchMode):
    """Notes where the host waits for the device: it asks for a value or for a shape that values decide, or sends what
    is not in pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.pinned: list[Tensor] = []

    def note(self, what: str) -> None:
        ours = [f for f in traceback.extract_stack() if "/birl/" in f.filename.replace("\\", "/")]
        self.places.append(f"{what} in {ours[-1].filename}:{ours[-1].lineno}" if ours else what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = func.__name__.partition(".")[0]
        if name == "index":
            if any(t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1]) if isinstance(t, Tensor)):
                self.note("a mask as an index")
        elif torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
            self.note(name)
        elif name in ("_to_copy", "copy_") and len({t.device.type for t in (*given, result)}) > 1:
            free = (kwargs or {}).get("non_blocking") and any(given[0] is t for t in self.pinned)
            if not free:
                self.note(name)
        return result


@contextmanager
def a_card(patch: pytest.MonkeyPatch, device: torch.device) -> Iterator[Waits]:
    """Within, values of the card that are asked for are zeros, and it is noted that they were."""
    waits = Waits()

    def asked(name: str, value: Any) -> None:
        owner = FakeTensor if name in vars(FakeTensor) else Tensor
        plain = getattr(owner, name)

        def instead(tensor: Tensor) -> Any:
            if tensor.device.type != device.type:
                return plain(tensor)
            waits.note(name)
            return value(tensor)

        patch.setattr(owner, name, instead)

    def pin(tensor: Tensor) -> Tensor:
        waits.pinned.append(tensor.clone())
        return waits.pinned[-1]

    with ExitStack() as stack:
        stack.enter_context(card(patch, lambda name, args: None))
        asked("__bool__", lambda tensor: True)
        asked("item", lambda tensor: 0.0)
        asked("tolist", lambda tensor: np.zeros(tuple(tensor.shape)).tolist())
        patch.setattr(Tensor, "pin_memory", pin)
        patch.setattr(learning, "dither", lambda *args: 0)  # counts what it changes, once
        if device is META:
            patch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor.device == META), raising=False)
            patch.setattr(learning, "adamw", lambda *args, **options: None)  # which knows no such device
        yield waits


def on_host(batch: Batch) -> Batch:
    """The same with tensors that have no contents, as those of the card."""
    mode = cast(Any, _get_current_dispatch_mode())
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{n: mode.from_tensor(t) for n, t in values.items() if isinstance(t, Tensor)})


#: Gemma 3's constructor makes a tensor of a number, which is not simulated on this device
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "gemma3_text"])
def test_the_gradients_of_a_step_are_waited_for_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its figures, when all of its micro-batches are launched."""
    assert len(WORK) > 2
    with a_card(monkeypatch, META) as waits, torch.enable_grad():
        learner = Learner(family(kind, torch.float32, "meta"), dtype=torch.bfloat16, router_aux_coef=MODELS[kind])
        for tensor in learner.masters.tensors.values():
            tensor.grad = torch.zeros_like(tensor)
        work, stats = [(replace(on_host(b).to(META)), reinforce) for b in WORK], Stats()
        monkeypatch.setattr("birl.models.varlen.upload", lambda tensor, device: tensor.to(device))
        waits.places.clear()
        with waits:
            learner.learn(work, stats)
    values = [place for place in waits.places if "copy" not in place]  # this card has no memory to send to
    assert len(values) == 1 and "tolist" in values[0], values
    assert stats.count and ("router/balance" in stats.other) == (MODELS[kind] > 0)


@pytest.mark.parametrize("kind", MODELS)
def test_a_micro_batch_is_sent_without_a_wait(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with a_card(monkeypatch, CUDA) as waits:
        learner = Learner(family(kind, torch.float32, "cuda"), dtype=torch.bfloat16)
        work, stats = [on_host(batch) for batch in WORK], Stats()
        learner.forward(work[0])  # what is learned of the model, once
        waits.places.clear()
        with waits:
            for batch in work:
                learner.measure(batch, reinforce, stats)
        assert not waits.places, waits.places


@pytest.mark.parametrize("form", ["gather", "ulysses"])
def test_a_ranks_tokens_of_a_row_are_chosen_without_a_wait(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Context parallelism on a device whose tensors have no values to read."""
    samples = drawn(groups(3), 3)
    batch = padded(pack(samples, [1.0] * len(samples), 400)[0], 2)
    with first_of(Grid(cp=2, context=form), monkeypatch, "cpu") as ranks:
        wanted, there = split(batch, ranks), split(batch.to(META), ranks)
    assert wanted.support is not None and there.support is not None
    assert there.counts == wanted.counts and there.support.starts == wanted.support.starts
    assert 0 < wanted.counts[0] < len(batch.targets)
    for name in ("tokens", "positions", "source", "targets", "order"):
        assert getattr(there, name).is_meta and getattr(there, name).shape == getattr(wanted, name).shape
    assert there.support.ids.is_meta and there.support.ids.shape == wanted.support.ids.shape


@pytest.mark.parametrize("kind", ["qwen3", "lfm2"])
def test_an_engines_step_waits_for_its_tokens_only(
    kind: str, compute: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, then parts of longer ones and next tokens without graphs: what is sent is not waited for. It was in
    every transfer, with states in each of their layers."""
    with a_card(monkeypatch, CUDA) as waits:
        model = family(kind, torch.bfloat16, "cuda") if kind in FAMILIES else made(kind)
        engine = EmbeddedEngine(
            model, cast(Any, None), end_ids=frozenset(), context=4096, compute=compute, version=lambda: 0, max_batch=4,
            kv_cache_gb=0.1,
        )  # fmt: skip
        engine.runner.eager = "no graphs here"
        for length in (40, 50, 3000):
            engine.scheduler.add(request(length, 9, first=5))
        with engine.runner.steady(0, engine.scheduler.pages):
            for _ in range(4):
                waits.places.clear()
                with waits:
                    engine.steps.step()
                assert len(waits.places) <= 2 and all("tolist in" in place for place in waits.places), waits.places


def test_an_optimizer_step_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the gradient's norm, without which it is not taken."""
    with a_card(monkeypatch, CUDA) as waits:
        learner = Learner(family("qwen3", torch.float32, "cuda"), dtype=torch.bfloat16)
        for tensor in learner.masters.tensors.values():
            tensor.grad = torch.zeros_like(tensor)
        with waits:
            learner.optim_step(1e-4)
    assert len(waits.places) == 1 and "item" in waits.places[0], waits.places


@pytest.mark.parametrize("preset", PRESETS)
def test_losses_do_not_wait(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config: schema.RL = load(schema.RL, ["data.train=x.jsonl", f"algorithm={preset}"])
    surrogate = surrogate_of(config.algorithm)
    learner: Any = SimpleNamespace(version=3)
    with a_card(monkeypatch, CUDA) as waits:
        batch = on_host(WORK[0])
        plain = torch.zeros(len(batch.entry))
        known = LossInputs(ref_logp=plain, factor=plain)
        objective = objective_of(config, learner, surrogate, reference=None, logp_and_entropy=lambda batches: [])
        logp, batch = torch.zeros(len(batch.entry), device=CUDA), batch.to(CUDA)
        with waits:
            objective.loss(known, 0.01, 1.0)(logp, logp, batch)
    assert not waits.places, waits.places
