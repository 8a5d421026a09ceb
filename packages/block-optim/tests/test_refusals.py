"""Every call that is refused: (call, error, words). In one process, by every optimizer, and on every rank."""

import copy
import math
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from routing_helpers import make_model
from runs import BF16, KINDS, SHAPES, Run, every_kind, make, put, run_of, tensors, world_mesh
from test_ema import nn_of
from test_tensor_parallel import cut, pair
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from block_optim import EMA, SOAP, AdamW, AdamW8bit, Mixed, Muon, Param, Recipe, Shampoo, mixed_optimizer_for
from block_optim.muon.newton_schulz import steps_of
from layout_planner import Elements, Rows, Tile
from ragged_shard import held_boxes
from ragged_shard.testing import rank_mesh, run_ranks

ADAMS: tuple[Any, ...] = (AdamW, AdamW8bit)
ROOTS: tuple[Any, ...] = (Shampoo, SOAP)
NONE: dict[str, Any] = {}
KELLER = (3.4445, -4.7750, 2.0315)
Table = dict[str, tuple[Any, Any, str]]


def p(*shape, dtype=torch.float32):
    return nn.Parameter(torch.zeros(shape or (4, 4), dtype=dtype))


def twice(call):
    """A call that is refused, and refused again."""
    with pytest.raises((ValueError, KeyError)):
        call()
    call()


def step(run):
    run.give(1)
    twice(run.optimizer.step)


def edited(case, edit):
    """Steps after an edit of the optimizer."""
    run = run_of(case).steps(0, 1)
    edit(run.optimizer)
    step(run)


def record_other_blocks(optimizer):
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first]["format"] = torch.tensor(1_000000002_000000003)


def add_late(optimizer, param):
    optimizer.param_groups[0]["params"].append(param)
    optimizer.param_groups[0]["param_names"].append("late")


class NoState(AdamW):
    """Has no states for one parameter."""

    def init_states(self, group, params):
        if any(p.name == "late" for p in params):
            raise ValueError("late: no states")
        super().init_states(group, params)


def without_states():
    run = Run(NoState, shapes=SHAPES)
    add_late(run.optimizer, p())
    step(run)


def load(optimizer, saved, **options):
    """Load the state dict of another optimizer, with other options in its first group."""
    saved = copy.deepcopy(saved.state_dict())
    saved["param_groups"][0].update(options)
    optimizer.load_state_dict(saved)


def load_torchs(**options):
    param = p()
    param.grad = torch.ones_like(param)
    reference = torch.optim.AdamW([param])
    reference.step()
    load(AdamW([p()]), reference, **options)


def routed(model=None, **options):
    return mixed_optimizer_for(model or make_model(), verbose=False, **options)


def mixed(**options):
    """Groups of AdamW that differ in an option."""
    key, values = options.popitem()
    return [{"params": [p()], "algorithm": "adamw", key: value} for value in values]


def add_groups(first, *others):
    optimizer = Mixed([first])
    for group in others:
        optimizer.add_param_group(group)


def stepped(optimizer, **options):
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step(**options)


