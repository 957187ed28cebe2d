"""LoRA on a base of 4 or 8 bits: gradients by autograd, the numbers of a base that holds what the codes say, and one
policy for learner, engine, servers, checkpoints and exports."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from birl import kernels
from birl.cli import main
from birl.config import schema
from birl.config.load import load
from birl.data.pack import pack
from birl.errors import BirlError
from birl.learner import checkpoint
from birl.learner.comparison import Past
from birl.learner.learner import Learner
from birl.learner.lora import Lora, digest, targets
from birl.models import attention
from birl.models.load import load_model
from birl.models.quantized import quantized_layers
from birl.models.slices import quantize, values
from birl.plan import run_memory as memory
from birl.plan import sizes
from birl.types import Update
from birl.weights.publisher import published
from tests.engine import test_engine
from tests.engine.test_engine import PROMPTS, Bench, seeded
from tests.engine.test_update import engine
from tests.gpu.test_lora_memory import QWEN_7B
from tests.learner.test_lora import SAMPLES, WAYS, backward, close, gradients, loss_of, model_of, shaken, trained
from tests.train import test_rl

KINDS = ["nf4", "int8"]
DTYPES = [torch.float32, torch.bfloat16]


def learner_of(
    way: str, kind: str = "nf4", dtype: torch.dtype = torch.float32, base: int = 0, **options: Any
) -> Learner:
    lora = {"rank": 4, "alpha": 8.0, "seed": 5} | {k: options.pop(k) for k in Lora.__slots__ if k in options}
    model = quantize(model_of(way, base), kind)
    return Learner(model, dtype=dtype, max_grad_norm=0, lora=Lora(**lora), **options)  # type: ignore[arg-type]


def dense(way: str, kind: str, dtype: torch.dtype) -> torch.nn.Module:
    """A plain model with the numbers that the codes say."""
    model, quantized = model_of(way), quantize(model_of(way), kind)
    for name, value in values(quantized):
        model.get_parameter(name).data = value.to(dtype).float() if name in quantized_layers(quantized) else value
    return model


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [*WAYS, "qwen2, with biases"])
def test_gradients_are_autograds_through_the_dequantised_weights(way: str, kind: str, dora: bool) -> None:
    learner = shaken(learner_of(way, kind, dora=dora, gradient_checkpointing=way == "plain"))
    base = dense(way, kind, torch.float32)
    stats = backward(learner, 60)
    leaves = {n: t.clone().requires_grad_() for n, t in learner.masters.tensors.items()}
    whole = {}
    for name in targets(base, ["all-linear"]):
        v = base.get_parameter(f"{name}.weight").detach() + 2.0 * leaves[f"{name}.lora_B"] @ leaves[f"{name}.lora_A"]
        if dora:
            v = v * (leaves[f"{name}.lora_magnitude"] / v.detach().norm(dim=1))[:, None]
        whole[f"{name}.weight"] = v
    loss = loss_of(lambda ids: functional_call(base, whole, (ids,), {"use_cache": False}))
    assert stats.loss == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    close(gradients(learner), {n: t.grad for n, t in leaves.items() if t.grad is not None}, 2e-5)
    assert all(p.grad is None for p in learner.model.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_lora_on_a_base_with_the_numbers_of_the_codes(way: str, dtype: torch.dtype, kind: str) -> None:
    """Bit for bit where the products are the same; A and B have another sum of products where there are no kernels."""
    one = learner_of(way, kind, dtype)
    two = Learner(dense(way, kind, dtype), dtype=dtype, max_grad_norm=0, lora=Lora(rank=4, alpha=8.0, seed=5))
    (batch,) = pack(SAMPLES, [0.1] * len(SAMPLES), 10_000)
    for _ in range(2):
        if way == "kernels" and not kernels.problem():
            assert torch.equal(one.forward(batch), two.forward(batch))
            assert all(torch.equal(t, two.tensors()[n]) for n, t in one.tensors().items() if n != "lora.base")
        else:
            near = 1e-4 if dtype == torch.float32 else 0.1  # nats; the last bits of bfloat16 differ by processor
            torch.testing.assert_close(one.forward(batch), two.forward(batch), rtol=0, atol=near)
        for learner in (one, two):
            backward(learner, 60)
            learner.optim_step(1e-3)
    assert one.weights().keys() == two.weights().keys() == published(one.model).keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("way", "dtype"), [("kernels", torch.float32), ("kernels", torch.bfloat16), ("plain", torch.float32)]
)
def test_the_engine_samples_from_what_was_trained(
    way: str, dtype: torch.dtype, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded engine, and one elsewhere that was sent the weights."""
    monkeypatch.setattr(
        test_engine, "Learner", lambda model, **options: Learner(quantize(model, kind), lora=Lora(rank=4), **options)
    )
    with ThreadPoolExecutor(1) as compute:
        folder = request.getfixturevalue("tiny" if way == "kernels" else "plain")
        bench = Bench(folder, compute, dtype)
        before = bench.generate(PROMPTS, seeded(len(PROMPTS)))
        backward(bench.learner)
        bench.learner.optim_step(0.05)
        embedded = bench.generate(PROMPTS, seeded(len(PROMPTS)))
        other = engine(folder, compute, dtype)
        update = Update(version=1, tensors=published(bench.learner.model), digests={})
        assert other.weights is not None
        other.weights.swap(other.weights.stage(update), update)
        bench.engine = other
        sent = bench.generate(PROMPTS, seeded(len(PROMPTS)))
        assert bench.gap(PROMPTS, before).abs().mean() > 0.1
        for after in (embedded, sent):
            gap = bench.gap(PROMPTS, after).abs()
            if way == "kernels" and not kernels.problem():
                assert gap.max() == 0
            else:
                assert gap.mean() < (0.05 if dtype == torch.bfloat16 else 1e-5)


