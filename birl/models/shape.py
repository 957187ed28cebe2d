"""Sizes of an architecture that determine cost: parameters, and multiplications for a token."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from birl.errors import BirlError, did_you_mean
from birl.hub import run_of
from birl.regular import read_json

# logits in memory at once: 24 MiB in float32, and at most as much again for values computed from them
CHUNK = 6 * 2**20
# on a GPU: 512 MiB in float32, half as much for their gradient in bfloat16; fewer would launch tiny kernels
GPU_CHUNK = 2**27
# bytes of a kept token while its index among logits is computed (`SupportRows.outside`)
RESTRICTED = 33
# elements of a weight that are widened to float32 at once if no product returns float32 itself
WIDENED = 2**22

# model types whose MLPs have two matrices
UNGATED = {
    *("apertus", "arcee", "falcon", "gpt_neox", "gpt_neox_japanese", "jais2", "nanochat", "nemotron", "opt"),
    *("persimmon", "phi", "starcoder2"),
}
# model types without attention; their layers are counted as MLPs with three matrices, which is nearly right
MAMBA = {"falcon_mamba", "mamba", "mamba2"}
OWN_KEYS = {"gpt_neox", "gpt_neox_japanese", "opt", "persimmon"}  # transformers ignores num_key_value_heads there


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only transformer. Norms and biases are left out: they are below a thousandth of the parameters.

    Example: Shape.of({"hidden_size": 4096, "num_hidden_layers": 32, ...}) from a model's config.json
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # of a dense MLP
    vocabulary: int
    tied: bool = False  # the head is the embedding
    gated: bool = True  # three matrices in an MLP, not two
    experts: int = 0  # of a layer; 0: dense
    chosen: int = 0  # experts of a token
    expert_inner: int = 0
    shared_inner: int = 0  # of the MLP for all tokens of a mixture-of-experts layer
    head_norms: bool = False  # of queries and keys
    dense_layers: int = 0  # of a mixture of experts: the first layers
    query_rank: int = 0  # multi-head latent attention (DeepSeek-V3)
    latent: int = 0  # width of its compressed keys and values
    rope_dim: int = 0  # of a head, in queries and keys only; head_dim is the rest

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape":
        """`config`: content of a Hugging Face model's config.json. Raises `BirlError` naming the key that is
        missing."""
        config = config.get("text_config") or config
        try:
            hidden, kind = config["hidden_size"], config.get("model_type")
            heads = 0 if kind in (*MAMBA, "xlstm") else config["num_attention_heads"]
            kv_heads = config.get("num_key_value_heads") or heads
            if kind == "falcon":
                alone = config.get("multi_query") and not config.get("new_decoder_architecture")
                kv_heads = 1 if alone else config.get("num_kv_heads") or heads
            inner = config.get("expand", 2) * hidden if kind in MAMBA else config.get("intermediate_size") or 4 * hidden
            if isinstance(inner, list | tuple):  # by layer
                inner = sum(inner) // len(inner)
            experts = 0
            for name in ("num_experts", "num_local_experts", "n_routed_experts"):
                experts = experts or config.get(name) or 0
            expert_inner = config.get("moe_intermediate_size") or inner
            shared = config.get("n_shared_experts") or 0
            return cls(
                layers=config["num_hidden_layers"],
                hidden=hidden,
                heads=heads,
                kv_heads=heads if kind in OWN_KEYS else kv_heads,
                head_dim=config.get("qk_nope_head_dim") or config.get("head_dim") or hidden // (heads or 1),
                inner=inner,
                vocabulary=config["vocab_size"],
                tied=bool(config.get("tie_word_embeddings")),
                gated=kind not in UNGATED,
                experts=experts,
                chosen=(config.get("num_experts_per_tok") or 0) if experts else 0,
                expert_inner=expert_inner if experts else 0,
                shared_inner=(config.get("shared_expert_intermediate_size") or shared * expert_inner) if experts else 0,
                head_norms=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
                dense_layers=(config.get("first_k_dense_replace") or 0) if experts else 0,
                query_rank=config.get("q_lora_rank") or 0,
                latent=config.get("kv_lora_rank") or 0,
                rope_dim=(config.get("qk_rope_head_dim") or 0) if config.get("kv_lora_rank") else 0,
            )
        except KeyError as error:
            raise BirlError(f"config.json: {error.args[0]} is missing; the planner needs it.") from error

    @classmethod
    def of_model(cls, model: Any) -> "Shape":
        """The shape of a transformers module, whose configuration may have other names for these keys."""
        config = model.config.get_text_config()
        return cls.of(config.to_dict() | {name: getattr(config, name) for name in config.attribute_map})

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention."""
        width = self.heads * self.head_dim
        if not self.latent:
            return 2 * self.hidden * (width + self.kv_heads * self.head_dim)
        query = self.heads * (self.head_dim + self.rope_dim)
        queries = self.query_rank * (self.hidden + query) if self.query_rank else self.hidden * query
        keys = self.hidden * (self.latent + self.rope_dim) + self.latent * 2 * width
        return queries + keys + width * self.hidden

    @property
    def matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated else 2

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts in all layers, which expert parallelism splits."""
        return self.sparse_layers * self.experts * self.matrices * self.hidden * self.expert_inner

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        dense = (self.layers - self.sparse_layers) * self.matrices * self.hidden * self.inner
        return self._shared + dense + self.expert_parameters + self.embedding * (1 if self.tied else 2)

    @property
    def active(self) -> int:
        """Parameters of the layers that a token is multiplied with, without the head."""
        dense = (self.layers - self.sparse_layers) * self.matrices * self.hidden * self.inner
        return self._shared + dense + self.sparse_layers * self.chosen * self.matrices * self.hidden * self.expert_inner

    @property
    def _shared(self) -> int:
        """Parameters of attention, routers and shared experts."""
        sparse = self.matrices * self.hidden * self.shared_inner + self.hidden * self.experts
        return self.layers * self.attention + self.sparse_layers * sparse

    @property
    def widths(self) -> tuple[int, int]:
        """Widths of a layer's queries (and keys, once they are repeated for all heads), and of its values."""
        return self.heads * (self.head_dim + self.rope_dim), self.heads * self.head_dim

    @property
    def pair_flops(self) -> int:
        """Forward FLOPs for a token and one that it attends to, in all layers: the score and the weighted sum."""
        return 2 * self.layers * sum(self.widths)

    @property
    def pair_cost(self) -> float:
        """Cost of a pair of tokens, relative to a token's products with the layers' weights."""
        return self.pair_flops / (2 * self.active)

    def flops(self, sequence: float, factor: float = 3.0) -> float:
        """FLOPs of a token in a sequence of `sequence` tokens; `factor` 3: forward, and twice as much backward. Half of
        all pairs: attention is causal (Korthikanti et al. 2022, appendix A, with half of its attention term)."""
        return factor * (2 * (self.active + self.embedding) + self.pair_flops * (sequence + 1) / 2)


