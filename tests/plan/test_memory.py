"""The pieces of the prediction against the real thing, a prediction against a measured run, and how much of the memory
the cache takes. SmolLM2 in eight settings: `benchmarks/memory.py`."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from birl import kernels
from birl.cli import main
from birl.config import schema
from birl.config.load import load
from birl.data.pack import pack
from birl.engine import open as opening
from birl.engine.sampler import sample
from birl.errors import BirlError
from birl.learner.learner import Learner, Stats
from birl.learner.lora import Adapters
from birl.learner.open import make_learner
from birl.learner.policy import load_policy
from birl.models.attention import Packed
from birl.models.decoder import decoder_for
from birl.models.load import cast, load_model, skeleton
from birl.models.paged import Cache
from birl.models.slices import quantizable
from birl.models.slots import slots_of
from birl.plan import run as plan
from birl.plan import run_memory as memory
from birl.plan import sizes
from birl.plan.sizes import Load, Module
from birl.types import SamplingParams
from tests.data.test_pack import groups
from tests.held import Held
from tests.learner.test_learner import reinforce
from tests.tiny import tiny_model, tiny_tokenizer

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
STEP = Load(microbatch=1000, several=False, sequences=16, group=4, prompt=40, longest=100)


def settings(*words: str) -> schema.RL:
    return load(schema.RL, ["data.train=x.jsonl", "validation.every=0", *words])


def size(tensors: list[Tensor]) -> int:
    """Bytes of what they share only once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("folder", ["tiny", "plain"])
