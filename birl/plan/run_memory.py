"""Prediction of a run's memory by purpose and phase, before it starts. `docs/runs.md` compares it with measured peaks.

In one process generation and training share one thread and alternate. The peak is the larger of the two, not their sum:

    always       the process, the weights (compute type and float32), AdamW's state, a reference model; the copy of a
                 checkpoint that is written in the background, possibly for longer than the next step
    generation   keys and values, one step's hidden states and logits; without the kernels, weights laid out
    training     activations and the gradient; with the kernels, the weights laid out stay for both. In an asynchronous
                 run answers are generated meanwhile, so their KV cache counts, too
    servers      if the run starts some: a process, weights and generation each; the peak is theirs and training's

On a GPU (`card`) all of the cache is there from the first step on, beside the training, and no weight is laid out in a
copy but those that are quantised, and these only while something is sampled; a checkpoint that is written, earlier
versions and what `optimizer.offload=cpu` moves are in the machine's memory. Each server has a GPU of its own, so the
peak is the largest phase; the figures are of one GPU.

Where several processes train, the figures are one's, and each has as much (`parallel`): weights, gradients and the
optimizer's state are split over fsdp x cp x tp, micro-batches and answers over ddp x fsdp. On GPUs the training is then
the worst moment of `rank_memory.py`.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from birl.config import schema
from birl.config.decided import CRITIC, SELF, teachers_of
from birl.engine.graphs import AHEAD
from birl.engine.open import SHARE
from birl.engine.pages import pages_for
from birl.engine.scheduler import PREFILL
from birl.errors import BirlError
from birl.hub import addressed
from birl.kernels.tensors import PAGE
from birl.learner.comparison import KEPT
from birl.models.quantized import stored
from birl.models.shape import CHUNK, RESTRICTED, Shape, backward_bytes, shape_of
from birl.models.tree_attention import SCORES
from birl.plan.cluster import Layout, Workload
from birl.plan.rank_memory import Passes, moments
from birl.plan.sizes import Load, Module, Trained
from birl.train.objective import keeps_reference, surrogate_of

GIB = 2**30
CONTEXT = GIB  # CUDA's context, libraries and workspaces of a process on a card; assumed
PROCESS = int(0.52 * GIB)  # interpreter, torch and transformers with their libraries; measured
LOST = 0.08  # share of everything: fragmentation in the C library's heap; measured
SPLIT_LOST = 0.25  # the same if FSDP gathers and frees; 0.21 to 0.32 with four models on two and four ranks

STATE = {
    "adamw": "optimizer state, float32",
    "adamw8bit": "optimizer state, 8 bits",
    "muon": "optimizer state, float32",
}

Phases = dict[str, dict[str, int]]  # phase -> purpose -> bytes


def codes_of(module: Module, keys: schema.Engine) -> int:
    """Bytes of an int8 copy as it is laid out, with its head."""
    if keys.weights == "same":
        return 0
    codes = module.quantizable * 33 // 32 if module.on_kernels else module.wide * module.quantizable
    return codes + module.wide * (module.linear - module.quantizable)


def predict(model: nn.Module, config: schema.RL, load: Load, card: int = 0) -> Phases:
    """Bytes of one process by phase and purpose; of several processes, of the first. `model` may be on the meta device.
    `card`: memory of the GPU [bytes]; 0: a CPU."""
    module, gpu = Module.of(model, config.model.dtype, card > 0), card > 0
    split = config.parallel.fsdp * config.parallel.cp * config.parallel.tp
    sampled, trained, lora = module, Trained.of(model, config.lora, config.optimizer.kind), config.lora.rank > 0
    kind = config.lora.quantize if lora else "none"
    coded = module.quantizable if kind != "none" else 0
    if split > 1:  # on a CPU the learner's layers are transformers'
        module = replace(module, on_kernels=False)
    trained = of_one(trained, split, config, coded > 0 and not module.on_kernels, gpu)
    parameters = module.parameters // split - coded
    separate = module.wide == 2 and split == 1  # from the float32 masters
    # with LoRA: the base weights beside the merged ones, in the compute type, on a GPU in CPU memory; and A and B
    base = 0 if coded or (gpu and split == 1 and not config.lora.dora) else module.wide * trained.weights
    beside = base + 4 * trained.stepped if lora else 0
    laid_out = module.wide * (coded if gpu else module.linear)
    always = {
        "process": CONTEXT if gpu else PROCESS,
        "weights, float32": beside + (0 if lora and separate else 4 * parameters),
        "weights, bfloat16": module.wide * parameters if separate else 0,
        **({f"weights, {kind}": stored(coded, kind)} if coded else {}),
        STATE[config.optimizer.kind]: trained.state,
    }
    if gpu and config.optimizer.offload == "cpu":
        always |= {"weights, float32": 0, STATE[config.optimizer.kind]: 0}
    if not gpu and (earlier := min(config.rollout.max_staleness, KEPT)):
        always["weights of earlier versions"] = earlier * (module.wide if split == 1 else 4) * trained.weights
    if config.engine.kind == "embedded" and (split > 1 or config.engine.weights == "int8"):
        always["the engine's own weights"] = sampled.wide * sampled.parameters + codes_of(sampled, config.engine)
    frozen = module.wide * parameters + (laid_out if module.on_kernels else 0) + (stored(coded, kind) if coded else 0)
    if keeps_reference(config.algorithm, surrogate_of(config.algorithm)):
        always["reference model"] = frozen
    as_large = module.wide * (parameters + coded) + (laid_out if module.on_kernels else 0)
    always |= beside_policy(module, config, as_large, 4 * trained.stepped * separate)
    critic = config.algorithm.advantage in CRITIC and not config.critic.shared
    if config.checkpoint.asynchronous and not gpu:
        always["checkpoint being written"] = (4 * trained.stepped + trained.state) * (1 + critic)
    if critic:
        own = beside if lora else 4 * (parameters + trained.gradient)
        always["critic and its optimizer"] = frozen + trained.state + own
        if config.critic.path and coded:  # a separate critic is not quantised
            always["critic and its optimizer"] += module.wide * (coded + trained.weights)
    room = card - sum(always.values()) - (laid_out if coded else 0) if gpu else 0
    generating, stays = generation(sampled, config.engine, load, room), gpu or config.rollout.max_staleness > 0
    computing = training(module, trained, load, config, gpu, coded > 0) | supports(module, load, config)
    if split > config.parallel.tp and not gpu:
        computing["gathered weights and gradients"] = gathered(module) // config.parallel.tp
    phases = {"training": always | {"weights laid out": laid_out if module.on_kernels else 0} | computing}
    if config.engine.kind == "embedded":
        phases = {"generation": always | {"weights laid out": laid_out} | generating} | phases
        if stays:
            kept = 0 if gpu and coded and not config.rollout.max_staleness else laid_out
            phases["training"] |= {"weights laid out": kept, "keys and values": generating["keys and values"]}
    elif not config.engine.attach:
        phases["servers"] = servers(module, config, {"process": always["process"]} | generating, gpu)
    for phase, purposes in phases.items():
        lost = SPLIT_LOST if split > 1 and phase != "servers" and not gpu else LOST
        purposes["between blocks"] = int(lost * sum(purposes.values()) - (lost - LOST) * always["process"])
    return phases


def beside_policy(module: Module, config: schema.RL, as_large: int, masters: int) -> dict[str, int]:
    """Bytes of a teacher's weights: one `as_large` as the policy has that many; a moving average also has `masters`."""
    averaged = config.algorithm.teacher == SELF and 0 < config.algorithm.teacher_rate < 1
    size = {name: int(as_large * s.parameters / module.shape.parameters) for name, s in teacher(module, config)}
    return {name: own + averaged * masters for name, own in size.items()}


