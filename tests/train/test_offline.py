"""SFT, reward models and preference losses on tiny models: the definition's numbers; they learn; they resume."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from birl.config import schema
from birl.config.load import load
from birl.data.examples import load_examples
from birl.errors import BirlError
from birl.learner import checkpoint, export, step_folders
from birl.learner.policy import load_policy
from birl.learner.reference import _digest, _stored
from birl.named import Given
from birl.text.chat import Chat
from birl.train.command import train
from birl.train.rm import Ranking
from birl.train.setup import packer_of

TEXTS = [{"prompt": f"What is {i} + 2?", "response": f"The answer is {i + 2}."} for i in range(12)]
PAIRS = [
    {
        "prompt": f"What is {i} + 2?",
        "chosen": f"The answer is {i + 2}.",
        "rejected": f"Anna has {i} apples"[: 9 + i % 9],
    }
    for i in range(12)
]
GOLDEN = Path(__file__).parent / "golden"


def run(
    tiny: Path, folder: Path, command: str, *words: str, rows: Any = None, held_out: Any = None, given: bool = True
) -> dict[str, Any]:
    config = load(
        schema.TRAINING[command],
        [
            *(f"model.path={tiny}", "model.dtype=float32", "data.train=[given]", "batch_size=4", "optimizer.lr=3e-3"),
            *(["data.validation=[given]"] if held_out else []),
            *("steps=3", "track.console=off", "track.tensorboard=false", "track.report=false", "threads=1"),
            *(f"run={folder}/run", *words),
        ],
    )
    handed = Given(train=rows or (TEXTS if command == "sft" else PAIRS), validation=held_out)
    return train(config, given=handed if given else None)


def log(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / f"{name}.jsonl").read_bytes().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = step_folders.latest(folder / "run" / "checkpoints")
    assert newest is not None
    return checkpoint.read_tensors(newest)


def logprobs(folder: Path, prompt: str, answer: str) -> torch.Tensor:
    """Of the answer's tokens and its end token, by transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": prompt}]
    before = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    ids = [*before, *tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    with torch.no_grad():
        table = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    return torch.stack([table[i - 1, ids[i]] for i in range(len(before), len(ids))])


@pytest.mark.parametrize("denominator", ["token", "sequence"])
def test_sft_loss_is_the_mean_negative_log_likelihood(tiny: Path, tmp_path: Path, denominator: str) -> None:
    run(tiny, tmp_path, "sft", f"denominator={denominator}", "batch_size=12", "steps=1")
    each = [logprobs(tiny, row["prompt"], row["response"]) for row in TEXTS]
    token = -torch.cat(each).mean().item()
    expected = token if denominator == "token" else sum(-e.mean().item() for e in each) / len(each)
    step = log(tmp_path)[0]
    assert step["loss"] == pytest.approx(expected, abs=1e-5) and step["nll"] == pytest.approx(token, abs=1e-5)


@pytest.mark.parametrize("command", ["sft", "rm", "dpo"])
def test_it_learns(tiny: Path, tmp_path: Path, command: str) -> None:
    summary = run(
        tiny, tmp_path, command, "steps=25", "validation.every=10", held_out=PAIRS if command != "sft" else TEXTS
    )
    steps = log(tmp_path)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    first, last = (log(tmp_path, "validation")[i] for i in (0, -1))
    assert last["validation/loss"] < 0.5 * first["validation/loss"]
    if command != "sft":
        assert last["validation/accuracy"] == 1.0
    assert summary["finished"] and [v["step"] for v in log(tmp_path, "validation")] == [0, 10, 20, 25]


@pytest.mark.parametrize("command", ["sft", "rm", "dpo"])
def test_micro_batches_change_nothing(tiny: Path, tmp_path: Path, command: str) -> None:
    words = ("rows", "batch_size=12", "steps=1")
    run(tiny, tmp_path / "a", command, *words[1:], "learner.tokens_per_microbatch=4096")
    run(tiny, tmp_path / "b", command, *words[1:], "learner.tokens_per_microbatch=140")
    a, b = log(tmp_path / "a")[0], log(tmp_path / "b")[0]
    for name in ("loss", "grad_norm"):
        assert a[name] == pytest.approx(b[name], rel=1e-5)
    one, other = weights(tmp_path / "a"), weights(tmp_path / "b")
    for name in one:
        if name.endswith("exp_avg"):
            torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("command", ["sft", "rm", "dpo"])
def test_a_run_in_pieces_is_the_same_run(tiny: Path, tmp_path: Path, command: str) -> None:
    held_out = TEXTS[:3] if command == "sft" else PAIRS[:3]
    words = ("validation.every=2", "optimizer.warmup_steps=1")
    run(tiny, tmp_path / "whole", command, *words, "steps=5", held_out=held_out)
    run(tiny, tmp_path / "parts", command, *words, "steps=2", held_out=held_out)
    run(tiny, tmp_path / "parts", command, *words, "steps=5", held_out=held_out)
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    losses = [[m["loss"] for m in log(tmp_path / part)] for part in ("whole", "parts")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_golden_curve(tiny: Path, tmp_path: Path, command: str) -> None:
    """The curve that was committed. After a change that is meant to move it: delete the file and run the test."""
    run(tiny, tmp_path, command, "steps=12", "optimizer.lr=1e-3")
    found = [m["loss"] for m in log(tmp_path)]
    file = GOLDEN / f"{command}.txt"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{value:.6f}\n" for value in found))
    assert found == pytest.approx([float(line) for line in file.read_text().split()], rel=1e-3)


def test_the_end_token_is_learned_though_it_is_the_padding_token_too(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, "sft", "steps=30", "optimizer.lr=1e-2", rows=[{"prompt": "Hi", "response": "7"}] * 4)
    export.export(step_folders.latest(tmp_path / "run/checkpoints"), tmp_path / "run", tmp_path / "out", torch.float32)  # type: ignore
    assert logprobs(tmp_path / "out", "Hi", "7").exp().min() > 0.9


def test_epochs_and_the_last_short_batch(tiny: Path, tmp_path: Path) -> None:
    run(tiny, tmp_path, "sft", "steps=0", "epochs=2", "batch_size=5")
    assert [m["rows"] for m in log(tmp_path)] == [5, 5, 5, 5, 4]


def test_more_epochs_for_a_finished_run_train_every_row(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step of the first epoch was short, so the second takes three more: with two, rows were left out."""
    for epochs in (1, 2):
        run(tiny, tmp_path, "sft", "steps=0", f"epochs={epochs}", "batch_size=5", "track.console=plain")
    assert [m["rows"] for m in log(tmp_path)] == [5, 5, 2, 5, 5, 2]
    assert "birl: run: 6 steps" in "".join(capsys.readouterr())


def test_a_validation_split_and_its_best_checkpoint(tiny: Path, tmp_path: Path) -> None:
    summary = run(tiny, tmp_path, "sft", "data.validation_split=0.25", "validation.every=1", "checkpoint.keep_last=1")
    assert len(log(tmp_path, "validation")) == 4
    nll = {v["step"]: v["validation/nll"] for v in log(tmp_path, "validation") if v["step"]}
    assert summary["best_step"] == min(nll, key=nll.__getitem__)


def test_a_reward_model_is_a_standard_one(tiny: Path, tmp_path: Path) -> None:
    """Its scores are those of transformers' sequence classification, for texts of any length in one padded batch."""
    run(tiny, tmp_path, "rm", "steps=20")
    newest = step_folders.latest(tmp_path / "run/checkpoints")
    assert newest is not None
    export.export(newest, tmp_path / "run", tmp_path / "out", torch.float32)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1
    talks = [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
        for row in PAIRS
        for side in ("chosen", "rejected")
    ]
    texts = [tokenizer.apply_chat_template(t, tokenize=False) for t in talks]
    with torch.no_grad():
        scores = model(**tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)).logits[:, 0]
    chosen, rejected = scores[0::2], scores[1::2]
    assert (chosen > rejected).all()
    run(
        tiny,
        tmp_path / "again",
        "rm",
        f"model.path={tiny}",
        f"resume={newest}",
        "steps=21",
        "validation.every=20",
        held_out=PAIRS,
    )
    first = log(tmp_path / "again", "validation")[0]
    assert first["validation/score/chosen"] == pytest.approx(chosen.mean().item(), abs=1e-4)
    assert first["validation/score/rejected"] == pytest.approx(rejected.mean().item(), abs=1e-4)
    expected = torch.nn.functional.softplus(rejected - chosen).mean().item()
    assert first["validation/loss"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("denominator", ["token", "sequence"])
def test_the_loss_of_a_validation_does_not_depend_on_its_pieces(tiny: Path, tmp_path: Path, denominator: str) -> None:
    """Rows of other lengths: a mean over pieces of their means over tokens would be another one."""
    held_out = [{"prompt": "Hi", "response": "Anna " * n} for n in (1, 1, 9, 2, 30)]
    for size in (1, 2, 5):
        words = (f"batch_size={size}", f"denominator={denominator}", "steps=1", "optimizer.lr=0")
        run(tiny, tmp_path / str(size), "sft", *words, held_out=held_out)
    losses = [log(tmp_path / str(size), "validation")[0]["validation/loss"] for size in (1, 2, 5)]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)


def test_margin_and_centering_are_in_the_loss(tiny: Path, tmp_path: Path) -> None:
    rows = [row | {"gap": 3.0} for row in PAIRS]
    run(tiny, tmp_path / "m", "rm", "data.margin_column=gap", "steps=1", "batch_size=12", rows=rows)
    run(tiny, tmp_path / "c", "rm", "ranking.centering=10", "steps=1", "batch_size=12")
    run(tiny, tmp_path / "p", "rm", "steps=1", "batch_size=12")
    plain, margin, centred = (log(tmp_path / n)[0] for n in "pmc")
    assert plain["loss"] == pytest.approx(math.log(2), abs=0.1)
    assert margin["loss"] == pytest.approx(math.log1p(math.exp(3)), abs=0.2)
    assert centred["loss"] > plain["loss"]


@pytest.mark.parametrize("loss", ["dpo", "ipo", "hinge", "robust", "simpo", "orpo", "kto"])
def test_every_preference_loss_prefers(tiny: Path, tmp_path: Path, loss: str) -> None:
    words = {"robust": "preference.label_smoothing=0.1", "simpo": "preference.beta=2"}.get(loss, "preference.beta=0.1")
    run(tiny, tmp_path, "dpo", f"preference.loss={loss}", words, "steps=15", "optimizer.lr=1e-3")
    steps = log(tmp_path)
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["reward/margin"] > steps[0]["reward/margin"]
    assert steps[-1]["accuracy"] >= 0.75


def test_dpo_begins_at_log_2_and_is_its_definition_after_a_step(tiny: Path, tmp_path: Path) -> None:
    run(
        tiny,
        tmp_path,
        "dpo",
        "batch_size=12",
        "steps=2",
        "checkpoint.every=1",
        "optimizer.lr=1e-3",
        "checkpoint.keep_last=0",
    )
    steps = log(tmp_path)
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6) and steps[0]["reward/margin"] == pytest.approx(
        0, abs=1e-6
    )
    export.export(tmp_path / "run/checkpoints/step-000001", tmp_path / "run", tmp_path / "out", torch.float32)
    total = 0.0
    for row in PAIRS:
        gain = [
            (
                logprobs(tmp_path / "out", row["prompt"], row[s]).sum() - logprobs(tiny, row["prompt"], row[s]).sum()
            ).item()
            for s in ("chosen", "rejected")
        ]
        total += math.log1p(math.exp(-0.1 * (gain[0] - gain[1])))
    assert steps[1]["loss"] == pytest.approx(total / len(PAIRS), abs=1e-4)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_precomputed_reference_is_the_live_one(tiny: Path, tmp_path: Path, pieces: bool) -> None:
    run(tiny, tmp_path / "live", "dpo", "steps=4", held_out=PAIRS[:2])
    if pieces:
        run(tiny, tmp_path / "pre", "dpo", "preference.reference=precomputed", "steps=2", held_out=PAIRS[:2])
    run(tiny, tmp_path / "pre", "dpo", "preference.reference=precomputed", "steps=4", held_out=PAIRS[:2])
    live, once = log(tmp_path / "live"), log(tmp_path / "pre")
    assert [m["loss"] for m in live] == pytest.approx([m["loss"] for m in once], abs=1e-5)


def test_a_precomputed_reference_knows_rows_of_one_name_apart(tiny: Path, tmp_path: Path) -> None:
    """data.jsonl for training and data.jsonl in another folder for validation: their rows have the same ids."""
    for folder, rows in (("train", PAIRS), ("test", PAIRS[::-1])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = (f"data.train={tmp_path}/train/data.jsonl", f"data.validation={tmp_path}/test/data.jsonl")
    for reference in ("live", "precomputed"):
        run(tiny, tmp_path / reference, "dpo", *files, f"preference.reference={reference}", given=False)
    live, once = (log(tmp_path / reference) for reference in ("live", "precomputed"))
    assert [m["loss"] for m in live] == pytest.approx([m["loss"] for m in once], abs=1e-5)


def test_kto_on_votes(tiny: Path, tmp_path: Path) -> None:
    votes = [
        {"prompt": r["prompt"], "answer": r[s], "good": s == "chosen"} for r in PAIRS for s in ("chosen", "rejected")
    ]
    words = (
        "preference.loss=kto",
        "data.chosen_column=answer",
        "data.label_column=good",
        "steps=15",
        "optimizer.lr=1e-3",
    )
    run(tiny, tmp_path, "dpo", *words, rows=votes)
    steps = log(tmp_path)
    assert steps[0]["loss"] == pytest.approx(0.5, abs=1e-5) and steps[-1]["loss"] < 0.45
    assert steps[-1]["reward/chosen"] > 0 > steps[-1]["reward/rejected"]


def test_a_warm_up_longer_than_the_epochs_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BirlError, match=r"optimizer\.warmup_steps=99: the run has only \d+ optimizer steps?,"):
        run(tiny, tmp_path, "sft", "steps=0", "optimizer.warmup_steps=99")
    assert not (tmp_path / "run").exists()


def test_what_is_too_long_for_a_micro_batch_is_told_before_the_first_step(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BirlError, match=r"longest pair \(both answers together\), \d+ tokens"):
        run(tiny, tmp_path, "rm", "learner.tokens_per_microbatch=60")


def test_dry_run_writes_nothing(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(
        schema.DPO,
        [
            f"model.path={tiny}",
            "data.train=[given]",
            "preference.reference=precomputed",
            f"run={tmp_path}/run",
            "threads=1",
        ],
    )
    found = train(config, dry_run=True, given=Given(train=PAIRS))
    assert found["loss"] == pytest.approx(math.log(2), abs=1e-3) and "longest" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()  # of an earlier run
    train(config, dry_run=True, given=Given(train=PAIRS))
    assert not list((tmp_path / "run").iterdir())


def test_packing_shares_the_prompt_of_a_pair(tiny: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        policy = load_policy(schema.Model(path=str(tiny), dtype="float32"), pool)
    config = load(schema.RM, [f"model.path={tiny}", "data.train=[given]"])
    objective = Ranking(pack=packer_of(config, policy.pair_cost), centering=0.0)
    examples = list(load_examples(config.data, "train", policy.chat, 512, PAIRS)[0])
    ((batch,), _) = objective.micro_batches(examples)
    separate = sum(len(s) + 1 for e in examples for s in e.sequences)
    assert len(batch.tokens) < 0.7 * separate and len(batch.source) == 2 * len(examples)
    assert isinstance(policy.chat, Chat)


def test_the_sums_of_another_model_are_not_taken_for_this_one(tiny: Path, tmp_path: Path) -> None:
    words = ("preference.reference=precomputed", "steps=1", "batch_size=12")
    run(tiny, tmp_path / "other", "dpo", *words)
    (tmp_path / "run").mkdir()
    stored = json.loads((tmp_path / "other/run/reference.json").read_text())
    sums = {name: [x - 5 for x in sums] for name, sums in stored["sums"].items()}
    wrong = {"of": "another", "sha256": _digest(sums), "sums": sums}
    (tmp_path / "run/reference.json").write_text(json.dumps(wrong))
    run(tiny, tmp_path, "dpo", *words)
    assert log(tmp_path)[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"of": "m", "sums": {"a": [1.5]}}', "cut", "changed"])
def test_damaged_sums_of_the_reference_are_computed_again(
    tmp_path: Path, content: bytes | str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were a traceback, or were taken."""
    file, sums = tmp_path / "reference.json", {"a": [-1.5, -2.25]}
    whole = json.dumps({"of": "m", "sha256": _digest(sums), "sums": sums}).encode()
    file.write_bytes(whole)
    assert _stored(file, "m") == sums and _stored(file, "other") == {}
    assert _stored(tmp_path / "none", "m") == {} and not capsys.readouterr().out
    other = {"cut": whole[:-3], "changed": whole.replace(b"2.25", b"2.75")}
    file.write_bytes(content if isinstance(content, bytes) else other[content])
    assert _stored(file, "m") == {}
    assert f"WARNING: {file} is damaged" in capsys.readouterr().out


def test_the_adapter_of_a_reward_model_has_its_head(tiny: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    run(tiny, tmp_path, "rm", "lora.rank=2", "optimizer.lr=1e-2", "steps=3")
    newest = step_folders.latest(tmp_path / "run/checkpoints")
    assert newest is not None
    export.export(newest, tmp_path / "run", tmp_path / "merged", torch.float32)
    export.export_adapter(newest, tmp_path / "run", tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.tensor([[5, 9, 33, 7, 100]])
    with torch.no_grad():
        assert adapted(ids).logits.item() == pytest.approx(merged(ids).logits.item(), abs=1e-5)


def test_a_summary_does_not_take_a_loss_for_a_share(tiny: Path, tmp_path: Path) -> None:
    from birl.track.summary import facts, lines

    run(tiny, tmp_path, "sft", "steps=20", "validation.every=10", held_out=TEXTS[:3])
    words = dict(lines(facts(tmp_path / "run")))["held-out nll"]
    best = min(v["validation/nll"] for v in log(tmp_path, "validation"))
    assert f"best {best:.3f}" in words and "points" not in words
    assert not (tmp_path / "run/rollouts.jsonl").exists()
