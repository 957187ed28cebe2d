"""Loads models and tokenizers by name. Weights are float32 safetensors; unexpected or missing ones are refused by
name."""

import contextlib
import json
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from birl.errors import BirlError, first_line
from birl.hub import WEIGHTS, check_tokenizer, check_weights, is_local
from birl.models import attention
from birl.models.heads import add_score_head
from birl.named import template_file
from birl.regular import check_all, inside, read_json, read_text

# by model type: the table in which transformers looks up its attention by name
TABLES = {
    "gptj": ("gptj.modeling_gptj", "GPTJ_ATTENTION_CLASSES"),
    "gpt_neo": ("gpt_neo.modeling_gpt_neo", "GPT_NEO_ATTENTION_CLASSES"),
    "falcon": ("falcon.modeling_falcon", "FALCON_ATTENTION_CLASSES"),
}
MAKING = threading.RLock()
LAYER = re.compile(r"\blayers\.(\d+)\.")
# kinds of rotary positions whose angles transformers changes if the longest sequence of a batch exceeds a limit: the
# model's context, or its pretraining context (longrope, arXiv:2402.13753). birl keeps the angles of shorter sequences,
# so that sequences do not affect each other, and accepts no longer ones
CHANGING = {"dynamic", "longrope"}
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
AGAIN = ["*/*.safetensors", "consolidated*"]  # the same weights in another program's format: gpt-oss, Mistral
# keys of a config.json that describe the stored weights, or their folder
LEFT_OUT = {"quantization_config", "compression_config", "_name_or_path", "_attn_implementation"}
# names of a reward model's weights that differ from a language model's
REWARD_MODEL: dict[str, Any] = {"beside": {"score.weight"}, "without": {"lm_head.weight"}}


def resolve(path: str, say: Callable[[str], None] = print, weights: bool = True, key: str = "model.path") -> Path:
    """Return a model folder for `smollm2`, a folder, a .gguf file or a hub id; `weights`: with those of the latter, and
    4- or 8-bit ones made plain (`stored.plain`). `key` names it in errors. Raises `BirlError`."""
    from birl.models.gguf import bundled, converted
    from birl.models.stored import plain

    local = Path(path).expanduser()
    if path == "smollm2" or (is_local(key, path) and local.is_file()):
        return converted(bundled() if path == "smollm2" else local.resolve(), say)
    if is_local(key, path):
        check_all(local)
        return plain(local, say) if weights else local
    folder = from_hub(path, WANTED if weights else [p for p in WANTED if "safetensors" not in p], key)
    return plain(folder, say) if weights else folder


def from_hub(name: str, wanted: list[str], key: str = "model.path") -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=AGAIN))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = first_line(error)
        raise BirlError(
            f"{key}={name}: there is no such folder, and it could not be downloaded from the hub ({reason}). "
            "Name an existing folder, a .gguf file, a hub id, or smollm2."
        ) from error


def load_reward_model(folder: Path) -> nn.Module:
    """The language model's body with its score head (`models/heads.py`), from a sequence-classification folder with one
    label. Raises `BirlError` for anything else."""
    weight = reward_head(folder)
    return with_head(load_model(folder, **REWARD_MODEL), weight)


def reward_head(folder: Path) -> Tensor:
    """The score head [1, H] of a reward model's folder. Raises `BirlError` if there is none, or several scores."""
    check_files(folder)
    weight = next((w for file in sorted(folder.glob("*.safetensors")) if (w := score_weight(file)) is not None), None)
    if weight is None:
        raise BirlError(
            f"{folder} is no reward model: it has no score.weight. Train one with `birl rm run=RUN`, then "
            "reward.model=RUN."
        )
    if weight.shape[0] != 1:
        raise BirlError(f"{folder}: gives {weight.shape[0]} scores for a text, a reward model gives one.")
    return weight


def with_head(model: nn.Module, weight: Tensor) -> nn.Module:
    add_score_head(model, 0)
    model.get_submodule("score").weight.data.copy_(weight)  # pyright: ignore
    return model


def score_weight(file: Path) -> Tensor | None:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        result = "score.weight" in opened.keys()  # noqa: SIM118  safetensors' file is no mapping
        return opened.get_tensor("score.weight").float() if result else None


def model_class(config: Any, pictures: bool = False) -> Any:
    """transformers' class for a config. `pictures`: the vision-language class, if there is also one for text alone."""
    known(config.model_type)
    autos = AutoModelForImageTextToText, AutoModelForCausalLM
    sees, reads = (auto._model_mapping.get(type(config), None) for auto in autos)
    return autos[0] if sees is not None and (pictures or reads in (None, sees)) else autos[1]


