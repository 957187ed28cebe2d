"""`birl chat`: chat with a model, or with the trained model of a run."""

import asyncio
import sys
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal

from birl.config import schema
from birl.config.load import read_section
from birl.config.schema.kinds import Amount, Count, Gpu, Nucleus, Section, Whole
from birl.errors import BirlError
from birl.hub import check_model, is_model
from birl.text.bounds import cannot_fit
from birl.types import Message, SamplingParams
from birl.visible import visible


@dataclass(kw_only=True)
class Settings(Section):
    """Keys of `birl chat` beside the model."""

    temperature: Amount = 0.7
    top_p: Nucleus = 0.95
    max_tokens: Count = 512
    seed: Whole = 0
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] | Gpu = "auto"
    system: str = ""
    """What the model is told before the conversation."""


def run(words: list[str]) -> int:
    """`birl chat [MODEL or RUN] [key=value ...]`: a run folder, a checkpoint of a run, or anything that `model.path`
    takes; then keys of `Settings`."""
    named = [word.removeprefix("model=") for word in words if is_target(word)]
    if len(named) > 1:
        raise BirlError(f"birl chat takes one model or run, not {len(named)}: {' '.join(named)}.")
    target = (named or ["smollm2"])[0]
    keys = dict(word.split("=", 1) for word in words if not is_target(word))
    settings = read_section(Settings, keys, "")
    if "top_p" in keys and not settings.temperature:
        raise BirlError(f"top_p={keys['top_p']}: has no effect because temperature=0 is greedy; set a temperature.")
    check_model("model", target)
    print(f"birl: loading {target}", file=sys.stderr, flush=True)  # importing torch takes seconds
    from birl.models.device import choose
    from birl.parallel.machine import compute_thread

    with compute_thread(device=choose(settings.device, "device")) as compute, asyncio.Runner() as runner:
        _converse(target, settings, compute, runner)
    return 0


def is_target(word: str) -> bool:
    """Whether a word names the model; the folder of a run of --multirun has an = in its name."""
    return "=" not in word or word.startswith("model=") or is_model(word)


def _converse(target: str, settings: Settings, compute: Executor, runner: asyncio.Runner) -> None:
    """Read lines outside of the event loop, where Ctrl-C ends `input` at once, and answer them in it."""
    from birl.engine.open import open_engine
    from birl.learner.policy import DTYPES, load_policy
    from birl.models.load import cast

    policy = load_policy(schema.Model(path=target, device=settings.device), compute)
    cast(policy.model, DTYPES[settings.dtype]).requires_grad_(False)
    engine = open_engine(policy, schema.Engine(max_batch=1), policy.context, lambda: 0)
    messages = [Message(role="system", content=settings.system)] if settings.system else []
    print("An empty line starts a new conversation, Ctrl-D ends.")
    try:
        while (text := _ask()) is not None:
            if not text:
                messages = messages[:1] if settings.system else []
                continue
            messages.append(Message(role="user", content=text))
            prompt = tuple(messages) if policy.chat.has_template else text
            params = SamplingParams(
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                seed=settings.seed + len(messages),
            )
            ids = () if cannot_fit(prompt, policy.context) else policy.chat.render(prompt)
            if not 0 < len(ids) < policy.context:
                messages.pop()
                print(f"The context of {policy.context} tokens is exceeded. Shorten the text, or start again.")
                continue
            answer = runner.run(engine.generate(ids, params)).ids
            messages.append(policy.chat.parse(answer, prompt=ids))
            print(visible(policy.chat.reply_text(answer)))
    finally:
        runner.run(engine.close())


def _ask() -> str | None:
    """A line of standard input; None at its end."""
    while True:
        try:
            text = input("> ").strip()
            text.encode()
            return text
        except EOFError:
            return None
        except UnicodeError:
            print("This line is not UTF-8. Type it again.")
