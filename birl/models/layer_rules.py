"""Checks that birl supports a model's layers and modules. All others are refused by name, whatever the weights are:

    kinds of layers    by the config's name of each layer's kind
    modules            only birl's attention may mix tokens, or use a token's index in the row

The second is tested with attention that returns zeros: a NaN token must not affect any other (0 * NaN is NaN, so small
weights hide nothing), and tokens in reverse order with their own positions must give the same rows in reverse order.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from birl.errors import BirlError, first_line
from birl.models import attention
from birl.models.slots import Witness, body_of, computed_by

KINDS = {"full_attention", "sliding_attention", "chunked_attention", "attention", "dense", "sparse", "moe", "mlp"}
KINDS |= {"global", "local"}  # GPT-Neo
# with a state: the modules that compute them are checked by name
KINDS |= {"conv", "linear_attention", "hybrid", "hybrid_sliding", "recurrent"}
ALIBI = "its attention adds a bias by distance to every score (alibi), for which birl has no rule"
QWEN4 = (
    "its embeddings are looked up by the ids of the tokens before, too (n-grams), and an indexer chooses the keys of "
    "each query, for both of which birl has no rule"
)
# by model type, for which the checks below would report only a symptom
REASONS = {
    **dict.fromkeys(("bloom", "mpt"), ALIBI),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), QWEN4),
    "rwkv": "its forward pass divides its own weights, and each of its blocks keeps two states",
}
SORTING = ("JetMoeMoA", "JetMoeMoE")  # experts with submodules, unlike transformers' common ones
TOKENS = 13  # not the number of heads of any model
SPOILT = 6  # index of the NaN token
ALIKE = 1e-3  # relative to the largest number; more is not rounding


def check_layers(model: nn.Module) -> None:
    """Raise `BirlError` that names the first unsupported kind of layer, or module."""
    name, config = type(model).__name__, cast(Any, model).config.get_text_config()
    if why := REASONS.get(config.model_type):
        raise BirlError(f"birl does not support {name}: {why}.")
    for option, kinds in vars(config).items():
        if not isinstance(kinds, list | tuple) or len(kinds) != config.num_hidden_layers:
            continue
        for i, kind in enumerate(kinds):
            if isinstance(kind, str) and kind not in KINDS:
                raise BirlError(
                    f"birl does not support {name}: layer {i} is of the kind {kind} ({option} in its config.json). "
                    f"birl has rules for {', '.join(sorted(KINDS))}."
                )
    with computed_by(model, attention.NAME):
        check_modules(model)


@torch.no_grad()
def check_modules(model: nn.Module) -> None:
    """Test the modules by forward passes."""
    kinds = {path: type(module).__name__ for path, module in model.named_modules()}
    size = cast(Any, model).get_input_embeddings().weight.shape[0]
    device = cast(Any, model).get_output_embeddings().weight.device
    places = torch.arange(TOKENS, device=device)
    straight, turned, spoilt = Pass(model), Pass(model), Pass(model)
    straight.run(places % size, places)
    turned.run(places.flip(0) % size, places.flip(0))
    spoilt.run(places % size, places, spoilt=True)
    for (path, call), rows in straight.given.items():
        if spreads(spoilt.given.get((path, call))) and not spreads(rows):
            while spoilt.entered.get(path):  # an inner module whose input has NaN already
                path = path.rpartition(".")[0]
            raise BirlError(
                f"birl does not support {kinds['']}: {kinds[path]} ({path}) lets tokens see one another outside of the "
                "attention that birl computes: a recurrent state, a convolution, attention of its own, or attention "
                "that does not hand on what the model was called with. birl has no rule for it."
            )
        back = turned.given.get((path, call))
        if back is None or back.shape != rows.shape or not rows.numel():  # no features: DeepSeek without shared experts
            continue
        if (rows - back.flip(0)).abs().max() > ALIKE * rows.abs().max():
            raise BirlError(
                f"birl does not support {kinds['']}: {kinds[path]} ({path}) counts a token's place in the row instead "
                "of its position, which is another one where sequences are packed."
            )


@dataclass(slots=True)
class Pass:
    """A forward pass with attention that returns zeros: by module and call, the output for each token, [TOKENS, ...]
    float32, in the order of completion, so inner modules first."""

    model: nn.Module
    given: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    entered: dict[str, bool] = field(default_factory=dict)  # by module: whether an input has the NaN of another token

    def run(self, ids: Tensor, places: Tensor, spoilt: bool = False) -> None:
        """Raises `BirlError` if a module fails."""
        calls: dict[str, int] = {}

        def note(path: str, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            output = output[0] if isinstance(output, tuple | list) and output else output
            rows = rows_of(output)
            if rows is not None:
                calls[path] = calls.get(path, 0) + 1
                self.given[path, calls[path]] = rows
            self.entered[path] = any(spreads(rows_of(x)) for x in (*args, *options.values()))

        def spoil(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            output = output.clone()
            output.view(TOKENS, -1)[SPOILT] = float("nan")
            return output

        hooks = [cast(Any, self.model).get_input_embeddings().register_forward_hook(spoil)] if spoilt else []
        experts = [m for m in self.model.modules() if hasattr(m, "is_transposed") or type(m).__name__ in SORTING]
        sorted_rows = {id(inner) for m in experts for inner in m.modules() if inner is not m}  # by expert
        for path, module in self.model.named_modules():
            if id(module) in sorted_rows:
                continue
            hooks.append(
                module.register_forward_hook(
                    lambda m, args, options, output, path=path: note(path, args, options, output), with_kwargs=True
                )
            )
        options = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None]), "position_ids": places[None]}
        try:
            with named(self.model):
                body_of(self.model)(**options, layout=Witness(), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()


def rows_of(value: Any) -> Tensor | None:
    """The value as a row of numbers for each token, if it has that form."""
    if not isinstance(value, Tensor) or value.ndim < 2 or not value.is_floating_point():
        return None
    rows = value[0] if value.shape[:2] == (1, TOKENS) else value
    return rows.float() if rows.shape[0] == TOKENS else None


def spreads(rows: Tensor | None) -> bool:
    """Whether a token other than `SPOILT` is NaN."""
    return rows is not None and bool(rows.flatten(1).isnan().any(1).nonzero().ne(SPOILT).any())


@contextmanager
def named(model: nn.Module) -> Iterator[None]:
    """Context that turns failures into a `BirlError` that names the innermost failing module."""
    try:
        yield
    except BirlError:
        raise
    except Exception as error:
        paths = {id(module): path for path, module in model.named_modules()}
        where, trace = model, error.__traceback__
        while trace is not None:
            frame = trace.tb_frame.f_locals
            where = frame["self"] if id(frame.get("self")) in paths else where
            trace = trace.tb_next
        path = paths[id(where)]
        raise BirlError(
            f"birl does not support {type(model).__name__}: {type(where).__name__}{path and f' ({path})'} fails with "
            f"birl's attention, which has no mask ({type(error).__name__}: {first_line(error)})."
        ) from error
