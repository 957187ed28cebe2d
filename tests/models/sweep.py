"""Every causal language model of transformers, tiny and random, through birl: `python -m tests.models.sweep [KIND ...]`
prints what is supported, measured against transformers' own generation and its own attention; `--write` writes it to
docs/models.md, where other architectures keep what was measured before."""

import asyncio
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from birl.data.pack import pack
from birl.engine.engine import EmbeddedEngine
from birl.errors import BirlError
from birl.learner.export import write_shards
from birl.learner.learner import Learner, Stats
from birl.learner.lora import Lora
from birl.models import twin
from birl.models.decoder import llama_shaped
from birl.models.fused_layers import fused_layers
from birl.models.load import keep_angles
from birl.models.slots import computed_by
from birl.models.verify import verify
from birl.parallel import experts, tensor
from birl.types import Sample, SamplingParams
from tests.data.test_pack import make
from tests.learner.test_learner import reinforce
from tests.models import test_vision
from tests.zoo import KINDS, LEFT_OUT, build

PROMPT, ANSWER = tuple(range(5, 28)), 64  # more tokens than a window of the zoo has
TREES = 1e-5  # of log-probs, absolute and relative; of gradients, relative to the norm of the whole
LOGP, TIE = 1e-4, 1e-3  # TIE: of two log-probs
#: for models that know no other kind
LONGROPE: dict[str, Any] = {
    **{"rope_type": "longrope", "original_max_position_embeddings": 128, "short_mscale": 1.2, "long_mscale": 1.3},
    **{"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.0 + 2 * i for i in range(8)]},
}
GRADIENT = 5e-4  # of the largest number in it: a delta rule whose chunks are cut elsewhere differs by 1.7e-4 in float32
#: Gated DeltaNet, which multiplies rounding beyond TREES (transformers' own chunks and steps differ as much): these are
#: trained with matrices of a quarter
STEEP = ("olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
PAGE = Path(__file__).parents[2] / "docs/models.md"
HEAD = """# Models

What birl does with every causal language model of transformers {version}, measured with tiny random models of its real
classes in float32 on a CPU by `make models`, which writes this page. Nothing here was written by hand.

- **sampled**: {answer} greedy tokens of the engine, over its pages, are those of transformers' own `generate`.
- **trained**: log-probs of packed sequences are those of transformers' own forward of each alone (within {trees:.0e},
  absolute and relative), and the gradient is that of each alone (the norm of the difference within {trees:.0e} of its
  norm, and each weight's within {gradient:g} of its largest number). Gated DeltaNet multiplies rounding: models with it
  have matrices of a quarter here.
- **trees**: the same where the answers of a prompt share it.
- **LoRA**: adapters on all linear layers take a step, and the engine's log-probs are the learner's (within {logp:g}).
- **rope**: trees with rotary positions that are scaled (linear, by 4; Phi's by longrope). -: its config has no one such
  option.
- **exported**: transformers loads what birl writes of it, and every weight has the same bits. vLLM and others read the
  same names.
- **TP**, **EP**: `parallel.tp=2` splits its layers, `parallel.ep=2` its experts (-: it has none). no: refused when a
  run starts, by name. That the numbers are those of one rank is tested for fewer (`tests/parallel/`).
- **own layers**: where birl's own kernels compute whole layers instead of transformers' modules, in sizes that the
  kernels have: on a CPU, on CUDA.

Sequences are longer than the windows of sliding attention and the chunks of chunked attention.

Before any run, birl's `verify` refuses what it has no rule for: a kind of layer, a module that mixes tokens outside of
attention, or an option of attention, by name and whatever the weights are. Speed is another matter: see
[gpu.md](gpu.md).
"""
PICTURES = """
## Pictures

Vision-language models, by their own image processors ([pictures.md](pictures.md)): **sampled**, 64 greedy tokens behind
prompts with pictures are those of `generate`; **trees**, log-probs of packed answers that share their pictures, and
gradients, the tower's among them, are those of transformers' own forward of each sequence (1e-5); **engine**, its
log-probs are the learner's (1e-5), also of prompts in pieces and behind a step that moved the tower.
"""
NONE, NO = "-", "no"


class Bench:
    def __init__(self, model: Any, lora: Lora | None = None) -> None:
        self.model = model
        self.learner = Learner(model, dtype=torch.float32, max_grad_norm=0, lora=lora)

    def generate(self, params: Sequence[SamplingParams]) -> Any:
        with ThreadPoolExecutor(1) as compute:
            options: Any = {"end_ids": frozenset(), "context": 256, "kv_cache_gb": 0.1, "compute": compute}
            engine = EmbeddedEngine(self.model, cast(Any, None), version=lambda: self.learner.version, **options)

            async def main() -> Any:
                return await asyncio.gather(*(engine.generate(PROMPT, p) for p in params))

            return asyncio.run(asyncio.wait_for(main(), 120))

    def logprobs(self, samples: Sequence[Sample]) -> Tensor:
        batches = pack(samples, [1.0] * len(samples), 10_000)
        order = torch.cat([b.sample for b in batches]).argsort(stable=True)
        return torch.cat([self.learner.forward(b) for b in batches])[order]

    def gradient(self, parts: Sequence[Sequence[Sample]]) -> dict[str, Tensor]:
        for master in self.learner.masters.tensors.values():
            master.grad = None
        for samples in parts:
            for batch in pack(samples, [0.1] * len(samples), 10_000):
                self.learner.forward_backward(batch, reinforce, Stats())
        tensors = self.learner.masters.tensors
        return {name: t.grad.clone() for name, t in tensors.items() if t.grad is not None and t.numel()}


@torch.no_grad()
def own_logprobs(model: Any, samples: Sequence[Sample]) -> Tensor:
    """Of the answers' tokens, each sample alone by transformers' own."""
    result = []
    with computed_by(model, "eager"):
        for s in samples:
            ids = torch.as_tensor(s.tokens)[None]
            logp = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)[:-1]
            mask = torch.tensor(s.mask[1:])
            result.append(logp.gather(1, ids[0, 1:, None])[:, 0][mask])
    return torch.cat(result)


@torch.no_grad()
def sampled(bench: Bench) -> str:
    """What is wrong with greedy answers. Where two words are as likely, either is right, and what follows is that
    word's."""
    (answer,) = bench.generate([SamplingParams(max_tokens=ANSWER, temperature=0.0)])
    with computed_by(bench.model, "eager"):
        ids = torch.tensor([PROMPT])
        options = {"do_sample": False, "max_new_tokens": ANSWER, "use_cache": True, "eos_token_id": None}
        expected = bench.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(PROMPT) :].tolist()
        if answer.tokens.tolist() == expected:
            return ""
        logits = bench.model(input_ids=torch.tensor([PROMPT + answer.ids]), use_cache=False).logits[0]
    best = logits[len(PROMPT) - 1 : -1].float().log_softmax(-1)
    gap = (best.max(1).values - best.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]).max().item()
    return "" if gap < TIE and len(answer.ids) == ANSWER else f"other tokens than generate ({gap:.2g} nats)"


