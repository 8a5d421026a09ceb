"""What a stranger's optimizer gets from `BlockOptimizer`: the guide's Lion, written with public names only."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from readme_examples import run_examples
from runs import Mix, Run, same
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from block_optim import BlockOptimizer, Muon, local_of
from layout_planner import Rows
from ragged_shard.testing import on_ranks, record_collectives, run_ranks

SHAPES = ((9, 4), (7,), (3, 5, 2))


def lion():
    return run_examples("Write your own")["Lion"]


def trained(layout="plain"):
    run = Run(lion(), layout, shapes=SHAPES, lr=0.1, weight_decay=0.1).steps(0, 2)
    run.give(2)
    with record_collectives() as record:
        run.optimizer.step()
    assert record.kinds == (["all_reduce"] if layout in ("elements", "rows", "shard") else [])
    return run.result()


def test_it_computes_what_its_paper_says():
    run = Run(lion(), shapes=SHAPES, lr=0.1, weight_decay=0.1)
    weights, momenta = [p.detach().clone() for p in run.params], [torch.zeros(s) for s in SHAPES]
    for step in range(3):
        run.step(step)
        for w, m, p in zip(weights, momenta, run.params, strict=True):
            assert p.grad is not None
            w.mul_(1 - 0.1 * 0.1).sub_(0.1 * (0.9 * m + 0.1 * p.grad).sign())
            m.mul_(0.99).add_(p.grad, alpha=0.01)
    for w, m, p in zip(weights, momenta, run.params, strict=True):
        torch.testing.assert_close(p.detach(), w)
        torch.testing.assert_close(run.optimizer.state[p]["exp_avg"], m)


@on_ranks(3)
def test_in_every_layout_it_gives_the_bits_of_one_process():
    for layout in ("elements", "rows", "shard", "replicate"):
        same(trained(layout), trained())


def test_its_state_is_saved_loaded_and_copied_and_bad_gradients_skip_its_step():
    run, loaded = Run(lion(), shapes=SHAPES, lr=0.1).steps(0, 1), Run(lion(), shapes=SHAPES, lr=0.5)
    copied = copy.deepcopy(run)
    loaded.module.load_state_dict(run.module.state_dict())
    loaded.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for each in (run, copied, loaded):
        each.give(2)
        each.params[1].grad.fill_(torch.nan)
        each.optimizer.step()
        assert each.optimizer.skipped_steps == 1
        same(each.steps(3, 4).result(), run.result())


def test_mixed_takes_it_next_to_others_and_names_it_in_state_dicts():
    kind = lion()
    run, alone = (
        Run(Mix(("muon", {}), (kind, {"lr": 0.1})), shapes=SHAPES[::2]),
        Run(Muon, shapes=SHAPES[::2]),
    )
    apart = [Muon(alone.params[:1], lr=0.1), kind(alone.params[1:], lr=0.1)]
    for step in range(2):
        run.step(step)
        alone.give(step)
        for optimizer in apart:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(run.params, alone.params, strict=True))
    assert [g["algorithm"] for g in run.optimizer.state_dict()["param_groups"]] == ["muon", "Lion"]
    copied = copy.deepcopy(run)
    same(copied.steps(7, 8).result(), run.steps(7, 8).result())


def test_it_may_say_which_blocks_must_be_whole():
    class Wants(BlockOptimizer):
        def __init__(self, params, lr=1e-3, rows=2):
            super().__init__(params, {"lr": lr, "rows": rows})

        @classmethod
        def block_of(cls, name, param, options):
            return Rows(options["rows"]) if param.ndim > 1 else None

    assert Wants.block_policy()("w", torch.zeros(4, 3)) == Rows(2)
    assert Wants.block_policy(rows=4)("w", torch.zeros(4, 3)) == Rows(4)
    layer = torch.nn.Linear(64, 2)
    assert Wants.block_policy([layer], 8, max_padding=0.0)("weight", layer.weight) is None
    Wants.requires_blocks = True
    assert Wants.block_policy([layer], 8, max_padding=0.0)("weight", layer.weight) == Rows(2)


def test_a_parameter_shows_its_local_memory_and_makes_states_like_itself():
    class Spy(BlockOptimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def init_states(self, group, params):
            for p in params:
                assert p.group is group
                assert p.local.data_ptr() == p.tensor.data_ptr()
                self.state[p.tensor]["wide"] = p.zeros(torch.float64)

    weight = torch.nn.Parameter(torch.ones(3, 2))
    state = Spy([weight]).state[weight]["wide"]
    assert local_of(state) is state
    assert state.dtype == torch.float64
    assert state.shape == (3, 2)


MATRICES = ((6, 4), (4, 6), (3, 5))


def adafactor(layout, cuts=0):
    return Run(run_examples("Write your own")["Adafactor"], layout, shapes=MATRICES, cuts=cuts)


def checkpoint(run):
    weights = {name: p.detach() for name, p in run.module.named_parameters()}
    return {"model": weights, "optimizer": get_optimizer_state_dict(run.module, run.optimizer)}


def owners_states_go_round(folder):
    dcp.save(checkpoint(adafactor("planned").steps(0, 3)), checkpoint_id=folder)


def loaded(folder, expected):
    run = adafactor("planned", cuts=1).steps(50, 51)
    state = checkpoint(run)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(run.module, run.optimizer, state["optimizer"])
    same(run.steps(3, 5).result(), expected)


def test_states_of_other_shapes_lie_on_the_owner_and_load_at_any_world_size(tmp_path):
    expected = adafactor("plain").steps(0, 5).result()
    run_ranks(3, owners_states_go_round, str(tmp_path))
    for ranks in (2, 3):
        run_ranks(ranks, loaded, str(tmp_path), expected)


@on_ranks(3)
def test_cut_blocks_and_plain_states_of_cut_parameters_are_refused():
    kind: Any = run_examples("Write your own")["Adafactor"]
    with pytest.raises(ValueError, match=r"cut Whole\(\), which Adafactor needs whole .*block_policy"):
        adafactor("shard")

    class PlainAtFirst(kind):
        requires_blocks = False

        def init_states(self, group, params):
            for p in params:
                self.state[p.tensor] = {"row": torch.zeros(p.shape[0])}

    class PlainInStep(kind):
        def init_states(self, group, params):
            for p in params:
                self.state[p.tensor] = {}

        def update(self, active):
            for p, _ in active:
                self.state[p.tensor].setdefault("row", torch.zeros(p.shape[0]))

    with pytest.raises(ValueError, match=r"p0: state 'row' is a plain tensor of shape \(6,\).*p\.zeros"):
        Run(PlainAtFirst, "shard", shapes=MATRICES)
    run = Run(PlainInStep, "planned", shapes=MATRICES)
    run.step(0)
    with pytest.raises(ValueError, match=r"p0: state 'row' is a plain tensor"):
        run.optimizer.state_dict()

    class NotWhole(kind):
        requires_blocks = False

    with pytest.raises(ValueError, match=r"p0: a state of shape .* no rank holds the whole parameter"):
        Run(NotWhole, "shard", shapes=MATRICES)


@on_ranks(3)
def test_a_state_for_each_row_is_cut_as_the_rows_are():
    class Rowwise(BlockOptimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        def init_states(self, group, params):
            for p in params:
                self.state[p.tensor] = {
                    "row": p.zeros(shape=p.shape[:1]),
                    "wide": p.zeros(shape=(p.shape[0], 2)),
                }

    for layout in ("rows", "shard", "replicate"):
        run = Run(Rowwise, layout, shapes=MATRICES)
        params: list[Any] = run.params
        for param in params:
            for key, shape in (("row", param.shape[:1]), ("wide", (param.shape[0], 2))):
                state = run.optimizer.state[param][key]
                assert state.shape == torch.Size(shape)
                assert state.placements == param.placements
                assert local_of(state).shape[0] == local_of(param).shape[0]
    assert dist.get_world_size() == 3
