"""GRPO in one file, without birl: naive, slow and correct. Read it beside docs/how_it_works.md.

    python examples/00_grpo_in_one_file.py --model DIR --steps 2

DIR is a chat model in Hugging Face format. Each step asks `--prompts` questions `--group` times each, gives each answer
a reward, and makes an optimizer step (GRPO, arXiv:2402.03300, without its KL term).
"""

import argparse
import json
import random
import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DATA = Path(__file__).parents[1] / "recipes" / "data" / "arithmetic" / "train.jsonl"


def reward(text: str, answer: str) -> float:
    """1 when the last number of the text is the answer."""
    return float(re.findall(r"-?\d+", text)[-1:] == [answer])


def end_ids(model, tokenizer) -> set[int]:
    """Trap: a model may have several end tokens, and the chat model's is often not the tokenizer's `eos`."""
    ids = model.generation_config.eos_token_id
    return {*(ids if isinstance(ids, list) else [ids]), tokenizer.eos_token_id} - {None}


@torch.no_grad()
def sample(model, prompt: list[int], n: int, max_tokens: int, temperature: float, end: set[int]):
    """n answers to one prompt, and the log-prob of each token when it was sampled: [(tokens, logprobs)]."""
    answers: list[tuple[list[int], list[float]]] = [([], []) for _ in range(n)]
    ids, cache = torch.tensor([prompt] * n), None
    for _ in range(max_tokens):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        # Trap: top_k, top_p or a repetition penalty (`generate` takes them from generation_config.json) would sample
        # from another distribution than the one trained below.
        logp = (output.logits[:, -1].float() / temperature).log_softmax(-1)
        ids = torch.multinomial(logp.exp(), 1)
        for (tokens, logprobs), token, row in zip(answers, ids[:, 0].tolist(), logp, strict=True):
            # Trap: the end token is part of the answer, or the model never learns to stop. A truncated answer has
            # none, and gets none. Nothing here compares with the pad id: often pad == eos.
            if not tokens or tokens[-1] not in end:
                tokens.append(token)
                logprobs.append(row[token].item())
        if all(tokens[-1] in end for tokens, _ in answers):
            break
    return answers


def logprobs_of(model, prompt: list[int], answer: list[int], temperature: float) -> torch.Tensor:
    """log p of each token of the answer. Trap: place i predicts token i + 1. Trap: the same temperature as sampling."""
    logits = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logp = (logits.float() / temperature).log_softmax(-1)
    return logp.gather(1, torch.tensor(answer)[:, None])[:, 0]


def advantages(rewards: list[float]) -> list[float]:
    """(r - mean) / std within the group. Trap: all equal means no signal, so 0 and not 0/0; and `std` of a tensor is
    the sample's (n - 1) by default, NaN for a group of one. Dr. GRPO (arXiv:2503.20783) leaves the division out."""
    r = torch.tensor(rewards)
    return ((r - r.mean()) / (r.std(correction=0) + 1e-6)).tolist()


def loss_of(logp: torch.Tensor, old: torch.Tensor, advantage: float, clip: float = 0.2) -> torch.Tensor:
    """PPO's clipped surrogate of each token. Trap: the old log-probs are numbers from the time of sampling. At the
    first update the ratio is 1 and the clip idle, but the gradient A * grad log p still flows through the ratio."""
    ratio = (logp - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def step(model, tokenizer, optimizer, rows: list[dict[str, str]], args: argparse.Namespace) -> float:
    """Rollout, rewards, advantages, `--updates` optimizer steps. Returns the mean reward."""
    end, batch, all_rewards = end_ids(model, tokenizer), [], []
    for row in rows:
        ask = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(ask, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False).input_ids  # trap: the template has already added them
        answers = sample(model, prompt, args.group, args.max_tokens, args.temperature, end)
        rewards = [reward(tokenizer.decode(tokens, skip_special_tokens=True), row["answer"]) for tokens, _ in answers]
        all_rewards += rewards  # trap: a truncated answer is scored like any other; it is not a failure
        for (tokens, old), advantage in zip(answers, advantages(rewards), strict=True):
            batch.append((prompt, tokens, torch.tensor(old), advantage))
    for _ in range(args.updates):
        for prompt, tokens, old, advantage in batch:
            logp = logprobs_of(model, prompt, tokens, args.temperature)
            # Trap: one denominator for the whole batch, in which answers with advantage 0 count. GRPO: mean over the
            # answer's tokens, then over answers. DAPO: all tokens of the batch. Dr. GRPO: len(batch) * max_tokens.
            (loss_of(logp, old, advantage).sum() / (len(batch) * len(tokens))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return sum(all_rewards) / len(all_rewards)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder of a chat model in Hugging Face format")
    sizes = {"steps": 20, "prompts": 4, "group": 8, "max-tokens": 32, "updates": 1, "seed": 0}
    for name, default in {"temperature": 1.0, "lr": 1e-5, **sizes}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    random.Random(args.seed).shuffle(rows)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    # Trap: float32. In bfloat16 an AdamW step of this size is lost to rounding. eval(): no dropout.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    for number in range(args.steps):
        chosen = [rows[(number * args.prompts + i) % len(rows)] for i in range(args.prompts)]
        print(f"step {number + 1}: reward {step(model, tokenizer, optimizer, chosen, args):.3f}", flush=True)


if __name__ == "__main__":
    main()