def trained(bench: Bench, samples: list[Sample]) -> str:
    """What is wrong with packed log-probs and gradients."""
    expected = own_logprobs(bench.model, samples)
    gaps = (bench.logprobs(samples) - expected).abs()
    if not (gaps - TREES * expected.abs()).max().item() <= TREES:
        return f"other log-probs ({gaps.max().item():.2g} nats)"
    packed, alone = bench.gradient([samples]), bench.gradient([[s] for s in samples])
    gap = norm(packed[name] - grad for name, grad in alone.items()) / norm(alone.values())
    if not gap <= TREES:
        return f"another gradient ({gap:.2g} of its norm)"
    least = 1e-2 * max(grad.abs().max().item() for grad in alone.values())  # a key's bias has none but rounding
    for name, grad in alone.items():
        gap = ((packed[name] - grad).abs().max() / grad.abs().max().clamp(min=least)).item()
        if not gap <= GRADIENT:
            return f"another gradient of {name} ({gap:.2g})"
    return ""


def norm(tensors: Iterable[Tensor]) -> float:
    return sum(t.double().pow(2).sum().item() for t in tensors) ** 0.5


def adapted(model: Any) -> str:
    bench = Bench(model, Lora(rank=2, alpha=4.0))
    samples = rows(groups=1, episodes=2)
    bench.gradient([samples])
    bench.learner.optim_step(1e-2)
    bench.gradient([samples])  # B is zero no more
    bench.learner.optim_step(1e-2)
    (answer,) = bench.generate([SamplingParams(max_tokens=16, seed=1)])
    gap = (bench.logprobs([make(PROMPT, answer.ids, 0, 0)]) - torch.tensor(answer.logprobs.tolist())).abs().max().item()
    return "" if gap <= LOGP else f"other log-probs ({gap:.2g} nats)"