def test_a_skeleton_has_the_shape_of_the_model(folder: str, dtype: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(folder)
    model = load_model(path)
    found = Module.of(skeleton(path), dtype)
    assert found == Module.of(model, dtype) and all(p.is_meta for p in skeleton(path).parameters())
    assert found.on_kernels == (decoder_for(cast(model, DTYPES[dtype])) is not None)
    cache = Cache.make(3, slots_of(model), DTYPES[dtype], torch.device("cpu"))
    assert size([*cache.keys, *cache.values]) == 3 * found.page


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_layer_keeps_is_what_is_counted(dtype: str) -> None:
    model = cast(tiny_model(), DTYPES[dtype])
    decoder, module = decoder_for(model), Module.of(model, dtype)
    if decoder is None:
        pytest.skip("no kernels here")
    (batch,) = pack(groups(4), [1.0] * len(groups(4)), 10_000)
    layout = Packed(batch.trees, torch.device("cpu"))
    x = torch.zeros(len(batch.tokens), module.shape.hidden)
    with torch.no_grad():
        _, kept = decoder.forward(decoder.layers[0], x, *decoder.rotations(batch.positions), layout, in_place=False)
    assert kept is not None
    assert size([getattr(kept, f.name) for f in fields(kept)]) == len(x) * module.kept
    if dtype == "bfloat16":
        matrices = [m for layer in decoder.layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        assert size([m.layout().data for m in (*matrices, decoder.head)]) == module.wide * module.linear


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_autograd_keeps_of_other_models_is_what_is_counted(plain: Path, dtype: str) -> None:
    learner = Learner(load_model(plain), dtype=DTYPES[dtype])
    module = Module.of(learner.model, dtype)
    (batch,) = pack(groups(30), [1.0] * len(groups(30)), 10_000)
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        learner.forward_backward(batch, reinforce, Stats())
    weights = size(list(learner.model.parameters()))
    assert (sum(kept.values()) - weights) / (len(batch.tokens) * module.shape.layers * module.kept) == pytest.approx(
        1, abs=0.2
    )


def test_phases_do_not_add_up_and_each_key_counts_where_it_should() -> None:
    model = tiny_model(vocab=320)

    def found(*words: str, **load: int) -> memory.Phases:
        return memory.predict(model, settings(*words), replace(STEP, **load))

    base = found()
    totals = [sum(column.values()) for column in base.values()]
    assert memory.peak(base) == max(totals) < sum(totals)
    assert "keys and values" not in base["training"]
    assert not [name for name in base["generation"] if "activations" in name or "gradient" in name]
    big, small = found(microbatch=10**6), found("learner.gradient_checkpointing=true", microbatch=10**6)
    assert big["generation"] == base["generation"] and memory.peak(small) < memory.peak(big)
    assert found(sequences=99)["training"] == base["training"]
    later = found(several=True)["training"]
    assert later["gradient, float32"] == 4 * sum(p.numel() for p in model.parameters())
    assert sum(later.values()) > sum(base["training"].values())
    assert found("algorithm.kl_coef=0.1")["generation"]["reference model"] > 0
    assert found("algorithm=online_dpo")["generation"]["reference model"] > 0
    assert found("algorithm.teacher=m")["generation"]["teacher, if as large"] > 0
    assert found("algorithm.teacher=http://localhost:8000/v1/completions") == base
    small, large = (found(f"algorithm.teacher={name}") for name in ("qwen2.5-7b", "qwen2.5-32b"))
    assert large["training"]["teacher"] > 4 * small["training"]["teacher"] > 7e9
    whole = found("algorithm.teacher=qwen2.5-7b", "algorithm.teacher_divergence=jsd")
    name = "activations, then gradient"
    assert whole["training"][name] > small["training"][name] and whole["generation"] == small["generation"]
    assert "weights, bfloat16" in base["training"] and not found("model.dtype=float32")["training"]["weights, bfloat16"]


def test_words_that_are_left_out_take_memory() -> None:
    words = [sizes.load_of(settings(*w), 50, 150).support for w in ((), ("rollout.top_p=0.9",), ("rollout.top_k=20",))]
    assert words == [0, 1024, 20]
    model = tiny_model(vocab=320)
    plain, told, all_of_them = (memory.predict(model, settings(), replace(STEP, support=n)) for n in (0, 20, 1024))
    name = "supports of tokens"
    assert name not in plain["training"]
    assert told["training"][name] == 8 * 21 * STEP.microbatch and all_of_them["training"][name] == 8 * 321 * 1000
    assert memory.peak(plain) < memory.peak(told) < memory.peak(all_of_them)
    card = [memory.predict(model, settings(), replace(STEP, support=n), 2**36)["generation"] for n in (0, 20)]
    assert card[1]["hidden states and logits"] - card[0]["hidden states and logits"] == 4 * 20 * 16 * 34


def test_what_a_sampler_on_a_cpu_takes_is_what_is_counted() -> None:
    """Beside 8 bytes of a logit."""
    logits = torch.randn(16, 32_000)
    asked = [SamplingParams(max_tokens=1, top_k=50, support=True)] * len(logits)
    with Held(logits) as held:
        sample(logits, asked, [0.5] * len(logits), kernels.load(torch.float32, 64))
    counted = [
        memory.predict(tiny_model(vocab=320), settings(), replace(STEP, support=n))["generation"] for n in (0, 320)
    ]
    each = counted[1]["hidden states and logits"] - counted[0]["hidden states and logits"] - 4 * 320 * STEP.sequences
    assert held.peak + logits.nbytes <= (8 + each // (320 * STEP.sequences)) * logits.numel() * 1.01


def test_what_asynchronous_runs_and_servers_add() -> None:
    base, ahead, servers = (
        memory.predict(tiny_model(), settings(*words), STEP)
        for words in ((), ("rollout.max_staleness=2",), ("engine.kind=birl", "engine.count=3"))
    )
    cache = base["generation"]["keys and values"]
    assert ahead["training"]["keys and values"] == cache and memory.peak(ahead) > memory.peak(base)
    assert "generation" not in servers and servers["servers"]["keys and values"] == 3 * cache
    assert memory.peak(servers) == sum(sum(column.values()) for column in servers.values())


def test_an_engine_in_int8_adds_a_copy_and_its_codes() -> None:
    model = tiny_model()
    base, int8 = (memory.predict(model, settings(*words), STEP) for words in ((), ("engine.weights=int8",)))
    name, linear = "the engine's own weights", sum(m.weight.numel() for m in quantizable(model).values())
    least = 2 * sum(p.numel() for p in model.parameters()) + linear
    for phase in base:
        assert least < int8[phase][name] < 2 * least and int8[phase].keys() - {name} == base[phase].keys()


@pytest.mark.parametrize("words", [[], ["lora.dora=true", "lora.targets=[q_proj,down_proj]"]])
def test_what_lora_adds_and_saves_is_what_is_counted(words: list[str]) -> None:
    config = settings("lora.rank=4", *words)
    learner = make_learner(config, tiny_model())
    masters = learner.masters
    assert isinstance(masters, Adapters)
    found = memory.predict(tiny_model(), config, STEP)["training"]
    steps = 4 * len(masters.tensors)
    state = [t for name, t in learner.tensors().items() if name.startswith("optimizer.")]
    assert size(state) == found["optimizer state, float32"] + steps
    bases = [a.weight for a in masters.adapters.values()]
    assert size([*masters.tensors.values(), *bases]) == found["weights, float32"]
    assert size(list(learner.model.parameters())) == found["weights, bfloat16"]
    (batch,) = pack(groups(4), [1.0] * len(groups(4)), 10_000)
    learner.forward_backward(batch, reinforce, Stats())
    gradient = [t.grad for t in masters.tensors.values() if t.grad is not None]
    several = memory.predict(tiny_model(), config, replace(STEP, several=True))["training"]
    largest = max(a.parameter.numel() for a in masters.adapters.values())  # which alone has a whole one at once
    assert size(gradient) + 4 * largest == several["gradient, float32"]
    assert memory.peak(memory.predict(tiny_model(), settings(), STEP)) > memory.peak({"training": found})


def test_a_step_is_as_large_as_its_keys_allow() -> None:
    config = settings("rollout.prompts=8", "rollout.group_size=4", "rollout.max_tokens=100")
    step = sizes.load_of(config, prompt=50, longest=150)
    assert (step.microbatch, step.several, step.sequences) == (8 * 450, False, 32)
    config.learner.tokens_per_microbatch = 1000
    assert (sizes.load_of(config, 50, 150).microbatch, sizes.load_of(config, 50, 150).several) == (900, True)
    config.algorithm.updates_per_batch = 4
    assert not sizes.load_of(config, 50, 150).several
    config.data.validation, config.validation.every = ["v.jsonl"], 5
    assert sizes.load_of(config, 50, 150).sequences == config.engine.max_batch


@pytest.mark.parametrize("gib", [1.0, 2.0, 20.0])
def test_the_largest_that_fits_fits_and_no_more(gib: float) -> None:
    model, config = tiny_model(), settings()
    available = int(gib * 2**30)
    tokens = memory.largest(model, config, STEP, available)["learner.tokens_per_microbatch"]

    def needs(tokens: int) -> int:
        return memory.peak(memory.predict(model, config, replace(STEP, microbatch=tokens, several=True)))

    assert needs(tokens) <= available < needs(tokens + 1)
    batch = memory.largest(model, config, STEP, available)["engine.max_batch"]
    assert 0 < batch < memory.largest(model, config, STEP, 2 * available)["engine.max_batch"]
    assert set(memory.largest(model, config, STEP, 2**20).values()) == {0}


def test_plan_reads_neither_weights_nor_data(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    words = ["plan", f"model.path={tmp_path}", "rollout.max_tokens=8", "data.max_prompt_tokens=40", "--memory", "3"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["peak"] == max(sum(column.values()) for column in found["phases"].values())
    assert found["available"] == 3 * 2**30 and found["largest"]["learner.tokens_per_microbatch"] > 0
    assert main(words) == 0
    page = capsys.readouterr().out
    for part in ("generation", "training", "keys and values", "weights, float32", "optimizer state", "peak", "GiB"):
        assert part in page
    assert f"learner.tokens_per_microbatch={found['largest']['learner.tokens_per_microbatch']}" in page
    assert main([*words[:-1], "0.1"]) == 0
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--memory"], "--memory takes a number"),
        (["--memory", "much"], "--memory takes a number"),
        (["--memory", "nan"], "--memory takes a number"),
        (["--memory=-1"], "--memory takes a number"),
        (["optimizer.offload=cpu"], "in CPU memory already"),
        (["model.path=nowhere.gguf"], "no such file"),
        (["lr=1"], "optimizer.lr"),
    ],
)
def test_mistakes_of_plan(words: list[str], part: str, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"model.path={tiny}", *words]) == 2
    assert part in capsys.readouterr().err


def test_an_optimizer_that_is_in_cpu_memory_cannot_be_offloaded_there() -> None:
    with pytest.raises(BirlError, match=r"optimizer\.offload=cpu: the weights are in CPU memory already"):
        make_learner(settings("optimizer.offload=cpu"), tiny_model())


def test_the_cache_is_as_large_as_needed_or_half_of_what_is_free(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(tiny)
    page = Module.of(model, "float32").page
    with ThreadPoolExecutor(1) as compute:
        loaded = load_policy(schema.Model(path=str(tiny)), compute)

        def pages(free: int, longest: int | None, **engine: float) -> int:
            monkeypatch.setattr(opening, "free_memory", lambda device: free)
            config = schema.Engine(**engine)  # type: ignore[arg-type]
            made = opening.open_engine(loaded, config, 512, lambda: 0, longest)
            opening.check_cache(config, made, 30, 30)
            return made.scheduler.pages.total

        assert pages(2**40, 70, max_batch=5) == 15
        assert pages(0, 70, max_batch=5) == 15  # nobody says what is free
        assert pages(2**40, None, max_batch=2) == 32
        assert pages(16 * page, 70, max_batch=5) == 8
        assert pages(16 * page, 70, max_batch=5, kv_cache_gb=1.0) == 80
        with pytest.raises(BirlError, match=r"Half of the free memory holds .* 32 tokens.*Set engine\.kv_cache_gb="):
            pages(2 * page, 60, max_batch=5)


RUN = """
import dataclasses, sys, threading, time
from birl.allocator import keep_memory
keep_memory()
from birl.config import schema
from birl.config.load import load
from birl.named import Given
from birl.train import build
from birl.train.command import train
import birl.track.report, birl.track.tensorboard
from birl.learner import checkpoint
from birl.learner.policy import load_policy
from birl.models.load import load_model, load_tokenizer

def anonymous():
    # not ru_maxrss: how much of a library's file counts as resident depends on what else is in the page cache
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)

plain = build.sampling
build.sampling = lambda rollout: dataclasses.replace(plain(rollout), ignore_eos=True)
different = lambda completions, **_: list(range(len(completions)))
write = checkpoint.save
def slowly(root, step, *rest):
    if step == 1:
        time.sleep(6)  # so that it is still being written while the next step trains
    return write(root, step, *rest)
checkpoint.save = slowly
rows = [{"prompt": f"{n} + 1 is what?", "answer": "2"} for n in range(4)]  # with nothing in common
given = Given(rewards=[different], train=rows)
base = peak = anonymous()
threading.Thread(target=watch, daemon=True).start()
train(load(schema.RL, sys.argv[1:]), given=given)
print(peak - base)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the constants are Linux's")
@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="bfloat16 takes other memory without AVX-512"
)
@pytest.mark.parametrize("form", [(), ("parallel.fsdp=2",)], ids=str)
def test_a_run_takes_what_was_predicted(tmp_path: Path, form: tuple[str, ...]) -> None:
    """A model of 40 million parameters, so that the process is not everything."""
    model = tiny_model(hidden=768, heads=24, kv_heads=8, layers=8)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = [f"model.path={tmp_path}/model", "data.train=[given]", "reward.functions=[given:different]", "steps=2"]
    words += ["checkpoint.every=1", *form]
    words += ["rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=60", "validation.every=0"]
    words += ["track.console=off", "track.tensorboard=false", "track.report=false", f"run={tmp_path}/run", "threads=1"]
    done = subprocess.run([sys.executable, "-c", RUN, *words], capture_output=True, text=True, check=True)
    grown = int(done.stdout.splitlines()[-1])
    found = plan.plan(skeleton(tmp_path / "model"), load(schema.RL, words), prompt=60)
    predicted = found["peak"] - memory.PROCESS * (1 + memory.LOST)
    print(grown, predicted)
    assert predicted == pytest.approx(grown, rel=0.15)
    assert found["peak"] > 1.5 * memory.PROCESS
