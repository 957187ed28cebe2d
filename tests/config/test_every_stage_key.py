"""Every key of SFT, RM and DPO does something: changing it alone changes what a real, tiny run does, or is refused."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.config.keys import documentation
from birl.config.load import load_with_choices
from birl.config.schema import DPO, RM, SFT
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.learner.checkpoints import Writer
from birl.learner.learner import Learner
from birl.learner.store import Store
from birl.parallel.ranks import AXES
from birl.train.command import train
from tests.config.observed import write, write_subsets
from tests.config.test_every_key import SIGHT
from tests.config.witnesses import last, rates, saved
from tests.tiny import tiny_model_folder, tiny_moe_folder

ANY = object()
BASE = """
model.path=model model.dtype=float32 data.train=a.jsonl batch_size=2 optimizer.lr=0.001 checkpoint.every=0 steps=2
threads=1 track.console=off track.tensorboard=false track.report=false
"""


@dataclass
class Seen:
    """What a run did."""

    run: Path
    summary: dict[str, Any]
    threads: int
    passes: int
    printed: str
    dtype: torch.dtype
    staged: int

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / name).read_bytes().splitlines()]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.lines("metrics.jsonl")

    @property
    def validations(self) -> list[dict[str, Any]]:
        return self.lines("validation.jsonl")

    @property
    def weights(self) -> float:
        newest = step_folders.latest(self.run / "checkpoints")
        assert newest is not None
        return sum(t.double().abs().sum().item() for t in checkpoint.read_tensors(newest, "model.").values())


def loss(s: Seen) -> list[float]:
    return [m["loss"] for m in s.metrics]


def stored(s: Seen) -> bool:
    return bool(Store(f"memory://stages/{s.run.name}").steps())


def held_out(s: Seen) -> float:
    return s.validations[0]["validation/loss"]


@dataclass(frozen=True)
class Case:
    to: str
    see: Callable[[Seen], Any] = loss
    becomes: Any = ANY
    under: str = ""
    refused: str = ""


HELD_OUT = "data.validation=b.jsonl "
#: real runs of several processes: tests/parallel/test_runs.py
PARALLEL = {
    **{f"parallel.{axis}": Case("2", refused=f"{axis}=2 makes 2 ranks, but 1 were started") for axis in AXES},
    "parallel.tp": Case("2", refused=r"parallel\.tp=2 does not divide the 1 key/value heads"),
    "parallel.timeout": Case("5", refused="there is only one process"),
    "parallel.sequence": Case("false", refused=r"parallel\.sequence=false: has no effect because parallel\.tp=1"),
}
KEPT = "validation.every=1 validation.at_start=false checkpoint.keep_last=1 optimizer.lr=0.9 steps=3"
CASES = {
    "model.path": Case("other"),
    "model.dtype": Case("bfloat16", lambda s: s.dtype, torch.bfloat16),
    "model.device": Case("cuda", refused=r"model\.device=cuda: PyTorch")
    if not torch.cuda.is_available()
    else Case("cpu", refused=""),
    "model.chat_template": Case("shout.jinja"),
    "model.tool_format": Case(
        "llama", refused=r"model\.tool_format=llama: has no effect because the rows have no tools"
    ),
    **{
        f"model.{key}": Case(value, refused=rf"model\.{key}=.* has no effect because LlamaForCausalLM sees no pictures")
        for key, value in SIGHT.items()
    },
    "model.max_length": Case("100", lambda s: "dropped" in s.printed, True, "data.train=long.jsonl"),
    "data.train": Case("b.jsonl"),
    "data.weights": Case("[0,1]", under="data.train=[a.jsonl,b.jsonl]"),
    "data.validation": Case("b.jsonl", lambda s: len(s.validations), 2),
    "data.validation_split": Case("0.5", lambda s: len(s.validations), 2),
    "data.subset": Case("second", under="data.train=subsets"),
    "data.split": Case("test", under="data.train=splits"),
    "data.validation_data_split": Case("train", held_out, under="data.validation=splits"),
    "data.max_samples": Case("3", lambda s: sum(m["rows"] for m in s.metrics), 3.0, "steps=0"),
    "data.max_validation_samples": Case("1", held_out, under=HELD_OUT),
    "data.prompt_column": Case("other"),
    "data.system_prompt": Case("Be_brief."),
    "data.apply_chat_template": Case("false"),
    "data.shuffle": Case("false"),
    "data.too_long": Case("truncate", lambda s: "cut" in s.printed, True, "data.train=long.jsonl model.max_length=100"),
    "validation.every": Case("1", lambda s: len(s.validations), 3, HELD_OUT),
    "validation.at_start": Case("false", lambda s: [v["step"] for v in s.validations], [2], HELD_OUT),
    "optimizer.lr": Case("0.01", rates, [0.01, 0.01]),
    "optimizer.schedule": Case("linear", rates, under="steps=3"),
    "optimizer.warmup_steps": Case("2", rates, under="steps=3"),
    "optimizer.min_lr_ratio": Case("0.5", rates, under="optimizer.schedule=cosine steps=3"),
    "optimizer.beta1": Case("0.1", lambda s: s.weights),
    "optimizer.beta2": Case("0.1", lambda s: s.weights),
    "optimizer.eps": Case("0.1", lambda s: s.weights),
    "optimizer.weight_decay": Case("0.5", lambda s: s.weights),
    "optimizer.kind": Case("adamw8bit", lambda s: s.weights),
    "optimizer.offload": Case("cpu", refused=r"optimizer\.offload=cpu: the weights are in CPU memory already"),
    "optimizer.max_grad_norm": Case("0.001", lambda s: s.weights, under="optimizer.eps=0.1"),
    "lora.rank": Case("2", lambda s: s.weights),
    "lora.alpha": Case("64", loss, under="lora.rank=2"),
    "lora.targets": Case("[q_proj]", loss, under="lora.rank=2"),
    "lora.dora": Case("true", lambda s: s.weights, under="lora.rank=2"),
    "lora.quantize": Case("int8", loss, under="lora.rank=2"),
    # what it does: tests/parallel/test_context.py
    "parallel.context": Case("ulysses", refused=r"parallel\.context=ulysses: has no effect because parallel\.cp=1"),
    "learner.tokens_per_microbatch": Case("100", lambda s: s.passes > 2, True),
    "learner.gradient_checkpointing": Case("true", refused=""),
    **PARALLEL,
    "learner.router_aux_coef": Case("0.5", lambda s: s.weights, under="model.path=moe"),
    "parallel.ep": Case("2", refused=r"parallel\.ep=2: must divide parallel\.fsdp x parallel\.cp = 1 x 1"),
    "checkpoint.every": Case("1", saved, ["step-000001", "step-000002"]),
    "checkpoint.keep_last": Case("1", saved, ["step-000002"], "checkpoint.every=1"),
    "checkpoint.store": Case("memory://stages", stored, True),
    "checkpoint.asynchronous": Case("false", lambda s: s.staged, 0),
    "checkpoint.keep_best": Case("false", saved, ["step-000003"], HELD_OUT + KEPT),
    "track.console": Case("plain", lambda s: "step    2/2" in s.printed, True),
    "track.tensorboard": Case("true", lambda s: (s.run / "tensorboard").is_dir(), True),
    **{f"track.{name}": Case("offline", refused=f"birl.{name}.") for name in ("wandb", "mlflow", "trackio", "swanlab")},
    "track.report": Case("true", lambda s: (s.run / "report.html").is_file(), True),
    "track.trace": Case("false", lambda s: (s.run / "trace.json").is_file(), False),
    "batch_size": Case("3", last("rows"), 3.0),
    "steps": Case("3", lambda s: len(s.metrics), 3),
    "epochs": Case("2", lambda s: len(s.metrics), 6, "steps=0"),
    "seed": Case("2"),
    "run": Case("elsewhere", lambda s: Path("elsewhere/metrics.jsonl").is_file(), True),
    "resume": Case("earlier/checkpoints/step-000002", lambda s: [m["step"] for m in s.metrics], [3], "steps=3"),
    "threads": Case("2", lambda s: s.threads, 2),
}
OWN: dict[type, dict[str, Case]] = {
    SFT: {
        "data.answer_column": Case("rejected"),
        "data.train_on": Case("[all]"),
        "denominator": Case("sequence"),
        "distill.teacher": Case("other"),
        "distill.divergence": Case("reverse_kl", under="distill.teacher=other"),
        "distill.beta": Case("0.1", under="distill.teacher=other distill.divergence=jsd"),
        "distill.top_k": Case("4", under="distill.teacher=other"),
        "distill.nll_coef": Case("1", under="distill.teacher=other"),
        "epochs": CASES["epochs"],
    },
    RM: {
        "data.chosen_column": Case("response"),
        "data.rejected_column": Case("response"),
        "data.margin_column": Case("margin"),
        "ranking.centering": Case("1"),
    },
    DPO: {
        "data.chosen_column": Case("response", last("loss")),
        "data.rejected_column": Case("response", last("loss")),
        "data.label_column": Case("good", under="preference.loss=kto"),
        "preference.loss": Case("ipo"),
        "preference.beta": Case("0.5", last("loss")),
        "preference.label_smoothing": Case("0.2", last("loss")),
        "preference.margin": Case("1", under="preference.loss=simpo"),
        "preference.nll_coef": Case("1"),
        "preference.desirable_weight": Case("2", under="preference.loss=kto"),
        "preference.undesirable_weight": Case("2", under="preference.loss=kto"),
        "preference.reference": Case("precomputed", lambda s: (s.run / "reference.json").is_file(), True),
    },
}


class Bench:
    """Runs settings once and remembers what was seen."""

    def __init__(self) -> None:
        self.known: dict[tuple[type, str], Seen] = {}
        self.runs = 0

    def seen(self, schema: type, settings: str, capsys: Any) -> Seen:
        if (schema, settings) not in self.known:
            self.known[schema, settings] = self.observe(schema, settings, capsys)
        return self.known[schema, settings]

    def observe(self, schema: type, settings: str, capsys: Any) -> Seen:
        self.runs += 1
        words = f"{BASE} run=run{self.runs} {settings}"
        by_key = dict(word.partition("=")[::2] for word in words.split())  # pyright: ignore
        config, choices = load_with_choices(schema, [f"{k}={v.replace('_brief', ' brief')}" for k, v in by_key.items()])
        passes, threads, original, staged, begin = [], [], Learner.forward_backward, [], Writer.begin

        def begun(writer: Writer, *args: Any) -> None:
            begin(writer, *args)
            staged.append(writer.staged)

        def counted(learner: Learner, *args: Any) -> None:
            passes.append(learner.model.dtype)
            threads.append(torch.get_num_threads())
            original(learner, *args)

        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(Learner, "forward_backward", counted)
            patches.setattr(Writer, "begin", begun)
            summary = train(config, choices)
        run = Path(summary["run"])
        return Seen(run, summary, threads[0], len(passes), capsys.readouterr().out, passes[0], sum(staged))


@pytest.fixture(scope="module")
def bench(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("every_stage_key")
    with pytest.MonkeyPatch.context() as patches:
        patches.chdir(folder)
        patches.setenv("WORLD_SIZE", "1")  # as a launcher that has started nobody else
        Path("model").symlink_to(tiny)
        tiny_model_folder("other", seed=1)
        tiny_moe_folder("moe")
        shout = "{% for m in messages %}{{ m['role'] + m['content'] }}!{% endfor %}{% if add_generation_prompt %}"
        Path("shout.jinja").write_text(shout + "assistant{% endif %}")
        write("a.jsonl", [row(i) for i in range(6)])
        write("b.jsonl", [row(i) for i in range(20, 23)])
        write("long.jsonl", [row(i, "why? " * 40 if i < 2 else "") for i in range(6)])
        for part, start in (("train", 30), ("test", 40)):
            write(f"splits/{part}.jsonl", [row(start + i) for i in range(4)])
        for part, start in (("one", 50), ("other", 60)):
            write(f"subsets/{part}.jsonl", [row(start + i) for i in range(4)])
        write_subsets()
        yield Bench()


def row(i: int, tail: str = "") -> dict[str, Any]:
    return {
        "prompt": f"What is {i} + 2?",
        "other": f"And {i}?",
        "response": f"It is {i + 2}. {i * chr(33)} {tail}",
        "chosen": f"The answer is {i + 2}. {tail}",
        "rejected": f"Anna has {i} apples",
        "margin": 1.0 + i,
        "good": i % 2 == 0,
    }


@pytest.mark.parametrize(
    ("schema", "key"), [(s, k) for s in OWN for k in documentation(s) if s is SFT or k not in CASES or k in OWN[s]]
)
def test_changing_it_changes_a_run(bench: Bench, capsys: Any, schema: type, key: str) -> None:
    """What all three share is tried with SFT."""
    case = OWN[schema].get(key) or CASES.get(key)
    assert case is not None, f"{key} has no case: say here which effect it has, or remove it"
    changed = f"{case.under} {key}={case.to}"
    if case.refused:
        with pytest.raises(BirlError, match=case.refused):
            bench.observe(schema, changed, capsys)
        return
    if key == "resume":
        bench.observe(schema, "run=earlier", capsys)
    if key == "learner.gradient_checkpointing":  # bounds the memory, and changes nothing
        assert loss(bench.observe(schema, changed, capsys)) == pytest.approx(loss(bench.seen(schema, "", capsys)))
        return
    before = case.see(bench.seen(schema, case.under, capsys))
    after = case.see(bench.observe(schema, changed, capsys))
    assert after != before
    assert case.becomes is ANY or after == case.becomes


def test_there_is_no_case_for_a_key_that_is_gone() -> None:
    assert CASES.keys() <= documentation(SFT).keys()
    for schema, own in OWN.items():
        assert own.keys() <= documentation(schema).keys()
