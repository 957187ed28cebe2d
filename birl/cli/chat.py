"""`birl chat`: talk to a model, or to what a run has learned."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from math import inf
from typing import Any

from birl.config import schema
from birl.errors import BirlError
from birl.hub import check_model, is_model
from birl.text.bounds import cannot_fit
from birl.types import Message, SamplingParams

SETTINGS = {
    "temperature": 0.7,
    "top_p": 0.95,
    "max_tokens": 512,
    "seed": 0,
    "dtype": "bfloat16",
    "device": "auto",
    "system": "",
}
ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (lambda x: 0 <= x < inf, "a number of at least 0"),
    "top_p": (lambda x: 0 < x <= 1, "more than 0 and at most 1"),
    "max_tokens": (lambda x: x >= 1, "a whole number of at least 1"),
    "seed": (lambda x: x >= 0, "a whole number of at least 0"),
    "dtype": (lambda x: x in ("bfloat16", "float32"), "bfloat16 | float32"),
    "device": (
        lambda x: x in ("auto", "cpu", "cuda") or (x[:5] == "cuda:" and x[5:].isdigit()),
        "auto | cpu | cuda | cuda:1",
    ),
    "system": (lambda x: True, "text"),
}


def run(words: list[str]) -> int:
    """`birl chat [MODEL or RUN] [key=value ...]`: a run folder, a checkpoint of a run, or anything that `model.path`
    takes; then keys of `SETTINGS`."""
    named = [word.removeprefix("model=") for word in words if is_target(word)]
    if len(named) > 1:
        raise BirlError(f"birl chat takes one model or run, not {len(named)}: {' '.join(named)}.")
    settings, target = read_settings([word for word in words if not is_target(word)]), (named or ["smollm2"])[0]
    check_model("model.path", target)
    from birl.models.device import choose
    from birl.parallel.machine import compute_thread

    with compute_thread(device=choose(str(settings["device"]))) as compute:
        asyncio.run(_converse(target, settings, compute))
    return 0


def is_target(word: str) -> bool:
    """Whether a word names the model: the folder of a run of --multirun has an = in its name."""
    return "=" not in word or word.startswith("model=") or is_model(word)


def read_settings(overrides: list[str]) -> dict[str, float | int | str]:
    settings: dict[str, float | int | str] = dict(SETTINGS)
    for word in overrides:
        key, _, value = word.partition("=")
        if key not in SETTINGS:
            raise BirlError(f"birl chat has no key {key!r}; it has model, {', '.join(SETTINGS)}.")
        kind, (fits, needed) = type(SETTINGS[key]), ALLOWED[key]
        try:
            settings[key] = kind(value)
        except ValueError:
            raise BirlError(f"{word}: {key} must be {needed}.") from None
        if not fits(settings[key]):
            raise BirlError(f"{word}: {key} must be {needed}.")
    return settings


async def _converse(target: str, settings: dict, compute: Executor) -> None:
    from birl.engine.open import open_engine
    from birl.learner.policy import DTYPES, load_policy
    from birl.models.load import cast

    policy = load_policy(schema.Model(path=target, device=settings["device"]), compute)
    cast(policy.model, DTYPES[settings["dtype"]]).requires_grad_(False)
    engine = open_engine(policy, schema.Engine(max_batch=1), policy.context, lambda: 0)
    messages = [Message(role="system", content=settings["system"])] if settings["system"] else []
    print("An empty line starts a new conversation, Ctrl-D ends.")
    try:
        while True:
            text = await asyncio.to_thread(_ask)
            if text is None:
                return
            if not text:
                messages = messages[:1] if settings["system"] else []
                continue
            messages.append(Message(role="user", content=text))
            prompt = tuple(messages) if policy.chat.has_template else text
            params = SamplingParams(
                max_tokens=settings["max_tokens"],
                temperature=settings["temperature"],
                top_p=settings["top_p"],
                seed=settings["seed"] + len(messages),
            )
            ids = () if cannot_fit(prompt, policy.context) else policy.chat.render(prompt)
            if not 0 < len(ids) < policy.context:
                messages.pop()
                print(f"That is more than the context of {policy.context} tokens holds. Ask less, or start anew.")
                continue
            completion = await engine.generate(ids, params)
            answer = completion.ids
            messages.append(policy.chat.parse(answer, prompt=ids))
            print(policy.chat.reply_text(answer))
    finally:
        await engine.close()


def _ask() -> str | None:
    try:
        return input("> ").strip()
    except EOFError:
        return None
