"""`birl launch modal`: one app of Modal's cloud for each job, with a container for the learner and one for each engine
(`modal_app.py` defines it, `modal_container.py` runs there). Detached.

Tested with Modal's client against a mock of its servers, never in the cloud itself.
"""

import json
import os
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from birl.errors import STOPPED, BirlError
from birl.launch import external
from birl.launch import job as jobs
from birl.launch.job import Job
from birl.launch.launcher import Handle, Status, find
from birl.launch.modal_plan import VARIABLE, Keys, ModalPlan, prepare

MODULE = "birl.launch.modal_app"
REWARDS = "birl.launch.modal_rewards"  # in the cloud, module of reward functions of this machine
SILENT = 60.0  # s without a note after which a container's state is unknown
POLL = 2.0  # s


def render(job: Job, keys: Keys) -> dict[str, str]:
    plan = prepare(job, keys)
    learner = shlex.join(plan.learner)
    place = plan.settings.app
    commands = [
        f"{VARIABLE}=$(cat {VARIABLE.lower()}.json) modal deploy -m {MODULE}",
        f"# Learner.run in {place}: {learner}" if not plan.here else f"# on this machine: {learner}",
        *[f"# Engine.run in {place}, {plan.settings.engines} times: {shlex.join(plan.engine)}"] * bool(plan.engine),
    ]
    settings = json.dumps(json.loads(plan.settings.text()), indent=1)
    return {f"{VARIABLE.lower()}.json": settings, "commands": "\n".join(commands)}


@dataclass
class More:
    learner: str
    app: str
    environment: str
    count: int
    stop_timeout: float
    volume: str


def submit(job: Job, keys: Keys) -> Handle:
    """Deploy the app and start the job's functions. Raises `BirlError`."""
    plan = prepare(job, keys)
    modal = client()
    jobs.given(keys.env)  # the app reads them
    with asked(modal):
        refuse_second(job)
        with variables(plan), modal.enable_output():
            module = define()
            module.app.deploy(environment_name=keys.environment or None)
            notes = module.notes()
            notes.clear()
            learner = ""
            if plan.here:
                for number in range(plan.settings.engines):
                    module.Engine().run.spawn(plan.engine, plan.work, number)
            else:
                learner = module.Learner().run.spawn(plan.learner, plan.work, plan.engine).object_id
    more = More(
        learner=learner,
        app=plan.settings.app,
        environment=keys.environment,
        count=plan.settings.engines if plan.engine else 0,
        stop_timeout=keys.stop_timeout,
        volume=keys.volume,
    )
    handle = Handle(where="modal", id=module.app.app_id, run=str(job.run), name=job.name, more=asdict(more))
    if plan.here:
        handle.save()  # engines cost money from now on: `birl stop` must find them
        print(f"Waiting for {plan.settings.engines} engines; then, here:")
        print(f"  {shlex.join(plan.at(addresses(handle)))}")
    return handle


def refuse_second(job: Job) -> None:
    try:
        earlier = find(str(job.run), trusted=True)
    except BirlError:  # no job was launched from this folder yet
        return
    if earlier.where == "modal" and any(line.state in ("running", "restarting") for line in status(earlier)):
        raise BirlError(f"{job.run} is in use by {earlier.id}; `birl stop {job.run}` ends it")


def status(handle: Handle) -> Sequence[Status]:
    modal = client()
    with asked(modal):
        notes = notes_of(modal, handle)
        result: list[Status] = []
        if handle.more["learner"]:
            call = modal.FunctionCall.from_id(handle.more["learner"])
            result.append(learner_status(notes.get("learner") or {}, outcome(modal, call)))
        for number in range(handle.more["count"]):
            note = notes.get(f"engine/{number}") or {}
            state, detail = heard(note)
            result.append(Status(role="engine", index=number, state=state, where=note.get("url", ""), detail=detail))
        return result


def learner_status(note: dict[str, Any], ended: "int | str | None") -> Status:
    state, detail = heard(note)
    if isinstance(ended, int):
        well = ended in (0, *STOPPED)
        state = ("stopped" if ended or note.get("state") == "stopped" else "done") if well else "failed"
        detail = detail if well else f"exit code {ended} {note.get('detail', '')}".strip()
    elif ended is not None:
        state, detail = "failed", ended
    elif int(note.get("starts", 0)) > 1 and state == "running":
        detail = f"start {note['starts']} {detail}".strip()
    return Status(role="learner", index=0, state=state, where=note.get("task", ""), detail=detail)


def heard(note: dict[str, Any]) -> tuple[str, str]:
    """State and detail of a container's last note."""
    if not note:
        return "waiting", "for a machine"
    age = time.time() - float(note.get("time", 0.0))
    if note["state"] == "running" and age > SILENT:
        return "unknown", f"last heard {age:.0f} s ago"
    return note["state"], note.get("detail", "")


