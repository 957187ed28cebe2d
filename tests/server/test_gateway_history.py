"""Thoughts and rewritten histories of agents at the gateway: what of them is a sample."""

from typing import Any

import anthropic
import pytest

from birl.rollout.assemble import samples, token_rewards, turn_rewards
from birl.types import Completion, Outcome, Stop, Trajectory
from tests.rollout.scripted import CHAT, Scripted
from tests.server.places import CALL, HI, THINKING, TOOL, TOOLED, Place, played


def test_a_stop_string_within_the_thinking_is_not_shown() -> None:
    class Stops(Scripted):
        async def generate(self, prompt_ids: Any, params: Any, session: str = "") -> Completion:
            whole = await super().generate(prompt_ids, params, session)
            return Completion.of(whole.ids[:-1], whole.logprobs[:-1], whole.versions[:-1], Stop.STOP)

    async def body(here: Place) -> None:
        said = (await here.chat(stop=["STOP", "TOP"])).choices[0].message
        assert (said.content, said.reasoning_content) == ("", "hm ")

    played(Stops(["<think>\nhm STOP"], THINKING), body)


@pytest.mark.parametrize("told", ["hm", "", "another"])
def test_thinking_that_an_agent_rewrites_is_what_the_model_sees(told: str) -> None:
    """Leaving it out is no change; other words are, and the model must not be shown its own in their place."""
    engine = Scripted([f"<think>\nhm\n</think>\n\n{CALL}", "<think>\nso\n</think>\n\nseven"], THINKING)

    async def body(here: Place) -> None:
        tools: Any = [{"type": "function", "function": TOOL}]
        said = (await here.chat(tools=tools)).choices[0].message.model_dump(exclude_none=True)
        said["reasoning_content"] = told
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "7"}
        await here.chat([*HI, said, result], tools=tools)
        seen = THINKING.decode(engine.prompts[1])
        assert (f"<think>\n{told or 'hm'}\n</think>" in seen) and ("hm" in seen) == (told != "another")
        assert len(here.spoken()) == (2 if told == "another" else 1)

    played(engine, body)


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts_are_told_apart_and_may_be_dropped(stream: bool) -> None:
    """A client that sends the answer back without its thoughts continues the conversation, thoughts included, where the
    template lets it: while a tool is used. Behind a new question this template drops them: a new sample."""

    async def body(here: Place) -> None:
        tools = [{"type": "function", "function": TOOL}]
        if stream:
            async with here.openai.chat.completions.stream(model="any", messages=HI, tools=tools) as events:  # type: ignore
                first = (await events.get_final_completion()).choices[0].message
        else:
            first = (await here.chat(tools=tools)).choices[0].message
        assert first.reasoning_content.strip() == "hm" and "hm" not in first.content  # pyright: ignore
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
        said = [*HI, {"role": "assistant", "content": first.content, "tool_calls": [call]}]
        said.append({"role": "tool", "tool_call_id": "1", "content": "7"})
        await here.chat(said, tools=tools)
        assert here.spoken() == [f"<think>\nhm\n</think>\n\n{CALL}<|im_end|><think>\nso\n</think>\n\nseven<|im_end|>"]

    engine = Scripted([f"<think>\nhm\n</think>\n\n{CALL}", "<think>\nso\n</think>\n\nseven"], THINKING)
    played(engine, body)