def teacher(module: Module, config: schema.RL) -> list[tuple[str, Shape]]:
    """Purpose and shape of the teacher, the policy's shape if it is not on this machine; empty without one."""
    rate, result = config.algorithm.teacher_rate, list[tuple[str, Shape]]()
    for name, path in teachers_of(config).items():
        which = f"teacher {name}".strip()
        if addressed(path) or (path == SELF and rate == 1):
            continue
        if path == SELF:
            return [("teacher, the first weights" if rate == 0 else "teacher, an average", module.shape)]
        try:
            result.append((which, shape_of(path)))
        except BirlError:
            result.append((f"{which}, if as large", module.shape))
    return result


def servers(module: Module, config: schema.RL, rest: dict[str, int], gpu: bool) -> dict[str, int]:
    """Bytes of servers on one GPU, or of all on a CPU. `rest`: what each has besides weights."""
    laid_out = 0 if gpu else module.wide * module.linear
    weights = {f"weights, {config.model.dtype}": module.wide * module.parameters, "weights laid out": laid_out}
    each = config.engine.tensor_parallel * config.engine.pipeline_parallel
    purposes = {"process": rest["process"]} | weights | rest
    return {name: size // each if gpu else config.engine.count * size for name, size in purposes.items()}


def of_one(trained: Trained, split: int, config: schema.RL, by_product: bool, gpu: bool) -> Trained:
    """Trained parameters of one process, if weights are split over `split`. `by_product`: products with a quantised
    weight give the gradients of A and B."""
    if by_product and not config.lora.dora:
        trained = replace(trained, gradient=trained.stepped)
    if split > 1:
        weights, stepped = trained.weights // split, trained.stepped // split
        trained = replace(trained, weights=weights, gradient=weights, stepped=stepped, state=trained.state // split)
    return replace(trained, gradient=0) if gpu and config.optimizer.offload == "cpu" else trained


def gathered(module: Module) -> int:
    """On a CPU, bytes of other processes' weights that FSDP gathers: two layers, the embedding and an untied head; and
    of their gradients the largest, in compute type and float32."""
    ends = module.shape.embedding * (1 if module.shape.tied else 2)
    layer = (module.parameters - ends) // module.shape.layers
    return module.wide * (2 * layer + ends) + (module.wide + 4) * max(layer, ends)


def generation(module: Module, engine: schema.Engine, load: Load, room: int = 0) -> dict[str, int]:
    """`room`: GPU memory left beside the weights [bytes], of which the cache is allocated at once; 0: a CPU."""
    own = pages_for(load.longest) - load.prompt // PAGE  # pages of an answer that are not shared
    prompts = -(-load.sequences // load.group)
    cache = module.page * (load.sequences * own + prompts * (load.prompt // PAGE))
    # all of it is zeroed, or waiting answers take new pages first; otherwise it is allocated page by page
    if room or not module.paged_kernels or load.waits:
        cache = module.page * engine.max_batch * pages_for(load.longest)
    cache += module.state * engine.max_batch
    if room and not engine.kv_cache_gb:
        cache = min(cache, max(int(SHARE * room), 0))
    if engine.kv_cache_gb:
        given = int(engine.kv_cache_gb * GIB)
        cache = given if room else min(given, cache)
    rows = load.sequences + min(PREFILL, prompts * load.prompt)
    row = 4 * module.shape.hidden + module.wide * (4 * module.shape.hidden + 3 * module.shape.inner)
    if not module.paged_kernels:  # PyTorch's attention gets copies of keys and values, for each row
        row += 4 * module.wide * pages_for(load.longest) * PAGE * module.kv_heads * module.head_dim
    support = min(load.support, module.shape.vocabulary)
    logit = 8 + (25 if support and not room else 0)  # on a CPU tokens are ranked by a sort, measured
    # each token's id; of a GPU's graphs for each of `AHEAD` tokens, of all sizes up to the largest twice as many
    told = 4 * support * load.sequences * (2 * (AHEAD + 1) if room else 1)
    return {
        "keys and values": cache,
        "hidden states and logits": rows * row + logit * load.sequences * module.shape.vocabulary + told,
    }


def at_head(module: Module, trained: Trained, load: Load, config: schema.RL, gpu: bool) -> tuple[int, int]:
    """Bytes that `token_logprobs` holds, and bytes of the head's gradient."""
    parallel, shape = config.parallel, module.shape
    placed = parallel.fsdp * parallel.cp * parallel.tp == 1 and config.optimizer.offload == "none"  # in its master
    head = (4 if placed else module.wide) * shape.embedding // parallel.tp * trained.head
    kept = load.microbatch * min(load.support, shape.vocabulary)
    if not gpu:  # more than `backward_bytes`: `LOST` was measured with it
        return max(CHUNK * (10 if module.on_kernels else 18), 5 * CHUNK + RESTRICTED * kept), head
    vocab, ways = -(-shape.vocabulary // parallel.tp), parallel.tp  # ranks of tp have all tokens
    given = load.microbatch * ways, shape.hidden, vocab, module.wide
    most = backward_bytes(*given, gpu=True, kept=kept * ways, master=placed)
    return most, head


def training(
    module: Module, trained: Trained, load: Load, config: schema.RL, gpu: bool, quantized: bool
) -> dict[str, int]:
    """The backward pass of a first micro-batch begins with all activations and the head's gradient, and ends with the
    whole gradient and no activations: the larger of the two counts. Later micro-batches begin with both."""
    logits, head = at_head(module, trained, load, config, gpu)
    parallel, taught = config.parallel, 0
    if config.algorithm.teacher_divergence != "sampled":  # hidden states, and a copy of a gathered head
        heads, shapes = parallel.fsdp * parallel.cp > 1, [s for _, s in teacher(module, config)] or [module.shape]
        taught = sum(module.wide * (load.microbatch * s.hidden + s.embedding * heads) for s in shapes)
    if gpu and parallel.fsdp * parallel.cp * parallel.tp > 1:
        return among_ranks(module, trained, load, config, logits, taught)
    checkpointing = config.learner.gradient_checkpointing
    gradient, tokens = 4 * trained.gradient, load.microbatch
    activations = tokens * (module.shape.layers * (module.input if checkpointing else module.kept))
    activations += taught + tokens * module.shape.hidden * (4 + 2 * module.wide)  # before and after the last norm
    layer = tokens * (module.backward + (module.kept if checkpointing else 0))
    if not module.on_kernels:
        layer += 4 * 4 * min(SCORES, module.shape.heads * tokens**2)
    if quantized:  # a matrix in float32 before and after its merge, or the two sides of its gradient in float32
        layer += max(8 * module.matrix, 4 * tokens * (module.shape.hidden + module.shape.inner))
    if load.several:
        return {"gradient, float32": gradient, "activations": activations + max(logits, layer)}
    return {"activations, then gradient": max(activations + head + max(logits, layer), gradient + layer)}


def supports(module: Module, load: Load, config: schema.RL) -> dict[str, int]:
    size = 8 * (min(load.support, module.shape.vocabulary) + 1) * load.microbatch * config.parallel.tp
    return {"supports of tokens": size} if load.support else {}


def among_ranks(
    module: Module, trained: Trained, load: Load, config: schema.RL, logits: int, taught: int
) -> dict[str, int]:
    """The same on GPUs over which weights are split: the maximum of `rank_memory.moments`. A first micro-batch has the
    whole gradient only at the last of them."""
    parallel, checkpointing = config.parallel, config.learner.gradient_checkpointing
    layout = Layout(**{axis: getattr(parallel, axis) for axis in ("ddp", "fsdp", "cp", "tp", "ep")})
    row = load.microbatch * parallel.splits
    keep = "inputs" if checkpointing else "all"
    work = Workload(batch=row * layout.shares, microbatch=row, sequence=load.longest, keep=keep)
    passes = Passes.of(module.shape, layout, work)
    if not module.on_fused or module.wide > 2:
        again = load.microbatch * module.kept
        one = load.microbatch * module.input if checkpointing else again
        more = {"one": one, "again": again if checkpointing else 0, "layer": load.microbatch * module.backward}
        passes = replace(passes, activations=one * module.shape.layers, **more)
    passes = replace(passes, activations=passes.activations + taught, logits=logits)
    each = moments(module.shape, layout, passes, module.wide, trained.head)
    for moment in each if load.several else each[-1:]:
        moment["gradient, float32"] = 4 * trained.gradient
    return {name: int(size) for name, size in max(each, key=lambda moment: sum(moment.values())).items()}


def peak(phases: Phases, card: int = 0) -> int:
    """Peak memory [bytes]: servers beside the learner, generation and training in turns; on one GPU (`card`)."""
    sizes = {phase: sum(purposes.values()) for phase, purposes in phases.items()}
    if card:
        return max(sizes.values())
    return max(sizes["training"], sizes.get("generation", 0)) + sizes.get("servers", 0)


def largest(model: nn.Module, config: schema.RL, load: Load, memory: int, card: int = 0) -> dict[str, int]:
    """The largest values of two keys, each changed alone, with which the peak stays within `memory` [bytes]; 0 if none
    does. Micro-batches and batches are full, and the cache holds the whole batch: no preemption."""

    page = Module.of(model, config.model.dtype, card > 0).page

    def microbatch_fits(tokens: int) -> bool:
        return peak(predict(model, config, replace(load, microbatch=tokens, several=True), card), card) <= memory

    def batch_fits(sequences: int) -> bool:
        whole = replace(config, engine=replace(config.engine, max_batch=sequences, kv_cache_gb=0.0))
        phases = predict(model, whole, replace(load, sequences=sequences, waits=False), card)
        sizes = phases.get("generation") or phases.get("servers") or phases["training"]
        cache = sizes.get("keys and values", 0)
        loaded = sum(sizes.values()) - cache - sizes.get("hidden states and logits", 0)
        if card and cache < page * sequences * pages_for(load.longest):  # the cache is smaller than the batch needs
            return False
        return peak(phases, card) <= memory and cache <= SHARE * (memory - loaded)

    return {"learner.tokens_per_microbatch": _last(microbatch_fits), "engine.max_batch": _last(batch_fits)}


def _last(holds: Callable[[int], bool], limit: int = 2**24) -> int:
    """The largest n up to `limit` for which `holds` is true; it is true up to some n only."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