def _llama(layers: int, hidden: int, heads: int, inner: int, vocabulary: int, **more: Any) -> Shape:
    known: dict[str, Any] = {"kv_heads": 8, "head_dim": 128} | more
    return Shape(layers=layers, hidden=hidden, heads=heads, inner=inner, vocabulary=vocabulary, **known)


#: from each model's config.json on its hub page
KNOWN: dict[str, Shape] = {
    "qwen2.5-7b": _llama(28, 3584, 28, 18944, 152064, kv_heads=4),
    "qwen2.5-32b": _llama(64, 5120, 40, 27648, 152064),
    "qwen2.5-72b": _llama(80, 8192, 64, 29568, 152064),
    "llama3-8b": _llama(32, 4096, 32, 14336, 128256),
    "llama3-70b": _llama(80, 8192, 64, 28672, 128256),
    "llama3-405b": _llama(126, 16384, 128, 53248, 128256),
    "qwen3-30b-a3b": _llama(48, 2048, 32, 6144, 151936, kv_heads=4, experts=128, chosen=8, expert_inner=768),
    "qwen3-235b-a22b": _llama(94, 4096, 64, 12288, 151936, kv_heads=4, experts=128, chosen=8, expert_inner=1536),
    "deepseek-v3": _llama(
        *(61, 7168, 128, 18432, 129280),
        **{"kv_heads": 128, "experts": 256, "chosen": 8, "expert_inner": 2048, "shared_inner": 2048},
        **{"dense_layers": 3, "query_rank": 1536, "latent": 512, "rope_dim": 64},
    ),
}


def shape_of(model: str) -> Shape:
    """The shape of a name in `KNOWN`, a folder with config.json, a run, or the file itself. Raises `BirlError`."""
    if model.lower() in KNOWN:
        return KNOWN[model.lower()]
    path = Path(model).expanduser()
    path = run / "model" if (run := run_of(path)) else path
    path = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(path)
        if not isinstance(config, dict):
            raise ValueError("no object")
    except (OSError, ValueError) as error:
        near = did_you_mean(model, KNOWN)
        raise BirlError(f"model={model}: neither a config.json nor one of {', '.join(KNOWN)}.{near}") from error
    return Shape.of(config)


def backward_bytes(
    tokens: int, hidden: int, vocab: int, wide: int, *, gpu: bool = False, kernels: bool = False, kept: int = 0,
    master: bool = True,
) -> int:  # fmt: skip
    """Peak memory of the backward pass of `token_logprobs` [bytes], beside its inputs and the weight's gradient; the
    forward pass needs less. `vocab`: tokens on this rank. `wide`: bytes of the weight's dtype; if it is 2, the weight's
    gradient goes into a float32 `master`, or is of that dtype. `gpu`: Triton's kernels on a GPU; `kernels`: birl's CPU
    kernels. `kept`: size of all supports together, whose indices are computed beside the logits."""
    size = (GPU_CHUNK if gpu else CHUNK) // max(tokens, 1)
    piece = min(max(size // 32 * 32 or 32 if kernels else size, 1), vocab)  # tokens of the vocabulary at once
    count, rows = tokens * piece, 4 * tokens * hidden  # logits at once, and the gradient by `hidden` in float32
    restricted = rows + 5 * count + RESTRICTED * kept if kept else 0  # logits and their mask
    if kernels:
        made = (4 + wide) * count + rows + 3 * wide * tokens * hidden  # hidden states, laid out twice
    elif gpu and wide == 4:
        made = 4 * count + 2 * rows
    else:
        widened = 0 if gpu or wide == 4 else 4 * count + 4 * min(WIDENED, piece * hidden)
        products = wide * count + widened + max(rows, 4 * piece * hidden if wide == 2 and master else 0)
        made = rows + max((6 if gpu else 8) * count, products)
    return max(made, restricted)
