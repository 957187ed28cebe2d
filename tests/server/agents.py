"""One agent for each of the packages that agents are written with. Nothing in them knows of birl, and the same
function is trained (`birl rl env=tests/server/agents.py:pydantic_ai`) and talks to `birl serve`.
An answer is worth 1 where it is right, at least 0.5 where the package can read it, else less; errors of HTTP are
errors.
"""

import itertools
from typing import Any, Literal

import pydantic


class Answer(pydantic.BaseModel):
    """The result of a sum."""

    number: Literal[5, 6, 7]


def add(a: bool) -> str:
    """Adds.

    Args:
        a: Whether to add.
    """
    return "7" if a else "0"


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


LUCK = itertools.cycle((0.0, 0.1))  # no two episodes are worth the same, so that there is something to learn


def worth(number: Any, task: dict[str, Any]) -> float:
    return 1.0 if str(number) == task["answer"] else 0.5 + next(LUCK)


def openai_client(task: dict[str, Any], base_url: str, api_key: str) -> float:
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        said: Any = [{"role": "developer", "content": "Add."}, {"role": "user", "content": task["prompt"]}]
        tool = openai.pydantic_function_tool(Answer, name="add")
        keys: Any = {"model": "any", "messages": said, "max_completion_tokens": 120}
        client.chat.completions.create(**keys, tools=[tool], tool_choice="required", parallel_tool_calls=False)
        try:
            reply = client.chat.completions.parse(**keys, response_format=Answer)
        except (pydantic.ValidationError, openai.LengthFinishReasonError):
            return next(LUCK)
        found = reply.choices[0].message.parsed
        return worth(found.number, task) if found else next(LUCK)


def anthropic_client(task: dict[str, Any], base_url: str, api_key: str) -> float:
    import anthropic

    tool: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
    said: Any = [{"role": "user", "content": task["prompt"]}]
    with anthropic.Anthropic(base_url=base_url, api_key=api_key) as client:
        keys: Any = {"model": "any", "max_tokens": 120, "system": "Be brief.", "tools": [tool]}
        with client.messages.stream(messages=said, **keys, tool_choice={"type": "any"}) as events:
            reply = events.get_final_message()
        said.append({"role": "assistant", "content": reply.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input)}
            for block in reply.content
            if block.type == "tool_use"
        ]
        said.append({"role": "user", "content": results or "Well?"})
        reply = client.messages.create(messages=said, **keys)
        return worth(sum(block.input.get("a", 0) for block in reply.content if block.type == "tool_use"), task)


async def pydantic_ai(task: dict[str, Any], base_url: str, api_key: str) -> float:
    from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=base_url, api_key=api_key))
    agent = Agent(model, output_type=Answer, tools=[add], system_prompt="Add.", model_settings={"max_tokens": 120})
    try:
        result = await agent.run(task["prompt"], usage_limits=UsageLimits(request_limit=3))
    except (UnexpectedModelBehavior, UsageLimitExceeded):
        return next(LUCK)
    return worth(result.output.number, task)


async def pydantic_ai_anthropic(task: dict[str, Any], base_url: str, api_key: str) -> float:
    from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    model = AnthropicModel("any", provider=AnthropicProvider(base_url=base_url, api_key=api_key))
    agent = Agent(model, output_type=Answer, tools=[add], model_settings={"max_tokens": 120})
    try:
        result = await agent.run(task["prompt"], usage_limits=UsageLimits(request_limit=3))
    except (UnexpectedModelBehavior, UsageLimitExceeded):
        return next(LUCK)
    return worth(result.output.number, task)


async def openai_agents(task: dict[str, Any], base_url: str, api_key: str, *, api: str = "chat") -> float:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    kind = agents.OpenAIChatCompletionsModel if api == "chat" else agents.OpenAIResponsesModel
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = agents.Agent(
            name="adder",
            instructions="Add.",
            model=kind(model="any", openai_client=client),
            tools=[agents.function_tool(add)],
            output_type=Answer,
            model_settings=agents.ModelSettings(max_tokens=120, tool_choice="required", parallel_tool_calls=False),
        )
        try:
            result = await agents.Runner.run(agent, task["prompt"], max_turns=3)
        except (agents.MaxTurnsExceeded, agents.ModelBehaviorError):
            return next(LUCK)
    return worth(result.final_output.number, task)


async def openai_responses(task: dict[str, Any], base_url: str, api_key: str) -> float:
    return await openai_agents(task, base_url, api_key, api="responses")