def test_only_targets_are_trained_and_the_rest_is_quantised_too() -> None:
    learner = learner_of("kernels", dtype=torch.bfloat16, targets=["q_proj", "layers.1.mlp.up_proj"])
    before = {name: layer.matrix() for name, layer in quantized_layers(learner.model).items()}
    backward(learner)
    learner.optim_step(0.05)
    moved = {n for n, layer in quantized_layers(learner.model).items() if not torch.equal(layer.matrix(), before[n])}
    assert moved == {f"{name}.weight" for name in learner.masters.adapters} and len(moved) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_holds_the_matrices_and_gives_the_same_bits(tmp_path: Path, way: str, dora: bool) -> None:
    one = learner_of(way, dtype=torch.bfloat16, dora=dora)
    for _ in range(2):
        backward(one)
        one.optim_step(1e-2)
    path = checkpoint.save(tmp_path, 2, one.tensors(), {})
    assert not [n for n in one.tensors() if "weight" in n or "codes" in n]
    other = learner_of(way, dtype=torch.bfloat16, dora=dora)
    checkpoint.fill(path, other.tensors())
    other.loaded(2)
    for learner in (one, other):
        backward(learner)
        learner.optim_step(1e-2)
    assert all(torch.equal(t, other.tensors()[n]) for n, t in one.tensors().items())
    for wrong in (learner_of(way, "int8", dora=dora), learner_of(way, base=1, dora=dora)):
        with pytest.raises(BirlError, match=r"another base model.*lora\.quantize"):
            checkpoint.fill(path, wrong.tensors())
            wrong.loaded(2)


def test_the_digest_is_of_every_code_and_scale() -> None:
    model = quantize(model_of("kernels"), "nf4")
    before, layer = digest(model), quantized_layers(model)["model.layers.1.mlp.up_proj.weight"]
    assert before == digest(quantize(model_of("kernels"), "nf4")) != digest(model_of("kernels"))
    layer.codes[7] ^= 1
    assert before != digest(model)
    layer.codes[7] ^= 1
    layer.scales[3] *= 1.001
    assert before != digest(model)