def captured(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        call()


def ema(*weights, **options):
    return EMA(nn_of(weights or tensors(SHAPES, 0)), **{"decay": 0.9, **options})


def load_averages(change, updates=2):
    """Load ones as averages, with a change; None leaves one out. Nothing is loaded."""
    average = ema()
    ones = {name: torch.ones_like(value) for name, value in average.state_dict()["averages"].items()}
    values = {name: value for name, value in (ones | change).items() if value is not None}
    try:
        average.load_state_dict({"averages": values, "updates": updates})
    finally:
        assert not any(value.eq(1).all() for value in average.state_dict()["averages"].values())
        assert average.updates == 0


def inside_swapped(call):
    average = ema()
    with average.swapped():
        call(average)


def muon(*shape, **options):
    return Muon([("w", p(*(shape or (4, 4))))], **options)


def layer():
    return nn.Linear(8, 8)


ONE: Table = {
    **{f"{kind.__name__} {option}": (partial(kind, [p()], **{option: True}), ValueError, f"{option}=True")
       for kind in ADAMS for option in ("amsgrad", "capturable", "differentiable")},
    **{f"{kind.__name__} {option} of a group": (partial(kind, [{"params": [p()], option: True}]), ValueError,
                                                f"{option}=True")
       for kind in ADAMS for option in ("amsgrad", "capturable", "differentiable")},
    "another block": (lambda: load(run_of("AdamW8bit").optimizer, run_of("AdamW8bit", block=Tile(4, 8)).optimizer),
                      ValueError, "p0: its saved 8-bit states have blocks of tile:4x8, this optimizer has "
                      r"block='elements:8'; build it with block=Tile\(rows=4, columns=8\)"),
    "other scales": (lambda: load(run_of("AdamW8bit", block="auto").optimizer, run_of("AdamW8bit").optimizer),
                     ValueError, "p0: its .* blocks of elements:8, block='auto' gives it tile:1x256 here"),
    "another record": (lambda: edited("AdamW8bit", record_other_blocks), ValueError,
                       r"p0: its state's 'format' says blocks of tile:2x3, .* shape \(4, 2\); it has \(6,\)"),
    "fp32 states for codes": (lambda: load(run_of("AdamW8bit").optimizer, run_of("AdamW").optimizer), ValueError,
                              "p0: the saved state has .* this optimizer needs"),
    "a block of rows": (lambda: run_of("AdamW8bit", block=Rows(3)), ValueError, "Elements"),
    "betas of a group": (lambda: AdamW8bit([p()]).add_param_group({"params": [p()], "betas": (0.9, 1.0)}), ValueError,
                         "betas"),
    "torch's amsgrad": (lambda: load_torchs(amsgrad=True), ValueError,
                        r"param_groups\[0\] of the state dict: amsgrad=True"),
    "torch's betas": (lambda: load_torchs(betas=(0.9, 1.5)), ValueError, r"betas\[1\]=1.5"),
    "torch's coupled decay": (lambda: load_torchs(decoupled_weight_decay=False, weight_decay=0.1), ValueError,
                              "decoupled_weight_decay=False"),
    # -- edits
    "late parameter": (lambda: edited("AdamW", lambda o: add_late(o, nn.Parameter(torch.zeros(4, 4)[:, :2]))),
                       ValueError, "late: its memory has holes"),
    "late states": (without_states, ValueError, "late: no states"),
    "an option removed": (lambda: edited("AdamW", lambda o: o.param_groups[0].pop("betas")), KeyError, "betas"),
    **{f"{case} {key} edited": (partial(edited, case, lambda o, new={key: value}: o.param_groups[0].update(new)),
                                ValueError, key)
       for case, key, value in (
           ("AdamW", "fused", True), ("AdamW8bit", "block", Elements(16)), ("AdamW8bit", "quantize", False),
           ("AdamW8bit", "min_8bit_numel", 99), ("Muon", "normuon", True),
           ("Shampoo", "grafting", "none"), ("SOAP", "max_preconditioner_dim", 8), ("Mixed", "algorithm", "shampoo"))},
    **{f"{kind.__name__} capturable": (partial(kind, [{"params": [p()], "capturable": True}]), ValueError,
                                       "capturable=True") for kind in (Muon, *ROOTS)},
    "captured": (lambda: captured(lambda: stepped(AdamW([p()]))), RuntimeError, "step outside the graph"),
    # -- Mixed and routing
    "an override of nothing": (lambda: routed(overrides={"qvk": "adamw"}), ValueError,
                               r"overrides \['qvk'\] match no parameter of Model"),
    "an override to SGD": (lambda: routed(overrides={"qkv": "sgd"}), ValueError,
                           "'sgd' is not one of muon, adamw, adamw8bit, shampoo, soap"),
    "others are SGD's": (lambda: routed(others="sgd"), ValueError, "others='sgd'"),
    "betas for Muon": (lambda: routed(muon={"betas": (0.9, 0.95)}), ValueError,
                       "algorithm 'muon' has no option 'betas'"),
    "momentum for AdamW": (lambda: routed(adamw={"momentum": 0.9}), ValueError,
                           "algorithm 'adamw' has no option 'momentum'"),
    "nothing trains": (lambda: routed(nn.ReLU()), ValueError, "no parameter that requires a gradient"),
    "no algorithm": (lambda: Mixed([{"params": [("w", p())]}]), ValueError,
                     r"first: w\) has algorithm=None: expected one of muon"),
    "Mixed's policy": (lambda: Mixed.block_policy(), TypeError, "use Recipe"),
    "fused differs": (lambda: add_groups(*mixed(fused=(True, False))), ValueError,
                      "fused=False in one group, True in its first one"),
    "other algorithms": (lambda: load(routed(), routed(), algorithm="adamw8bit"), ValueError,
                         "saved with algorithm='adamw8bit'"),
    "a recipe's option": (lambda: Recipe(AdamW8bit, momentum=0.9), TypeError, "momentum"),
    "a model's recipe's option": (lambda: Recipe(make_model(), momentum=0.9), TypeError, "momentum"),
    "a recipe's others": (lambda: Recipe(make_model(), others="sgd"), ValueError, "others='sgd': expected"),
    "a recipe's muon": (lambda: Recipe(make_model(), muon={"betas": (0.9, 0.95)}), ValueError,
                        "algorithm 'muon' has no option 'betas'"),
    **{f"{kind.__name__}'s policy": (partial(kind.block_policy, blocks=3), TypeError,
                                     f"{kind.__name__} has no option 'blocks'") for kind in (*ADAMS, Muon, Shampoo)},
    "units without ranks": (lambda: Muon.block_policy([layer()]), ValueError, "needs world_size"),
    # -- Muon
    **{f"muon {options}": (partial(muon, **options), ValueError, words) for options, words in (
        ({"lr": -1.0}, "lr=-1.0"), ({"momentum": 1.0}, "momentum=1.0"), ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"ns_coefficients": "best"}, "'best' are not known"),
        ({"ns_coefficients": "quintic", "ns_steps": 4}, "belong together"), ({"adjust_lr_fn": "rms"}, "fn='rms'"),
        ({"matrices": (4, 1)}, "^w: .* are 5 rows, the tensor has 4"), ({"matrices": "heads:2"}, "expected .auto."),
        ({"matrices": (4, 0)}, "expected .auto."), ({"matrices": ()}, "expected .auto."))},
    "a vector": (lambda: muon(4), ValueError, r"^w: shape \(4,\) is not a matrix"),
    "columns first": (lambda: Muon([nn.Parameter(torch.zeros(4, 6).T)]), ValueError, "not row-major"),
    **{f"coefficients {numbers}": (partial(steps_of, *numbers), ValueError, words)
       for numbers, words in (
           (("kelller", None), "not known: use one of keller"), (("quintic", 3), "belong together"),
           (("deepseek_v4", 5), "belong together"), (([(1.0, 2.0)], None), "expected a list of triples"),
           (([], None), "expected a list of triples"), (([(1.0, math.nan, 0.0)], None), "finite"),
           (([KELLER, KELLER], 3), "belong together"), (("keller", 0), "from 1 to 99"),
           (("keller", 100), "from 1 to 99"))},
    # -- Shampoo and SOAP
    **{f"{kind.__name__} {options}": (partial(kind, [p()], **options), ValueError, words)
       for kinds, options, words in (
           ((Shampoo,), {"grafting": "lamb"}, "grafting='lamb'"),
           ((Shampoo,), {"root_epsilon": 0.0}, "0 < root_epsilon"),
           ((SOAP,), {"betas": (0.9, 1.0)}, r"betas\[1\]"), ((SOAP,), {"shampoo_beta": 1.5}, "shampoo_beta=1.5"),
           (ROOTS, {"max_preconditioner_dim": 1}, "use AdamW"),
           (ROOTS, {"precondition_frequency": 0}, "precondition_frequency=0"),
           (ROOTS, {"betas": (1.0, 0.9)}, r"betas\[0\]"),
           (ROOTS, {"lr": -1.0}, "lr="))
       for kind in kinds},
    **{f"{kind.__name__}, columns first": (partial(kind, [("head", nn.Parameter(torch.zeros(4, 6).t()))]), ValueError,
                                           "head: its memory is not row-major") for kind in ROOTS},
    # -- EMA
    **{f"ema {options}": (partial(ema, **options), ValueError, words) for options, words in (
        ({"decay": 1.0}, r"decay=1.0: expected a number in \[0, 1\)"), ({"decay": "fast"}, "decay='fast'"),
        ({"dtype": torch.float16}, "dtype=torch.float16: expected one of"),
        ({"dtype": torch.int8}, "dtype=torch.int8: expected one of"), ({"warmup": 1}, "warmup=1"))},
    "ema of nothing": (lambda: EMA(iter([]), 0.9), ValueError, "none of the 0 given tensors"),
    "ema of frozen": (lambda: EMA(tensors(SHAPES, 0), 0.9), ValueError, "none of the 3 given tensors requires"),
    "ema of one tensor": (lambda: EMA(p(), 0.9), TypeError, "one tensor"),
    "ema of names": (lambda: EMA(["lr"], 0.9), TypeError, "given 'lr': expected"),  # type: ignore[arg-type]
    "ema of equal names": (lambda: EMA([("w", p()), ("w", p())], 0.9), ValueError, "two parameters named 'w'"),
    "ema of fp64": (lambda: ema(torch.zeros(3, dtype=torch.float64), dtype=BF16), ValueError,
                    "p0: dtype=torch.bfloat16 .* torch.float64"),
    "ema, columns first": (lambda: ema(torch.zeros(2, 3).t().contiguous().t(), dtype=BF16), ValueError,
                           r"p0: dtype=torch.bfloat16 .* stride \(1, 2\)"),
    "ema, holes": (lambda: ema(torch.zeros(4, 4)[:, :2]), ValueError, "p0: its memory has holes"),
    "ema, update of averages": (lambda: inside_swapped(EMA.update), RuntimeError, r"update\(\) inside swapped\(\)"),
    "ema, swapped twice": (lambda: inside_swapped(lambda average: average.swapped().__enter__()), RuntimeError,
                           r"swapped\(\) inside swapped\(\)"),
    "ema, missing average": (lambda: load_averages({"p2": None}), ValueError,
                             "2 averages, this EMA 3; p2 is in one of them only"),
    "ema, another shape": (lambda: load_averages({"p2": torch.ones(4)}), ValueError,
                           r"EMA: state 'p2' has shape \(4,\), expected \(12, 4\)"),
    "ema, updates": (lambda: load_averages({}, -1), ValueError, "updates=-1"),
    "a strided shard": (lambda: held_boxes((8, 3), (2, 2), [_StridedShard(0, split_factor=4), Shard(0)], (0, 0)),
                        ValueError, "strided Shard is known only with the number of ranks"),
}  # fmt: skip


