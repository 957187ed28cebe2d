"""Export a checkpoint as a model folder in Hugging Face format or, with LoRA, as an adapter folder in peft's."""

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from birl.cache import sweep
from birl.errors import BirlError, first_line
from birl.hub import is_run, read_config, run_of
from birl.learner import checkpoint, step_folders
from birl.learner.lora import UNCALLED, digest, merged, targets
from birl.learner.rounding import Dither, noise, on_grid
from birl.learner.tensors import Reader
from birl.models import released
from birl.models.heads import HEADS
from birl.models.load import load_model, load_tokenizer, quiet, resolve, save_config, skeleton
from birl.models.quantized import BITS, QuantizedLinear
from birl.models.slices import quantizable
from birl.regular import check_new, clear, discard, inside, open_regular

#: last names that peft takes for parts of experts (its transformers_weight_conversion.py)
OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def resolved(path: str, key: str = "model.path", weights: bool = True, say: Callable[[str], None] = print) -> Path:
    """Return the model folder for a `path` in any key or command: smollm2, a folder, a .gguf file, a hub id, or the
    folder of a run or of one of its checkpoints. For the last two it is the export in Hugging Face format beside them,
    which is made once. Without `weights` no weights are downloaded or exported. `key`: its name in errors. Raises
    `BirlError`."""
    folder = Path(path).expanduser()
    run = run_of(folder)
    if run is None:
        return resolve(path, say, weights, key)
    if not weights:
        return run / "model"
    chosen = step_folders.latest(run / "checkpoints") if is_run(folder) else folder
    if chosen is None:
        raise BirlError(f"{key}={path}: the run has no checkpoint yet.")
    goal = run / "export" / chosen.name
    sources = (chosen / "manifest.json", *(run / "model").iterdir())
    if goal.is_dir() and goal.stat().st_mtime < max(file.stat().st_mtime for file in sources):
        discard(goal)  # of an earlier training in this folder, or with another chat template
    if not goal.is_dir():
        say(f"Exporting {chosen} ...")
        export(chosen, run, goal, there="kept")
    return goal


def export(
    path: Path,
    run: Path,
    target: Path,
    dtype: torch.dtype | None = None,
    shard_gb: float = 5.0,
    there: str = "refused",
    policy: str = "",
) -> None:
    """Write the checkpoint `path` of the run `run` as a whole model of `dtype` (None: the run's model.dtype), in files
    of at most `shard_gb` [GB], of which one is in memory at a time. A model with a score head becomes a
    sequence-classification model with one label; LoRA is merged, which needs the run's base model; of several policies
    the one named `policy` is written. `there`: of `written`. Raises `BirlError` if `target` cannot be written, or the
    checkpoint is damaged."""
    checkpoint.check(path)
    dtype, tokenizer = dtype or computed_in(run), load_tokenizer(run / "model")  # one that cannot be read is told here
    with written(target, there) as part:
        reader = Reader(path / "tensors")  # its index once, however many files are written
        shapes = checkpoint.shapes(reader, "model.")
        read = partial(checkpoint.read_some, reader, "model.")
        if policy or any(name.endswith(".lora_A") for name in shapes):
            whole = whole_of_adapters(path, run, policy)
            shapes = {n: t.shape for n, t in whole.items()}
            read = lambda names, whole=whole: {name: whole[name] for name in names}  # noqa: E731
        shapes.pop("value.weight", None)  # a critic's, which nothing but training needs
        scores = "score.weight" in shapes
        model: Any = skeleton(run / "model", scores, pictures=True)
        if scores:
            shapes.pop("lm_head.weight", None)
        check_names(path, run, model, set(shapes))
        copy_files(run / "model", part)
        if scores:
            model.config.pad_token_id = tokenizer.pad_token_id = padding(tokenizer)  # pyright: ignore
            model.config.problem_type = "regression"  # otherwise vLLM would give its sigmoid
            tokenizer.save_pretrained(part)
        model.config.dtype, model.config.architectures = dtype, [type(model).__name__]
        with quiet():
            save_config(model.config, part, run / "model")
        write_shards(part, model, shapes, read, dtype, int(shard_gb * 1e9))


