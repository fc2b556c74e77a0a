"""CriticalKV by hand, output projections of any kind, and keys that cannot be rotated back. test_every_choice.py
compares scores of values and keys with the oracle."""

import pytest
import tiny
import torch
import transformers
from policy_cases import Slots

import kvevict
from kvevict.models import families


@pytest.mark.parametrize("seed", range(5))
def test_critical_by_hand(seed):
    """Half of each head's slots by score, protected ones counted first, then the best of the rest by the product."""
    generator = torch.Generator().manual_seed(seed)
    slots, keep = Slots(2, 11, window=3), torch.tensor([[7, 9]])
    score, norm = torch.rand(2, 1, 2, 11, generator=generator)
    got = kvevict.REFINEMENTS["critical"]().pick(slots, score, keep, norm)
    for head, (number, half) in enumerate(((7, 0), (9, 1))):
        free = range(8)  # the last three are kept anyway
        first = sorted(free, key=lambda i: -score[0, head, i])[:half]
        rest = sorted(set(free) - {*first}, key=lambda i: -(score[0, head, i] + 1e-4) * norm[0, head, i])
        want = {*first, *rest[: number - 3 - half]}
        assert {*got[0, head, :8].topk(number - 3).indices.tolist()} == want


@torch.no_grad()
@pytest.mark.parametrize("change", ["as it is", "int8", "conv", "lora", "wrapped"])
def test_the_output_projection_of_any_kind(change):
    """A projection that is not a plain matrix is measured by projecting unit vectors; a bias is left out."""
    module = tiny.model().model.layers[0].self_attn
    plain = torch.nn.Linear(128, 64)
    want = plain.weight.detach().clone()
    module.o_proj = plain
    if change == "conv":
        module.o_proj = transformers.pytorch_utils.Conv1D(64, 128)
        module.o_proj.weight.copy_(want.T)
    elif change == "lora":
        module.o_proj, more = _Adapted(plain), torch.randn(64, 128)
        module.o_proj.more, want = more, want + more
    elif change == "int8":
        module.o_proj = _Stored(plain)
    elif change == "wrapped":  # by a module that says no size
        module.o_proj = torch.nn.Sequential(plain)
    torch.testing.assert_close(families.output_weight(module, torch.float32), want, rtol=0, atol=1e-5)


def test_an_unknown_output_projection_is_refused():
    made = tiny.model()
    attention = made.model.layers[2].self_attn
    attention.ours = attention._modules.pop("o_proj")
    with pytest.raises(ValueError, match="no output projection by a known name"):
        kvevict.patch(made, "defensive", budget=64)
    assert "_kvevict" not in made.model.__dict__


class _Adapted(torch.nn.Linear):
    def __init__(self, plain):
        super().__init__(128, 64)
        self.plain = plain

    def forward(self, x):
        return self.plain(x) + x @ self.more.T


class _Stored(torch.nn.Module):
    """Weights stored in another order."""

    in_features = 128

    def __init__(self, plain):
        super().__init__()
        self.plain = plain

    def forward(self, x):
        return self.plain(x)


def test_keys_whose_rotation_depends_on_the_length_are_refused():
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)
    made = tiny.model(rope_parameters=rope)
    with pytest.raises(ValueError, match="rotary frequencies change with the prompt's length"):
        kvevict.patch(made, "compactor", budget=64)
    assert "_kvevict" not in made.model.__dict__
