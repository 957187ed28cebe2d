"""Pictures go through birl as through transformers' own: its processors, its `generate`, its autograd."""

import asyncio
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from PIL import Image
from torch import Tensor

from birl import kernels
from birl.data.pack import pack
from birl.engine.engine import EmbeddedEngine
from birl.learner.learner import Learner, Stats
from birl.models import vision
from birl.models.load import load_model, load_tokenizer
from birl.models.paged import Cache, Slot
from birl.models.slots import computed_by
from birl.models.verify import ROUNDING, verify
from birl.models.vision import load_pictures
from birl.text.pictures import FIRST, Bounds, Pictures
from birl.types import Completion, Picture, Sample, SamplingParams
from tests import sights
from tests.data.test_pack import make
from tests.learner.test_learner import reinforce

ONE, OTHER = Picture.of(sights.drawn("7", (24, 16))), Picture.of(sights.drawn("3", (16, 32), "yellow"))
KINDS = (
    *("qwen3_vl", "qwen2_5_vl", "qwen3_5", "internvl", "lfm2_vl", "mistral3", "smolvlm", "qwen3_vl_moe", "qwen3_5_moe"),
    *("gemma3", "gemma4", "gemma4_unified"),
)
#: processors that need more than Pillow
NEEDS = {"gemma4_unified": "torchvision", "lfm2_vl": "torchvision", "mistral3": "torchvision", "smolvlm": "num2words"}


@dataclass
class Bench:
    kind: str
    model: Any
    pictures: Pictures
    learner: Learner

    def prompt(self, text: str, *shown: Picture) -> tuple[int, ...]:
        return self.pictures.encode(text.replace("#", sights.MARKS[self.kind][0]), iter(shown))

    def generate(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams, step: int = 2048
    ) -> list[Completion]:
        """`step`: tokens of prompts that are computed at once."""
        with ThreadPoolExecutor(1) as compute:
            options: Any = {"end_ids": frozenset(), "context": 512, "kv_cache_gb": 0.1, "compute": compute}
            engine = EmbeddedEngine(self.model, cast(Any, None), version=lambda: self.learner.version, **options)

            engine.scheduler.prefill = step

            async def main() -> list[Completion]:
                each = (engine.generate(p, replace(params, seed=i)) for i, p in enumerate(prompts))
                return list(await asyncio.gather(*each))

            return asyncio.run(asyncio.wait_for(main(), 120))

    def inputs(self, ids: Sequence[int]) -> dict[str, Any]:
        """What transformers' forward takes for these ids."""
        real = torch.tensor([[self.pictures.id if token >= FIRST else token for token in ids]])
        result: dict[str, Any] = {"input_ids": real, "attention_mask": torch.ones_like(real)}
        spans = self.pictures.spans(list(ids))
        if spans:
            images = [Image.open(io.BytesIO(self.pictures.files[s.picture.digest])).convert("RGB") for s in spans]
            marks = " ".join([self.pictures.token] * len(spans))
            given = self.pictures.processor(text=[marks], images=[images], return_tensors="pt")
            result |= {k: v for k, v in given.items() if k not in ("input_ids", "attention_mask")}
            kinds = torch.tensor([[int(token >= FIRST) for token in ids]])
            result |= {k: kinds for k in ("mm_token_type_ids", "token_type_ids") if k in given}
        return result

    def masks(self, given: dict[str, Any]) -> Any:
        embeddings, shown = self.model.get_input_embeddings()(given["input_ids"]), given.get("mm_token_type_ids")
        positions = torch.arange(given["input_ids"].shape[1])[None]
        return self.model.create_masks_for_generate(self.model.config, embeddings, None, None, positions, shown)

    def logprobs(self, ids: Sequence[int], start: int) -> Tensor:
        """Of the tokens from `start` on, by transformers' own, with its gradient."""
        given = self.inputs(ids)
        with computed_by(self.model, "eager"):
            if self.kind == "gemma4_unified":  # Google's masks, which transformers has with a static cache alone
                given["attention_mask"] = self.masks(given)
            rows = self.model(**given, use_cache=False).logits[0].float().log_softmax(-1)
        targets = torch.tensor(ids[start:])
        return rows[start - 1 : -1].gather(1, targets[:, None])[:, 0]


