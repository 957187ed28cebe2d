"""A checkpoint to the hub: its own client, unchanged, against a double of the hub's HTTP interface."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from birl.cli.model_card import model_card
from tests.train import test_offline as offline
from tests.train import test_rl as rl

TOKEN = "hf_secret"


class Hub:
    """Repositories by name, each a folder; what came in one commit, and how often."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.commits, self.blobs, self.private = folder, list[str](), dict[str, bytes](), dict[str, bool]()

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, Any]:
        if method == "PUT":
            self.blobs[path.rpartition("/")[2]] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        parts = path.strip("/").split("/")
        match parts:
            case ["api", "whoami-v2"]:
                return 200, {"type": "user", "name": "me", "auth": {}}
            case ["api", "validate-yaml"]:
                yaml.safe_load(json.loads(body)["content"].split("---\n", 2)[1])
                return 200, {"errors": [], "warnings": []}
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                owner = asked.get("organization") or "me"
                if owner != "me":
                    return 403, {"error": f"You don't have the rights to create a model under the namespace {owner}"}
                name = f"{owner}/{asked['name']}"
                known = name in self.private
                self.private.setdefault(name, asked.get("visibility") == "private" or bool(asked.get("private")))
                return (409 if known else 200), {"url": f"{self.url}/{name}", "id": name, "name": name}
            case ["api", "models", user, name] if f"{user}/{name}" in self.private:
                return 200, {"id": f"{user}/{name}", "private": self.private[f"{user}/{name}"]}
            case ["api", "models", user, name, "preupload", "main"]:
                files = json.loads(body)["files"]
                mode = lambda f: "lfs" if f["path"].endswith(".safetensors") else "regular"  # noqa: E731
                return 200, {
                    "files": [{"path": f["path"], "uploadMode": mode(f), "shouldIgnore": False} for f in files]
                }
            case [user, git, "info", "lfs", "objects", "batch"] if git.endswith(".git"):
                objects = [
                    {**o, "actions": {"upload": {"href": f"{self.url}/blobs/{o['oid']}"}}}
                    for o in json.loads(body)["objects"]
                ]
                return 200, {"transfer": "basic", "objects": objects}
            case ["api", "models", user, name, "commit", "main"]:
                head, *operations = map(json.loads, body.splitlines())
                self.commits.append(head["value"]["summary"])
                for operation in operations:
                    self.write(f"{user}/{name}", operation["key"], operation["value"])
                return 200, {"commitUrl": f"{self.url}/{user}/{name}/commit/1", "commitOid": "1"}
            case _:
                return 404, {"error": "Not found"}

    def write(self, name: str, kind: str, value: dict[str, Any]) -> None:
        blob = base64.b64decode(value["content"]) if kind == "file" else self.blobs[value["oid"]]
        assert kind == "file" or hashlib.sha256(blob).hexdigest() == value["oid"]
        target = self.folder / name / value["path"]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(blob)

    url: str


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    hub = Hub(tmp_path / "hub")

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            status, answer = hub.answer(self.command, path, body, self.headers.get("Authorization", ""))
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            if isinstance(answer, dict) and "error" in answer:
                self.send_header("X-Error-Message", answer["error"])
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = respond

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()


def push(hub: Hub, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(hub.folder / "home"), "HF_TOKEN": token}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {k: v for k, v in own.items() if v}
    command = [sys.executable, "-m", "birl", "checkpoints", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_what_was_pushed_is_the_model_with_its_card(tiny: Path, tmp_path: Path, hub: Hub) -> None:
    rl.run(tiny, tmp_path, "steps=2", "validation.every=1", "data.validation_split=0.25", "checkpoint.every=1")
    run = tmp_path / "run"
    done = push(hub, str(run), "export", "last", "hf://me/letters", "--license", "mit", "--private")
    assert (done.returncode, done.stdout.strip()) == (0, f"{hub.url}/me/letters"), done.stderr
    folder = hub.folder / "me/letters"
    assert hub.commits == ["run, step-000002"] and hub.private == {"me/letters": True}
    ids = torch.arange(3, 30)[None]
    subprocess.run([sys.executable, "-m", "birl", "checkpoints", run, "export", "last", tmp_path / "here"], check=True)
    here, there = (AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (tmp_path / "here", folder))
    assert torch.equal(here, there)
    _, head, text = (folder / "README.md").read_text().split("---\n", 2)
    known = yaml.safe_load(head)
    assert known["license"] == "mit" and "base_model" not in known and known["library_name"] == "transformers"
    assert f"base model | {tiny.name};" in text  # which is no model of the hub
    assert "| 0 |" in text and "| 2 |" in text and "Against step 0" in text and "95 %" in text
    assert str(tmp_path) not in text and not list(run.glob(".push-*"))
    again = push(hub, str(run), "export", "1", "hf://me/letters")  # into what is there
    assert again.returncode == 0 and hub.commits[1:] == ["run, step-000001"]


def test_an_adapter_alone(tiny: Path, tmp_path: Path, hub: Hub) -> None:
    rl.run(tiny, tmp_path, "steps=1", "lora.rank=4", "validation.every=0", "checkpoint.every=1")
    done = push(hub, str(tmp_path / "run"), "export-adapter", "last", "hf://me/adapter")
    assert done.returncode == 0, done.stderr
    folder = hub.folder / "me/adapter"
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), folder)
    before = list(hub.commits)
    done = push(hub, str(tmp_path / "run"), "export-adapter", "last", "hf://me/adapter", "--private")
    assert (done.returncode, hub.commits) == (2, before) and "is public" in done.stderr
    head = yaml.safe_load((folder / "README.md").read_text().split("---\n", 2)[1])
    assert (head["library_name"], "lora" in head["tags"], "license" in head) == ("peft", True, False)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == tiny.name
    assert not any(str(tiny.parent).encode() in file.read_bytes() for file in folder.iterdir())


@pytest.mark.parametrize(
    ("target", "token", "told"),
    [
        ("hf://me/x", "", "there is no token"),
        ("hf://me/x", "hf_wrong", "hf://me/x: "),
        ("hf://you/x", TOKEN, "the rights to create a model under the namespace you"),
        ("hf://me/x/y", TOKEN, "hf://USER/NAME"),
        ("hf://", TOKEN, "hf://USER/NAME"),
    ],
)
def test_what_the_hub_refuses_is_told_in_a_line(
    tiny: Path, tmp_path: Path, hub: Hub, target: str, token: str, told: str
) -> None:
    offline.run(tiny, tmp_path, "sft", "steps=1", "checkpoint.every=1")
    done = push(hub, str(tmp_path / "run"), "export", "last", target, token=token)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not hub.commits and TOKEN not in done.stderr


def test_a_card_holds_what_names_hold(tiny: Path, tmp_path: Path) -> None:
    offline.run(tiny, tmp_path, "sft", "steps=1", "checkpoint.every=1")
    run = tmp_path / "run"
    config = json.loads((run / "config.json").read_text())
    config["data.train"] = ["a|b\n<script>.jsonl"]
    (run / "config.json").write_text(json.dumps(config))
    text = model_card(run, 1, "me/x")
    assert "a\\|b &lt;script>.jsonl" in text and "This checkpoint was not validated." in text
