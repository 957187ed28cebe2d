"""A toy language that a tiny model learns in seconds: sort four digits. Every stage of birl runs on it.

    python recipes/toy/toy.py make FOLDER                 model and data
    python recipes/toy/toy.py stages FOLDER [SEED ...]    SFT, DPO, GRPO, PPO in turn; a reward model, RL against it
    python recipes/toy/toy.py presets FOLDER [SEED ...]   every preset of `algorithm`, each from the SFT model
    python recipes/toy/toy.py staleness FOLDER [SEED ...] old answers, with a correction and without
    python recipes/toy/toy.py hybrid FOLDER [SEED ...]    SFT and GRPO of a model with Gated DeltaNet layers

The last four write the curves that are committed beside this file.
"""

import json
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

from birl.cli import main

HERE = Path(__file__).parent
LENGTH = 4
THREADS = ["threads=1", "track.console=off", "track.tensorboard=false", "track.report=false", "model.dtype=float32"]
TEXTS = ["data.apply_chat_template=false", "validation.every=0", "checkpoint.every=0"]


def right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the digits in order, and nothing more."""
    return [float(c.removesuffix("<eos>") == a) for c, a in zip(completions, answer, strict=True)]


def partly(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of places that are right; what is too long or too short loses."""
    texts = [c.removesuffix("<eos>") for c in completions]
    pairs = zip(texts, answer, strict=True)
    return [sum(x == y for x, y in zip(t, a, strict=False)) / max(len(t), len(a)) for t, a in pairs]


def share(completions: list[str], **_: Any) -> list[float]:
    """The share of sevens."""
    texts = [c.removesuffix("<eos>") for c in completions]
    return [t.count("7") / max(len(t), 1) for t in texts]


def one(completions: list[str], **_: Any) -> list[float]:
    """1 where there is a seven."""
    return [float("7" in c) for c in completions]


