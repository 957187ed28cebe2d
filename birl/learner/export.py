"""A checkpoint as a model folder in Hugging Face format."""

import shutil
from pathlib import Path
from typing import Any

import torch

from birl.errors import BirlError
from birl.learner import checkpoint


def export(path: Path, model_files: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """`model_files` is the run's `model/` folder: configuration and tokenizer. A model with a score head becomes a
    sequence-classification model with one label. Raises `BirlError` where `target` exists."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    if target.exists():
        raise BirlError(f"{target} exists already. Name another folder or delete it.")
    config = AutoConfig.from_pretrained(model_files)
    tokenizer = AutoTokenizer.from_pretrained(model_files)
    weights = checkpoint.read_tensors(path, "model.")
    scores = "score.weight" in weights
    if scores:
        config.num_labels = 1
        config.pad_token_id = tokenizer.pad_token_id = padding(tokenizer)
        weights.pop("lm_head.weight", None)
    weights.pop("value.weight", None)  # a critic's, which nothing but training needs
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config, dtype=torch.float32)
    _, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    absent = [n for n, p in model.named_parameters() if p.device.type == "meta"]
    if unexpected or absent:
        raise BirlError(f"{path} does not fit {model_files}: missing {absent[:5]}, unexpected {list(unexpected)[:5]}.")
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    shutil.copytree(model_files, part, dirs_exist_ok=True)
    if scores:
        tokenizer.save_pretrained(part)
    model.to(dtype).save_pretrained(part)
    part.rename(target)


def padding(tokenizer: Any) -> int | None:
    """A token to pad with that ends no text. transformers reads a score at the last token that is not padding: were
    that the end token, as in many chat models, it would read one token too early."""
    special = [i for i in tokenizer.all_special_ids if i != tokenizer.eos_token_id]
    return special[0] if special else None
