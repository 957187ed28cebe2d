import pytest
import torch

from birl.data.trees import Tree
from birl.errors import BirlError
from birl.models import attention
from birl.models.attention import Packed, tree_mask
from birl.models.forward import hidden_states
from birl.models.verify import verify
from tests.tiny import tiny_model


def model(**options: int):
    made = tiny_model(**options).eval()
    made.set_attn_implementation(attention.NAME)
    return made


def test_packed_trees_equal_separate_sequences() -> None:
    """Invariant 2. The peer that packs by position_ids alone is wrong here by 0.5 (transformers, unless
    use_cache=False)."""
    policy = model()
    plain = tiny_model().eval()
    ids = torch.randint(3, 300, (31,), generator=torch.Generator().manual_seed(1))
    tree, other = Tree.of(6, (5, 9, 1)), Tree.of(10)
    positions = torch.tensor(tree.positions() + other.positions())
    with torch.no_grad():
        rows = hidden_states(policy, ids, positions, Packed([tree, other]))
        alone = [ids[:11], torch.cat([ids[:6], ids[11:20]]), torch.cat([ids[:6], ids[20:21]]), ids[21:]]
        expected = [plain.model(s[None], use_cache=False).last_hidden_state[0] for s in alone]
    wanted = torch.cat([expected[0], expected[1][6:], expected[2][6:], expected[3]])
    torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_shared_prompt_are_the_sum_over_its_answers() -> None:
    policy = model()
    ids = torch.randint(3, 300, (12,), generator=torch.Generator().manual_seed(2))
    tree = Tree.of(4, (3, 5))
    rows = hidden_states(policy, ids, torch.tensor(tree.positions()), Packed([tree]))
    rows[4:].square().sum().backward()
    shared = {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    for answer in (ids[4:7], ids[7:]):
        alone = torch.cat([ids[:4], answer])
        rows = hidden_states(policy, alone, torch.arange(len(alone)), Packed([Tree.of(len(alone))]))
        rows[4:].square().sum().backward()
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(shared[name], parameter.grad, atol=1e-3, rtol=1e-4)


def test_a_window_is_seen_within_each_branch() -> None:
    mask = tree_mask(Tree.of(3, (2, 2)), window=2)
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]


def test_an_architecture_that_packs_wrongly_is_refused() -> None:
    policy = model()
    verify(policy)
    policy.config.logits_scaling = 2.0
    original = policy.forward
    policy.forward = lambda *a, **k: _halved(original(*a, **k))  # logits that the bare head does not give
    with pytest.raises(BirlError, match=r"by its head .* logits are changed"):
        verify(policy)


def _halved(output):
    output.logits = output.logits / 2
    return output


def test_unknown_attention_options_are_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(BirlError, match="no rule for: position_bias"):
        attention.attention(torch.nn.Module(), q, q, q, None, position_bias=q)
    with pytest.raises(BirlError, match="no rule for: a mask of its own"):
        attention.attention(torch.nn.Module(), q, q, q, q)
