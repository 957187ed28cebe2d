"""Names of models and data sets that are no local place: is there such a name? Asked before anything heavy is imported.

What is in the cache counts as there, so that nobody is asked without a network.
"""

import os
from pathlib import Path

from birl.errors import BirlError, first_line

SECONDS = 10.0  # for one answer of the hub


def check_model(key: str, path: str) -> None:
    """Raises `BirlError` unless `path` is smollm2, a folder, a .gguf file, or the name of a model on the hub."""
    if path != "smollm2" and not is_local(key, path) and (why := missing(path, "model")):
        raise BirlError(
            f"{key}={path}: there is no such folder here, and {why}. Name an existing folder, a .gguf file, a hub id, "
            "or smollm2."
        )


def is_local(key: str, path: str) -> bool:
    """Whether the model is a folder or file here. Raises `BirlError` where it could only be that, and is not."""
    local = Path(path).expanduser()
    if path.endswith(".gguf") and not local.is_file():
        raise BirlError(f"{key}={path}: there is no such file.")
    if local.exists() and not (local.is_dir() or path.endswith(".gguf")):
        raise BirlError(f"{key}={path} is a file; expected a folder in Hugging Face format or a .gguf file.")
    return local.exists()


def missing(name: str, kind: str) -> str:
    """Why there is no such `kind` (model, dataset) on the hub or in its cache; empty where there may be."""
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
        if getattr(error, "response", None) is None:  # nobody answered; a refusal is left to the loader to explain
            return "the Hugging Face hub cannot be reached, nor has it been downloaded before"
    return ""
