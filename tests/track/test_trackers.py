"""The real packages, in an environment of their own: they do not agree with birl's other packages on versions."""

import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-trackers" / "bin" / "python"
NAMES = ("wandb", "mlflow", "trackio", "swanlab")
pytestmark = [pytest.mark.skipif(not PYTHON.exists(), reason="no trackers: make setup-trackers")]


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    """An address that programs take for their way to the network, and what they asked it for."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(2)
                    asked.append(connection.recv(200).decode("latin-1").split("\r\n")[0])

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked


def run(name: str, mode: str, folder: Path, *words: str, **env: str) -> dict[str, Any]:
    """What `tracker_process` says at its end."""
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    known = {k: v for k, v in os.environ.items() if not re.match("WANDB|MLFLOW|TRACKIO|SWANLAB|HF_|PYTHON", k)}
    done = subprocess.run(
        [str(PYTHON), "-m", "tests.track.tracker_process", "write", name, mode, str(folder), *words],
        cwd=ROOT,
        env={**known, "HOME": str(home), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=180,
    )
    lines = done.stdout.splitlines()
    told = [json.loads(line.removeprefix("TOLD ")) for line in lines if line.startswith("TOLD ")]
    assert told or done.returncode == 9, done.stderr[-3000:]
    return told[0] if told else {}


@pytest.mark.parametrize("name", NAMES)
def test_offline(name: str, tmp_path: Path, proxy: tuple[str, list[str]]) -> None:
    """A run is killed behind its checkpoint, resumed, and ends: each step once, in one run, without a secret, with
    nothing asked of the network."""
    address, asked = proxy
    folder = tmp_path / "my run"
    env = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)
    env |= {"TRACKIO_SPACE_ID": "me/space", "MLFLOW_TRACKING_URI": "http://192.0.2.1", "HF_TOKEN": "hf_x"}
    assert run(name, "offline", folder, "1", "7", "killed", **env) == {}
    told = run(name, "offline", folder, "6", "10", "read", **env)
    lost = {7} if name == "wandb" else set()  # W&B holds a step back until the next one comes
    assert [step for step, _ in told["points"]] == sorted({*range(1, 11)} - lost)
    assert all(value == pytest.approx(0.2 + 0.02 * step) for step, value in told["points"])
    assert len(told["runs"]) == 1 and not told["heard"]
    assert told["config"]["env.api_key"] == "(hidden)" and float(told["config"]["optimizer.lr"]) == 1e-5
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files if b"very-secret" in path.read_bytes()]
    assert not asked and not folder.with_suffix(".network").exists()
    if name in ("wandb", "mlflow"):
        found = {key.split(".", 1)[-1].removeprefix("summary/"): value for key, value in told["summary"].items()}
        assert float(found["validation/best"]) == pytest.approx(0.4)


@pytest.mark.parametrize("name", NAMES)
def test_a_server_that_is_away_holds_nobody_up(name: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    key = "0123456789abcdef" * 2 + "01234567"
    env = {
        "wandb": {"WANDB_BASE_URL": nobody, "WANDB_API_KEY": key},
        "mlflow": {"MLFLOW_TRACKING_URI": nobody},
        "trackio": {"TRACKIO_SERVER_URL": nobody, "TRACKIO_WRITE_TOKEN": key},
        "swanlab": {"SWANLAB_API_HOST": nobody, "SWANLAB_API_KEY": key},
    }[name]
    told = run(name, "online", tmp_path / "run", "1", "10", **env)
    assert told["waited"] < 200
    assert len((tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()) == 10
    assert name == "trackio" or 1 <= len(told["heard"]) <= 2, told["heard"]  # Trackio keeps what it cannot send


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_nobody_logged_in_is_an_error_that_says_what_to_do(name: str, tmp_path: Path) -> None:
    words = r"wandb login|MLFLOW_TRACKING_URI=http|swanlab login"
    try:
        said = run(name, "online", tmp_path / "run", "1", "2", "patient")["heard"]  # on a machine that is very busy
    except AssertionError as error:
        said = [str(error)]
    assert re.search(words, "".join(said)), said


def test_mlflow_in_a_store_that_runs_share(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/shared.db"
    for number in ("a", "b"):
        run("mlflow", "online", tmp_path / number, "1", "2", "patient", MLFLOW_TRACKING_URI=store)
    code = f"""
import mlflow
client = mlflow.MlflowClient(tracking_uri={store!r})
print(sorted(run.info.run_name for run in client.search_runs(["1"])))
"""
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("['a', 'b']"), done.stderr[-2000:]
