"""The chat program of verifiers' harness `null`, in this process. verifiers starts one for each episode, with uv."""

import asyncio
import importlib.machinery
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from contextvars import ContextVar
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

from birl.envs.adapters.package import imported
from birl.errors import innermost

KIND = "verifiers"
NAME = "birl"  # of the harness, for verifiers
CONNECTING = 60.0  # seconds that a tool server may take to list its tools, as in verifiers


class Speakers:
    """Names of agents for requests at `address` in one episode: each run of a role is one, `solver` and `solver_2`.
    Without `named` none has a name."""

    def __init__(self, address: str, named: bool) -> None:
        self.address, self.named = address, named
        self.runs: Counter[str] = Counter()
        self.names: dict[str, str] = {}  # by the trace's id

    def of(self, trace: Any, address: str) -> str:
        if not self.named or address != self.address:
            return ""
        if trace.id not in self.names:
            role = trace.agent.name
            self.runs[role] += 1
            self.names[trace.id] = role if self.runs[role] == 1 else f"{role}_{self.runs[role]}"
        return self.names[trace.id]

    def name(self, trace: Any) -> str:
        """Name of a finished run; its role's if the name is not known."""
        return self.names.get(trace.id, str(trace.agent.name))


# of the current episode
SPEAKERS: ContextVar[Speakers] = ContextVar("speakers")


@cache
def registered() -> str:
    """Register the harness with verifiers, and return its name: verifiers looks for a module that has the class."""
    module = ModuleType(f"verifiers.v1.harnesses.{NAME}")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    vars(module).update(Chat=harness(), __all__=["Chat"])
    sys.modules[module.__name__] = module
    return NAME


@cache
def program() -> Any:
    """verifiers' modules core, compaction and mcp, which are parts of one program there: they use each other's names
    without importing them."""
    parts = [imported(f"verifiers.v1.harnesses.utils.{name}", KIND) for name in ("mcp", "compaction", "core")]
    names = {n: value for part in parts for n, value in vars(part).items() if n[0] != "_"}
    for part in parts[1:]:
        vars(part).update(names)
    return SimpleNamespace(**names)


def harness() -> type:
    result = imported("verifiers.v1.runtimes", KIND).ProgramResult

    class Chat(imported("verifiers.v1.harnesses.null", KIND).NullHarness):
        """Calls the model and its tools until there is an answer without a call."""

        async def setup(self, runtime: Any) -> None:
            pass

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            messages = first_messages(*self.resolve_prompt(data))
            name = SPEAKERS.get().of(trace, ctx.client.base_url)
            client = imported("openai", KIND).AsyncOpenAI
            asks = partial(
                client, base_url=endpoint, api_key=secret, default_headers={"X-Birl-Agent": name} if name else {}
            )
            try:
                await talk(asks, ctx.model, messages, servers, tool_interception_url or "")
            except SystemExit as ended:  # as the program exits if it cannot reach the model
                return result(int(ended.code or 0), "", str(ended.__cause__))
            except Exception as error:  # verifiers reads the exit code and the end of a program's output
                cause = innermost(error)
                return result(1, "", traceback.format_exception_only(cause)[-1])
            return result(0, "", "")

    return Chat


def first_messages(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """The first messages in OpenAI's format."""
    wire = imported("verifiers.v1.dialects.chat", KIND).message_to_wire
    first = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*first, {"role": "user", "content": prompt}]
    return [*first, *(wire(message) for message in prompt or ())]


async def talk(
    asks: Callable[..., Any], model: str, messages: list[dict[str, Any]], servers: dict[str, Any], gate: str
) -> None:
    """The program's `main`, which here also closes its clients. `asks` makes OpenAI's client."""
    httpx, parts = imported("httpx", KIND), program()
    patience = httpx.Timeout(None, connect=5.0)  # env.timeout bounds the episode
    async with AsyncExitStack() as stack:
        http, asking = [
            await stack.enter_async_context(httpx.AsyncClient(timeout=patience, verify=False, trust_env=False))
            for _ in range(2)
        ]
        client = asks(timeout=patience, max_retries=0, http_client=http)
        connecting = parts.connect_mcp({"mcpServers": servers}, stack)
        schemas, dispatch, connected = await asyncio.wait_for(connecting, CONNECTING)
        compactor = parts.Compactor(client, model, schemas, False, None)
        compactor.note_good(messages)
        own = SimpleNamespace(bash=False, edit=False, search=False, api_key=client.api_key, tool_interception_url=gate)
        await parts.run_chat_loop(own, compactor, messages, dispatch, connected, asking)
