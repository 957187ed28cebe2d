"""The model's forward passes, as both the engine and the learner use them, and the proof that they mean what we
think."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from birl.errors import BirlError
from birl.models import decoder, fused_decoder
from birl.models.attention import Layout, Packed, RowLayout, Tree
from birl.models.decoder import decoder_for
from birl.models.fused_decoder import fused_for


def hidden_states(model: nn.Module, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
    """Last hidden state of each token: tokens [T], positions [T] -> [T, H]. On birl's kernels where they fit, on CUDA
    on the fused ones."""
    if decoder := decoder_for(model):
        return decoder.hidden_states(tokens, positions, cast(RowLayout, layout))  # sharded models have no decoder
    if fused := fused_for(model):
        return fused.hidden_states(tokens, positions, layout)
    body = cast(Any, model).base_model
    output = body(input_ids=tokens[None], position_ids=positions[None], layout=layout, use_cache=False)
    return output.last_hidden_state[0]


def weights_changed(model: nn.Module) -> None:
    """New values are in the parameters: forget every laid-out copy of them."""
    decoder.weights_changed(model)
    fused_decoder.weights_changed(model)


def forget(model: nn.Module) -> None:
    """Its parameters are other ones from now on: choose anew what computes it."""
    decoder.MADE.pop(model, None)
    fused_decoder.MADE.pop(model, None)


def head(model: nn.Module) -> nn.Linear:
    """The layer that turns hidden states into logits."""
    return model.get_output_embeddings()  # pyright: ignore


def packed(trees: Sequence[tuple[int, tuple[int, ...]]], device: torch.device) -> Packed:
    return Packed([Tree(prefix, branches) for prefix, branches in trees], device)


@torch.no_grad()
def verify(model: nn.Module) -> None:
    """Refuse an architecture for which packing, shared prefixes or the bare head would be silently wrong: recurrent
    layers, logit scaling, biases by absolute place. Compares three short sequences, separate and packed, with the
    logits of transformers' own forward. For float32 weights.

    Raises `BirlError`.
    """
    if changing := rope_types(model) & {"dynamic", "longrope"}:
        raise BirlError(
            f"{type(model).__name__} has rotary positions of the kind {changing.pop()}: the angles of every token "
            "depend on the longest sequence in the batch, so that no token has one log-prob. birl cannot train it; "
            "where the sequences are short enough to do without, set rope_type to default in its config.json."
        )
    vocabulary = head(model).weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (17,), generator=generator)
    tree, other = Tree(5, (4, 3)), Tree(5)
    device = head(model).weight.device
    ids = ids.to(device)
    positions = torch.tensor(tree.positions() + other.positions(), device=device)

    def computed() -> tuple[Tensor, Tensor]:
        """Log-probs of the three sequences, packed by us and alone by transformers."""
        rows = hidden_states(model, ids, positions, Packed([tree, other], device))
        separate = [ids[:9], torch.cat([ids[:5], ids[9:12]]), ids[12:]]
        logits = [model(input_ids=s[None], use_cache=False).logits[0].float() for s in separate]
        alone = torch.cat([logits[0], logits[1][5:], logits[2]])
        return head(model)(rows).float().log_softmax(-1), alone.log_softmax(-1)

    found, expected = computed()
    gap = (found - expected).abs().max().item()
    bound = 1e-3
    if not gap <= bound:
        again = [(a - b).abs().max().item() for a, b in zip(computed(), (found, expected), strict=True)]
        raise BirlError(
            f"{type(model).__name__} gives other log-probs packed than alone (difference {gap:.2g}, allowed {bound}): "
            + (
                "its layers look across packed sequences, or its logits are post-processed. birl cannot train this "
                "architecture."
                if not any(again)
                else f"computed again, the same numbers come out otherwise (packed by {again[0]:.2g}, alone by "
                f"{again[1]:.2g}), so this machine or a library computes wrongly. Try again; BIRL_KERNELS=0 leaves out "
                "birl's own kernels."
            )
        )


def rope_types(model: nn.Module) -> set[str]:
    """Kinds of rotary positions, which some architectures have one of for each kind of layer."""
    found = getattr(cast(Any, model).config.get_text_config(), "rope_parameters", None) or {}
    nested = [found, *(v for v in found.values() if isinstance(v, dict))]
    return {p["rope_type"] for p in nested if "rope_type" in p}
