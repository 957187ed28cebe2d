"""Tinker's own client against `birl tinker`, unchanged."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.server.tinker_server import KEYS, Server, serving
from tests.tiny import tiny_model_folder

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no Tinker client: make setup-tinker"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server]]:
    folder = tmp_path_factory.mktemp("tinker")
    model = tiny_model_folder(folder / "model")
    with serving(model, folder / "state") as server:
        yield model, server


def said(place: tuple[Path, Server], *words: str) -> list[str]:
    """Lines of a program of the client's."""
    env = {"TINKER_BASE_URL": place[1].url, "TINKER_API_KEY": KEYS["alice"], "HOME": str(place[0])}
    done = subprocess.run(
        [str(PYTHON), *words], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def limits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a tenant hears that wants more than it may have."""
    folder = tmp_path_factory.mktemp("limits")
    model = tiny_model_folder(folder / "model")
    words = ["quota_sessions=2", "quota_runs=2", "quota_samplers=3", "quota_checkpoints=4", "quota_gb=0.001"]
    with serving(model, folder / "state", *words) as server:
        (line,) = [x[5:] for x in said((model, server), "-m", "tests.server.tinker_quotas") if x.startswith("TOLD ")]
    return json.loads(line)


@pytest.fixture(scope="module")
def told(place: tuple[Path, Server]) -> dict[str, Any]:
    lines = [json.loads(x[5:]) for x in said(place, "-m", "tests.server.tinker_process") if x.startswith("TOLD ")]
    return {name: value for line in lines for name, value in line.items()}


def test_the_example_runs(place: tuple[Path, Server]) -> None:
    lines = said(place, "examples/tinker_grpo.py", "2", "model", str(place[0]))
    assert [line.partition(":")[0] for line in lines] == ["step 1", "step 2"]
    assert len((ROOT / "examples" / "tinker_grpo.py").read_text().splitlines()) <= 65


def test_it_trains_saves_and_loads(told: dict[str, Any]) -> None:
    found = told["training"]
    assert found["rank"] == 8 and found["wide"] == [2, 4]
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["same"][0] == found["same"][1] < found["losses"][-1]


def test_every_loss_that_it_names_is_computed_and_nothing_lies_between_sampler_and_trainer(told: dict) -> None:
    found = told["policies"]
    assert found["gap"] <= 1e-6
    assert len(found["losses"]) == 6
    assert found["losses"]["importance_sampling"] == pytest.approx(-16)  # the ratio is 1 in each of 16 places
    assert found["losses"]["cispo"] == pytest.approx(found["losses"]["stable_reinforce"])
    assert found["custom"]["loss:sum"] == pytest.approx(found["custom"]["squares"])


def test_every_option_of_sampling_is_answered(told: dict[str, Any]) -> None:
    found = told["sampling"]
    assert found["lengths"] == [6, 6] and found["ids"] == 2
    assert found["prompt"][0] is None and all(p < 0 for p in found["prompt"][1:])
    assert found["top"][0] is None and [len(t) for t in found["top"][1:]] == [3, 3]
    assert found["top_sampled"] == [2] * 6 and found["alternatives"] == [2, 4]
    assert found["targets"][0] == [pytest.approx(found["prompt"][1], abs=1e-6), 0.0]
    assert found["targets"][1][0] == pytest.approx(found["prompt"][2], abs=1e-6)
    assert found["last"][:2] == [None, None] and found["last"][2] == pytest.approx(found["prompt"][2], abs=1e-6)
    assert found["one"] == [[None], [None], [0, 4], [0, 2]]  # the client raised an error of its own
    assert found["stopped"][0] == "stop" and found["stopped"][1] <= 3
    assert found["greedy"][0] == found["greedy"][1]


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("loss", "RequestFailedError", "computes them at the client"),
        ("nan", "RequestFailedError", "1 numbers are infinite or NaN"),
        ("model", "RequestFailedError", "base_model=gpt: this server has model"),
        ("optimizer", "RequestFailedError", "Only AdamW"),
        ("path", "BadRequestError", "no path of a checkpoint|is no session"),
        ("name", "RequestFailedError", "a checkpoint's name"),
        ("picture", "RequestFailedError", "text alone"),
        ("long", "RequestFailedError", "prompt: has 600 tokens"),
    ],
)
def test_what_is_wrong_or_not_offered_is_the_clients_own_error_with_the_reason(
    told: dict[str, Any], name: str, kind: str, said: str
) -> None:
    assert told["errors"][name].startswith(kind), told["errors"][name]
    assert re.search(said, told["errors"][name]), told["errors"][name]
    assert float(told["errors"]["goes_on"]) > 0


def test_what_it_has_is_listed_and_deleted(told: dict[str, Any]) -> None:
    found = told["lists"]
    assert found["who"] == {"who": "me"} and found["rank"] == 4
    assert set(found["names"]) == {"sampler_weights/ready", "external_weights/out"}
    assert found["left"] == ["external_weights/out"]
    assert "model" in found["models"]


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("sessions", "BadRequestError", "You have 2 sessions, which is your quota: close one"),
        ("runs", "RequestFailedError", "You have 2 training runs, which is your quota: close a session"),
        ("runs from a checkpoint", "RequestFailedError", "You have 2 training runs"),
        ("samplers", "BadRequestError", "You have 3 sampling sessions, which is your quota"),
        ("samplers with weights", "RequestFailedError", "You have 3 sampling sessions"),
        ("checkpoints", "RequestFailedError", "You have 4 checkpoints, which is your quota: delete some"),
        ("bytes", "RequestFailedError", "the quota is 1.0: delete some"),
    ],
)
def test_a_quota_is_the_clients_own_error_with_the_reason(
    limits: dict[str, str], what: str, kind: str, said: str
) -> None:
    assert limits[what].startswith(f"{kind}: ") and said in limits[what], limits[what]


def test_what_ended_makes_room_and_its_checkpoints_stay(limits: dict[str, str]) -> None:
    assert limits["goes on"] == "1"
    assert {"weights/kept", "weights/last"} <= set(limits["left"].split())


@pytest.fixture(scope="module")
def methods(place: tuple[Path, Server]) -> dict[str, Any]:
    words = ["-m", "tests.server.tinker_methods", str(place[0]), KEYS["bob"]]
    (line,) = [x[5:] for x in said(place, *words) if x.startswith("TOLD ")]
    return json.loads(line)


def test_every_public_method_of_the_client_was_called(methods: dict[str, Any]) -> None:
    assert methods["not called"] == [] and methods["names"] >= 50


def test_training_by_every_method(methods: dict[str, Any]) -> None:
    found = methods["training"]
    assert found["custom"][0] == pytest.approx(found["custom"][1]) == pytest.approx(found["custom"][2])
    assert found["same path"] and "There is a checkpoint" in found["taken"]
    assert found["moved"][0] == found["moved"][1] != found["moved"][2]  # with the optimizer, and without
    assert found["same sampled"] and found["tokenizers"][0] == found["tokenizers"][1] > 0
    assert all("RequestFailedError: Request failed: There is no checkpoint" in said for said in found["hidden"]), found[
        "hidden"
    ]


def test_copies_of_a_sampler_are_the_same(methods: dict[str, Any], place: tuple[Path, Server]) -> None:
    found = methods["sampling"]
    assert len(found["tokens"]) == 4 and all(t == found["tokens"][0] for t in found["tokens"])
    assert found["scored"] == 3 and found["base"] == [str(place[0])] * 2


def test_what_is_listed_and_searched(methods: dict[str, Any]) -> None:
    found = methods["lists"]
    assert found["expires"] == {"weights/state": True, "sampler_weights/weights": False}
    assert found["left"] == ["weights/state"] and found["sizes"][0] and found["sizes"][2]
    assert [p[0] for p in found["pages"]] == [1, 1] and found["pages"][0][1] == found["pages"][1][1] >= 3
    assert found["runs"][0] == 2 and found["runs"][1] >= 3
    assert found["session"] == [True, "methods of a test", {"who": "me"}] and found["listed"]
    assert found["one"] == [True, {"who": "me"}] and found["rank"] == 4 and found["capabilities"]
    assert found["found"] == [[False], [True]] and found["last page"]  # the newest first, one to a page
    assert found["closed"] == [[True, "interrupted"]] and found["stranger"] == 0
    assert found["counted"] == [3]


@pytest.mark.parametrize(
    ("case", "kind", "said"),
    [
        ("full", "RequestFailedError", "full fine-tuning is not offered by this server"),
        ("dimuon", "RequestFailedError", "Only the optimizer adamw"),
        ("dimuon from state", "RequestFailedError", "Only the optimizer adamw"),
        ("token", "RequestFailedError", "weights_access_token is not offered"),
        ("token in place", "RequestFailedError", "weights_access_token is not offered"),
        ("copy", "BadRequestError", "no projects. Make a run from the weights"),
        ("copy to a project", "BadRequestError", "no projects. Make a run from the weights"),
        ("project", "BadRequestError", "no projects"),
        ("trace", "BadRequestError", "no traces"),
        ("audit", "BadRequestError", "audit.jsonl"),
        ("billing", "BadRequestError", "has no billing"),
        ("encrypted", "RequestFailedError", "encrypted exports are not offered"),
        ("urls", "ValueError", "external"),  # the client's own
        ("whoami", "RuntimeError", "JWT"),  # the client's own
    ],
)
def test_what_a_method_asks_for_that_is_not_offered(methods: dict[str, Any], case: str, kind: str, said: str) -> None:
    assert methods["refused"][case].startswith(f"{kind}: ") and said in methods["refused"][case], methods["refused"]


def test_no_key_of_another_tenant_is_kept(methods: dict[str, Any], place: tuple[Path, Server]) -> None:
    files = [f for f in (place[0].parent / "state").rglob("*") if f.is_file()]
    assert methods and len(files) > 10 and not any(b"tml-some-other" in f.read_bytes() for f in files)


def test_the_cookbook_merges_what_a_run_learned_into_a_whole_model(tmp_path: Path) -> None:
    model, ids = tiny_model_folder(tmp_path / "model"), torch.arange(5, 30)[None]
    with serving(model, tmp_path / "state", "model.dtype=float32", "names=[model]") as server:
        lines = said((model, server), "-m", "tests.server.tinker_weights", str(model), str(tmp_path))
    (wanted,) = [torch.tensor(json.loads(line[5:])) for line in lines if line.startswith("TOLD ")]

    def logprobs(of: Any) -> torch.Tensor:
        with torch.no_grad():
            return of(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]

    def loaded(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    assert (logprobs(loaded(model)) - wanted).abs().max() > 0.1
    for made in (loaded(tmp_path / "merged"), PeftModel.from_pretrained(loaded(model), tmp_path / "peft")):
        torch.testing.assert_close(logprobs(made), wanted, atol=1e-4, rtol=0)