def write_shards(
    folder: Path,
    model: Any,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[Sequence[str]], dict[str, Tensor]],
    dtype: torch.dtype,
    limit: int,
) -> None:
    """Write model.safetensors, or model-00001-of-0000N.safetensors and an index, each of at most `limit` bytes unless
    tensors that belong together are larger. Names are those of the model as published in transformers' format.
    Parameters are of `dtype`; buffers, such as the bias of router scores, keep their own."""
    own = {name: buffer.dtype for name, buffer in model.named_buffers()}
    wanted = {name: (tuple(shapes[name]), own.get(name, dtype)) for name in sorted(shapes)}
    shards: list[list[str]] = [[]]
    size = 0
    for part in released.parts(model, wanted):
        one = released.nbytes(part.names, wanted)
        if shards[-1] and size + one > limit:
            shards.append([])
            size = 0
        shards[-1].extend(part.names)
        size += one
    where, total = {}, 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors = released.reverted(model, {n: t.to(wanted[n][1]).contiguous() for n, t in read(names).items()})
        total += sum(t.nbytes for t in tensors.values())
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def computed_in(run: Path) -> torch.dtype:
    """The run's compute type; bfloat16 if its configuration has none."""
    return {"float32": torch.float32, "float16": torch.float16}.get(configured(run, "model.dtype"), torch.bfloat16)


def quantized_as(run: Path) -> str:
    """nf4 or int8 if the run's base model was quantised (`lora.quantize`); else empty."""
    name = configured(run, "lora.quantize")
    return name if name in BITS else ""


def configured(run: Path, key: str) -> str:
    """Return a value of the run's configuration; empty if it has none. Raises `BirlError` if it cannot be read."""
    return str(read_config(run).get(key, ""))


def copy_files(source: Path, target: Path) -> None:
    """Copy all files of a folder and its subfolders. Raises `BirlError` for a link that leads out of it, and for
    anything but a regular file."""
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if not inside(source, name).is_dir():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                with open_regular(path) as file, (target / name).open("wb") as into:
                    shutil.copyfileobj(file, into)
            except OSError as error:
                raise BirlError(f"{path} cannot be copied: {error.strerror or error}.") from error


