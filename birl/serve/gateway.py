"""Where agents find the model: an address for each episode, in OpenAI's and Anthropic's dialects, on loopback."""

from birl.text.chat import Chat


class Gateway:
    """Its sessions are `birl.rollout.session.Session`s; each has an address that nobody can guess."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    async def start(self) -> None:
        """Listen at a free port."""

    def enter(self, session) -> str:
        """The address of a session, until `leave`."""
        raise NotImplementedError

    def leave(self, session) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        pass
