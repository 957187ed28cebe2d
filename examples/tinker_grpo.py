"""GRPO over Tinker's client, against `birl tinker` on this machine: the whole loop.

TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python tinker_grpo.py [STEPS [MODEL [TOKENIZER]]]
"""

import random
import re
import sys

import tinker
from tinker import types

PROMPTS, GROUP, TOKENS = 4, 8, 12
BEFORE = "<|im_start|>user\nWhat is {} + {}?<|im_end|>\n<|im_start|>assistant\n"


def reward(text: str, answer: int) -> float:
    numbers = re.findall(r"\d+", text)
    return float(bool(numbers) and numbers[-1] == str(answer))


def main(steps: int, model: str, tokenizer_path: str) -> list[float]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(model, rank=16, seed=0).result()
    draw, means = random.Random(0), []
    for step in range(steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        asked = []
        for a, b in [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(PROMPTS)]:
            prompt = tokenizer.encode(BEFORE.format(a, b), add_special_tokens=False)
            params = types.SamplingParams(max_tokens=TOKENS, seed=draw.randrange(2**31))
            asked.append((prompt, a + b, sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params)))
        data, rewards = [], []
        for prompt, answer, future in asked:
            sequences = future.result().sequences
            own = [reward(tokenizer.decode(s.tokens), answer) for s in sequences]
            rewards += own
            mean = sum(own) / GROUP
            for sequence, value in zip(sequences, own, strict=True):
                if value == mean:
                    continue  # no advantage, no gradient
                zeros, advantage = [0.0] * (len(prompt) - 1), (value - mean) / (PROMPTS * GROUP * TOKENS)
                inputs = {
                    "target_tokens": [*prompt[1:], *sequence.tokens],
                    "logprobs": [*zeros, *(sequence.logprobs or ())],
                    "advantages": [*zeros, *[advantage] * len(sequence.tokens)],
                }
                ids = types.ModelInput.from_ints([*prompt, *sequence.tokens[:-1]])
                data.append(types.Datum(model_input=ids, loss_fn_inputs=inputs))
        if data:
            learned = training.forward_backward(data, "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=2e-4)).result()
            learned.result()
        means.append(sum(rewards) / len(rewards))
        print(f"step {step + 1}: reward {means[-1]:.3f}", flush=True)
    return means


if __name__ == "__main__":
    given = dict(enumerate(sys.argv[1:]))
    main(int(given.get(0, 20)), given.get(1, "smollm2"), given.get(2, "HuggingFaceTB/SmolLM2-135M-Instruct"))