@pytest.mark.parametrize("row", ONE)
def test_a_call_that_makes_no_sense_is_refused_by_name(row):
    call, error, words = ONE[row]
    with pytest.raises(error, match=words):
        call()


# -- by every optimizer ------------------------------------------------------------------------------------------------


def set_option(case, how, key, value):
    run = run_of(case).steps(0, 1)
    optimizer, group = run.optimizer, run.optimizer.param_groups[-1]
    if how == "loaded":
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][-1][key] = value
        optimizer.load_state_dict(saved)
    elif how == "added":
        optimizer.add_param_group({**group, "params": [p()], "param_names": ["late"], key: value})
    else:
        group[key] = value
        step(run)


def reshaped(case, how, steps):
    """Steps after `.data` of a parameter was set to memory of another shape, order or dtype."""
    run = run_of(case).steps(0, steps)
    param = run.params[0]
    param.grad, param.data = None, how(param)
    param.grad = torch.ones_like(param)
    twice(run.optimizer.step)


def sparse(case):
    optimizer = make(case, [("p0", param := p())])
    param.grad = torch.ones_like(param).to_sparse()
    optimizer.step()


def kind_of(case):
    return Mixed if case == "Mixed" else KINDS[case][0]


def again(case):
    param = p()
    make(case, [("p0", param)]).add_param_group({"params": [("again", param)], "algorithm": "muon"})