def test_thoughts_are_blocks_for_anthropic() -> None:
    async def body(here: Place) -> None:
        thought, words = (await here.message()).content
        assert (thought.type, thought.thinking.strip(), words.text.strip()) == ("thinking", "hm", "seven")
        assert thought.signature  # clients leave thinking without one out of what they send back
        async with here.anthropic.messages.stream(model="any", max_tokens=90, messages=HI) as events:
            kinds = [e.delta.type async for e in events if e.type == "content_block_delta"]
            again, words = (await events.get_final_message()).content
        assert (again, words.text.strip(), kinds[:2]) == (thought, "seven", ["thinking_delta", "signature_delta"])  # pyright: ignore

    played(Scripted(["<think>\nhm\n</think>\n\nseven"] * 2, THINKING), body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_thread_of_anthropics_goes_on_token_by_token(stream: bool) -> None:
    """The client's own loop of tools, which sends only what is new; an answer that is gone is sent anew."""

    @anthropic.beta_async_tool
    async def add(a: int) -> str:
        """Adds.

        Args:
            a: A number.
        """
        return str(a + 4)

    async def body(here: Place) -> None:
        keys: Any = {"model": "any", "max_tokens": 90, "system": "Be brief.", "tools": [add], "messages": HI}
        runner = here.anthropic.beta.messages.tool_runner(**keys, stream=stream)
        said = [await one.get_final_message() if stream else one async for one in runner]  # pyright: ignore
        assert [one.stop_reason for one in said] == ["tool_use", "end_turn"]  # pyright: ignore
        assert here.spoken() == [CALL + "<|im_end|>seven<|im_end|>"]  # one sample
        assert CHAT.decode(here.session.turns[1].prompt).endswith("tool\n7<|im_end|>\n<|im_start|>assistant\n")
        lost: Any = {"type": "continue", "previous_message_id": "msg_1"}
        with pytest.raises(anthropic.NotFoundError, match="there is no answer 'msg_1'") as caught:
            await here.anthropic.beta.messages.create(model="any", max_tokens=9, messages=HI, thread=lost)
        assert caught.value.body["error"]["details"] == {"error_code": "thread_not_found"}  # type: ignore[index, call-overload]

    played(Scripted([CALL, "seven"], TOOLED), body)


def test_a_rewritten_history_is_told_once_with_its_turn(capsys: pytest.CaptureFixture[str]) -> None:
    """Of an agent that goes on, asks several things, or asks anew nothing is told."""

    async def body(here: Place) -> None:
        talk: list[Any] = [*HI]
        for n in range(2):
            reply = await here.chat(talk)
            talk += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": f"More {n}."}]
            await here.chat([{"role": "user", "content": f"Another question {n}."}])
        await here.chat(talk[:3])
        assert "history" not in capsys.readouterr().out
        for n in range(3):
            talk[1] = {"role": "assistant", "content": f"rewritten {n}"}
            reply = await here.chat(talk)
            talk += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "More."}]
        (told,) = [line for line in capsys.readouterr().out.splitlines() if "history" in line]
        turn = here.session.turns[5]
        assert told == (
            "An agent changed its history: in turn 5 message 1 (assistant) differs from before. So the turn begins a "
            f"new sample, and the {len(turn.prompt)} tokens of its prompt are computed again. Told once."
        )

    played(Scripted(lambda prompt: "seven"), body, turns=20)


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_a_summary_in_place_of_the_history_begins_a_second_sample(dialect: str) -> None:
    """As coding agents do where the context is full. Both parts are trained, once, for the episode's reward."""

    async def asked(here: Place, talk: list[Any]) -> str:
        match dialect:
            case "chat":
                reply = (
                    (await here.chat([{"role": "system", "content": "Be brief."}, *talk])).choices[0].message.content
                )
            case "responses":
                keys = {"model": "any", "instructions": "Be brief.", "input": talk}
                reply = (await here.openai.responses.create(**keys)).output_text
            case _:
                reply = (await here.message(talk, system="Be brief.")).content[0].text  # pyright: ignore
        talk += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]
        return reply or ""

    async def body(here: Place) -> None:
        talk = list(HI)
        for _ in range(2):
            await asked(here, talk)
        talk[-1] = {"role": "user", "content": "Write a summary."}
        talk = [{"role": "user", "content": f"Go on from this summary: {await asked(here, talk)}"}]
        for _ in range(2):
            await asked(here, talk)
        end = "<|im_end|>"
        assert here.spoken() == [f"a{end}b{end}summary{end}", f"c{end}d{end}"]
        assert "Hi" not in CHAT.decode(here.session.turns[3].prompt)
        played = Trajectory(turns=here.session.turns, reward=2.0, score=2.0, outcome=Outcome.OK)
        assert [s.advantage for s in samples(played, 0.5, 0, 0)] == [0.5, 0.5]
        assert [sum(own) for own in token_rewards(played, turn_rewards(played))] == [2.0, 2.0]

    played(Scripted(["a", "b", "summary", "c", "d"]), body)