def langchain(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """A graph of LangGraph's: the model and its tools, then an answer of a form."""
    from langchain_core.exceptions import OutputParserException
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError
    from langgraph.prebuilt import create_react_agent
    from openai import LengthFinishReasonError

    model = ChatOpenAI(model="any", base_url=base_url, api_key=api_key, max_tokens=120)  # pyright: ignore
    graph = create_react_agent(model, [tool(add)], prompt="Add.", response_format=Answer)
    try:
        result = graph.invoke({"messages": [("user", task["prompt"])]}, {"recursion_limit": 6})
    except (GraphRecursionError, OutputParserException, pydantic.ValidationError, LengthFinishReasonError):
        return next(LUCK)
    found = result["structured_response"]
    return worth(found.number, task) if found else next(LUCK)


def smolagents(task: dict[str, Any], base_url: str, api_key: str) -> float:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(model_id="any", api_base=base_url, api_key=api_key, max_tokens=120)
    agent = ToolCallingAgent(tools=[tool(add)], model=model, max_steps=2, verbosity_level=0)
    return worth(agent.run(task["prompt"]), task)


def litellm(task: dict[str, Any], base_url: str, api_key: str) -> float:
    import litellm

    keys: Any = {"model": "openai/any", "api_base": base_url, "api_key": api_key, "max_tokens": 120, "num_retries": 0}
    said: Any = [{"role": "user", "content": task["prompt"]}]
    tool = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
    reply: Any = litellm.completion(messages=said, tools=[tool], tool_choice="auto", **keys)
    message = reply.choices[0].message
    said.append(message.model_dump())
    said += [{"role": "tool", "tool_call_id": c.id, "content": "7"} for c in message.tool_calls or ()]
    said.append({"role": "user", "content": "As JSON."})
    pieces: Any = litellm.completion(messages=said, stream=True, response_format=Answer, **keys)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    try:
        return worth(Answer.model_validate_json(text).number, task)
    except pydantic.ValidationError:
        return next(LUCK)


def dspy(task: dict[str, Any], base_url: str, api_key: str) -> float:
    import dspy
    from dspy.utils.exceptions import AdapterParseError

    model = dspy.LM("openai/any", api_base=base_url, api_key=api_key, max_tokens=120, cache=False, num_retries=0)
    with dspy.context(lm=model):
        try:
            found = dspy.Predict("question -> number: int")(question=task["prompt"])
        except AdapterParseError:
            return next(LUCK)
    return worth(found.number, task)


def anthropic_loop(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """As Claude's agents work: the client calls tools and asks again until the model has none to call."""
    import anthropic

    @anthropic.beta_tool
    def look(name: str) -> str:
        """Looks a file up.

        Args:
            name: Its name.
        """
        return {"a": "7"}.get(name, "There is no such file.")

    with anthropic.Anthropic(base_url=base_url, api_key=api_key) as client:
        said: Any = [{"role": "user", "content": task["prompt"]}]
        keys: Any = {"model": "any", "max_tokens": 120, "system": [{"type": "text", "text": "Look it up."}]}
        runner = client.beta.messages.tool_runner(messages=said, tools=[look], max_iterations=3, **keys)
        *_, last = runner
    return worth("".join(block.text for block in last.content if block.type == "text"), task)


def instructor(task: dict[str, Any], base_url: str, api_key: str) -> float:
    import instructor
    import openai
    from instructor.core import IncompleteOutputException, InstructorRetryException

    with openai.OpenAI(base_url=base_url, api_key=api_key) as own:
        client: Any = instructor.from_openai(own)
        said: Any = [{"role": "user", "content": task["prompt"]}]
        try:
            found = client.create(model="any", messages=said, response_model=Answer, max_retries=2, max_tokens=120)
        except (InstructorRetryException, IncompleteOutputException):
            return next(LUCK)
    return worth(found.number, task)


def agno(task: dict[str, Any], base_url: str, api_key: str) -> float:
    from agno.agent import Agent
    from agno.models.openai import OpenAILike

    model = OpenAILike(id="any", base_url=base_url, api_key=api_key, max_tokens=120, retries=0)
    agent = Agent(model=model, tools=[add], instructions="Add.", tool_call_limit=2, telemetry=False)
    return worth(agent.run(task["prompt"]).content, task)


def haystack(task: dict[str, Any], base_url: str, api_key: str) -> float:
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import Tool
    from haystack.utils import Secret

    model = OpenAIChatGenerator(
        model="any", api_base_url=base_url, api_key=Secret.from_token(api_key), generation_kwargs={"max_tokens": 120}
    )
    tool = Tool(name="add", description="Adds.", parameters=SCHEMA, function=add)
    agent = Agent(chat_generator=model, tools=[tool], system_prompt="Add.", max_agent_steps=3)
    agent.warm_up()
    return worth(agent.run(messages=[ChatMessage.from_user(task["prompt"])])["messages"][-1].text, task)


#: the package that each needs -> the function
AGENTS = {
    "openai": openai_client,
    "anthropic": anthropic_client,
    "pydantic_ai": pydantic_ai,
    "pydantic_ai.models.anthropic": pydantic_ai_anthropic,
    "agents": openai_agents,
    "agents.models.openai_responses": openai_responses,
    "langgraph": langchain,
    "smolagents": smolagents,
    "litellm": litellm,
    "dspy": dspy,
    "anthropic.lib": anthropic_loop,
    "instructor": instructor,
    "agno": agno,
    "haystack": haystack,
}
