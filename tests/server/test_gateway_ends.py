"""Addresses and answers of the gateway that end: with an episode, a client, an engine, or the room that there is."""

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from birl.server import gateway as module
from birl.server.connections import Patient
from birl.types import Completion
from tests.rollout.scripted import Scripted
from tests.server.places import HI, Place, played


def test_an_address_is_a_secret_and_ends_with_its_episode() -> None:
    async def body(here: Place) -> None:
        root = here.url.partition("/s/")[0]
        for url in (root, f"{root}/v1/models", f"{root}/s/", f"{root}/s/guess/v1/models", f"{here.url}x/models"):
            assert (await here.http.get(url)).status_code == 404
        assert (await here.http.get(f"{here.url}/elsewhere")).status_code == 404
        here.session.close()
        with pytest.raises(openai.NotFoundError):
            await here.chat()
        with pytest.raises(anthropic.NotFoundError):
            await here.message()

    played(Scripted(["a"]), body)


class Held(Scripted):
    """Answers when it is let; counts who went away meanwhile."""

    def __init__(self) -> None:
        super().__init__(["a"] * 20)
        self.free, self.cancelled, self.begun = asyncio.Event(), 0, 0

    async def generate(self, prompt_ids: Any, params: Any, session: str = "") -> Completion:
        self.begun += 1
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().generate(prompt_ids, params, session)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_leaves_no_turn(stream: bool, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks again then, and only the answer that it gets is trained."""
    monkeypatch.setattr(module, "PING", 0.05)
    engine = Held()

    async def body(here: Place) -> None:
        if stream:
            events = await here.chat(stream=True, n=n)
            await until(lambda: engine.begun == n)
            await events.response.aclose()
        else:
            with pytest.raises(openai.APITimeoutError):
                await here.chat(timeout=0.2, n=n)
        await until(lambda: engine.cancelled == n)
        assert not here.session.turns and not here.session.known
        engine.free.set()
        assert (await here.chat()).choices[0].message.content == "a"
        assert here.spoken() == ["a<|im_end|>"]

    played(engine, body, turns=3)


def test_the_end_of_an_episode_aborts_what_is_being_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PING", 0.05)
    engine = Held()

    async def body(here: Place) -> None:
        whole, stream = asyncio.create_task(here.chat()), await here.message(stream=True)
        await until(lambda: engine.begun == 2)
        here.session.close()
        with pytest.raises(openai.InternalServerError, match="The episode is over"):
            await whole
        with pytest.raises(anthropic.APIStatusError, match="The episode is over"):
            _ = [event async for event in stream]
        assert engine.cancelled == 2 and not here.session.turns

    played(engine, body)


def test_a_stream_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PING", 0.02)

    async def body(here: Place) -> None:
        kinds = [event.type async for event in await here.message(stream=True)]
        assert kinds.count("message_stop") == 1
        text = [c.choices[0].delta.content or "" async for c in await here.chat(stream=True)]
        assert "".join(text) == "b"
        raw = (await here.http.post("/messages", json={"messages": HI, "max_tokens": 9, "stream": True})).text
        assert raw.count("event: ping") >= 2

    played(Scripted(["a", "b", "c"], delay=0.1), body)


def test_no_room_is_told_in_the_words_of_the_api() -> None:
    async def body(here: Place) -> None:
        await here.chat()
        with pytest.raises(openai.BadRequestError) as told:
            await here.chat([*HI, {"role": "user", "content": "long " * 60}])
        assert told.value.code == "context_length_exceeded"
        with pytest.raises(anthropic.BadRequestError):
            await here.message([{"role": "user", "content": "long " * 60}])
        assert here.spoken() == ["a<|im_end|>"] and "leaves no room" in str(here.session.failure)

    played(Scripted(["a"]), body, tokens=150)


def test_a_dead_engine_is_told_once_and_not_asked_again() -> None:
    class Down(Scripted):
        async def generate(self, prompt_ids: Any, params: Any, session: str = "") -> Completion:
            self.prompts.append(prompt_ids)
            raise RuntimeError("boom")

    engine = Down([])

    async def body(here: Place) -> None:
        for _ in range(2):
            eager = here.openai.with_options(max_retries=2)
            with pytest.raises(openai.InternalServerError, match="boom") as told:
                await eager.chat.completions.create(model="any", messages=HI)
            assert told.value.status_code == 503
        assert len(engine.prompts) == 1

    played(engine, body)


def test_parallel_requests_keep_apart() -> None:
    """Twenty conversations of three turns at once, with one address."""

    def says(prompt: str) -> str:
        return prompt.rpartition("number ")[2].partition("<|im_end|>")[0] + "!"

    async def body(here: Place) -> None:
        async def talk(i: int) -> None:
            said: list[Any] = [{"role": "system", "content": f"agent {i}"}]
            for turn in range(3):
                said.append({"role": "user", "content": f"number {i}.{turn}"})
                reply = (await here.chat(said)).choices[0].message.content
                assert reply == f"{i}.{turn}!"
                said.append({"role": "assistant", "content": reply})

        await asyncio.gather(*map(talk, range(20)))
        end = "!<|im_end|>"
        assert sorted(here.spoken()) == sorted(f"{i}.0{end}{i}.1{end}{i}.2{end}" for i in range(20))

    played(Scripted(says, delay=0.01), body, turns=60)


def test_connections_wait_for_file_descriptors(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are answered once others have closed, and one line reports it: asyncio printed thousands of tracebacks."""
    monkeypatch.setattr(Patient, "most", 1000)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def body(here: Place) -> None:
        address, path = here.url.removeprefix("http://").partition("/")[::2]
        host, port = address.split(":")
        asked = f"GET /{path}/models HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        used = {int(number) for number in os.listdir("/proc/self/fd")}  # the limit is of the largest number
        free = [number for number in range(len(used) + 20) if number not in used][12]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        clients = [socket.create_connection((host, int(port))) for _ in range(9)]  # three are left for their other ends
        try:
            for client in clients:
                client.setblocking(False)
                client.sendall(asked)
            loop = asyncio.get_running_loop()
            for client in clients:
                assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 200")
                client.close()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for client in clients:
                client.close()

    played(Scripted(["a"]), body)
    said = "".join(capfd.readouterr())
    assert said.count("has no file descriptors left") == 1 and "Traceback" not in said