def known(model_type: str) -> None:
    """Before a model is built: add birl's attention to its model type's table, if it has one (`handing.py`)."""
    if model_type in TABLES:
        file, name = TABLES[model_type]
        table = getattr(import_module(f"transformers.models.{file}"), name)
        table.setdefault(attention.NAME, table["eager"])


def load_model(
    folder: Path,
    beside: AbstractSet[str] = frozenset(),
    without: AbstractSet[str] = frozenset(),
    *,
    pictures: bool = False,
) -> nn.Module:
    """Load a model with float32 weights and birl's attention function. Raises `BirlError` for anything missing, damaged
    or unfit. `beside`: names of weights that may exist and are not read, `without`: that may be missing; `pictures` is
    of `model_class`."""
    check_files(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with quiet():
            loaded: Any = model_class(config, pictures).from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention.named(config),
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # `check_report` refuses them with their names
                output_loading_info=True,
            )
    except BirlError:
        raise
    except Exception as error:
        raise not_loadable(folder, error) from error
    model, report = loaded
    report["missing_keys"] = set(report.get("missing_keys") or ()) - without
    report["unexpected_keys"] = set(report.get("unexpected_keys") or ()) - beside
    check_report(folder, model, report)
    for name, other in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if name not in model.all_tied_weights_keys:
            raise two_values(folder, name, other)
    keep_angles(model)
    return model.eval()


def two_values(folder: Path, name: str, other: str) -> BirlError:
    """transformers would untie such weights, other programs would read one of them."""
    return BirlError(
        f"{folder}: {name} and {other} have different values, and config.json says that they are one weight "
        "(tie_word_embeddings). Set that to false there, or take the former out of the file."
    )


def not_loadable(folder: Path, error: Exception) -> BirlError:
    if isinstance(error, KeyError) and error.args == (attention.NAME,):
        return BirlError(
            f"{folder}: transformers does not let birl replace this model's attention, so it cannot train."
        )
    return BirlError(f"{folder}: not loadable as a causal language model: {first_line(error)}")


def skeleton(folder: Path, scores: bool = False, *, pictures: bool = False) -> nn.Module:
    """The model of a folder on the meta device: shapes without weights, from its config.json; with `scores` as a
    sequence-classification model with one label. `pictures`: of `model_class`. Raises `BirlError`."""
    check_weights(folder, whole=False)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with quiet(), torch.device("meta"):
            if scores:
                config.num_labels = 1
            kind = AutoModelForSequenceClassification if scores else model_class(config, pictures)
            model = kind.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:
        raise not_loadable(folder, error) from error
    model.tie_weights()
    return model