SHAPE = r"its \.data was set"
EVERY: Table = {  # of a case
    "no such argument": (lambda case: kind_of(case)([("p0", p())], lrr=0.1), TypeError, "KIND.*'lrr'"),
    "no parameters": (lambda case: make("AdamW" if case == "Mixed" else case, []), ValueError, "empty parameter list"),
    "no leaf": (lambda case: make(case, [("p0", p() * 2)]), ValueError, "can't optimize a non-leaf"),
    "two groups": (again, ValueError, "more than one parameter group"),
    "sparse": (sparse, RuntimeError, "p0: sparse gradients"),
    **{f"lr={lr}": (partial(lambda lr, case: run_of(case, lr=lr), lr), ValueError, "lr")
       for lr in (-0.1, math.nan, torch.tensor(-1.0), torch.zeros(2), "0.1", True, None, np.zeros(2))},
    **{f"{key} {how}": (partial(lambda *args: set_option(args[-1], *args[:-1]), how, key, value), ValueError,
                        f"{key}={value!r}")
       for key, value in {"lr": -0.1, "weight_decay": "much", "eps": -1.0, "stochastic_rounding": 1}.items()
       for how in ("loaded", "added", "edited")},
    **{f"{what}, {steps} steps": (partial(lambda how, steps, case: reshaped(case, how, steps), how, steps), ValueError,
                                  SHAPE)
       for steps in (0, 2) for what, how in {
           "fewer elements": lambda p: torch.zeros(4, 6), "another shape": lambda p: torch.zeros(p.shape[::-1]),
           "another order": lambda p: torch.zeros(p.shape[::-1]).T, "a view": lambda p: p.data.view(p.shape[::-1]),
           "a wider dtype": lambda p: p.data.double()}.items()},
    "fp16 rounded": (lambda case: run_of(case, dtype=torch.float16, stochastic_rounding=True), ValueError,
                     "p0: stochastic_rounding is for bf16 .* torch.float16"),
    "stochastic_rounding=1": (lambda case: run_of(case, dtype=BF16, stochastic_rounding=1), ValueError,
                              "stochastic_rounding=1: expected True or False$"),
}  # fmt: skip


