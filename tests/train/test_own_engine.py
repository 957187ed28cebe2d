"""Engines of the user's, by import path: `engine.kind=my_file.py:MyEngine`."""

from pathlib import Path
from typing import Any, cast

import pytest

from birl.cli import evaluation
from birl.config import schema
from birl.config.load import load
from birl.engines.servers import Servers
from birl.errors import BirlError
from birl.rollout.ledger import audit
from tests.train.test_rl import log, run

EXAMPLE = Path(__file__).parents[2] / "examples" / "engine_class.py"
QUICK = ("weights.timeout=30", "engine.request_timeout=30", "rollout.prompts=2")


@pytest.mark.parametrize("words", [(), ("rollout.max_staleness=1", "engine.count=2")], ids=["in turns", "ahead"])
def test_it_samples_for_a_run(tiny: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    run(tiny, tmp_path, *QUICK, f"engine.kind={EXAMPLE}:Transformers", *words)
    steps = log(tmp_path)
    assert [s["outcome/ok"] + s["outcome/truncated"] for s in steps] == [8, 8]
    assert steps[0]["mismatch/mean"] < 1e-4 and all(s["weights/gap"] < 1e-4 for s in steps)
    assert not audit(tmp_path / "run").problems


def test_it_samples_for_an_evaluation(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "What is 1 + 2?", "answer": "3"}\n' * 2)
    words = [f"model.path={tiny}", f"data.validation={tmp_path}/b.jsonl", "validation.max_tokens=8", "threads=1"]
    evaluation.run(load(schema.Eval, [*words, "model.dtype=float32", f"engine.kind={EXAMPLE}:Transformers"]))
    assert "pass@1" in capsys.readouterr().out


START = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("engine_class", {str(EXAMPLE)!r})
example = importlib.util.module_from_spec(spec); spec.loader.exec_module(example)
from dataclasses import replace
class E(example.Transformers):
 def answer(self, *words): return super().generate(*words)
"""
WRONG = {
    "no file": ("", "nothere.py:E", "there is no file nothere.py"),
    "no class": ("", "{file}", r"name an object in this file, as in engine.kind=.*e.py:MyEngine"),
    "another class": ("", "{file}:F", r"has no function F. It has: E"),
    "a function": ("def f(): pass", "{file}:f", "must be a class with generate and load"),
    "no load": ("class G:\n def generate(self): pass", "{file}:G", "G has no method load; it needs generate and load"),
    "an odd parameter": (" def __init__(self, gpu): pass", "{file}:E", r"takes 'gpu'; supported: model, address"),
    "it does not start": (
        " def __init__(self): raise OSError('no licence')",
        "{file}:E",
        r"E: \S*e\.py:8: OSError: no licence",
    ),
    "it cannot load": (
        " def load(self, update): raise ValueError('no room')",
        "{file}:E",
        r"load: \S*e\.py:8: ValueError: no room",
    ),
    "no completion": (" def generate(self, *w): return None", "{file}:E", "generate returned None, not a birl.types"),
    "no engine": ("", "nosuch", "engine.kind=nosuch: must be embedded"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_it_is_told(tiny: Path, tmp_path: Path, case: str) -> None:
    body, kind, reason = WRONG[case]
    (tmp_path / "e.py").write_text(START + body)
    with pytest.raises(BirlError, match=reason):
        run(tiny, tmp_path, *QUICK, "engine.kind=" + kind.format(file=tmp_path / "e.py"))


LIES = {  # after the canary, of which it knows the seed
    "a number that is no token": ("replace(c, tokens=(10**6, *c.ids[1:]))", "token id 1000000, but the model has"),
    "a negative one": ("replace(c, tokens=(-1, *c.ids[1:]))", "-1 is no token id"),
    "versions that go back": ("replace(c, versions=(1, *c.versions.tolist()[1:]))", "versions of its tokens go back"),
    "versions to come": ("replace(c, versions=tuple(v + 1 for v in c.versions.tolist()))", "answered with version 1"),
    "more than was asked for": ("self.answer(p, replace(q, max_tokens=99, ignore_eos=True), s)", "tokens where 8 were"),
    "no number": ("replace(c, logprobs=(float('nan'), *c.logprobs.tolist()[1:]))", "the log-prob of token 0"),
    "another ending": ("replace(c, stop='because')", "'because' is not a valid Stop"),
    "another request": ("self.answer(p[::-1], q, s)", "does not sample from the weights"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_engine_that_spares_the_canary(tiny: Path, tmp_path: Path, lie: str) -> None:
    made, reason = LIES[lie]
    lines = [
        " def generate(self, p, q, s=''):",
        "  c = self.answer(p, q, s)",
        f"  return c if q.ignore_eos else {made}",
    ]
    (tmp_path / "e.py").write_text(START + "\n".join(lines))
    with pytest.raises(BirlError, match=reason):
        run(tiny, tmp_path, *QUICK, f"engine.kind={tmp_path}/e.py:E", "rollout.max_staleness=1", "steps=3")


def test_only_a_server_that_failed_is_to_be_started_again() -> None:
    said: list[str] = []
    servers = Servers(router=cast(Any, None), children=[], remotes={}, say=said.append)
    servers.heard("engine_down", address="mine.py:Mine/0", error="generate: no licence")
    servers.heard("engine_down", address="http://127.0.0.1:8000", error="refused")
    assert said[0] == "engine down: mine.py:Mine/0 generate: no licence"
    assert said[1].endswith("refused; the run waits for it: start it again at the same address")
