"""RL2's environments: one function on text. The model learns whether its guess is too low or too high.

    birl rl env=examples/step_function.py:step env.most=4 data.train=examples/data/numbers.jsonl model.max_length=512

`next_state` begins with the prompt and the reply, so the whole episode is one sequence, token by token.
"""

import re

TURN = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


async def step(state, action, extra_info, *, most=8):
    """`most` is a key: env.most=4."""
    number, tries = extra_info["number"], extra_info.get("tries", 0) + 1
    found = re.findall(r"\d+", action)
    guess = int(found[-1][:9]) if found else None
    done = guess == number or tries == most
    hint = "Say a number." if guess is None else "Too low." if guess < number else "Too high."
    return {
        "next_state": state + action + TURN.format(hint),
        "reward": (1.0 - 0.1 * (tries - 1)) * (guess == number),
        "score": float(guess == number),
        "done": done,
        "extra_info": {"number": number, "tries": tries},
    }
