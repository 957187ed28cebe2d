"""What cannot fit into a context, known before anything of it is rendered or encoded."""

from birl.types import Conversation

#: of a token, on average over a text; more are not possible in earnest
CHARACTERS = 64


def cannot_fit(said: Conversation, tokens: int) -> bool:
    """Whether a conversation has more characters than so many tokens hold, which is known before it is encoded."""
    if isinstance(said, str):
        return len(said) > CHARACTERS * tokens
    texts = (t for m in said for t in (m.content, m.thinking, *(call.arguments for call in m.tool_calls)))
    return len(said) > tokens or sum(map(len, texts)) > CHARACTERS * tokens
