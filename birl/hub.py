"""Check that the models and data sets that are named exist, before anything heavy is imported.

Models in the hub's cache count as existing, so that no server is needed without a network.
"""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from birl.errors import BirlError, did_you_mean, first_line
from birl.regular import read_json

SECONDS = 10.0  # timeout of a request to the hub
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
MOST, COUNTS = 2**16, re.compile("(layers?|blocks?|depth|heads?|experts)$")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def check_model(key: str, path: str, whole: bool = True) -> None:
    """Raises `BirlError` unless `path` is smollm2, the folder of a model, of a run or of a checkpoint, a .gguf file, or
    the name of a model on the hub. `whole`: weights and tokenizer are required, too."""
    if path == "smollm2":
        return
    if not is_local(key, path):
        if why := missing(path, "model"):
            near = did_you_mean(path, ["smollm2", *_models_beside(path)])
            raise BirlError(
                f"{key}={path}: there is no such folder here, and {why}. Name an existing folder, a .gguf file, a hub "
                f"id, or smollm2.{near}"
            )
        return
    folder = Path(path).expanduser()
    run = run_of(folder)
    if folder.is_file():
        return
    if run is None:
        check_folder(folder, whole)
        return
    if whole and run == folder and not any((folder / "checkpoints").glob("step-*")):
        raise BirlError(f"{key}={path}: the run has no checkpoint yet.")
    if key != "critic.path" and _judges(run) is not (key == "reward.model"):
        what, needed = ("a reward model", "a language model")[:: -1 if key == "reward.model" else 1]
        hint = "name a run of `birl rm`" if key == "reward.model" else f"it can judge: reward=model reward.model={path}"
        raise BirlError(f"{key}={path}: the run has trained {what}, and {key} is {needed}; {hint}.")


def _models_beside(path: str) -> list[str]:
    """Model folders and .gguf files in the folder of `path`."""
    parent = Path(path).expanduser().parent
    return [*(str(f.parent) for f in parent.glob("*/config.json")), *map(str, parent.glob("*.gguf"))]


def _judges(run: Path) -> bool:
    """Whether it is a run of `birl rm`: only those have the key."""
    try:
        return "ranking.centering" in read_json(run / "config.json")
    except (OSError, ValueError, TypeError):
        return False


