"""A checkpoint as a model folder in Hugging Face format."""

import shutil
from pathlib import Path

import torch

from birl.errors import BirlError
from birl.learner import checkpoint


def export(path: Path, model_files: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """`model_files` is the run's `model/` folder: configuration and tokenizer. Raises `BirlError` where `target`
    exists."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if target.exists():
        raise BirlError(f"{target} exists already. Name another folder or delete it.")
    config = AutoConfig.from_pretrained(model_files)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = checkpoint.read_tensors(path, "model.")
    _, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    absent = [n for n, p in model.named_parameters() if p.device.type == "meta"]
    if unexpected or absent:
        raise BirlError(f"{path} does not fit {model_files}: missing {absent[:5]}, unexpected {list(unexpected)[:5]}.")
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    shutil.copytree(model_files, part, dirs_exist_ok=True)
    model.to(dtype).save_pretrained(part)
    part.rename(target)