def bench(path: Path, kind: str, frozen: bool = False) -> Bench:
    if kind in NEEDS:
        pytest.importorskip(NEEDS[kind])
    folder = sights.folder(path / kind, kind)
    model = load_model(folder, pictures=True)
    pictures = load_pictures(folder, model, load_tokenizer(folder), Bounds())
    assert pictures is not None
    vision.give(model, pictures, frozen=frozen)
    return Bench(kind, model, pictures, Learner(model, dtype=torch.float32, max_grad_norm=0))


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Whatever else is in the batch."""
    b = bench(tmp_path, kind)
    verify(b.model)
    prompts = [b.prompt("Hi # and # is?", ONE, OTHER), b.prompt("Only text."), b.prompt("Two: ##", OTHER, OTHER)]
    greedy = SamplingParams(max_tokens=64, temperature=0.0)
    answers = b.generate(prompts, greedy)
    with computed_by(b.model, "eager"):
        for ids, answer in zip(prompts, answers, strict=True):
            options = {"do_sample": False, "max_new_tokens": 64, "use_cache": True, "eos_token_id": None}
            if kind == "gemma4_unified":
                options["cache_implementation"] = "static"
            expected = b.model.generate(**b.inputs(ids), **options)[0, len(ids) :].tolist()
            assert list(answer.tokens) == expected
    assert len({a.ids for a in answers}) == 3


def test_the_processor_says_the_same_tokens(tmp_path: Path) -> None:
    b = bench(tmp_path, "qwen3_vl")
    ids = b.prompt("Hi # and # is? ab", ONE, OTHER)
    images = [Image.open(io.BytesIO(p.data)) for p in (ONE, OTHER)]
    mark = sights.MARKS["qwen3_vl"][0]
    own = b.pictures.processor(text=[f"Hi {mark} and {mark} is? ab"], images=[images])["input_ids"][0]
    assert [b.pictures.id if token >= FIRST else token for token in ids] == list(own)
    assert b.pictures.shown(ids).count(b.pictures.id) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_packed_trees_are_separate_sequences(kind: str, tmp_path: Path) -> None:
    """In log-probs and gradients, by transformers' own forward and autograd; answers of a group share their picture."""
    b = bench(tmp_path, kind)
    first, second = b.prompt("Hi # and # is?", ONE, OTHER), b.prompt("Other #: ", OTHER)
    samples = [
        *(make(first, answer, 0, i, 0.5 + i) for i, answer in enumerate([(5, 9, 30), (5, 7, 11, 40, 41)])),
        make(second, (50, 51), 1, 0, 2.0),
        make(b.prompt("Only text."), (60, 61), 2, 0, 1.0),
    ]
    batches = pack(samples, [0.1] * len(samples), 10_000)
    assert len(batches) == 1 and len(batches[0].trees) == 3
    expected = [b.logprobs(s.tokens.tolist(), int(s.mask.argmax())) for s in samples]
    torch.testing.assert_close(b.learner.forward(batches[0]), torch.cat(expected), atol=1e-5, rtol=1e-5)
    b.learner.forward_backward(batches[0], reinforce, Stats())
    ours = {n: t.grad.clone() for n, t in b.learner.masters.tensors.items() if t.grad is not None}
    b.model.zero_grad(set_to_none=True)
    loss = -sum((e * 0.1 * float(s.advantage)).sum() for e, s in zip(expected, samples, strict=True))
    cast(Tensor, loss).backward()
    largest = max(float(g.abs().max()) for g in ours.values())
    assert {n for n, g in ours.items() if n in vision.tower(b.model) and g.abs().max() > 1e-4 * largest}
    for name, parameter in b.model.named_parameters():
        if parameter.grad is not None:
            gap = (ours[name] - parameter.grad).abs().max().item()
            assert gap <= 3e-5 * max(largest, 1.0), (name, gap)  # sums over pictures, in another order


@pytest.mark.parametrize("kind", KINDS)
def test_engine_and_learner_agree(kind: str, tmp_path: Path) -> None:
    """Also behind a step that has moved the tower, from pages that were found again, and of a prompt in pieces."""
    b = bench(tmp_path, kind)
    prompt = b.prompt("Hi # and # is?", ONE, OTHER)
    for step in (2048, 7):
        answers = b.generate([prompt] * 3, SamplingParams(max_tokens=12), step)
        samples = [make(prompt, a.ids, 0, i, 1.0 - i) for i, a in enumerate(answers)]
        (batch,) = pack(samples, [0.1] * 3, 10_000)
        given = torch.tensor([p for a in answers for p in a.logprobs.tolist()])
        torch.testing.assert_close(b.learner.forward(batch), given, atol=1e-5, rtol=0)
        b.learner.forward_backward(batch, reinforce, Stats())
        b.learner.optim_step(1e-2)