def check_names(path: Path, run: Path, model: nn.Module, stored: set[str]) -> None:
    """Raises `BirlError` unless the stored names are the model's; of tied weights one name is enough."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    absent = [min(alias) for alias in names.values() if not alias & stored]
    unexpected = stored - {n for alias in names.values() for n in alias} - set(model.state_dict())
    if unexpected or absent:
        raise BirlError(
            f"{path} does not fit {run}/model: missing {sorted(absent)[:5]}, unexpected {sorted(unexpected)[:5]}."
        )


def of_policy(path: Path, policy: str) -> dict[str, Tensor]:
    """Return the trained tensors, of one policy if there are several. Raises `BirlError` if `policy` does not fit."""
    weights = checkpoint.read_tensors(path, "model.")
    names = sorted({name.partition("/")[0] for name in weights if "/" in name})
    if policy not in (names or [""]):
        there = f"the policies {', '.join(names)}" if names else "one policy without a name"
        fix = f"add --policy {names[0]} to `birl checkpoints RUN export STEP FOLDER`" if names else "leave --policy out"
        raise BirlError(f"{path} holds {there}: {fix}.")
    own = f"{policy}/" if names else ""
    return {name.removeprefix(own): t for name, t in weights.items() if name.startswith(own) or "/" not in name}


def whole_of_adapters(path: Path, run: Path, policy: str) -> dict[str, Tensor]:
    """Return the base model's weights with the trained matrices merged in, rounded as in the run: to its compute type.
    Heads are copied."""
    weights = of_policy(path, policy)
    heads = {f"{name}.weight": weights[f"{name}.weight"] for name in HEADS if f"{name}.weight" in weights}
    base = base_model(path, run)  # a quantised one dequantised
    on_grid((p.data for p in base.parameters()), computed_in(run))
    trained = adapters(weights)
    whole = merged_weights(base, trained, alpha_of(path))
    if computed_in(run) == torch.bfloat16:
        line = noise(torch.device("cpu"))
        for name in (f"{module}.weight" for module in trained):
            Dither.of(name, whole[name].shape, line)(whole[name])
    own = {name for name, _ in base.named_parameters()} | {name for name, _ in base.named_buffers()}
    return {n: t for n, t in whole.items() if n in own} | heads


def padding(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """A padding token that is not the end token. transformers reads a score at the last token that is not padding: if
    the end token were the padding token, as in many chat models, it would read one token too early."""
    special = [i for i in tokenizer.all_special_ids if i != tokenizer.eos_token_id]
    return special[0] if special else None


def export_adapter(path: Path, run: Path, target: Path, policy: str = "") -> None:
    """Write only the LoRA matrices, for `peft.PeftModel.from_pretrained(base, target)`. The metadata of the safetensors
    file has the quantisation of the base (`base_quantized`). Raises `BirlError` if `target` exists, and for a
    checkpoint with whole weights."""
    from peft import LoraConfig

    checkpoint.check(path)
    weights = of_policy(path, policy)
    result, score = adapters(weights), weights.get("score.weight")
    if not result:
        raise BirlError(
            f"{path} holds whole weights and no adapter: lora.rank was 0. `birl checkpoints {run} export` writes them."
        )
    first = next(iter(result.values()))
    if uncalled := next((name for name in result if name.rpartition(".")[2] in UNCALLED), ""):
        raise BirlError(
            f"{path} holds matrices of {uncalled}, whose weight transformers reads without calling the layer, so that "
            f"peft would leave them out. Export the merged model: `birl checkpoints {run} export`."
        )
    alpha, model = alpha_of(path), skeleton(run / "model", pictures=True)
    config = LoraConfig(
        r=len(first["lora_A"]),
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # pyright: ignore
        **peft_targets(list(result), model),
        use_dora="lora_magnitude" in first,
        base_model_name_or_path=base_name(run),
        task_type="CAUSAL_LM" if score is None else "SEQ_CLS",
        modules_to_save=None if score is None else ["score"],
        inference_mode=True,
    )
    names = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
    own = peft_names(list(result), model)
    tensors = {f"base_model.model.{own[n]}.{names[key]}": t for n, x in result.items() for key, t in x.items()}
    if score is not None:
        tensors["base_model.model.score.weight"] = score
    with written(target) as part:
        config.save_pretrained(str(part))
        base = {"base_quantized": kind} if (kind := quantized_as(run)) else {}
        save_file(tensors, part / "adapter_model.safetensors", metadata={"format": "pt"} | base)


@contextmanager
def written(target: Path, there: str = "refused") -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` when it is complete. `there`: a `target` that exists is
    refused, replaced, or, as another process has written it meanwhile, kept. Raises `BirlError` if it cannot be
    written."""
    if there == "refused":
        check_new(target)
    part = target.with_name(f"{target.name}.part-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep(target.parent, f"{target.name}.part-{'[0-9a-f]' * 8}")
        part.mkdir()
        yield part
        if there == "replaced":
            discard(target)
        if there != "kept" or not target.is_dir():
            part.rename(target)
    except (OSError, SafetensorError) as error:
        if there != "kept" or not target.is_dir():
            why = getattr(error, "strerror", None) or first_line(error)
            raise BirlError(
                f"{target} cannot be written: {why}. Make room, or name a folder that can be written: `birl "
                "checkpoints RUN export STEP FOLDER`."
            ) from error
    finally:
        clear(part)


def adapters(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Module -> lora_A, lora_B and lora_magnitude -> tensor; empty if whole weights were trained."""
    result: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind in ("lora_A", "lora_B", "lora_magnitude"):
            result.setdefault(module, {})[kind] = tensor
    return result


def alpha_of(path: Path) -> float:
    return checkpoint.read_tensors(path, "lora.")["alpha"].item()


def merged_weights(base: nn.Module, adapters: dict[str, dict[str, Tensor]], alpha: float) -> dict[str, Tensor]:
    weights = {**base.state_dict()}
    for name, parts in adapters.items():
        a, b = parts["lora_A"], parts["lora_B"]
        weight = weights[f"{name}.weight"]
        weights[f"{name}.weight"] = merged(weight, a, b, parts.get("lora_magnitude"), alpha / len(a))
    return weights


def base_model(path: Path, run: Path) -> nn.Module:
    """Load the run's base model; a quantised one with its dequantised weights, in float32. Raises `BirlError` if it is
    gone or has changed."""
    name, kind = began_with(run), quantized_as(run)
    try:
        model = load_model(resolved(name), pictures=configured(run, "model.pictures") == "True")
    except BirlError as error:
        raise BirlError(
            f"{path} holds LoRA matrices, and the model that they belong to is needed as well: {error} Export from the "
            f"folder where the run was started, or only the adapter: `birl checkpoints {run} export-adapter`."
        ) from error
    for linear in quantizable(model).values() if kind else ():
        weight = linear.weight.detach()
        weight.copy_(QuantizedLinear(linear, weight, kind, weight.device).values())
    if digest(model) != bytes(checkpoint.read_tensors(path, "lora.")["base"].tolist()):
        raise BirlError(
            f"{path} holds LoRA matrices for other weights than model.path={name} has now. Put the model back that the "
            f"run began with, or export only the adapter: `birl checkpoints {run} export-adapter`."
        )
    return model


def began_with(run: Path) -> str:
    """`model.path` of a run. Raises `BirlError`."""
    name = read_config(run).get("model.path")
    if not isinstance(name, str):
        raise BirlError(f"{run}/config.json, which names the base model, has no model.path.")
    return name


def base_name(run: Path) -> str:
    """Path that peft loads the base model from: a hub id, or an absolute path."""
    name = began_with(run)
    if name != "smollm2" and not Path(name).expanduser().exists():
        return name
    return str(resolved(name).resolve())


def peft_targets(names: list[str], model: nn.Module) -> dict[str, Any]:
    """The keys `target_modules` and `target_parameters` of peft's configuration for these layers. Layers beside the
    experts of a layer whose names, as target modules, peft would take for those of experts, which transformers holds
    together, are parameters: peft would leave out their matrices."""
    experts = any(isinstance(getattr(m, "down_proj", None), nn.Parameter) for m in model.modules())
    apart = [n for n in names if experts and n.rpartition(".")[2] in OF_EXPERTS]
    modules = short([n for n in names if n not in apart], model)
    return {"target_modules": modules, "target_parameters": [f"{n}.weight" for n in apart] or None}


def peft_names(names: Sequence[str], model: nn.Module) -> dict[str, str]:
    """The names of layers in peft's files. As peft reads them, it applies transformers' renamings of published weights.
    A name that these would change (`mlp.shared_experts` of Laguna) is the published one, which they turn into it."""
    ways = [w for w in get_model_conversion_mapping(cast(Any, model)) if isinstance(w, WeightRenaming)]
    result = {}
    for name in names:
        own = read = f"{name}.weight"
        for way in ways:
            read = way.rename_source_key(read)[0]
        empty = {own: torch.empty(0, dtype=torch.float32)}
        stored = own if read == own else next(iter(released.reverted(model, empty)))
        result[name] = stored.removesuffix(".weight")
    return result


def short(names: list[str], model: nn.Module) -> list[str]:
    """Target modules by their last names (q_proj), as other programs expect, if that selects the same; else in full."""
    last = sorted({name.rpartition(".")[2] for name in names})
    return last if targets(model, last) == names else names
