"""A reward model learns a separable taste, judges the same wherever it is asked, and RL against it follows it."""

import asyncio
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.learner import export, step_folders
from birl.learner.rewards import RewardModel
from birl.named import Given
from birl.train.command import train

#: all that the policy may try: what the reward model has never seen it would reward by chance
LETTERS = "".join(map(chr, range(32, 127))) + "éß中\n"
QUIET = ["track.console=off", "track.tensorboard=false", "track.report=false", "threads=1", "model.dtype=float32"]


def pairs(seed: int, count: int) -> list[dict[str, str]]:
    """Who has more a's, by two at least, is better."""
    rng = random.Random(seed)
    found = []
    while len(found) < count:
        texts = ["".join(rng.choices(LETTERS + "a" * 25, k=rng.randint(2, 9))) for _ in range(2)]
        texts.sort(key=lambda t: -t.count("a"))
        if texts[0].count("a") > texts[1].count("a") + 1 and all(t.strip() for t in texts):
            found.append({"prompt": f"What is {len(found) % 12} + 2?", "chosen": texts[0], "rejected": texts[1]})
    return found


@pytest.fixture(scope="module")
def trained(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an exported reward model, with its run beside it."""
    folder = tmp_path_factory.mktemp("reward_model")
    words = [f"model.path={tiny}", "data.train=[given]", "data.validation=[given]", f"run={folder}/run", *QUIET]
    config = load(schema.RM, [*words, "batch_size=32", "optimizer.lr=2e-3", "steps=150", "ranking.centering=0.01"])
    train(config, given=Given(train=pairs(0, 1200), validation=pairs(1, 200)))
    newest = step_folders.latest(folder / "run" / "checkpoints")
    assert newest is not None
    export.export(newest, folder / "run", folder / "model", torch.float32)
    return folder


def test_it_tells_them_apart(trained: Path) -> None:
    last = json.loads((trained / "run/validation.jsonl").read_bytes().splitlines()[-1])
    assert last["validation/accuracy"] >= 0.95


def test_it_judges_like_transformers(trained: Path) -> None:
    prompts: list[Any] = ["What is 1 + 2?", [{"role": "user", "content": "What is 3 + 4?"}]] * 2
    completions = ["aaa", "b 1", "a", "hello"]
    with ThreadPoolExecutor(1) as pool:
        judge = RewardModel(str(trained / "model"), schema.Model(dtype="float32"), pool)
        found = asyncio.run(judge(completions, prompts))
    model = AutoModelForSequenceClassification.from_pretrained(trained / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    for prompt, completion, score in zip(prompts, completions, found, strict=True):
        talk = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        talk = [*talk, {"role": "assistant", "content": completion}]
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        assert model(ids).logits.item() == pytest.approx(score, abs=1e-4)


def test_rl_against_it_raises_the_true_score(tiny: Path, trained: Path, tmp_path: Path) -> None:
    words = [f"model.path={tiny}", "data.train=[given]", "reward.functions=[model]", f"reward.model={trained}/model"]
    words += ["rollout.prompts=4", "rollout.group_size=8", "rollout.max_tokens=8", "optimizer.lr=3e-3", "steps=30"]
    rows = [{"prompt": f"What is {i} + 2?", "x": i} for i in range(12)]
    train(load(schema.RL, [*words, f"run={tmp_path}/run", *QUIET]), given=Given(train=rows))
    records = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_bytes().splitlines()]

    def true_score(first: int, last: int) -> float:
        texts = [r["text"] for r in records if first <= r["step"] <= last]
        return sum(t.count("a") for t in texts) / len(texts)

    assert true_score(26, 30) > true_score(1, 5) + 0.5
    assert {"model"} == {name for r in records for name in r["parts"]}


def test_what_is_no_reward_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    words = [f"model.path={tiny}", "data.train=[given]", "reward.functions=[model]", f"reward.model={tiny}"]
    with pytest.raises(BirlError, match=r"is no reward model: it has no score\.weight"):
        train(load(schema.RL, [*words, f"run={tmp_path}/run", *QUIET]), given=Given(train=[{"prompt": "Hi"}]))


class Served(BaseHTTPRequestHandler):
    """Answers as vLLM's /pooling does: the score is the number of a's."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = asked["messages"][-1]
        status = 500 if "crash" in said["content"] else 200
        body = json.dumps({"data": [{"index": 0, "object": "pooling", "data": [float(said["content"].count("a"))]}]})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode() if status == 200 else b"out of memory")

    def log_message(self, *_: Any) -> None:
        pass


def test_a_served_reward_model(tiny: Path, tmp_path: Path) -> None:
    server = HTTPServer(("127.0.0.1", 0), Served)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/pooling"
    words = [f"model.path={tiny}", "data.train=[given]", "reward.functions=[model]", f"reward.model={address}"]
    words += ["rollout.prompts=2", "rollout.group_size=4", "rollout.max_tokens=8", "steps=1"]
    rows = [{"prompt": f"What is {i} + 2?"} for i in range(4)]
    try:
        train(load(schema.RL, [*words, f"run={tmp_path}/run", *QUIET]), given=Given(train=rows))
    finally:
        server.shutdown()
        server.server_close()
    records = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_bytes().splitlines()]
    assert len(records) == 8
    assert all(r["reward"] == r["text"].replace("<|im_end|>", "").count("a") for r in records)
    with pytest.raises(BirlError, match="cannot be reached"):
        train(load(schema.RL, [*words, f"run={tmp_path}/other", *QUIET]), given=Given(train=rows))