def rows(groups: int, episodes: int) -> list[Sample]:
    """Sequences longer than the windows; `episodes` answers share a prompt."""
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 300, (n,), generator=generator).tolist())

    result = []
    for group in range(groups):
        prompt = ids(19 + group)
        result += [make(prompt, ids(9 + 4 * e), group, e, 0.5 + e) for e in range(episodes)]
    return result


def tried(work: Any, *arguments: Any) -> str:
    """`work`'s verdict, or its failure: whatever is wrong is told, not raised."""
    try:
        return work(*arguments)
    except BirlError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {line(error)}"


def measured(kind: str) -> dict[str, str]:
    """By column what is wrong, "" for nothing; or under `unbuilt` or `refused` a reason."""
    try:
        model = build(kind)
    except Exception as error:
        own = isinstance(error, KeyError) and error.args == ("birl",)
        why = "transformers does not let birl replace its attention" if own else ""
        return {"refused": why} if own else {"unbuilt": line(error)}
    try:
        verify(model)
    except BirlError as error:
        return {"refused": str(error)}
    bench = Bench(model)
    result = {"sampled": tried(sampled, bench)}
    bench = Bench(quarter(build(kind))) if kind in STEEP else bench
    result |= {"trained": tried(trained, bench, rows(groups=3, episodes=1))}
    result |= {"trees": tried(trained, bench, rows(groups=2, episodes=3)), "LoRA": tried(adapted, build(kind))}
    result |= {"rope": tried(scaled, kind), "exported": tried(exported, build(kind))}
    return result | {"TP": split(build(kind)), "EP": spread(build(kind)), "own layers": own_layers(bench.model)}


def quarter(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.25 if parameter.ndim > 1 else 1.0
    return model


def scaled(kind: str) -> str:
    before = getattr(build(kind).config, "rope_parameters", None)
    if not isinstance(before, dict) or before.get("rope_type") != "default":
        return NONE
    scaling = LONGROPE if kind in ("phi3", "phimoe") else {"rope_type": "linear", "factor": 4.0}
    model = build(kind, rope_parameters={**before, **scaling}, original_max_position_embeddings=128)
    keep_angles(model)
    verify(model)
    return trained(Bench(quarter(model) if kind in STEEP else model), rows(groups=2, episodes=2))


def exported(model: Any) -> str:
    """What is wrong with what transformers reads of a written model."""
    own = {n for n, _ in (*model.named_parameters(), *model.named_buffers())}  # tied ones by one name
    tensors = {name: t for name, t in model.state_dict().items() if name in own}
    with tempfile.TemporaryDirectory() as place:
        shapes = {name: t.shape for name, t in tensors.items()}
        write_shards(Path(place), model, shapes, lambda names: {n: tensors[n] for n in names}, torch.float32, 10**9)
        model.config.save_pretrained(place)
        again = type(model).from_pretrained(place, dtype=torch.float32).state_dict()
    other = [name for name, t in tensors.items() if not torch.equal(again[name], t)]
    return f"another {other[0]}" if other else ""


def split(model: Any) -> str:
    try:
        return "" if tensor.check(model, 2) else NO
    except BirlError:
        return NO


def spread(model: Any) -> str:
    each = experts.experts_of(model)
    try:
        for module in each:
            experts.check(module, 2, 1)
    except BirlError:
        return NO
    return "" if each else NONE


def own_layers(model: Any) -> str:
    made = {"CPU": llama_shaped(model), "CUDA": hasattr(model.base_model, "layers") and fused_layers(model)}
    return ", ".join(where for where, own in made.items() if own) or NONE


def seen(kind: str) -> dict[str, str]:
    """By column what is wrong with pictures for a vision-language model."""
    checks: dict[str, Any] = {
        "sampled": test_vision.test_greedy_answers_are_those_of_transformers,
        "trees": test_vision.test_packed_trees_are_separate_sequences,
        "engine": test_vision.test_engine_and_learner_agree,
    }
    result = {}
    for name, check in checks.items():
        with tempfile.TemporaryDirectory() as place:
            try:
                result[name] = tried(lambda *words, check=check: check(*words) or "", kind, Path(place))
            except pytest.skip.Exception as error:
                result[name] = f"not tried: {line(error)}"
    return result


def line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]