@every_kind
def test_every_optimizer_refuses_by_name(case):
    name = kind_of(case).__name__
    table = {
        row: (partial(call, case), error, words.replace("KIND", name))
        for row, (call, error, words) in EVERY.items()
    }
    problems = missed(table)
    assert not problems


def missed(table):
    """The rows of a table that are not refused, or in other words."""
    problems = []
    for name, (call, error, words) in table.items():
        try:
            call()
        except Exception as raised:
            if not isinstance(raised, error) or not re.search(words, str(raised)):
                problems.append(f"{name}: {raised!r}")
        else:
            problems.append(f"{name}: not refused")
    return problems


# -- on every rank -----------------------------------------------------------------------------------------------------


def by_torch(placement, *shape, dtype=torch.float32):
    return nn.Parameter(put(torch.ones(shape, dtype=dtype), world_mesh(), [placement]))


def state_removed(case):
    run = run_of(case, "elements").steps(0, 2)
    state = run.optimizer.state[run.params[2]]
    state.pop(next(iter(state)))
    state["other"] = torch.zeros(1)
    run.step(9)


def cast(case, layout):
    """Steps after a model was cast, of which some ranks hold nothing."""
    run = run_of(case, layout, shapes=((2, 6), (1, 8))).steps(0, 2)
    for param in run.params:
        param.grad = None
    run.module.double()
    run.dtype = torch.float64
    step(run)


def built_before_to_empty(kind):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
    fully_shard(model)
    optimizer = kind(list(model.named_parameters()))
    model.to_empty(device="cpu")
    stepped(optimizer, grad_norm=1.0)


