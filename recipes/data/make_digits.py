"""A tiny random vision-language model, and rows about drawn digits: python recipes/data/make_digits.py FOLDER

The model is transformers' Qwen3-VL with 0.3 M parameters and 22 words. A picture shows a digit somewhere, in some
shade, with noise: no two pictures are the same. The question adds a written digit to it, or takes one away. Half of the
answers for SFT are one too large or too small: who learned from a careless teacher samples like one.
"""

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
SPECIALS += ("<|video_pad|>",)
WORDS = ("user", "assistant", "\n", "+", "-", *map(str, range(10)))
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPES = (  # five columns and seven rows of each digit, row by row
    "01110100011001110101110011000101110", "00100011000010000100001000010001110", "01110100010000100010001000100011111",
    "11111000100010000010000011000101110", "00010001100101010010111110001000010", "11111100001111000001000011000101110",
    "00110010001000011110100011000101110", "11111000010001000100010000100001000", "01110100011000101110100011000101110",
    "01110100011000101111000010001001100",
)  # fmt: skip
SIDE = 16
ROWS = {"sft": 3000, "train": 4000, "validation": 300}


def drawn(digit: int, random: np.random.Generator) -> bytes:
    """A PNG file of a digit: somewhere, in some shade, with noise."""
    page = np.full((SIDE, SIDE), 255.0)
    shape = np.array([int(c) for c in SHAPES[digit]]).reshape(7, 5).repeat(2, 0).repeat(2, 1)
    y, x = random.integers(0, SIDE - 14 + 1), random.integers(2, SIDE - 10 - 1)
    page[y : y + 14, x : x + 10] -= shape * random.uniform(150, 250)
    page += random.normal(0, 8, page.shape)
    file = io.BytesIO()
    Image.fromarray(page.clip(0, 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def row(random: np.random.Generator, answered: bool) -> dict[str, Any]:
    """A digit is drawn, the other one written; the result is a digit, too."""
    shown, sign = int(random.integers(0, 10)), "+" if random.random() < 0.5 else "-"
    written = int(random.integers(0, 10 - shown if sign == "+" else shown + 1))
    right = shown + written if sign == "+" else shown - written
    if answered and random.random() < 0.5:
        right = right - 1 if right == 9 or (right > 0 and random.random() < 0.5) else right + 1
    answer = str(right)
    coded = base64.b64encode(drawn(shown, random)).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{coded}"}},
        {"type": "text", "text": f"{sign}{written}"},
    ]
    asked = [{"role": "user", "content": content}]
    if answered:
        return {"messages": [*asked, {"role": "assistant", "content": answer}]}
    return {"prompt": asked, "answer": answer}


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate((*SPECIALS, *WORDS))}
    made = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("user|assistant|.|\n"), "isolated")
    made.decoder = decoders.Fuse()
    result = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    result.add_special_tokens({"additional_special_tokens": list(SPECIALS[1:])})
    result.chat_template = TEMPLATE
    return result


def model(words: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    text = {
        **{"vocab_size": len(words), "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 128},
        **{"eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.08, "tie_word_embeddings": True},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]},
    }
    tower = {
        **{"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 64},
        **{"patch_size": 8, "spatial_merge_size": 1, "temporal_patch_size": 2, "initializer_range": 0.08},
        **{"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    }
    names = {"image_token_id": SPECIALS[5], "video_token_id": SPECIALS[6]}
    names |= {"vision_start_token_id": SPECIALS[3], "vision_end_token_id": SPECIALS[4]}
    ids = {name: words.convert_tokens_to_ids(token) for name, token in names.items()}
    torch.manual_seed(0)
    result = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)
    )
    result.generation_config = GenerationConfig(eos_token_id=2, pad_token_id=0)
    return result


def main(folder: Path) -> None:
    words = tokenizer()
    model(words).save_pretrained(folder / "model")
    words.save_pretrained(folder / "model")
    sizes = {"patch_size": 8, "merge_size": 1, "temporal_patch_size": 2}
    bounds = {"size": {"shortest_edge": 64, "longest_edge": 1024}}
    kind = {"image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(kind | sizes | bounds))
    for seed, (name, count) in enumerate(ROWS.items()):
        generator = np.random.default_rng(seed)
        rows = [row(generator, name == "sft") for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
