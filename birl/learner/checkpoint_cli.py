"""`birl checkpoints`: list, verify, export and prune the checkpoints of a run."""

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from birl.errors import BirlError, did_you_mean

FORMS = {
    "verify": "verify [STEP]",
    "export": "export STEP FOLDER [--shard-gb N], or export STEP FILE.gguf [--type f16|bf16|f32|q8_0]; --policy NAME "
    "where the run has several",
    "export-adapter": "export-adapter STEP FOLDER [--policy NAME]",
    "prune": "prune N",
    "convert": "convert",
}
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
            raise BirlError(f"Write it so: `birl checkpoints RUN {FORMS[action]}`.")
        case _:
            near = did_you_mean(words[1], FORMS)
            raise BirlError(f"{words[1]}: `birl checkpoints RUN` has {', '.join(FORMS)}.{near}")


def _root(folder: str) -> Path:
    root = Path(folder) / "checkpoints"
    if not Path(folder).exists():
        raise BirlError(f"There is no folder {folder}; `birl runs` lists the runs there are.")
    if not root.is_dir():
        raise BirlError(f"{folder} is not the folder of a run: there is no {root}.")
    return root


def _list(root: Path) -> int:
    from rich.console import Console
    from rich.table import Table

    from birl.learner import checkpoint

    entries, states = checkpoint.saved(root), {}
    for entry in entries:
        with suppress(BirlError):  # a damaged one is listed as that
            states[entry.step] = checkpoint.read_state(entry.path)
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


def best_step(root: Path) -> int | None:
    """The step of the best validation; None where there was none. Raises `BirlError` where the newest checkpoint cannot
    tell."""
    from birl.learner import checkpoint

    result = checkpoint.saved(root)
    return checkpoint.read_state(result[-1].path).get("best_step") if result else None


def _verify(root: Path, steps: Sequence[str]) -> int:
    from birl.learner import checkpoint

    chosen = [find(root, steps[0])] if steps else [s.path for s in checkpoint.saved(root)]
    bad = 0
    for path in chosen:
        problems = checkpoint.verify(path)
        bad += bool(problems)
        print(f"{path.name}: {'; '.join(problems) or 'intact'}")
    return 1 if bad else 0


def _convert(root: Path) -> int:
    from birl.learner import checkpoint
    from birl.learner.convert import convert

    for entry in checkpoint.saved(root):
        print(f"{entry.path.name}: {'converted' if convert(entry.path) else 'nothing to convert'}")
    return 0


def find(root: Path, step: str) -> Path:
    from birl.learner import checkpoint

    result = {s.step: s.path for s in checkpoint.saved(root)}
    if step == "last":
        newest = checkpoint.latest(root)
        wanted = None if newest is None else checkpoint.step_of(newest.name)
    elif step == "best":
        wanted = best_step(root)
    else:
        wanted = int(step) if step.isdecimal() else None
    if wanted not in result:
        raise BirlError(f"There is no checkpoint {step} in {root}; there are {', '.join(map(str, result)) or 'none'}.")
    return result[wanted]


def _size(word: str) -> float:
    try:
        size = float(word)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise BirlError(f"--shard-gb {word}: expected a number above 0, in GB.")
    return size


def _export(root: Path, step: str, target: Path, policy: str, adapter: bool, shard_gb: float = 5.0) -> int:
    from birl.learner.export import export, export_adapter, quantized_as

    source = find(root, step)
    if adapter:
        export_adapter(source, root.parent, target, policy)
    else:
        export(source, root.parent, target, shard_gb=shard_gb, policy=policy)
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
    from birl.learner.export import export
    from birl.learner.export_gguf import check, to_gguf

    source = find(root, step)
    check(root.parent / "model", target, kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        export(source, root.parent, Path(folder) / "model", policy=policy)
        to_gguf(Path(folder) / "model", target, kind)
    print(f"{source} -> {target} ({kind})")
    return 0


def _prune(root: Path, count: int) -> int:
    from birl.learner import checkpoint

    best = best_step(root)
    for path in checkpoint.prune(root, count, {best} if best is not None else set()):
        print(f"deleted {path}")
    return 0