def awaits_a_reduction():
    Param(
        nn.Parameter(DTensor.from_local(torch.ones(2, 6), world_mesh(), [Partial()]), requires_grad=False),
        "head",
    )


def differ(key, values):
    Muon([by_torch(Shard(0), 4, 4)], **{key: values[dist.get_rank() % 2]})


def tensor_parallel(case, **options):
    pair(case, (24, 16), cut(2, (0,), [2, 1], 1), **options)


RANKS: dict[int, Table] = {
    3: {
        "a tile is cut": (lambda: AdamW8bit([("w", by_torch(Shard(0), 100, 64))], block=Tile(32, 32)), ValueError,
                          "w: what rank 1 holds begins at element 2176, inside a block of tile:32x32"),
        "the way out": (lambda: AdamW8bit([("w", by_torch(Shard(0), 100, 64))], block=Elements(256)), ValueError,
                        r"block_policy=AdamW8bit\.block_policy"),
        "columns cut a block": (lambda: AdamW8bit([("w", by_torch(Shard(1), 100, 64))], block=Elements(256)),
                                ValueError, "w: .* its axes cut through blocks of elements:256; choose a block that"),
        "no automatic block": (lambda: AdamW8bit([("w", by_torch(Shard(1), 4, 3 * 4099))]), ValueError,
                               "w: 8-bit .* no block of 16 to 4096 elements divides the 4099 between"),
        "rounding of columns": (lambda: AdamW([("p", by_torch(Shard(1), 8, 2, dtype=BF16))], stochastic_rounding=True),
                                ValueError, "p: stochastic_rounding needs"),
        **{f"{case}, no state": (partial(state_removed, case), ValueError, "^p2: its state has no ")
           for case in ("AdamW", "Muon", "Shampoo", "Mixed")},
        **{f"{case} cast, {layout}": (partial(cast, case, layout), ValueError, "p0: it has precision double")
           for layout in ("shard", "one rank") for case in ("AdamW", "Muon", "Shampoo", "SOAP")},
        **{f"{kind.__name__} before to_empty": (
            partial(built_before_to_empty, kind), ValueError,
            r"0\.weight: it has memory its own, and had memory none \(meta\) when its states")
           for kind in (*ADAMS, Muon, *ROOTS)},
        "a partial sum": (awaits_a_reduction, ValueError, "head: a parameter with placements .* awaits a reduction"),
        **{f"{key} differ": (partial(differ, key, values), ValueError, "assign Muon's matrices differently")
           for key, values in {"ns_steps": (4, 5), "ns_coefficients": ("keller", "quintic")}.items()},
        "a group for a mesh": (lambda: run_of("Muon", replicate_mesh=dist.group.WORLD), TypeError,
                               "replicate_mesh=.*: expected a DeviceMesh; .*DeviceMesh.from_group"),
        "a mesh elsewhere": (
            lambda: Muon([("w0", nn.Parameter(torch.zeros(4, 4, device="meta")))], replicate_mesh=rank_mesh(3)),
            ValueError, "w0 is on meta, replicate_mesh is of 'cpu' devices"),
        "ema, bf16 columns": (lambda: EMA([("p", by_torch(Shard(1), 8, 2))], 0.9, dtype=BF16), ValueError,
                              "p: dtype=torch.bfloat16 needs .* one contiguous run"),
    },
    4: {
        "tp, tiles": (lambda: tensor_parallel("AdamW8bit", block=Tile(4, 16)), ValueError, "^p0: .*cut through blocks"),
        "tp, elements": (lambda: tensor_parallel("AdamW8bit", block=Elements(8)), ValueError,
                         "^p0: .*cut through blocks"),
        "tp, rows": (lambda: tensor_parallel("NorMuon"), ValueError,
                     r"^p0: .*cut inside rows, .*a block policy of Rows\(1\)"),
    },
}  # fmt: skip


def missed_on_ranks(number):
    return missed(RANKS[number])


@pytest.mark.parametrize("number", RANKS)
def test_every_rank_refuses(number):
    assert run_ranks(number, missed_on_ranks, number, timeout=200) == [[]] * number
