"""Pictures in requests of Tinker's own client: the numbers of birl's learner and of transformers, and refusals."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from birl.data.pack import pack
from birl.learner.learner import Learner
from birl.learner.low_rank_run import ALPHA, linear_layers
from birl.server.tinker.store import Store, read_tensors
from birl.types import Picture
from tests import sights
from tests.data.test_pack import make
from tests.models.test_vision import Bench, bench
from tests.server.test_tinker_client import PYTHON, ROOT
from tests.server.tinker_server import KEYS, serving

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no Tinker client: make setup-tinker"),
    pytest.mark.timeout(600),
]
FILES = {"one": sights.drawn("7", (24, 16)), "two": sights.drawn("3", (16, 32), "yellow")}
LARGE = sights.drawn("7", (100, 100))
ANSWER = (40, 41, 42, 43)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bench, Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("tinker")
    own = bench(folder, "qwen3_vl")
    for name, data in {**FILES, "large": LARGE}.items():
        (folder / f"{name}.png").write_bytes(data)
    Image.new("RGB", (24, 16)).save(folder / "one.gif")
    words = ["names=[sees]", "model.dtype=float32", "model.max_pixels=4000", "model.max_pictures=3"]
    with serving(folder / "qwen3_vl", folder / "state", *words) as server:
        env = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": KEYS["alice"], "HOME": str(folder)}
        command = [str(PYTHON), "-m", "tests.server.tinker_pictures", str(folder), KEYS["bob"]]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [x[5:] for x in done.stdout.splitlines() if x.startswith("TOLD ")]
    yield own, folder / "state", json.loads(line)


def prompt(b: Bench, name: str) -> tuple[int, ...]:
    return (5, 6, *b.pictures.encode(b.pictures.token, iter([Picture.of(FILES[name])])), 7, 8)


def behind(rows: list[list[float]], start: int) -> torch.Tensor:
    """Log-probs of the answers."""
    return torch.tensor([p for row in rows for p in row[start - 1 :]], dtype=torch.float32)


def by_learner(b: Bench, before: tuple[int, ...], answers: list[tuple[int, ...]]) -> torch.Tensor:
    (batch,) = pack([make(before, a, 0, i) for i, a in enumerate(answers)], [1.0] * len(answers), 10_000)
    return Learner(b.model, dtype=torch.float32, max_grad_norm=0).forward(batch)


@pytest.mark.parametrize("number", [0, 1])
def test_its_numbers_are_the_learners_and_its_gradient_is_transformers(
    place: tuple[Bench, Path, dict[str, Any]], number: int
) -> None:
    b, state, told = place
    found, before = told["alone"][number], prompt(b, ("one", "two")[number])
    answers = [ANSWER, (*ANSWER, 44)]
    torch.testing.assert_close(behind(found["before"], len(before)), by_learner(b, before, answers), atol=1e-5, rtol=0)
    assert found["before"] == found["taught"]
    store = Store(state)

    def adapter(path: str) -> dict[str, torch.Tensor]:
        made = store.find(path)
        assert made is not None
        return read_tensors(store.folder(made) / "adapter.safetensors")[0]

    layers, first = linear_layers(b.model), adapter(found["state"].replace("/state", "/first"))
    assert not any("visual" in name for name in first)
    b.model.requires_grad_(True).zero_grad(set_to_none=True)
    (-torch.cat([b.logprobs((*before, *a), len(before)) for a in answers]).sum()).backward()
    norms = [
        (ALPHA / 4 * torch.Tensor(m.weight.grad) @ first[f"{n}.lora_A"].T).norm() for n, m in layers.items()
    ]  # B is 0
    assert found["norm"]["grad_norm"] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-4)
    learned, weights = adapter(found["state"]), {n: m.weight.detach().clone() for n, m in layers.items()}
    with torch.no_grad():
        for name, layer in layers.items():
            layer.weight += ALPHA / 4 * learned[f"{name}.lora_B"] @ learned[f"{name}.lora_A"]
        expected = by_learner(b, before, answers)
        for name, layer in layers.items():
            layer.weight.copy_(weights[name])
    torch.testing.assert_close(behind(found["after"], len(before)), expected, atol=2e-5, rtol=0)
    assert float(expected.sum()) > float(behind(found["before"], len(before)).sum())


@pytest.mark.parametrize("number", [0, 1])
def test_what_is_sampled_has_the_log_probs_of_a_forward_pass(
    place: tuple[Bench, Path, dict[str, Any]], number: int
) -> None:
    b, _, told = place
    found, before = told["alone"][number], prompt(b, ("one", "two")[number])
    for row, (tokens, logprobs) in zip(found["again"], found["sampled"], strict=True):
        np.testing.assert_allclose(row[len(before) - 1 :], logprobs, atol=1e-5, rtol=0)
        assert len(tokens) == 6 and found["top"] == 6
    given = found["prompt"]  # none of the first token; 0 of a picture's, which the cookbook multiplies by weights of 0
    assert [p is None for p in given] == [True, *[False] * (len(before) - 1)]
    assert [p == 0 for p in given] == [False, False, *[True] * (len(before) - 4), False, False]


def test_pictures_of_two_tenants_at_once_change_nothing(place: tuple[Bench, Path, dict[str, Any]]) -> None:
    _, state, told = place
    for alone, beside in zip(told["alone"], told["beside"], strict=True):
        assert {k: v for k, v in alone.items() if k != "state"} == {k: v for k, v in beside.items() if k != "state"}
        store, files = Store(state), []
        for made in (store.find(alone["state"]), store.find(beside["state"])):
            assert made is not None
            files.append(read_tensors(store.folder(made) / "adapter.safetensors")[0])
        assert all(torch.equal(value, files[1][name]) for name, value in files[0].items())


@pytest.mark.parametrize(
    ("case", "kind", "said"),
    [
        ("count", "RequestFailedError", "prompt: a picture has 6 tokens for this model, and expected_tokens says 7"),
        ("count in training", "RequestFailedError", "data[0].model_input: a picture has 6 tokens for this model"),
        ("large", "RequestFailedError", "100 x 100 pixels is not decoded: at most 4000"),
        ("large in training", "RequestFailedError", "100 x 100 pixels is not decoded: at most 4000"),
        ("many", "RequestFailedError", "prompt: has more than 3 pictures"),
        ("gif", "RequestFailedError", "its file is image/gif: send png or jpeg"),
        ("format", "RequestFailedError", "format is 'jpeg', and its file is image/png"),
        ("none", "RequestFailedError", "cannot be read"),
        ("pointer", "RequestFailedError", "image_asset_pointer is not offered"),
        ("pointer in training", "ValueError", "ImageAssetPointerChunk"),  # the client's own
        ("sound", "RequestFailedError", "audio is not offered"),
        ("sound in training", "RequestFailedError", "audio is not offered"),
        ("target", "RequestFailedError", "is no token"),
        ("id", "RequestFailedError", "is no token"),  # nobody names a picture that another has sent
    ],
)
def test_what_is_refused_is_the_clients_own_error(
    place: tuple[Bench, Path, dict[str, Any]], case: str, kind: str, said: str
) -> None:
    told = place[2]["refused"]
    assert told[case].startswith(f"{kind}: ") and said in told[case], told[case]
    assert told["goes on"] == "1"
