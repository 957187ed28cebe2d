"""Layer states beside keys and values: the last inputs of a convolution, the state of a recurrence.

The modules in `CACHE` store it in transformers' cache. Without a cache they start at the row's first token and continue
from one packed sequence into the next. Called with a `layout`, they pass their rows to it instead, as attention does:

    layout.carry(layer, rows [1, T, H], step) -> [1, T, H]

calls step(rows [B, n, H], state) -> [B, n, H], which is transformers' own forward, for n tokens of B sequences. `state`
is the state before these tokens, and is updated to that after them. Gradients flow through states: branches that start
from the same one add their gradients.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache

from birl.data.support import uploaded
from birl.data.trees import Node, Tree, nodes
from birl.errors import BirlError

# transformers ignores their time step limits when it computes one token from a state
MAMBA2 = ("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "Mamba2Mixer", "NemotronHMamba2Mixer")
MAMBA2 += ("Zamba2MambaMixer",)
UNLIMITED = (0.0, math.inf)
MAMBA1 = ("FalconMambaMixer", "JambaMambaMixer", "MambaMixer")  # `recurrences.py`
PAIRS = ("MiniMaxLightningAttention", "RecurrentGemmaRecurrentBlock", "xLSTMLayer")  # modules that return a tuple
CCA = "ZayaCCAProjection"  # returns queries, keys and values
# by class of module, the argument of its forward that is transformers' cache
CACHE = {
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv", CCA, *PAIRS), "past_key_values"),
    **dict.fromkeys(
        (
            *("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "OlmoHybridGatedDeltaNet"),
            *("BailingHybridDeltaAttention", "KimiLinearDeltaAttention", *MAMBA1, *MAMBA2),
        ),
        "cache_params",
    ),
}
# classes of modules that pass on only their cache argument: it is set to the layout
RELAYS = {"JambaMambaDecoderLayer": "past_key_values", "FalconMambaModel": "cache_params", "MambaModel": "cache_params"}
COUNTS = "Llama4TextDecoderLayer"  # reads a row's first position from its cache, for the temperature of attention
ASKING: "WeakSet[nn.Module | type]" = WeakSet()  # classes whose forward supports layouts, and models of such

PADDED = 0.75  # least length of a batch's shortest sequence, relative to its longest

Step = Callable[[Tensor, "State"], Tensor]


@dataclass(slots=True)
class State:
    """The state of one layer for B sequences, or an empty one. It acts as transformers' cache for that layer.

    conv        [B, C, L], the last inputs of a convolution of width L
    recurrent   [B, ...]
    """

    conv: Tensor | None = None
    recurrent: Tensor | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Token by token, new inputs are written into it in place."""
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int = 0
    ) -> Tensor:
        """New inputs [B, C, n] -> these after the kept ones. Without a kernel size they are all that is kept."""
        if not conv_kernel_size:
            self.conv = conv_states
            return conv_states
        inputs = conv_states if self.conv is None else torch.cat([self.conv, conv_states], -1)
        missing = max(conv_kernel_size - inputs.shape[-1], 0)
        self.conv = F.pad(inputs, (missing, 0))[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.recurrent = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    @property
    def tensors(self) -> dict[str, Tensor]:
        both = {"conv": self.conv, "recurrent": self.recurrent}
        return {name: t for name, t in both.items() if t is not None}


def ask_layouts(model: nn.Module) -> None:
    """Make the model's modules in `CACHE`, and all others of their classes, pass their rows to the layout that they are
    called with. Without a layout only the changes of `limiting` and `rounding` apply."""
    if model in ASKING:
        return
    ASKING.add(model)
    if not torch.cuda.is_available():  # transformers advises kernels (fla, causal-conv1d) that need a GPU
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    for path, module in model.named_modules():
        owner: Any = next(k for k in type(module).__mro__ if "forward" in vars(k) and "handed" not in vars(k))
        if owner.__name__ in CACHE and owner not in ASKING:
            if not hasattr(Cache, "get_conv_state"):
                raise BirlError(
                    f"{type(model).__name__} keeps states, for which birl needs transformers 5.21 or newer. This is "
                    f"{transformers.__version__}: pip install -U transformers."
                )
            forward = limiting(owner.forward) if owner.__name__ in MAMBA2 else owner.forward
            forward = rounding(forward) if owner.__name__ == PAIRS[0] else forward
            owner.forward = asking(forward, CACHE[owner.__name__], owner.__name__)
            ASKING.add(owner)
        if owner.__name__ in CACHE and not hasattr(module, "layer_idx"):
            cast(Any, module).layer_idx = next(int(word) for word in path.split(".") if word.isdigit())
        for cache in {RELAYS[k.__name__] for k in type(module).__mro__ if k.__name__ in RELAYS}:
            module.register_forward_pre_hook(relaying(cache), with_kwargs=True)
            cast(Any, module)._can_checkpoint_with_cache = True  # else transformers removes the cache
        if owner.__name__ == COUNTS:
            module.register_forward_pre_hook(placing, with_kwargs=True)
            cast(Any, module)._can_checkpoint_with_cache = True
    from birl.models.handing import hand_down  # imports attention, which imports this file

    hand_down(model)


def relaying(cache: str) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        return (args, {**options, cache: options["layout"]}) if options.get("layout") is not None else None

    return hook


@dataclass(frozen=True, slots=True)
class Places:
    """A cache that stores nothing; returns each token's position minus its index in a row [1, T]."""

    positions: Tensor

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return self.positions[0] - torch.arange(self.positions.shape[1], device=self.positions.device)

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        return key, value


def placing(module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
    if options.get("layout") is None:
        return None
    return args, {**options, "past_key_values": Places(options["position_ids"])}


def asking(forward: Callable[..., Any], cache: str, name: str) -> Callable[..., Any]:
    def step(mixer: Any, rows: Tensor, state: State) -> Tensor:
        return forward(mixer, rows, **{cache: state})

    if name in (*MAMBA1, *PAIRS, CCA):
        from birl.models.recurrences import AROUND, STEPS

        step = STEPS[name] if name in STEPS else partial(AROUND[name], forward)

    @wraps(forward)
    def inner(self: Any, hidden_states: Tensor, *args: Any, layout: Any = None, **options: Any) -> Any:
        layout = options[cache] if hasattr(options.get(cache), "attend") else layout
        if layout is None:
            return forward(self, hidden_states, *args, **options)
        rows, own, adapters = hidden_states, partial(step, self), getattr(self, "low_rank", None)
        if adapters is not None and adapters.groups:
            rows, own = adapters.carried(rows, own)
        result = layout.carry(self.layer_idx, rows, own)
        if name == CCA:
            sizes = [n * self.head_dim for n in (self.num_attention_heads, *[self.num_key_value_heads] * 2)]
            return tuple(part.unflatten(-1, (-1, self.head_dim)) for part in result.split(sizes, -1))
        return (result, None) if name in PAIRS else result

    return inner


def rounding(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Run a layer with buffers in the dtype of its rows: transformers' lightning attention needs that of its decays."""

    @wraps(forward)
    def inner(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        buffers = dict(self._buffers)
        self._buffers.update({name: b.to(hidden_states.dtype) for name, b in buffers.items()})
        try:
            return forward(self, hidden_states, *args, **options)
        finally:
            self._buffers.update(buffers)

    return inner


def limiting(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Apply Mamba 2's `time_step_limit` also to single tokens: t = softplus(dt + dt_bias) is within it if dt is within
    log(exp(t) - 1) - dt_bias. dt is the last `num_heads` columns of `in_proj`, in Falcon-H1 times a factor."""

    @wraps(forward)
    def inner(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        limits = tuple(self.time_step_limit or UNLIMITED)
        if hidden_states.shape[1] > 1 or limits == UNLIMITED:
            return forward(self, hidden_states, *args, **options)
        bounds = [t + math.log(-math.expm1(-t)) if t > 0 else -math.inf for t in limits]

        def clamp(module: nn.Module, given: Any, out: Tensor) -> Tensor:
            rest, dt = out.split([out.shape[-1] - self.num_heads, self.num_heads], -1)
            factor = getattr(self, "mup_vector", self.dt_bias.new_ones(1)).flatten()[-self.num_heads :]
            least, most = (((bound - self.dt_bias.double()) / factor).to(dt.dtype) for bound in bounds)
            return torch.cat([rest, dt.clamp(least, most)], -1)

        handle = self.in_proj.register_forward_hook(clamp)
        try:
            return forward(self, hidden_states, *args, **options)
        finally:
            handle.remove()

    return inner


def by_trees(trees: Sequence[Tree], rows: Tensor, step: Step) -> Tensor:
    """Rows [1, T, H] of trees: a root starts without a state, every other node with its parent's final state. Nodes of
    one depth are computed as batches: inner nodes with equal token counts, leaves with padding after them, which does
    not change the results before it."""
    every = nodes(trees)
    pieces = list(rows[0].split([node.count for node in every]))  # split and unbind: a slice's gradient is a whole row
    behind: list[Behind | None] = [None] * len(every)
    for batch in batches(every, behind):
        above = [behind[every[i].parent] if every[i].parent >= 0 else None for i in batch]
        given = [pieces[i] if a is None else torch.cat([a.left, pieces[i]]) for a, i in zip(above, batch, strict=True)]
        states = [a.state for a in above if a is not None and a.state]
        state = State(**{name: torch.stack([s[name] for s in states]) for name in (states[0] if states else ())})
        padded, one = pad_sequence(given, batch_first=True), max(map(len, given)) == 1 and bool(states)
        # if each has only one token, transformers writes the next state into the old one in place, which a gradient
        # needs: that result is dropped, and children compute the token once more, before their own
        result = step(torch.cat([padded, padded], 1), replace(state))[:, :1] if one else step(padded, state)
        after = {name: tensor.unbind() for name, tensor in state.tensors.items()}
        for place, (i, out) in enumerate(zip(batch, result.unbind(), strict=True)):
            left = given[place] if one else given[place][:0]
            behind[i] = Behind({name: each[place] for name, each in after.items()}, left)
            pieces[i] = out[len(given[place]) - every[i].count : len(given[place])]
    return torch.cat([piece for piece, node in zip(pieces, every, strict=True) if node.count])[None]


@dataclass(frozen=True, slots=True)
class Behind:
    """State after a node: the state of its layer [...], by name, and the tokens [n, H] that it does not include yet."""

    state: dict[str, Tensor]
    left: Tensor


def batches(every: Sequence[Node], behind: list[Behind | None]) -> Iterator[list[int]]:
    """Batches of nodes, parents first: `behind` must have a batch's states before the next is requested. Nodes without
    tokens get their parent's."""
    inner, depths, levels = {node.parent for node in every}, list[int](), defaultdict[int, list[int]](list)
    for i, node in enumerate(every):
        depths.append(depths[node.parent] + 1 if node.parent >= 0 else 0)
        levels[depths[i]].append(i)
    for depth in range(len(levels)):
        alike: defaultdict[tuple[bool, int], list[int]] = defaultdict(list)  # key: has a state, and length (-1: leaf)
        lengths = dict[int, int]()
        for i in levels[depth]:
            above = behind[every[i].parent] if every[i].parent >= 0 else None
            if every[i].count:
                lengths[i] = every[i].count + (len(above.left) if above else 0)
                alike[bool(above and above.state), lengths[i] if i in inner else -1].append(i)
            else:
                behind[i] = above
        for (_, length), own in alike.items():
            longest, batch = 0, list[int]()
            for i in own if length >= 0 else sorted(own, key=lengths.__getitem__, reverse=True):
                if batch and lengths[i] < PADDED * longest:
                    yield batch
                    batch = []
                longest = longest if batch else lengths[i]
                batch.append(i)
            yield batch


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of one sequence in a step of the engine: `count` from row `first` on. `place`: index of its state; `begun`:
    whether it has one."""

    place: int
    first: int
    count: int
    begun: bool


@dataclass(slots=True)
class States:
    """The states of running sequences: tensors [sequences, ...] for each layer, made on the first write."""

    sequences: int
    layers: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def carry(self, layer: int, rows: Tensor, stretches: Sequence[Stretch], step: Step) -> Tensor:
        """Rows [1, T, H]: single next tokens of all sequences as one batch, other stretches one by one."""
        if sum(s.count for s in stretches) != rows.shape[1]:
            raise BirlError(f"Layer {layer} keeps a state, but it is not known whose: birl's engine cannot run it so.")
        out: Any = None  # [1, T, ...], as wide as the result of `step`
        single = [s for s in stretches if s.begun and s.count == 1]
        for s in stretches:
            if s.begun and s.count == 1:
                continue
            state = self.read(layer, [s.place]) if s.begun else State()
            part = step(rows[:, s.first : s.first + s.count], state)
            out = rows.new_empty(*rows.shape[:2], part.shape[-1]) if out is None else out
            out[:, s.first : s.first + s.count] = part
            self.write(layer, [s.place], state)
        if single:
            places = [s.place for s in single]
            firsts, state = uploaded([s.first for s in single], torch.int64, rows.device), self.read(layer, places)
            part = step(rows[0, firsts][:, None], state)[:, 0]
            out = rows.new_empty(*rows.shape[:2], part.shape[-1]) if out is None else out
            out[0, firsts] = part
            self.write(layer, places, state)
        return torch.empty_like(rows) if out is None else out

    def carry_next(self, layer: int, rows: Tensor, places: Tensor, step: Step) -> Tensor:
        """Rows [1, B, H]: the next token of each of B sequences, whose states are at `places` [B] int64.
        Data-independent, and states are updated in place (for CUDA graphs)."""
        kept = self.layers[layer]
        state = State(**{name: tensor.index_select(0, places) for name, tensor in kept.items()})
        out = step(rows[0, :, None], state)[:, 0]
        for name, new in state.tensors.items():
            kept[name].index_put_((places,), new.to(kept[name].dtype))
        return out[None]

    def read(self, layer: int, places: list[int]) -> State:
        kept = self.layers[layer]
        return State(**{name: t[uploaded(places, torch.int64, t.device)] for name, t in kept.items()})

    def write(self, layer: int, places: list[int], state: State) -> None:
        kept = self.layers.setdefault(layer, {})
        for name, new in state.tensors.items():
            if name not in kept:
                kept[name] = new.new_zeros(self.sequences, *new.shape[1:])
            kept[name][uploaded(places, torch.int64, new.device)] = new

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states by (from, to) pairs; none is both."""
        for tensor in (t for kept in self.layers.values() for t in kept.values() if pairs):
            sources, targets = uploaded(pairs, torch.int64, tensor.device).unbind(1)
            tensor[targets] = tensor[sources]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for kept in self.layers.values() for t in kept.values())
