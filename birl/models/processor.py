"""Loads the image processor of a model folder, without the video and audio processors, which need further libraries."""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from birl.errors import BirlError, first_line
from birl.models.load import model_class, quiet
from birl.models.vision import family_of
from birl.text.pictures import Bounds, Pictures

FILES = ("processor_config.json", "preprocessor_config.json")


def load_pictures(
    folder: Path, model: nn.Module, tokenizer: PreTrainedTokenizerBase, bounds: Bounds
) -> Pictures | None:
    """Return the image processing of a vision-language model; None if the model has no vision tower, or its folder no
    processor (it is then used for text only). Raises `BirlError`."""
    config: Any = model.config
    if family_of(model) is None or not any((folder / name).is_file() for name in FILES):
        return None
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    if name is None:
        raise BirlError(f"{folder}: transformers has no processor for {config.model_type}, so it cannot see pictures.")
    try:
        with quiet():
            own = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
            processor = made(name, own, tokenizer, folder)
    except Exception as error:
        raise BirlError(
            f"{folder}: the processor of its pictures cannot be loaded: {first_line(error)} Pictures need what "
            "`pip install 'birl[pictures]'` installs."
        ) from error
    return Pictures(processor, tokenizer, bounds)


def made(name: str, image_processor: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Any:
    import transformers

    kind: Any = getattr(transformers, name)
    seeing = type(name, (kind,), {"check_argument_for_proper_class": lambda *_: None})  # None in place of other parts
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    options, _ = kind.get_processor_dict(folder)
    return seeing.from_args_and_dict([parts.get(part) for part in kind.get_attributes()], options)


def sees(folder: Path, pictures: bool) -> bool:
    """Whether a folder's model is loaded with a vision tower."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # loading the model reports the error
        return False
    return "vision_config" in config.sub_configs and model_class(config, pictures) is AutoModelForImageTextToText
