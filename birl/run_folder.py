"""The folder of a run: who may write to it, its files about the run, and the checkpoint to continue from."""

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from birl.config import schema
from birl.config.file import to_yaml
from birl.errors import BirlError
from birl.learner import step_folders
from birl.learner.policy import Policy
from birl.learner.store import Damaged, Store, location
from birl.models import device
from birl.models.digests import digests, whole
from birl.models.load import save_hf_config
from birl.models.vision import PROCESSORS
from birl.parallel.ranks import Ranks
from birl.regular import clear, write_whole
from birl.text import tools
from birl.track.folder_lock import check_same, plain, unwritable

#: what changed after a checkpoint was saved -> what follows for a run that goes on from it
FOLLOWS = {
    "data.train": "its rows come in another order, so some may be trained twice and others not at all",
    "The chat template": "prompts are rendered in another way than before",
    "model.path": "it has other weights, so the reference is another model than before",
}


def recovered(url: str, run: Path) -> Path | None:
    """Copy the newest intact checkpoint of a run from a store to its empty folder; None if the store has none. Raises
    `BirlError` if all are damaged, or one cannot be read: an older one would replace a newer one."""
    store = Store(url)
    steps = store.steps()
    if steps:
        store.take_about(run)
    for step in reversed(steps):
        print(f"{run} has no checkpoint: taking step {step} from {url}.", flush=True)
        try:
            return store.take(step, run / "checkpoints")
        except Damaged as error:
            print(f"WARNING: {error}", flush=True)
    if steps:
        raise BirlError(f"All {len(steps)} checkpoints at {url} are damaged. Begin anew with run=ANOTHER_FOLDER.")
    return None


def fetched(url: str, root: Path) -> Path:
    """`resume=URL`: fetch a checkpoint from a store, or the newest one of a run there. Raises `BirlError`."""
    parent, _, name = url.rstrip("/").rpartition("/")
    if (step := step_folders.step_of(name)) >= 0:
        store, steps = Store(parent), [step]
        if steps[0] not in store.steps():
            raise BirlError(f"resume={url}: there is no complete checkpoint.")
    else:
        store = Store(url)
        steps = store.steps()
    if not steps:
        raise BirlError(f"resume={url}: there is no complete checkpoint of a run.")
    return store.take(steps[-1], root)


def chosen_checkpoint(chosen: Path, run: Path, newest: Path | None) -> Path:
    """`resume=FOLDER`. Raises `BirlError` if it is no checkpoint, or its history would mix with that of `run`."""
    if not (chosen / "manifest.json").is_file():  # a run: take its newest one
        inside = step_folders.latest(chosen / "checkpoints") or step_folders.latest(chosen)
        if inside is None:
            raise BirlError(
                f"resume={chosen}: holds no complete checkpoint. `birl checkpoints RUN` lists those of a run."
            )
        chosen = inside
    if newest is not None and os.path.realpath(newest) != os.path.realpath(chosen):
        raise _gone_on(chosen, run, newest)
    return chosen


def _gone_on(chosen: object, run: Path, newest: Path) -> BirlError:
    return BirlError(
        f"resume={chosen}: {run} has gone on to {newest.name}, and going on from another place would mix the two. "
        f"Choose run=ANOTHER_FOLDER, leave out resume=... to go on from {newest}, or delete what you do not want."
    )


def find_checkpoint(config: schema.RL | schema.Stage, run: Path) -> Path | None:
    """The checkpoint to continue from; chat templates stay at its time. Raises `BirlError`, see `check_same`."""
    result, tools.now = _chosen(config, run), datetime.now()
    with suppress(BirlError, KeyError, TypeError, ValueError):  # a damaged one is set aside later
        tools.now = datetime.fromisoformat(step_folders.read_state(result)["given"]["time"]) if result else tools.now
    return result