def test_the_tower_computes_a_picture_once_for_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b, own, shown = bench(tmp_path, "qwen3_vl"), vision._seen, list[int]()

    def counted(model: Any, inputs: Any, device: torch.device) -> list[Any]:
        shown.append(len(inputs["image_grid_thw"]))
        return own(model, inputs, device)

    monkeypatch.setattr(vision, "_seen", counted)
    prompt = b.prompt("Hi # and # is?", ONE, OTHER)
    answers = b.generate([prompt] * 4, SamplingParams(max_tokens=4))
    assert sum(shown) == 2
    shown.clear()
    (batch,) = pack([make(prompt, a.ids, 0, i, 1.0) for i, a in enumerate(answers)], [0.1] * 4, 10_000)
    b.learner.forward_backward(batch, reinforce, Stats())
    assert sum(shown) == 2


@pytest.mark.parametrize(("kind", "size"), [("qwen3_5", 16), ("gemma3", 32), ("gemma4", 32)])
def test_bfloat16_loses_what_transformers_loses(
    kind: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers with states, and of pages that birl's kernels pack, on which pictures' tokens see later ones."""
    monkeypatch.setitem(sights.TEXT, "head_dim", size)
    b = bench(tmp_path, kind)
    with torch.no_grad():
        for parameter in b.model.parameters():
            parameter.copy_(parameter.bfloat16())
        prompt, answer = b.prompt("Hi # and # is?", ONE, OTHER), tuple(range(40, 56))
        exact = b.logprobs((*prompt, *answer), len(prompt))
        b.learner = Learner(b.model, dtype=torch.bfloat16, max_grad_norm=0)
        least = (b.logprobs((*prompt, *answer), len(prompt)) - exact).abs().mean().item()
    (given,) = b.generate([prompt], SamplingParams(max_tokens=len(answer), forced=answer), 7)
    (batch,) = pack([make(prompt, answer, 0, 0, 1.0)], [0.1], 10_000)
    for found in (torch.tensor(given.logprobs.tolist()), b.learner.forward(batch)):
        assert (found - exact).abs().mean().item() <= ROUNDING * least
    b.learner.forward_backward(batch, reinforce, Stats())
    assert b.learner.optim_step(1e-3) > 0


def test_pages_are_read_in_order() -> None:
    """As the bfloat16 kernels pack them: what a picture's tokens see again, later ones too."""
    compiled = kernels.load(torch.bfloat16, 32)
    if compiled is None:
        pytest.skip(kernels.problem())
    cache = Cache.make(3, [Slot(0, 2, 2, 32, 32)], torch.bfloat16, torch.device("cpu"))
    keys, values = torch.randn(2, 70, 2, 32, dtype=torch.float32).bfloat16()
    numbers = torch.arange(70, dtype=torch.int32)
    pages = torch.tensor([2, 0, 1], dtype=torch.int32)
    compiled.cache_write(keys, values, cache.keys[0], cache.values[0], pages[numbers // 32], numbers % 32)
    k, v = cache.in_order(cache.keys[0], cache.values[0], pages.long(), packed=True)
    assert torch.equal(k[:, :70].transpose(0, 1), keys) and torch.equal(v[:, :70].transpose(0, 1), values)


def test_other_pictures_are_other_tokens(tmp_path: Path) -> None:
    """So neither pages of the cache nor the trees of a group can mix them up."""
    b = bench(tmp_path, "qwen3_vl")
    other = Picture.of(sights.drawn("8", (24, 16)))
    one, two = b.prompt("Hi #?", ONE), b.prompt("Hi #?", other)
    assert len(one) == len(two) and one != two
    first, again = b.generate([one, two, one], SamplingParams(max_tokens=8, temperature=0.0))[::2]
    assert first == again


def test_a_frozen_tower_keeps_its_weights(tmp_path: Path) -> None:
    b = bench(tmp_path, "qwen3_vl", frozen=True)
    before = {n: p.clone() for n, p in b.model.named_parameters()}
    sample: Sample = make(b.prompt("Hi #?", ONE), (5, 6, 7), 0, 0, 1.0)
    b.learner.forward_backward(pack([sample], [1.0], 1000)[0], reinforce, Stats())
    b.learner.optim_step(1e-2)
    tower = vision.tower(b.model)
    moved = {n for n, p in b.model.named_parameters() if not torch.equal(p, before[n])}
    assert tower and not moved & set(tower)
    assert any(".layers.0." in name for name in moved)
    kept = set(b.learner.optimizer.state)
    assert not any(b.learner.masters.tensors[name] in kept for name in tower)
