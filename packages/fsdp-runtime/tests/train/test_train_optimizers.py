"""How `fsdp-train` groups parameters for its optimizers."""

from torch import nn

from fsdp_runtime.train.optimizers import decay_groups, make_optimizer, without_vocabulary


class Model(nn.Module):
    """An embedding and a head with a row for each of 50 tokens, a matrix that has none, a vector."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)


def names(groups):
    return [[name for name, _ in group["params"]] for group in groups]


def test_vectors_are_not_decayed():
    groups = decay_groups(Model().named_parameters(), 0.1)
    assert names(groups) == [["embed.weight", "inner.weight", "head.weight"], ["inner.bias"]]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def test_matrices_with_a_row_for_each_token_are_apart_and_these_rows_not_rotated():
    model = Model()
    groups = without_vocabulary(decay_groups(model.named_parameters(), 0.1), model)
    assert names(groups) == [["inner.weight"], ["embed.weight", "head.weight"], ["inner.bias"]]
    assert [group.get("diagonal_above") for group in groups] == [None, 49, None]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]


def test_soap_is_given_these_groups_and_shampoo_is_not():
    assert len(make_optimizer("soap", Model(), lr=None, weight_decay=0.1).param_groups) == 3
    assert len(make_optimizer("shampoo", Model(), lr=None, weight_decay=0.1).param_groups) == 2
