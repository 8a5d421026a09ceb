"""Weights narrower than fp32: worked on in fp32, rounded once; stochastic rounding and masters of every optimizer."""

import copy
import logging

import pytest
import runs
import torch
import torch.distributed as dist
from runs import same, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from block_optim import AdamW, Muon, qk_clip_
from block_optim.core.rounding import CHUNK, Rounder
from ragged_shard.testing import on_ranks

SHAPES = ((24, 16), (13, 8), (3, 8, 6))
BF16 = torch.bfloat16
NAMES = ("AdamW", "AdamW fused", "AdamW8bit", "Muon", "NorMuon", "Shampoo", "SOAP")
every_kind = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR, "block_optim")


def run_of(name, layout="plain", dtype=BF16, shapes=SHAPES, **options):
    wide = (
        {"momentum_dtype": torch.float32, "cautious_weight_decay": name == "NorMuon"}
        if "Muon" in name
        else {}
    )
    own = {"shapes": shapes, "dtype": dtype, "lr": 0.02, "weight_decay": 0.1, **wide}
    return runs.run_of(name, layout, **{**own, **options})


def give_bf16(run, number):
    """The gradients of a step as bf16 has them, in the parameters' dtype."""
    for p, grad in zip(run.params, tensors(run.shapes, number, BF16), strict=True):
        p.grad = grad.to(p.dtype)


@pytest.mark.parametrize(
    ("name", "lr"),
    [*((name, 0.02) for name in NAMES), *((name, torch.tensor(0.02)) for name in ("AdamW", "Muon", "SOAP"))],
)
def test_a_step_of_bf16_weights_is_that_of_fp32_ones_rounded_once(name, lr):
    options = {"lr": lr, "weight_decay": 0.4}
    narrow, wide = run_of(name, **options), run_of(name, dtype=torch.float32, **options)
    for number in range(4):
        for p, w in zip(narrow.params, wide.params, strict=True):
            w.data.copy_(p.data)
        for run in (narrow, wide):
            give_bf16(run, number)
            run.optimizer.step()
        for p, w in zip(narrow.params, wide.params, strict=True):
            assert torch.equal(p, w.bfloat16())


@every_kind
def test_weights_rounded_at_random_decay_by_what_nearest_rounding_would_lose(name):
    plain = {"momentum": 0.0, "nesterov": False} if name == "Shampoo" else {}
    run = run_of(name, shapes=((64, 64),), stochastic_rounding=True, **plain)
    run.params[0].data.fill_(1)
    for _ in range(25):
        run.params[0].grad = torch.zeros_like(run.params[0])
        run.optimizer.step()
    assert float(run.params[0].float().mean().detach()) == pytest.approx(0.998**25, abs=2e-3)


@every_kind
def test_masters_make_the_run_one_of_fp32_weights_to_the_bit(name):
    narrow, wide = run_of(name, master_weights=True), run_of(name, dtype=torch.float32)
    for p, w in zip(narrow.params, wide.params, strict=True):
        w.data.copy_(p.data)
    for w, p in zip(wide.params, narrow.params, strict=True):
        w.data.copy_(p.data)
        narrow.optimizer.state[p]["master_param"].copy_(w.data)
    for number in range(6):
        for run in (narrow, wide):
            give_bf16(run, number)
            run.optimizer.step()
    for p, w in zip(narrow.params, wide.params, strict=True):
        state = dict(narrow.optimizer.state[p])
        assert torch.equal(state.pop("master_param"), w)
        assert torch.equal(p, w.bfloat16())
        same(state, wide.optimizer.state[w])


@every_kind
def test_writes_between_steps_go_into_the_masters_and_nothing_else_does(name):
    run = run_of(name, master_weights=True).steps(0, 2)
    weight = run.params[0]
    before = run.optimizer.state[weight]["master_param"].clone()
    with torch.no_grad():
        weight[0] = 3.0
        weight.data[1, 2] = -2.0  # does not count in the tensor's version
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    run.step(2)
    before[0], before[1, 2] = 3.0, -2.0
    assert torch.equal(run.optimizer.state[weight]["master_param"], before)
    assert torch.equal(weight, before.bfloat16())


def test_qk_clip_reaches_the_masters():
    weight = torch.nn.Parameter(torch.ones(4, 3, dtype=BF16))
    optimizer = Muon([weight], lr=0.0, master_weights=True)
    qk_clip_(weight, None, torch.tensor([400.0, 1.0]), tau=100.0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight[:, 0].tolist() == [0.5, 0.5, 1.0, 1.0]


@every_kind
def test_masters_are_copied_counted_and_reset_with_the_other_states(name):
    run = run_of(name, master_weights=True).steps(0, 2)
    copied = copy.deepcopy(run)
    assert copied.optimizer.state_bytes() == run.optimizer.state_bytes()
    assert run.optimizer.state_bytes()["master_param"] == 4 * sum(p.numel() for p in run.params)
    same(copied.steps(2, 3).result(), run.steps(2, 3).result())
    empty = {"state": {}, "param_groups": run.optimizer.state_dict()["param_groups"]}
    run.optimizer.load_state_dict(empty)
    for p in run.params:
        assert torch.equal(run.optimizer.state[p]["master_param"], p.detach().float())


@on_ranks(3)
def test_masters_move_on_ranks_that_have_no_gradient_but_others_have():
    run = run_of("Muon", "elements", master_weights=True).steps(0, 1)
    run.give(1)
    for p in run.params if dist.get_rank() else ():
        p.grad = None
    run.optimizer.step()
    result = run.result()
    for name, _ in run.module.named_parameters():
        assert torch.equal(result[name], result[f"{name} master_param"].bfloat16())
        assert not torch.equal(result[name], tensors(SHAPES, 0, BF16)[int(name[1:])])


@every_kind
def test_fp32_parameters_are_the_same_with_and_without(name):
    choices: tuple[dict[str, bool], ...] = ({}, {"stochastic_rounding": True}, {"master_weights": True})
    runs = [run_of(name, dtype=torch.float32, **choice) for choice in choices]
    for number in range(2):
        for run in runs:
            give_bf16(run, number)
            run.optimizer.step()
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run.params, runs[0].params, strict=True))


