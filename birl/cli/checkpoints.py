"""`birl checkpoints`: list, verify, export and prune the checkpoints of a run."""

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path

from birl.cache import sweep
from birl.errors import BirlError, did_you_mean, first_line
from birl.learner import step_folders
from birl.regular import check_new, read_json
from birl.visible import visible

FORMS = {
    "verify": "verify [STEP]",
    "export": "export STEP FOLDER [--shard-gb N], export STEP FILE.gguf [--type f16|bf16|f32|q8_0], or export STEP "
    "hf://USER/NAME [--private] [--license ID]; --policy NAME where the run has several",
    "export-adapter": "export-adapter STEP FOLDER [--policy NAME], or export-adapter STEP hf://USER/NAME [--private]",
    "prune": "prune N",
    "convert": "convert",
}
HUB = "hf://"
SCORES = ("validation/all/score", "validation/accuracy", "validation/nll")


def run(words: Sequence[str]) -> int:
    words, policy = list(words), ""
    if words[1:2] in (["export"], ["export-adapter"]) and words[-2:-1] == ["--policy"]:
        *words, _, policy = words
    match words:
        case []:
            raise BirlError("Name a run folder, as in `birl checkpoints runs/NAME`")
        case [folder]:
            return _list(_root(folder))
        case [folder, "verify", *steps] if len(steps) < 2:
            return _verify(_root(folder), steps)
        case [folder, "export" | "export-adapter" as action, step, target, *rest] if target.startswith(HUB):
            return _push(_root(folder), step, target.removeprefix(HUB), rest, policy, action == "export-adapter")
        case [folder, "export", step, target] if target.endswith(".gguf"):
            return _export_gguf(_root(folder), step, Path(target), policy=policy)
        case [folder, "export", step, target, "--type", kind] if target.endswith(".gguf"):
            return _export_gguf(_root(folder), step, Path(target), kind, policy)
        case [folder, "export", step, target]:
            return _export(_root(folder), step, Path(target), policy, adapter=False)
        case [folder, "export", step, target, "--shard-gb", size]:
            return _export(_root(folder), step, Path(target), policy, adapter=False, shard_gb=_size(size))
        case [folder, "export-adapter", step, target]:
            return _export(_root(folder), step, Path(target), policy, adapter=True)
        case [folder, "convert"]:
            return _convert(_root(folder))
        case [folder, "prune", count] if count.isdecimal() and int(count) > 0:
            return _prune(_root(folder), int(count))
        case [_, action, *_] if action in FORMS:
            raise BirlError(f"Usage: `birl checkpoints RUN {FORMS[action]}`.")
        case _:
            near = did_you_mean(words[1], FORMS)
            raise BirlError(f"{words[1]}: `birl checkpoints RUN` has {', '.join(FORMS)}.{near}")


def _root(folder: str) -> Path:
    root = Path(folder) / "checkpoints"
    if not Path(folder).exists():
        raise BirlError(f"There is no folder {folder}; `birl runs` lists the runs.")
    if not root.is_dir():
        raise BirlError(f"{folder} is not the folder of a run: there is no {root}.")
    return root


def _list(root: Path) -> int:
    from rich.console import Console
    from rich.table import Table

    entries, states = step_folders.saved(root), {}
    if not entries:
        print(f"There is no complete checkpoint in {root} yet.")
        return 0
    for entry in entries:
        with suppress(BirlError):  # a damaged one is listed as such
            states[entry.step] = step_folders.read_state(entry.path)
    best = next(reversed(states.values()), {}).get("best_step")
    table = Table("step", "saved", "size", "validation score", "")
    for entry in entries:
        state = states.get(entry.step, {})
        metrics = (state.get("last_validation") or {}).get("metrics") or {}
        score = next((metrics[name] for name in SCORES if name in metrics), None)
        size = sum(f.stat().st_size for f in entry.path.rglob("*") if f.is_file()) / 2**30
        when = datetime.fromtimestamp(entry.path.lstat().st_mtime).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(
            str(entry.step),
            when,
            f"{size:.2f} GiB",
            "" if score is None else f"{score:.3f}",
            "damaged" if entry.step not in states else "best" if entry.step == best else "",
        )
    Console().print(table)
    return 0


def _verify(root: Path, steps: Sequence[str]) -> int:
    from birl.learner import checkpoint

    chosen = [step_folders.find(root, steps[0])] if steps else [s.path for s in step_folders.saved(root)]
    bad = 0
    for path in chosen:
        problems = checkpoint.verify(path)
        bad += bool(problems)
        print(visible(f"{path.name}: {'; '.join(problems) or 'intact'}"))
    return 1 if bad else 0


