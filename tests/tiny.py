"""A model folder that behaves like SmolLM2 and takes milliseconds: random Llama, real fast tokenizer, ChatML
template."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # 0, 1, 2, as in SmolLM2
END = "<|im_end|>"
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}

# SmolLM2's own template, default system message included.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = (
    "What is 3 + 4? The answer is 7. What is 12 * 5? The answer is 60.",
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. system user assistant",
    "The sum of two numbers is what you get when you add them. Anna has three apples and buys five more.",
)


def tiny_tokenizer(vocab: int = 320, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE: the three special tokens, all 256 bytes, and a few merges. Digits are split one by one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token=END,
        pad_token=END,  # pad == eos, as in SmolLM2: a mask taken from the pad id would lose the end token
    )
    if template is not None:
        fast.chat_template = template
    return fast


def tiny_model(
    *, vocab: int = 320, layers: int = 2, hidden: int = 64, heads: int = 2, kv_heads: int = 1, seed: int = 0
) -> LlamaForCausalLM:
    """Random float32 Llama with tied embeddings, heads of 32 (birl's kernels) or, with heads=4 and kv_heads=2, of 16
    (PyTorch's operators). The wide initialisation keeps its distributions far from uniform."""
    shape = {
        **{"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 512},
        **{"tie_word_embeddings": True, "initializer_range": 0.2, **ENDS},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**shape))
    model.generation_config = GenerationConfig(**ENDS)
    return model


def tiny_moe(kind: str = "qwen3_moe", *, vocab: int = 320, experts: int = 4, seed: int = 0) -> PreTrainedModel:
    """Random float32 Qwen3-MoE (2 of `experts` for each token, in both layers) or Mixtral with untied embeddings."""
    shape = {
        **{"vocab_size": vocab, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.2},
        **{"num_experts_per_tok": 2, **ENDS},
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "mixtral":
            model = MixtralForCausalLM(MixtralConfig(**shape, intermediate_size=48, num_local_experts=experts))
        else:
            config = Qwen3MoeConfig(**shape, moe_intermediate_size=48, num_experts=experts, norm_topk_prob=True)
            model = Qwen3MoeForCausalLM(config)
    model.generation_config = GenerationConfig(**ENDS)
    return model


def tiny_moe_folder(path: Path | str, kind: str = "qwen3_moe") -> Path:
    """Save `tiny_moe` and `tiny_tokenizer` as a Hugging Face folder and return it."""
    tokenizer = tiny_tokenizer()
    tiny_moe(kind, vocab=len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return Path(path)


def tiny_model_folder(
    path: Path | str,
    *,
    vocab: int = 320,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int = 1,
    seed: int = 0,
    template: str | None = CHATML,
) -> Path:
    """Save `tiny_model` and `tiny_tokenizer` as a Hugging Face folder and return it. `template` None: none at all."""
    path = Path(path)
    tokenizer = tiny_tokenizer(vocab, template)
    model = tiny_model(vocab=len(tokenizer), layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, seed=seed)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
