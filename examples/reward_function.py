"""A reward of your own: how close the answer's length is to what the row asks for.

birl rl data.train=examples/data/lengths.jsonl reward=examples/reward_function.py:close_to
"""


def close_to(completions, words, **columns):
    """Completions as text and the row's columns in, one number for each completion out."""
    return [1.0 / (1.0 + abs(len(text.split()) - int(wanted))) for text, wanted in zip(completions, words, strict=True)]