def _chosen(config: schema.RL | schema.Stage, run: Path) -> Path | None:
    there = step_folders.saved(run / "checkpoints")
    newest = there[-1].path if there else None  # if it is damaged, it is set aside with a warning
    if newest is None and config.checkpoint.store:
        url = location(config.checkpoint.store, run)
        if config.resume == "auto":
            newest = recovered(url, run)
        elif Store(url).steps():
            raise BirlError(
                f"resume={config.resume}: {url} has the checkpoints of a run of this name, and two would delete each "
                "other's. Choose another name (run=...), or go on from them with resume=auto."
            )
    if "://" in config.resume:
        if newest is not None:
            raise _gone_on(config.resume, run, newest)
        return fetched(config.resume, run / "resumed")
    if config.resume not in ("auto", "never"):
        return chosen_checkpoint(Path(config.resume), run, newest)
    # an attempt that ended before its first step leaves nothing to lose or to continue from
    metrics = run / "metrics.jsonl"
    used = newest is not None or (metrics.is_file() and metrics.stat().st_size > 0)
    if config.resume == "never":
        if used:
            raise BirlError(
                f"{run} holds a run already, and resume=never. Choose another folder (run=...) or delete this one."
            )
        return None
    if used:
        check_same(run, config, newest)
    if used and newest is None and (run / "summary.json").is_file():
        raise BirlError(
            f"{run} holds a run that has ended, but its checkpoints are not there: it would begin anew and empty "
            "metrics.jsonl and the other records. Put them back, choose run=ANOTHER_FOLDER, or delete the folder."
        )
    return newest


def claim(run: Path, config: schema.RL | schema.Stage, policy: Policy) -> None:
    """Write the resolved configuration and the model's files except its weights into the run folder, each completely or
    not at all, as an earlier attempt may have left good ones."""
    part, model = run / "model.part", run / "model"
    try:
        run.mkdir(parents=True, exist_ok=True)
        clear(part)
        save_hf_config(policy.model, policy.tokenizer, part, policy.folder)
        for file in (policy.folder / name for name in PROCESSORS):
            if file.is_file():
                write_whole(part / file.name, file.read_bytes())
        policy.keep_pictures(run)
        before, now = (folder / "chat_template.jinja" for folder in (model, part))
        if before.is_file() and now.is_file() and before.read_bytes() != now.read_bytes():
            print(f"WARNING: {before} is replaced by that of model.path; model.chat_template=FILE sets another one.")
        clear(model)
        part.rename(model)
        write_whole(run / "config.yaml", to_yaml(config).encode())
        write_whole(run / "config.json", json.dumps(plain(config), indent=1).encode())
    except BirlError:
        raise
    except Exception as error:  # the tokenizers library has no error type of its own
        clear(part)
        raise unwritable(run, error) from error


def given(policy: Policy, train: Sequence[Sequence[Any]], objective: Any, ranks: Ranks) -> dict[str, str]:
    """The device, the templates' time, and digests of what a run reads beside its configuration: rows of each source
    (their number, and 64 of them), chat template, and weights of model.path if the `objective` compares with them."""
    rows = [source[i] for source in train for i in range(0, len(source), -(-len(source) // 64) or 1)]
    fields = [getattr(row, name, None) for row in rows for name in ("id", "prompt", "answer", "sequences")]
    texts = {"data.train": (list(map(len, train)), fields), "The chat template": policy.tokenizer.chat_template}
    result = {name: hashlib.sha256(repr(text).encode()).hexdigest() for name, text in texts.items()}
    reference = getattr(objective, "reference", None)
    frozen = getattr(reference, "first", reference) is not None or getattr(objective, "precompute", 0)
    if frozen and not ranks.sharded:
        tensors = chain(policy.model.named_parameters(), policy.model.named_buffers())  # quantised weights are buffers
        result["model.path"] = whole(digests({name: t for name, t in tensors if not t.is_meta}))
    return result | {"device": device.described(device.device_of(policy.model)), "time": str(tools.now)}


def changed(before: Mapping[str, str], now: Mapping[str, str], own: bool) -> list[str]:
    """Warnings about what differs from `given` at a checkpoint; `own`: it is one of the same run."""
    old, new = before.get("device", now["device"]), now["device"]
    moved = [f"It was saved on {old}, and this is {new}: rounding, and so the bits, will differ."] * (old != new)
    other = [name for name in FOLLOWS if own and name in now and before.get(name, now[name]) != now[name]]
    return moved + [f"WARNING: {name} has changed since the checkpoint was saved: {FOLLOWS[name]}." for name in other]


def next_commands(run: Path, finished: bool, talks: bool = True, tensorboard: bool = True) -> list[str]:
    """Commands to suggest next. `talks`: a language model, not a reward model; `tensorboard`: events were written."""
    if not finished:
        return ["run the same command again to go on"]
    name = shlex.quote(str(run))
    use = f"birl chat {name}" if talks else f"birl rl reward=model reward.model={name}"
    events = [f"tensorboard --logdir {shlex.quote(str(run.parent))}"] if tensorboard else []
    return [use, f"birl view {name}", f"birl checkpoints {name}", *events]