def check_files(folder: Path) -> None:
    check_weights(folder)
    check_all(folder)
    from safetensors import SafetensorError, safe_open

    for file in sorted({*folder.glob("*.safetensors"), *weight_files(folder)}):
        try:
            with safe_open(file, framework="pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise BirlError(f"{file} is damaged: {first_line(error)}. Download or convert the model again.") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder's weights. Raises `BirlError` for an invalid index, or one with names
    that are missing or outside of the folder."""
    alone, index = (folder / name for name in WEIGHTS)
    if alone.is_file():
        return [alone]
    try:
        read = read_json(index)
        names = read.get("weight_map") if isinstance(read, dict) else None
        if not isinstance(names, dict) or not names:
            raise ValueError("its weight_map names no file")
    except (OSError, ValueError) as error:
        raise BirlError(f"{index} cannot be read: {first_line(error)}. Download or convert the model again.") from error
    files = sorted({inside(folder, name) for name in names.values()})
    for file in files:
        if not file.is_file():
            raise BirlError(f"{folder} is not complete: {index.name} names {file.name}, which is not there.")
    return files


def check_report(folder: Path, model: nn.Module, report: dict[str, Any]) -> None:
    """Raise `BirlError` for missing or unfit weights; transformers would initialise a missing weight at random."""
    if "score.weight" in (report.get("unexpected_keys") or ()):
        raise BirlError(
            f"{folder} is a reward model, not a language model. It can judge (reward.functions=[model] "
            f"reward.model={folder}) or begin as a critic (critic.path={folder})."
        )
    problems = {kind: sorted(report.get(f"{kind}_keys") or []) for kind in ("missing", "unexpected")}
    problems["unexpected"] = [key for key in problems["unexpected"] if not predicts_further(key, model)]
    problems["mismatched"] = [
        f"{name} ({tuple(stored)} instead of {tuple(wanted)})"
        for name, stored, wanted in sorted(report.get("mismatched_keys") or [])
    ]
    result = [
        f"{kind} {', '.join(keys[:4])}{' ...' if len(keys) > 4 else ''}" for kind, keys in problems.items() if keys
    ]
    if result:
        raise BirlError(
            f"{folder}: the weights do not belong to its config.json ({type(model).__name__}): {'; '.join(result)}."
        )


def predicts_further(key: str, model: nn.Module) -> bool:
    """Whether a weight is of a layer after the last one, for multi-token prediction (MTP, DeepSeek-V3). transformers
    drops such layers, but recognises them only by the published models' layer numbers."""
    config: Any = model.config.get_text_config()  # pyright: ignore
    further = getattr(config, "num_nextn_predict_layers", None) or 0
    place = LAYER.search(key)
    return place is not None and 0 <= int(place[1]) - config.num_hidden_layers < further


def load_tokenizer(folder: Path, chat_template: str = "") -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder; `chat_template` names a replacement of its template: a Jinja file, or a template
    of the package."""
    check_tokenizer(folder)
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise BirlError(f"{folder}: the tokenizer cannot be loaded: {first_line(error)}") from error
    if chat_template:
        try:
            tokenizer.chat_template = read_text(template_file(chat_template))
        except OSError as error:
            raise BirlError(f"model.chat_template={chat_template}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise BirlError(f"model.chat_template={chat_template} is not a text file in UTF-8.") from error
    return tokenizer


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = model.get_input_embeddings().weight.shape[0]  # pyright: ignore
    tokens = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=-1))
    if tokens > rows:
        raise BirlError(f"The tokenizer has {tokens} tokens, the model only {rows}: they do not belong together.")


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert the parameters to another dtype, in place. `model.to(dtype)` would also round the buffers, including the
    rotary frequencies: all positions after the first few hundred would then be wrong."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def keep_angles(model: nn.Module) -> None:
    """Make all rotary angles independent of the longest sequence of a batch."""

    def kept(kind: str) -> str:
        return "default" if kind in CHANGING else kind

    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            module.rope_type = {name: kept(kind) for name, kind in kinds.items()}  # pyright: ignore
        elif isinstance(kinds, str):
            module.rope_type = kept(kinds)  # pyright: ignore


def context_limit(model: nn.Module) -> int:
    """Longest sequence that the model supports [tokens]; with longrope the longest for its short factors."""
    config = model.config.get_text_config()  # pyright: ignore
    rope = getattr(config, "rope_parameters", None) or {}
    each = [p for p in (rope, *rope.values()) if isinstance(p, dict) and p.get("rope_type") == "longrope"]
    limits = [p["original_max_position_embeddings"] for p in each]
    return min([int(getattr(config, "max_position_embeddings", 2**31)), *limits])


def end_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All tokens that end an answer: the tokenizer's, those in generation_config.json (one or a list), and the one that
    the chat template writes behind an answer: a base model's files name only the end of a text."""
    from birl.text.chat import Chat

    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return Chat(tokenizer).ends_written() | {i for i in (*ids, tokenizer.eos_token_id) if isinstance(i, int)}


def save_hf_config(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: Path, source: Path | None = None
) -> None:
    """Write all of a model folder except its weights, so that a checkpoint can be exported without the original.
    `source`: the folder that the model was read from."""
    with quiet():
        save_config(model.config, folder, source)
        if getattr(model, "generation_config", None) is not None:
            # save_pretrained of versions before 5.23 refuses a temperature without do_sample
            model.generation_config.to_json_file(folder / "generation_config.json")  # pyright: ignore
        tokenizer.save_pretrained(folder)


def save_config(config: Any, folder: Path, source: Path | None) -> None:
    """`source`: the folder whose config.json was read. Also writes its keys that transformers drops or renames: older
    versions of it and other programs read rope_theta, rope_scaling and torch_dtype, and would use defaults."""
    told = None if source is None else source / "config.json"
    old = read_json(told) if told is not None and told.is_file() else {}
    config.save_pretrained(folder)
    file = folder / "config.json"
    new = with_keys(read_json(file), old)
    file.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")


def with_keys(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """`new`, with keys of `old` that it lacks; also within the text and vision configs."""
    result = dict(new)
    for key, value in old.items():
        if key == "torch_dtype":
            result[key] = new.get("dtype", value)
        elif key not in new and key not in LEFT_OUT:
            result[key] = value
        elif key.endswith("_config") and isinstance(value, dict) and isinstance(new.get(key), dict):
            result[key] = with_keys(new[key], value)
    return result


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context without transformers' progress bars and warnings, for one thread at a time: building a model, it changes
    process-wide state (`PreTrainedModel.tie_weights` and the default dtype)."""
    with MAKING:
        level = transformers_logging.get_verbosity()
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        logging.getLogger("transformers").setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            transformers_logging.set_verbosity(level)
            if bars:
                transformers_logging.enable_progress_bar()