def outcome(modal: Any, call: Any) -> "int | str | None":
    """Result of a function call, or why it failed; None while it runs."""
    try:
        return int(call.get(timeout=0))
    except TimeoutError:
        return None
    except modal.exception.OutputExpiredError:
        return "ended more than a week ago"
    except modal.exception.AuthError:
        raise
    except Exception as error:  # any exception of the function
        return f"{type(error).__name__}: {error}".splitlines()[0]


def logs(handle: Handle, role: str, follow: bool) -> Iterator[str]:
    """Lines of Modal's log, each with role and number as prefix."""
    client()
    words = ["--follow"] if follow else ["--tail", "1000"]
    over = (lambda: ended(handle)) if follow else None
    with closing(external.lines(cli("app", "logs", handle.id, *words), over)) as lines:
        yield from (line for line in lines if not role or line.startswith(f"[{role} "))


def ended(handle: Handle) -> bool:
    """Whether the job has ended; a deployed app never ends by itself."""
    time.sleep(POLL)
    with suppress(Exception):
        return all(line.state in ("done", "failed", "stopped") for line in status(handle) if line.role == "learner")
    return False


def stop(handle: Handle) -> str:
    """The learner saves and ends, then the engines, then the app. Raises `BirlError` if it does not save in time."""
    modal = client()
    late, before = False, ""
    with asked(modal):
        notes = notes_of(modal, handle)
        notes.put("stop", True)
        if handle.more["learner"]:
            call = modal.FunctionCall.from_id(handle.more["learner"])
            if (result := outcome(modal, call)) is not None:
                before = learner_status(notes.get("learner") or {}, result).state
            deadline = time.monotonic() + float(handle.more["stop_timeout"])
            while outcome(modal, call) is None and not late:
                time.sleep(POLL)
                late = time.monotonic() > deadline
            if late:
                call.cancel(terminate_containers=True)
        notes.put("over", True)
    external.run(cli("app", "stop", handle.id, "--yes"), 120.0)
    if late:
        raise BirlError(
            f"{handle.name} had not saved after {handle.more['stop_timeout']:g} s (launch.stop_timeout) and was ended; "
            "it goes on from its newest checkpoint."
        )
    return before


def addresses(handle: Handle, patience: float = 1800.0) -> list[str]:
    """Addresses of the engines, after all have started. Raises `BirlError`."""
    modal = client()
    deadline = time.monotonic() + patience
    with asked(modal):
        notes = notes_of(modal, handle)
        while True:
            result = [notes.get(f"engine/{number}") or {} for number in range(handle.more["count"])]
            if all(note.get("state") == "running" for note in result):
                return [note["url"] for note in result]
            if time.monotonic() > deadline:
                raise BirlError(f"{handle.name}: the engines did not come; `birl logs {handle.run} engine` shows why")
            time.sleep(POLL)


def fetch(handle: Handle, name: str) -> bytes:
    """A file of the run folder. Raises `BirlError`."""
    modal = client()
    with asked(modal):
        volume = modal.Volume.from_name(handle.more["volume"], environment_name=handle.more["environment"] or None)
        try:
            return b"".join(volume.read_file(f"runs/{handle.name}/{name}"))
        except FileNotFoundError as error:
            raise BirlError(f"runs/{handle.name}/{name} is not on the volume {handle.more['volume']}") from error


def notes_of(modal: Any, handle: Handle) -> Any:
    return modal.Dict.from_name(
        handle.more["app"], environment_name=handle.more["environment"] or None, create_if_missing=True
    )


def cli(*words: str) -> list[str]:
    """A command of Modal's command line."""
    return [sys.executable, "-m", "modal", *words]


def client() -> Any:
    try:
        return import_module("modal")
    except ImportError as error:
        raise BirlError("birl launch modal: modal is not installed; pip install 'birl[modal]'") from error


@contextmanager
def asked(modal: Any) -> Iterator[None]:
    try:
        yield
    except modal.exception.AuthError as error:
        raise BirlError(f"Modal refuses access: {error}; `modal setup` creates a token") from error
    except modal.exception.Error as error:
        raise BirlError(f"Modal: {type(error).__name__}: {error}") from error


@contextmanager
def variables(plan: ModalPlan) -> Iterator[None]:
    """Environment variables that `modal_app` reads on import. Engines get a token of this job, unless one is set."""
    given = {VARIABLE: plan.settings.text()}
    if "BIRL_TOKEN" in plan.settings.env and not os.environ.get("BIRL_TOKEN"):
        given["BIRL_TOKEN"] = secrets.token_hex(24)
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def define() -> Any:
    """Import the app's module again: its definitions depend on the environment."""
    sys.modules.pop(MODULE, None)
    return import_module(MODULE)


@contextmanager
def answering(handle: Handle, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Answer calls of this process's reward functions for the job, as a context."""
    from birl.launch.modal_rewards import answer, queue_of

    client()
    over = threading.Event()
    queue = queue_of(handle.more["app"], handle.more["environment"])
    thread = threading.Thread(target=answer, args=(queue, functions, over.is_set), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60.0)
