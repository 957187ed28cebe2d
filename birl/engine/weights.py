"""The weights of an engine with weights of its own: replaced in place, all or none, and always verified by digests.

stage   read the new tensors beside the old ones, compare names, shapes, dtypes and digests
swap    copy them over the old ones (compute thread, between two steps), and compute the digests of the result
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from birl.errors import BirlError, WeightsFailed, first_line
from birl.models.decoder import weights_changed
from birl.models.device import device_of, use
from birl.models.digests import digests, nonfinite, whole
from birl.models.forward import forget
from birl.regular import check, inside
from birl.types import Held, Update


class Weights:
    """All parameters of a module by name; tied ones once. `version`: of the current weights."""

    def __init__(self, model: nn.Module, version: int = 0) -> None:
        self.model, self.version = model, version
        self.shapes = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: p.data for name, p in self.model.named_parameters()}

    def digests(self) -> dict[str, str]:
        return digests(self.tensors)

    def stage(self, update: Update) -> dict[str, Tensor]:
        """The new tensors, compared and checked. Raises `WeightsFailed`."""
        if getattr(self.model, "in_int8", False):
            raise WeightsFailed(
                "mismatch", "This engine was started with engine.weights=int8 and takes no new weights."
            )
        check_age(update, self.version)
        use(device_of(self.model))  # runs in another thread, which would launch the digest kernel on the first GPU
        most = 4 * sum(p.nbytes for p in self.tensors.values()) + 2**24  # another type is told by name
        result = dict(update.tensors) or read(Path(update.folder), most)
        check_layouts(
            f"Version {update.version} of the weights",
            {name: layout(t.shape, t.dtype) for name, t in result.items()},
            {name: layout(*own) for name, own in self.shapes.items()},
        )
        if update.digests:
            arrived = digests(result)
            problems = [name for name in self.shapes if update.digests.get(name) != arrived[name]]
            if problems:
                raise WeightsFailed(
                    "mismatch", _told(f"Version {update.version} arrived with other bytes than were sent", problems)
                )
        if broken := nonfinite(result):
            problems = [f"{name} holds NaN or infinity" for name in broken]
            raise WeightsFailed("numbers", _told(f"Version {update.version} of the weights", problems))
        return result

    def swap(self, staged: Mapping[str, Tensor], update: Update) -> Held:
        """Copy the tensors of `stage` over the parameters, in place. Raises `WeightsFailed`."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(staged[name])
        weights_changed(self.model)
        held = self.digests()
        self.version = update.version
        if update.digests and held != dict(update.digests):
            raise WeightsFailed("mismatch", f"Version {update.version} was copied, and is not what was sent.")
        size = sum(t.nbytes for t in staged.values())
        return Held(version=self.version, digest=whole(held), bytes=size)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def drop(self) -> None:
        """Free the weights and every repacked or joined copy of them."""
        forget(self.model)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.new_empty(0)

    def allocate(self) -> None:
        """Allocate the weights, filled with NaN."""
        for name, parameter in self.model.named_parameters():
            shape, dtype = self.shapes[name]
            parameter.data = torch.full(shape, float("nan"), dtype=dtype, device=parameter.device)


def check_age(update: Update, held: int) -> None:
    """Raise `WeightsFailed` if an update is older than the version that an engine holds."""
    if update.version < held and not update.anew:
        raise WeightsFailed("stale", f"The engine has version {held} of the weights and was given {update.version}.")


def read(folder: Path, most: float = math.inf) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder. Raises `WeightsFailed`, for files of more than `most` bytes before they are
    read."""
    result: dict[str, Tensor] = {}
    try:
        files = sorted(folder.glob("*.safetensors"))
        size = sum(check(inside(folder, file.name)) or file.stat().st_size for file in files)
        if not files or size > most:
            what = (
                f"{size:,} bytes of weights, far more than the model" if files else "no weights: no .safetensors file"
            )
            raise WeightsFailed("mismatch" if files else "missing", f"{folder} has {what}.")
        for file in files:
            with safe_open(file, framework="pt") as opened:
                result |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except WeightsFailed:
        raise
    except (SafetensorError, OSError, BirlError) as error:
        raise WeightsFailed("truncated", f"{folder}: {first_line(error)}") from error
    return result


def layout(shape: Sequence[int], dtype: torch.dtype | str) -> str:
    """Example: layout((2, 3), torch.float32) == "float32 [2, 3]" """
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def check_layouts(what: str, layouts: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Compare layouts by name of new tensors with a model's own. Raises `WeightsFailed` that names the first that
    differ."""
    problems = [f"{name} is missing" for name in sorted(own.keys() - layouts.keys())]
    problems += [f"{name} is not in the model" for name in sorted(layouts.keys() - own.keys())]
    if problems:
        raise WeightsFailed("missing", _told(what, problems))
    problems = [f"{n} is {layouts[n]} and should be {own[n]}" for n in sorted(own) if layouts[n] != own[n]]
    if problems:
        raise WeightsFailed("mismatch", _told(what, problems))


def _told(what: str, problems: list[str]) -> str:
    more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
    return f"{what}: {'; '.join(problems[:4])}{more}."