def is_model(word: str) -> bool:
    """Whether a word of a command line, without a key, can only be a model."""
    return word == "smollm2" or word.endswith(".gguf") or Path(word).expanduser().is_dir()


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a training run."""
    return (folder / "config.json").is_file() and (folder / "model").is_dir()


def read_config(run: Path) -> dict[str, Any]:
    """The configuration of a run, by key. Raises `BirlError`."""
    try:
        result = read_json(run / "config.json")
        if not isinstance(result, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BirlError(
            f"{run}/config.json, the configuration of the run, cannot be read: {why}. Restore it, or go on in another "
            f"folder: run=ANOTHER_FOLDER resume={run}/checkpoints/step-..."
        ) from error
    return result


def run_of(folder: Path) -> Path | None:
    """The run folder that `folder` is, or is a checkpoint of; None for others, including a checkpoint outside of its
    run."""
    if is_run(folder):
        return folder
    run = Path(os.path.abspath(folder)).parent.parent
    return run if (folder / "manifest.json").is_file() and (folder / "tensors").is_dir() and is_run(run) else None


def check_folder(folder: Path, whole: bool = True) -> None:
    """Raises `BirlError` unless it is a model folder in Hugging Face format; `whole`: with weights and tokenizer."""
    check_weights(folder, whole)
    if whole:
        check_tokenizer(folder)


def check_tokenizer(folder: Path) -> None:
    """Raises `BirlError` if a folder has no tokenizer, or if its config.json, which is read with it, is damaged."""
    there = any((folder / name).is_file() for name in TOKENIZERS)
    if not there or (folder / "config.json").is_file():
        check_weights(folder, whole=False)
    if not there:
        raise BirlError(
            f"{folder} has no tokenizer: expected tokenizer.json (and tokenizer_config.json) beside the weights."
        )


def check_weights(folder: Path, whole: bool = True) -> None:
    """Raises `BirlError` if a folder has no config.json, a damaged one, or, with `whole`, no weights."""
    if not (folder / "config.json").is_file():
        hint = ""
        if (folder / "adapter_config.json").is_file():
            hint = " It is an adapter alone: merge it with peft, or name the run that it is from."
        elif (folder / "tensors").is_dir():
            hint = " It is a checkpoint away from its run: name RUN/checkpoints/step-..., which knows its model."
        elif (folder / "checkpoints").is_dir():
            hint = " It is the folder of a run that has not begun, or is not complete."
        raise BirlError(f"{folder} is not a model folder: config.json is missing.{hint}")
    for file in (folder / "config.json", folder / "generation_config.json"):
        try:
            content = read_json(file) if file.is_file() else {}
            if not isinstance(content, dict):
                raise ValueError("another type")
            if key := too_many(content):
                raise ValueError(f"{key} is larger than {MOST:,}")
        except (OSError, ValueError) as error:
            why = first_line(error)
            raise BirlError(f"{file} is not a valid JSON object: {why}. Download the model again.") from error
    if whole and not any((folder / name).is_file() for name in WEIGHTS):
        pickles = [f.name for f in folder.glob("*.bin")]
        hint = f" {pickles[0]} is a pickle, which can run code; convert it to safetensors first." if pickles else ""
        raise BirlError(f"{folder} has no weights: expected {' or '.join(WEIGHTS)}.{hint}")


def too_many(config: dict[str, Any]) -> str:
    """The key of a number of layers, heads or experts above `MOST`, at any depth, or "": transformers would make them
    all, until no memory is left."""
    rest = list(config.items())
    while rest:
        key, value = rest.pop()
        if isinstance(value, dict):
            rest += value.items()
        elif isinstance(value, int | float) and value > MOST and COUNTS.search(key):
            return key
    return ""


def is_local(key: str, path: str) -> bool:
    """Whether the model is a local folder or file. Raises `BirlError` if it could only be one, but is not."""
    local = Path(path).expanduser()
    if path.endswith(".gguf") and not local.is_file():
        raise BirlError(f"{key}={path}: there is no such file.{did_you_mean(path, _models_beside(path))}")
    if local.exists() and not (local.is_dir() or path.endswith(".gguf")):
        raise BirlError(f"{key}={path} is a file; expected a folder in Hugging Face format or a .gguf file.")
    return local.exists()


def missing(name: str, kind: str) -> str:
    """Why there is no such `kind` (model, dataset) on the hub or in its cache; empty if there may be one."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    datasets = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")
    kept = (
        Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}"),
        Path(datasets, name.replace("/", "___")),
    )
    if any(folder.is_dir() for folder in kept):
        return ""
    ask = {"model": HfApi().model_info, "dataset": HfApi().dataset_info}[kind]
    try:
        ask(name, timeout=SECONDS)
    except HFValidationError as error:
        return f"it is no name of the Hugging Face hub ({first_line(error)})"
    except RepositoryNotFoundError:
        return f"the Hugging Face hub has no {kind} of that name, or it is private (HF_TOKEN)"
    except Exception as error:
        if getattr(error, "response", None) is None:  # no response; the loader explains a refusal
            return "the Hugging Face hub cannot be reached, nor has it been downloaded before"
    return ""


def addressed(name: str) -> bool:
    """Whether a model, a teacher, a judge, a tool or a picture is named by a URL."""
    return name.startswith(("http://", "https://"))


def is_address(text: str) -> bool:
    """Whether it is a valid URL with http:// or https://, a host, and a possible port."""
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port beyond 65535
        return False
    return known and text.isprintable() and " " not in text