def configs(vocabulary: int) -> dict[str, PreTrainedConfig]:
    """A Llama of two layers, and as hybrid a Qwen 3.5: Gated DeltaNet, then attention."""
    common = {
        "vocab_size": vocabulary,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "bos_token_id": 11,
    }
    heads = {"linear_num_key_heads": 3, "linear_num_value_heads": 3}
    sizes = {"head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    return {"model": LlamaConfig(**common), "hybrid": Qwen3_5TextConfig(**common, **heads, **sizes, **layers)}


def make(folder: Path) -> None:
    """Two models, a tokenizer with one token a character, and the rows of every stage."""
    words = ["<eos>", *"0123456789=", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<eos>|."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>", bos_token="="
    )
    for name, config in configs(len(words)).items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    rng = random.Random(0)
    prompts = ["".join(rng.choices("0123456789", k=LENGTH)) for _ in range(9000)]
    prompts = [p for p in dict.fromkeys(prompts) if len(set(p)) > 1]
    rows = [{"prompt": f"{p}=", "answer": "".join(sorted(p))} for p in prompts]
    for row in rows:
        row["chosen"], row["rejected"] = row["answer"], spoiled(row["answer"], rng)
    for name, start, end in (("held_out", 0, 300), ("sft", 300, 600), ("pairs", 600, 3600), ("rl", 3600, 6000)):
        lines = "".join(json.dumps(row) + "\n" for row in rows[start:end])
        (folder / f"{name}.jsonl").write_text(lines)
    (folder / "taste.jsonl").write_text("".join(json.dumps(sevens(rng)) + "\n" for _ in range(4000)))


def sevens(rng: random.Random) -> dict[str, str]:
    """Two answers, of which the better has more sevens, by two at least."""
    while True:
        texts = ["".join(rng.choices("01234567777789", k=rng.randint(2, 7))) for _ in range(2)]
        worse, better = sorted(texts, key=lambda text: text.count("7"))
        if better.count("7") > worse.count("7") + 1:
            return {"prompt": "".join(rng.choices("0123456789", k=LENGTH)) + "=", "chosen": better, "rejected": worse}


def spoiled(answer: str, rng: random.Random) -> str:
    """One to three mistakes: two neighbours exchanged, another digit, one too few, or one too many."""
    found = answer
    for _ in range(rng.choice((1, 1, 2, 3))):
        unequal = [i for i, (a, b) in enumerate(pairwise(found)) if a != b]
        kind, i = rng.randrange(4), rng.randrange(len(found))
        if kind == 0 and unequal:
            i = rng.choice(unequal)
            found = found[:i] + found[i + 1] + found[i] + found[i + 2 :]
        elif kind == 1 and len(found) > 1:
            found = found[:i] + found[i + 1 :]
        elif kind == 2 and len(found) < 6:
            found = found[:i] + rng.choice("0123456789") + found[i:]
        else:
            found = found[:i] + rng.choice([d for d in "0123456789" if d != found[i]]) + found[i + 1 :]
    return found if found != answer else spoiled(answer, rng)


def birl(*words: str) -> None:
    code = main(list(words))
    if code:
        raise SystemExit(code)


def accuracy(folder: Path, model: Path) -> float:
    """Share of held-out prompts whose greedy answer is right."""
    out = folder / "measured.json"
    birl(
        *("eval", f"model.path={model}", f"data.validation={folder}/held_out.jsonl", "data.apply_chat_template=false"),
        *(
            "reward=" + str(Path(__file__).resolve()) + ":right",
            "validation.max_tokens=8",
            "threads=1",
            f"output={out}",
        ),
        "model.dtype=float32",
    )
    return json.loads(out.read_text())["metrics"]["validation/all/score"]


def stage(folder: Path, name: str, model: Path, *words: str) -> tuple[Path, list[dict[str, Any]], float]:
    """One run and its exported model: (model, metrics of its steps, seconds)."""
    run = folder / name
    began = time.perf_counter()
    birl(words[0], f"model.path={model}", f"run={run}", *THREADS, *TEXTS, *words[1:])
    seconds = time.perf_counter() - began
    birl("checkpoints", str(run), "export", "last", str(run / "exported"))
    return run / "exported", [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()], seconds


def rl(data: Path, reward: str = "partly") -> tuple[str, ...]:
    judge = (f"reward={Path(__file__).resolve()}:{reward}",) if reward else ()
    return (
        *("rl", f"data.train={data}", "rollout.prompts=64", "rollout.group_size=8", "rollout.max_tokens=7"),
        *("optimizer.lr=2e-4", "optimizer.warmup_steps=10", "engine.max_batch=256", *judge),
    )


class Notes:
    """The table of one seed: what each stage was like, and how good its model is."""

    def __init__(self, data: Path, seed: int) -> None:
        self.data, self.seed, self.table = data, seed, []

    def add(self, name: str, done: tuple[Path, list[dict[str, Any]], float], figure: str, score: Any = None) -> Path:
        """`score`: what was measured on held-out rows; None: the share of right answers."""
        model, metrics, seconds = done
        curve = [round(m[figure], 4) for m in metrics if m[figure] is not None]
        score = round(accuracy(self.data, model), 4) if score is None else score
        record = {"stage": name, "seconds": round(seconds, 1), "figure": figure, "curve": curve, "held_out": score}
        self.table.append(record)
        print(
            f"seed {self.seed}: {name} {seconds:.0f} s, {figure} {curve[0]} -> {curve[-1]}, held-out {score}",
            flush=True,
        )
        return model

    def write(self, name: str = "stages") -> None:
        (HERE / f"{name}-{self.seed}.json").write_text(json.dumps(self.table, indent=1) + "\n")


def stages(data: Path, seeds: list[int]) -> None:
    pairs, ask = f"data.train={data}/pairs.jsonl", rl(data / "rl.jsonl")
    for seed in seeds:
        folder, notes, s = data / f"stages-{seed}", Notes(data, seed), f"seed={seed}"
        rows = (f"data.train={data}/sft.jsonl", "data.answer_column=answer", "batch_size=64", "epochs=12")
        rate = ("optimizer.lr=2e-3", "optimizer.schedule=linear")
        sft = notes.add("sft", stage(folder, "sft", data / "model", "sft", *rows, *rate, s), "loss")
        words = ("batch_size=64", "optimizer.lr=2e-4", "preference.nll_coef=0.5")
        dpo = notes.add("dpo", stage(folder, "dpo", sft, "dpo", pairs, *words, s), "accuracy")
        grpo = notes.add("grpo", stage(folder, "grpo", dpo, *ask, "steps=60", s), "reward/mean")
        words = ("algorithm=ppo", "algorithm.kl_coef=0.001", "critic.lr=1e-3", "steps=60")
        notes.add("ppo", stage(folder, "ppo", grpo, *ask, *words, s), "reward/mean")
        taste(data, folder, sft, notes, s)
        notes.write()


def taste(data: Path, folder: Path, sft: Path, notes: Notes, seed: str) -> None:
    """A reward model that likes sevens, and RL against it: the model must see the taste, the policy must follow it."""
    words = (
        f"data.train={data}/taste.jsonl",
        "data.validation_split=0.1",
        "validation.every=20",
        "batch_size=64",
        "optimizer.lr=1e-3",
        seed,
    )
    rm, metrics, seconds = stage(folder, "rm", sft, "rm", *words)
    measured = [json.loads(line) for line in (folder / "rm" / "validation.jsonl").read_text().splitlines()]
    notes.add("rm", (rm, metrics, seconds), "accuracy", measured[-1]["validation/accuracy"])
    words = ("reward.functions=[model]", f"reward.model={rm}", "steps=25", seed)
    model, metrics, seconds = stage(folder, "rl_rm", sft, *rl(data / "rl.jsonl", ""), *words)
    records = [json.loads(line) for line in (folder / "rl_rm" / "rollouts.jsonl").read_text().splitlines()]
    sevens = [[r["text"].count("7") for r in records if first <= r["step"] < first + 3] for first in (1, 23)]
    before, after = (round(statistics.mean(counts), 3) for counts in sevens)
    notes.add("rl against rm", (model, metrics, seconds), "reward/mean", {"sevens before": before, "after": after})


def hybrid(data: Path, seeds: list[int]) -> None:
    """SFT and GRPO of the model with a state beside attention."""
    rows = (f"data.train={data}/sft.jsonl", "data.answer_column=answer", "batch_size=64", "epochs=12")
    for seed in seeds:
        folder, notes, s = data / f"hybrid-{seed}", Notes(data, seed), f"seed={seed}"
        rate = ("optimizer.lr=2e-3", "optimizer.schedule=linear")
        sft = notes.add("sft", stage(folder, "sft", data / "hybrid", "sft", *rows, *rate, s), "loss")
        notes.add("grpo", stage(folder, "grpo", sft, *rl(data / "rl.jsonl"), "steps=60", s), "reward/mean")
        notes.write("hybrid")


WORDS = {  # what a preset needs beside its name
    "ppo": ["critic.lr=1e-3", "algorithm.kl_coef=0.001"],
    "rloo": ["algorithm.kl_coef=0.001"],
    "reinforce_pp": ["algorithm.kl_coef=0.001"],
    "pass_at_k": ["algorithm.pass_k=2"],
}


def presets(data: Path, seeds: list[int]) -> None:
    """Every preset learns another taste, as many sevens as possible, from the SFT model."""
    from birl.config.keys import presets as known
    from birl.config.schema import RL

    start = data / "stages-0" / "sft" / "exported"
    found: dict[str, Any] = {}
    for name in sorted(known(RL)["algorithm"].keys() - {"distill"}):
        reward = "one" if name in ("pass_at_k", "maxrl") else "share"
        first, last, seconds = [], [], []
        for seed in seeds:
            words = [
                f"algorithm={name}",
                "algorithm.overlong_buffer=0",
                "steps=40",
                f"seed={seed}",
                *WORDS.get(name, []),
            ]
            run = data / f"preset-{name}-{seed}"
            began = time.perf_counter()
            more = ("rollout.prompts=16", "optimizer.lr=1e-3", f"model.path={start}", f"run={run}")
            birl(*rl(data / "rl.jsonl", reward), *THREADS, *TEXTS, *more, *words)
            seconds.append(round(time.perf_counter() - began, 1))
            metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            rewards = [m["reward/mean"] for m in metrics]
            first.append(round(rewards[0], 3))
            last.append(round(statistics.mean(rewards[-3:]), 3))
        found[name] = {"reward": reward, "first": first, "last": last, "seconds": seconds}
        print(f"{name:24} {reward:6} {first} -> {last}  {statistics.median(seconds)} s", flush=True)
        (HERE / "presets.json").write_text(json.dumps(found, indent=1) + "\n")


WAYS = {  # what the importance ratio starts from, and whether that is weighed against what sampled
    "corrected": [],  # algorithm.proximal=auto
    "ratio to what sampled": ["algorithm.proximal=behaviour"],  # PPO
    "as if fresh": ["algorithm.proximal=recompute", "algorithm.correction=none"],
}
TASKS = {  # reward, steps, rollout.max_staleness, words
    "sevens": ("share", 60, (1, 4, 16), ["optimizer.lr=1e-3", "algorithm.updates_per_batch=8"]),
    "sorting": ("partly", 60, (8,), ["optimizer.lr=3e-4", "algorithm.updates_per_batch=4"]),
}


def staleness(data: Path, seeds: list[int]) -> None:
    """GRPO on answers of old weights: by task, way and rollout.max_staleness the curve of each seed, in staleness.json,
    which `benchmarks.pictures` draws."""
    start = data / "stages-0" / "sft" / "exported"
    if not start.exists():
        raise SystemExit(f"{start} is missing: run `python recipes/toy/toy.py stages {data} 0` first")
    found: dict[str, dict[str, Any]] = {}
    for task, (reward, steps, bounds, words) in TASKS.items():
        table = found[task] = {}
        for bound, way in [(0, "synchronous"), *((b, w) for b in bounds for w in WAYS)]:
            curves, old = [], []
            for seed in seeds:
                run = data / f"staleness-{task}-{bound}-{way.replace(' ', '_')}-{seed}"
                more = ("rollout.prompts=16", "engine.max_batch=4096", "track.rollouts=false")
                more += (*words, *WAYS.get(way, []))
                more += (f"rollout.max_staleness={bound}", f"steps={steps}", f"seed={seed}", f"run={run}")
                birl(*rl(data / "rl.jsonl", reward), *THREADS, *TEXTS, f"model.path={start}", *more)
                metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                curves.append([round(m["reward/mean"], 4) for m in metrics])
                old.append(round(statistics.mean(m["staleness/mean"] for m in metrics[bound:]), 2))
            record = {"way": way, "max_staleness": bound, "staleness": old, "curves": curves}
            record["last"] = [round(statistics.mean(c[-5:]), 4) for c in curves]
            record["mean"] = [round(statistics.mean(c), 4) for c in curves]
            table[f"{way}, {bound}"] = record
            told = f"staleness {old}, reward of all steps {record['mean']}, of the last five {record['last']}"
            print(f"{task}, {way}, {bound}: {told}", flush=True)
            rows = ",\n".join(f"{json.dumps(t)}: {json.dumps(records)}" for t, records in found.items())
            (HERE / "staleness.json").write_text(f"{{{rows}}}\n")


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    target = Path(where).resolve()
    target.mkdir(parents=True, exist_ok=True)
    if what == "make":
        make(target)
    else:
        commands = {"stages": stages, "presets": presets, "staleness": staleness, "hybrid": hybrid}
        commands[what](target, [int(x) for x in rest] or [0, 1, 2])