def test_fp32_parameters_next_to_narrow_ones_have_no_masters():
    wide, narrow = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = AdamW([wide, narrow], master_weights=True)
    assert "master_param" not in optimizer.state[wide]
    assert optimizer.state[narrow]["master_param"].dtype == torch.float32


@every_kind
def test_seeds_give_other_bits(name):
    def trained(seed):
        run = run_of(name, shapes=((64, 8),), stochastic_rounding=True)
        run.optimizer.param_groups[0]["seed"] = seed
        return run.steps(0, 3).params[0]

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


# The GPU's NaN, the CPU's, the smallest and the largest payloads; infinities; the largest finite number and zeros.
EXTREMES = (0x7FFFFFFF, 0x7FC00000, 0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7F800000, 0x7F7F0000, 0)


def with_both_signs(bits):
    return torch.cat([bits, bits | -(1 << 31)]).to(torch.int32)


def rounded(bits, step=1):
    out = torch.zeros(len(bits), dtype=torch.bfloat16)
    Rounder(len(bits), bits.device)(bits.clone().view(torch.float32), out, 0, "w", step, 0)
    return out


@pytest.mark.parametrize("step", [1, 2, 3])
def test_every_nan_stays_nan_whatever_its_payload_and_sign(step):
    payloads = torch.randint(1, 1 << 23, (1 << 16,), generator=torch.Generator().manual_seed(step))
    ends = torch.cat([torch.arange(1, 1 << 10), torch.arange((1 << 23) - (1 << 10), 1 << 23)])
    upper = torch.arange(1, 1 << 7) << 16  # with every upper half, an empty and a full lower one
    bits = with_both_signs(0x7F800000 | torch.cat([payloads, ends, upper, upper | 0xFFFF, upper - 1 | 1]))
    assert rounded(bits, step).isnan().all()


def test_infinities_zeros_and_numbers_that_bf16_has_stay_what_they_are():
    bits = with_both_signs(torch.tensor(EXTREMES))
    wide = bits.view(torch.float32)
    for step in range(8):
        found = rounded(bits, step).float()
        assert torch.equal(found.isnan(), wide.isnan())
        assert torch.equal(found[~wide.isnan()], wide[~wide.isnan()])
        assert torch.equal(found[~wide.isnan()].signbit(), wide[~wide.isnan()].signbit())


def test_a_long_stretch_gets_the_bits_of_its_pieces_and_small_buffers_are_enough():
    wide = torch.randn(CHUNK + 100, generator=torch.Generator().manual_seed(0))
    start = (1 << 32) - 50  # the lower half of the index begins again within
    whole, pieces = torch.zeros(2, len(wide), dtype=torch.bfloat16).unbind()
    Rounder(len(wide), wide.device)(wide.clone(), whole, 7, "w", 3, start)
    small = Rounder(1000, wide.device)
    for low in range(0, len(wide), 70_001):
        small(wide[low : low + 70_001].clone(), pieces[low : low + 70_001], 7, "w", 3, start + low)
    assert torch.equal(whole, pieces)
    assert ((whole.float() - wide).abs() <= wide.abs() / 128).all()  # a neighbor of bf16
    assert not torch.equal(whole, wide.bfloat16())


class ForeachDtypes(TorchDispatchMode):
    """Notes foreach ops whose lists have tensors of several dtypes, which CUDA does one by one; copies it does not."""

    def __init__(self):
        super().__init__()
        self.seen, self.mixed = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_foreach_" in (name := str(func)):
            self.seen += 1
            dtypes = {
                t.dtype
                for some in args
                if isinstance(some, (list, tuple))
                for t in some
                if torch.is_tensor(t)
            }
            self.mixed += [name] * ("_foreach_copy" not in name and len(dtypes) > 1)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", ["AdamW", "Muon", "Shampoo", "SOAP", "AdamW8bit"])
def test_foreach_ops_get_tensors_of_one_dtype(case):
    narrow = [
        torch.nn.Parameter(t.to(d))
        for t, d in zip(tensors(SHAPES, 0), (BF16, torch.float32, BF16), strict=True)
    ]
    optimizer = runs.make(case, narrow)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with ForeachDtypes() as mode:
        for _ in range(2):
            for p in narrow:
                p.grad = torch.randn_like(p)
            optimizer.step()
    assert mode.mixed == []
    assert mode.seen