@pytest.mark.parametrize("way", WAYS)
def test_what_an_earlier_version_gave_it_gives_again(way: str) -> None:
    learner, (batch,) = learner_of(way, dtype=torch.bfloat16), pack(SAMPLES, [0.1] * len(SAMPLES), 10_000)
    past, given = Past(learner, 2), []
    for _ in range(3):
        past.keep()
        given.append(learner.forward(batch))
        backward(learner)
        learner.optim_step(1e-2)
    now = learner.forward(batch)
    with past.instead() as put:
        for version in (2, 1, 2):
            put(version)
            assert torch.equal(learner.forward(batch), given[version])
    assert torch.equal(learner.forward(batch), now) and not torch.equal(now, given[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_is_resumed_and_exported_is_the_one_that_was_trained(
    tiny: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("lora.rank=4", "lora.quantize=nf4", f"model.dtype={dtype}")
    run, two = trained(tiny, tmp_path / "a", *words), tmp_path / "b"
    trained(tiny, two, *words, "steps=1")
    trained(tiny, two, *words)  # goes on
    last = run / "checkpoints" / "step-000002"
    one, other = (checkpoint.read_tensors(p / "checkpoints" / last.name, "") for p in (run, two / "run"))
    assert one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
    gaps = [m["mismatch/mean"] for m in test_rl.log(tmp_path / "a")]
    assert max(gaps) <= (1e-5 if dtype == "float32" or not kernels.problem() else 0.05)
    learner = Learner(quantize(load_model(tiny), "nf4"), dtype=getattr(torch, dtype), lora=Lora(rank=4))
    checkpoint.fill(last, learner.tensors())
    learner.loaded(2)
    capsys.readouterr()
    assert main(["checkpoints", str(run), "export", "last", str(tmp_path / "merged")]) == 0
    assert "codes of the base model in nf4 (lora.quantize), with the adapter merged in" in capsys.readouterr().out
    exported = dict(load_model(tmp_path / "merged").named_parameters())
    for name, weight in published(learner.model).items():
        assert torch.equal(weight.float(), exported[name]), name
    assert main(["checkpoints", str(run), "export-adapter", "last", str(tmp_path / "adapter")]) == 0
    assert "nf4" in capsys.readouterr().out
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", framework="pt") as opened:
        assert opened.metadata()["base_quantized"] == "nf4"


def test_the_reference_is_the_quantised_base(tiny: Path, tmp_path: Path) -> None:
    trained(tiny, tmp_path, "lora.rank=4", "lora.quantize=int8", "algorithm.kl_coef=0.1")
    kl = [m["kl"] if "kl" in m else m["kl/mean"] for m in test_rl.log(tmp_path)]
    assert kl[0] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_those_that_are_predicted(kind: str) -> None:
    learner = learner_of("kernels", kind, torch.bfloat16)
    words = ("data.train=x.jsonl", "lora.rank=4", f"lora.quantize={kind}", "checkpoint.asynchronous=false")
    step = sizes.Load(microbatch=100, several=False, sequences=4, group=4, prompt=10, longest=20)
    found = memory.predict(model_of("kernels"), load(schema.RL, [*words]), step)["training"]
    assert found == memory.predict(learner.model, load(schema.RL, [*words]), step)["training"]
    layers, own = quantized_layers(learner.model).values(), [p for p in learner.model.parameters() if not p.is_meta]
    assert found[f"weights, {kind}"] == sum(m.codes.nbytes + m.scales.nbytes for m in layers)
    assert found["weights, bfloat16"] == sum(p.nbytes for p in own)
    assert found["weights, float32"] == sum(t.nbytes for t in learner.masters.tensors.values())


@pytest.mark.parametrize(("kind", "fits"), [("nf4", True), ("none", False)])
def test_seven_billion_parameters_sample_and_train_within_24_gib(kind: str, fits: bool) -> None:
    """With the embedded engine, on a card that is not there."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(QWEN_7B, attn_implementation=attention.NAME, dtype=torch.bfloat16)
    words = ("learner.gradient_checkpointing=true", "learner.tokens_per_microbatch=8192", "lora.rank=16")
    config = load(schema.RL, ["data.train=x.jsonl", *words, f"lora.quantize={kind}"])
    phases = memory.predict(model, config, sizes.load_of(config, 512, 1536), card=24 * memory.GIB)
    assert (memory.peak(phases, 24 * memory.GIB) < 24 * memory.GIB) == fits


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora.rank=4", "lora.quantize=nf5"], "lora.quantize"),
        (["lora.quantize=nf4"], r"lora\.rank=0"),
        (["lora.rank=4", "lora.quantize=nf4", "parallel.fsdp=2"], r"lora\.quantize=nf4: .*parallel\.fsdp=1"),
        (["lora.rank=4", "lora.quantize=int8", "parallel.tp=2"], r"lora\.quantize=int8: .*parallel\.tp=1"),
        (["lora.rank=4", "lora.quantize=nf4", "optimizer.offload=cpu"], r"lora\.quantize=nf4: .*offload=none"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(BirlError, match=message) as refused:
        load(schema.RL, ["data.train=x.jsonl", *words])
    assert len(str(refused.value).splitlines()) == 1