def _convert(root: Path) -> int:
    from birl.learner.convert import convert

    for entry in step_folders.saved(root):
        print(f"{entry.path.name}: {'converted' if convert(entry.path) else 'nothing to convert'}")
    return 0


def _size(word: str) -> float:
    try:
        size = float(word)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise BirlError(f"--shard-gb {word}: expected a number above 0, in GB.")
    return size


def _push(root: Path, step: str, name: str, options: Sequence[str], policy: str, adapter: bool) -> int:
    """`options`: --private, --license ID."""
    words, licence, private = list(options), "", False
    while words:
        match words:
            case ["--private", *words]:
                private = True
            case ["--license", licence, *words]:
                pass
            case [word, *_]:
                raise BirlError(f"{word}: hf://USER/NAME may be followed by --private and --license ID.")
    source = step_folders.find(root, step)
    print(push(root.parent, source, name, private=private, licence=licence, policy=policy, adapter=adapter))
    return 0


def push(
    run: Path,
    source: Path,
    name: str,
    *,
    private: bool = False,
    licence: str = "",
    policy: str = "",
    adapter: bool = False,
) -> str:
    """Push the checkpoint `source` of `run` as a model, or only its `adapter`, to the repository `name` (USER/NAME) of
    the hub, which is created if needed; by the hub's client, with its settings. Returns the URL. Raises `BirlError`;
    the hub's earlier content is then unchanged, as all files are in one commit."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    api = HfApi()
    try:
        api.whoami()  # fail before minutes of exporting, and before importing torch
        from birl.cli.model_card import base_of, model_card
        from birl.learner.export import began_with, export, export_adapter

        address = api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(address.repo_id).private:  # unchanged by the call above
            raise BirlError(f"hf://{name} is public. Make it private in its settings, or leave --private out.")
        sweep(run, ".push-*")
        with tempfile.TemporaryDirectory(dir=run, prefix=".push-") as folder:
            model = Path(folder) / "model"
            (export_adapter if adapter else export)(source, run, model, policy=policy)
            card = model_card(run, step_folders.step_of(source.name), address.repo_id, licence, adapter)
            (model / "README.md").write_text(card, "utf-8")
            if adapter:
                own = read_json(file := model / "adapter_config.json")
                own["base_model_name_or_path"] = base_of(began_with(run))[0]  # instead of a local folder
                file.write_text(json.dumps(own, indent=2), "utf-8")
            files = sorted(path for path in model.rglob("*") if path.is_file())
            added = [CommitOperationAdd(path.relative_to(model).as_posix(), path) for path in files]
            api.create_commit(address.repo_id, added, commit_message=f"{run.name}, {source.name}")
    except HFValidationError as error:
        raise BirlError(f"hf://{name}: {first_line(error)} Write it as hf://USER/NAME.") from error
    except LocalTokenNotFoundError as error:
        raise BirlError(f"hf://{name}: there is no token. Set HF_TOKEN, or run `hf auth login`.") from error
    except BirlError:
        raise
    except Exception as error:  # of several libraries: no permission, no network, no space
        raise BirlError(f"hf://{name}: {first_line(error)}") from error
    return str(address)


def _export(root: Path, step: str, target: Path, policy: str, adapter: bool, shard_gb: float = 5.0) -> int:
    source = step_folders.find(root, step)
    check_new(target)
    from birl.learner.export import export, export_adapter, quantized_as

    write = export_adapter if adapter else partial(export, shard_gb=shard_gb)
    write(source, root.parent, target, policy=policy)
    print(f"{source} -> {target}")
    if kind := quantized_as(root.parent):
        as_theirs = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")' if kind == "nf4" else "8 bits"
        what = f"the base model in {kind} (lora.quantize)"
        print(
            f"It belongs to {what}, as transformers loads it with {as_theirs}."
            if adapter
            else f"Its weights are those of the codes of {what}, with the adapter merged in, and not quantised."
        )
    return 0


def _export_gguf(root: Path, step: str, target: Path, kind: str = "f16", policy: str = "") -> int:
    source = step_folders.find(root, step)
    check_new(target)
    from birl.learner.export import export
    from birl.learner.export_gguf import check, to_gguf

    check(root.parent / "model", target, kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target.parent, f".{target.name}.part-*")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.part-") as folder:
        export(source, root.parent, Path(folder) / "model", policy=policy)
        to_gguf(Path(folder) / "model", target, kind)
    print(f"{source} -> {target} ({kind})")
    return 0


def _prune(root: Path, count: int) -> int:
    best = step_folders.best_step(root)
    for path in step_folders.prune(root, count, {best} if best is not None else set()):
        print(f"deleted {path}")
    return 0