def page(results: dict[str, dict[str, str]], pictures: dict[str, dict[str, str]]) -> str:
    columns = ("sampled", "trained", "trees", "LoRA", "rope", "exported", "TP", "EP", "own layers")
    whole = {k: r for k, r in results.items() if "sampled" in r}
    refused = {k: r["refused"] for k, r in results.items() if "refused" in r}
    unbuilt = {k: r["unbuilt"] for k, r in results.items() if "unbuilt" in r} | LEFT_OUT
    version = transformers.__version__.rpartition(".")[0]
    lines = [HEAD.format(version=version, answer=ANSWER, logp=LOGP, trees=TREES, gradient=GRADIENT)]
    lines += [
        f"## Accepted: {len(whole)}\n",
        "| model type | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    lines += [
        f"| {k} | " + " | ".join(r[c].replace("|", "/") or "yes" for c in columns) + " |" for k, r in whole.items()
    ]
    lines += [f"\n## Refused: {len(refused)}\n", "| model type | what `verify` says |", "|---|---|"]
    lines += [f"| {k} | {cell(r)} |" for k, r in refused.items()]
    lines += [f"\n## Not tried: {len(unbuilt)}\n", "| model type | why no tiny one was built |", "|---|---|"]
    lines += [f"| {k} | {cell(r)} |" for k, r in unbuilt.items()]
    lines += [PICTURES, "| model type | sampled | trees | engine |", "|---|---|---|---|"]
    lines += [
        f"| {k} | " + " | ".join(cell(r[c]) or "yes" for c in ("sampled", "trees", "engine")) + " |"
        for k, r in pictures.items()
    ]
    others = sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(pictures))
    lines += [f"\nNo rule for the pictures of: {', '.join(others)}. A picture for one of these is an error."]
    return "\n".join([*lines, ""])


def cell(text: str) -> str:
    for mark in "|<>_*`":
        text = text.replace(mark, f"\\{mark}")
    return text


def main(arguments: Sequence[str]) -> None:
    names = [a for a in arguments if not a.startswith("-")] or KINDS
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        twin.cache_folder = lambda name: Path(folder)
        results = {}
        for kind in names:
            results[kind] = measured(kind)
            print(kind, results[kind], flush=True)
        pictures = {}
        for kind in test_vision.KINDS if names is KINDS else set(names) & set(test_vision.KINDS):
            result = seen(kind)
            if not any(each.startswith("not tried") for each in result.values()):  # else what was measured before stays
                pictures[kind] = result
            print(kind, "pictures", result, flush=True)
    if "--write" in arguments:
        known = written(PAGE.read_text(encoding="utf-8"))
        results = {k: r for k in KINDS if (r := results.get(k) or known[0].get(k))}
        pictures = {k: r for k in test_vision.KINDS if (r := pictures.get(k) or known[1].get(k))}
        PAGE.write_text(page(results, pictures), encoding="utf-8")


def written(text: str) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """What `page` has written, its arguments again."""
    results, pictures, columns = dict[str, dict[str, str]](), dict[str, dict[str, str]](), list[str]()
    for row in text.splitlines():
        if row.startswith("| model type |"):
            columns = [column.strip() for column in row.strip("|").split("|")][1:]
        elif row.startswith("| "):
            kind, *cells = [plain(each.strip()) for each in re.split(r"(?<!\\)\|", row)[1:-1]]
            own = ["" if each == "yes" else each for each in cells]
            if "engine" in columns:
                pictures[kind] = dict(zip(columns, own, strict=True))
            elif len(columns) > 1:
                results[kind] = dict(zip(columns, own, strict=True))
            elif kind not in LEFT_OUT:
                results[kind] = {"refused" if "verify" in columns[0] else "unbuilt": own[0]}
    return results, pictures


def plain(text: str) -> str:
    """`cell` undone."""
    return re.sub(r"\\([|<>_*`])", r"\1", text)


if __name__ == "__main__":
    main(sys.argv[1:])
