"""Cases of parallelism: each trains on 4 ranks with this runtime or FSDP2, and says how far it is from one process.

    @case("A unit", "dense and experts on meshes of their own", counts={"all_gather": 4, "reduce_scatter": 4})
    def two_meshes(fsdp):                      # fsdp: fsdp_runtime or torch.distributed.fsdp; runs on every rank
        return train(fsdp, build, wrap, loss)

Tests hold this runtime to the numbers of one process and to the exact counts; `checks/parallel.py` writes a table of
where FSDP2 differs.
"""

import importlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from runtime_helpers import full
from torch import nn

from ragged_shard.testing import record_collectives

IMPLEMENTATIONS = {"ours": "fsdp_runtime", "fsdp2": "torch.distributed.fsdp"}
MODULES = ("cases_ep", "cases_tp", "cases_pp", "cases_cp", "cases_checkpoints")
RANKS = 4
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(frozen=True)
class Outcome:
    """What a case found on one rank, or on all of them (`worst_of`). Distances are from a single plain process.

    Attributes:
        loss: the largest distance of a step's loss, relative to it.
        gradients: the largest distance of a gradient after clipping, relative to the tensor's largest value.
        norm: the largest distance of a step's norm, relative to it; or why there is none; None: the case does not clip.
        counts: collectives of the last step, by kind.
        bytes_sent: in them, by this rank.
    """

    loss: float
    gradients: float
    norm: float | str | None = None
    counts: Mapping[str, int] | None = None
    bytes_sent: float = 0.0


@dataclass(frozen=True)
class Case:
    """A function of the implementation, and what it must give with ours: one process's numbers and these counts.

    Attributes:
        counts: collectives of rank 0 in the last step, by kind; None: not checked.
        bound: on every distance.
        only_ours: why FSDP2 is not asked.
        since: the torch that ours needs for it.
    """

    name: str
    section: str
    text: str
    fn: Callable[[Any], Outcome]
    counts: Mapping[str, int] | None = None
    bound: float = 1e-5
    only_ours: str = ""
    since: tuple[int, int] = (2, 11)


CASES: dict[str, Case] = {}


def case(section, text, *, name="", **options):
    """Enter a case, with options of `Case`. The name defaults to the function's."""

    def enter(fn: Callable[[Any], Outcome]) -> Callable[[Any], Outcome]:
        entered = name or fn.__name__
        assert entered not in CASES, f"two cases called {entered}"
        CASES[entered] = Case(entered, section, text, fn, **options)
        return fn

    return enter


def of_values(record: Any) -> list[str]:
    """Kinds of the collectives, but of the exchange of the parameters that were used."""
    return [event.kind for event in record.events if event.kind != "all_reduce" or event.bytes_sent >= 128]


def counts(*numbers: int, **kinds: int) -> dict[str, int]:
    """Collectives by kind, those that there are; numbers are in the order of `KINDS`."""
    return {
        kind: count for kind, count in {**dict(zip(KINDS, numbers, strict=False)), **kinds}.items() if count
    }


def all_cases() -> dict[str, Case]:
    for module in MODULES:
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module)
    return CASES


# -- on a rank ---------------------------------------------------------------------------------------------------------


def run_case(name: str, implementation: str) -> Outcome | str:
    """What the case found on this rank, or its error: type and first line."""
    entry = all_cases()[name]
    torch.manual_seed(0)
    try:
        return entry.fn(importlib.import_module(IMPLEMENTATIONS[implementation]))
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"


def run_cases(names: list[str], implementation: str) -> dict[str, Outcome | str]:
    """Several, one after another in one process group."""
    return {name: run_case(name, implementation) for name in names}


def worst_of(found: list[Outcome | str]) -> Outcome | str:
    """Of all ranks: the largest distances, most bytes, and rank 0's counts; or an error."""
    errors = [one for one in found if isinstance(one, str)]
    if errors:
        return errors[0]
    outcomes = [one for one in found if isinstance(one, Outcome)]
    norms = [one.norm for one in outcomes]
    refused = [norm for norm in norms if not isinstance(norm, float)]
    return replace(
        outcomes[0],
        loss=max(one.loss for one in outcomes),
        gradients=max(one.gradients for one in outcomes),
        norm=refused[0] if refused else max(norm for norm in norms if isinstance(norm, float)),
        bytes_sent=max(one.bytes_sent for one in outcomes),
    )


def problems(entry: Case, found: Outcome | str) -> list[str]:
    """What of an outcome of ours is not as it must be."""
    if isinstance(found, str):
        return [f"{entry.name}: {found}"]
    distances = {"loss": found.loss, "gradients": found.gradients, "norm": found.norm}
    texts = [
        f"{what} {value} from one process"
        for what, value in distances.items()
        if isinstance(value, str) or (value is not None and not value <= entry.bound)
    ]
    # All-reduces also compare titles and used parameters, as many as there are meshes: the others are exact.
    moved, expected = (
        {kind: count for kind, count in (counts or {}).items() if kind != "all_reduce"}
        for counts in (found.counts, entry.counts)
    )
    if entry.counts is not None and moved != expected:
        texts.append(f"collectives {dict(found.counts or {})}, expected {dict(entry.counts)}")
    return [f"{entry.name}: {text}" for text in texts]


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


# -- training ----------------------------------------------------------------------------------------------------------

Loss = Callable[[nn.Module, Any], torch.Tensor]


def train(fsdp, build, wrap, loss, *, batches, share, clip=0.5, scale=1.0, clip_with=None) -> Outcome:
    """Train a wrapped model on this rank's share, and an untouched twin on everything, for three steps.

    Args:
        build: the model, whose parameters follow from the seed.
        wrap: `(fsdp, model)`: parallelize and shard it, in place.
        loss: of the model and a batch: a mean, so that the mean over ranks is that of the whole batch.
        batches: the whole batch of a step.
        share: of a whole batch, this rank's.
        clip: the norm to clip to; None: do not.
        scale: the loss is multiplied by this before backward; for trainers that divide gradients themselves.
        clip_with: `(parameters, max_norm) -> norm`. Defaults to torch's.
    """
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(0)
    twin = build()
    wrap(fsdp, model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin)]
    outcome = Outcome(0.0, 0.0)
    for step in range(3):
        whole = batches(step)
        with record_collectives() as record:
            found = loss(model, share(whole))
            (found * scale).backward()
            norm = _clipped(model, clip, clip_with or nn.utils.clip_grad_norm_)
        wanted = loss(twin, whole)
        wanted.backward()
        outcome = _compared(outcome, model, twin, average(found), wanted.item(), norm, clip)
        outcome = replace(outcome, counts=dict(Counter(of_values(record))), bytes_sent=record.bytes_sent)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return outcome


def _clipped(model, clip, clip_with) -> float | str | None:
    if clip is None:
        return None
    try:
        norm = clip_with(model.parameters(), clip)
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return full(norm).item()


def _compared(so_far, model, twin, found, wanted, norm, clip) -> Outcome:
    distance: float | str | None = norm
    if clip is not None and not isinstance(norm, str):
        assert norm is not None
        expected = nn.utils.clip_grad_norm_(twin.parameters(), clip).item()
        distance = max(
            abs(norm - expected) / expected, so_far.norm if isinstance(so_far.norm, float) else 0.0
        )
    return Outcome(
        max(so_far.loss, abs(found - wanted) / abs(wanted)),
        max(so_far.gradients, gradient_distance(model, twin)),
        distance,
    )


def gradient_distance(model: nn.Module, twin: nn.Module) -> float:
    """The largest, relative to each tensor's largest value; infinite where only one of the two has a gradient."""
    worst = 0.0
    for (name, param), plain in zip(model.named_parameters(), twin.parameters(), strict=True):
        if (param.grad is None) != (plain.grad is None):
            raise AssertionError(f"{name}: gradient {param.grad}, in one process {plain.grad}")
        if param.grad is None or plain.grad is None:
            continue
        grad = full(param.grad)
        assert grad.shape == plain.grad.shape, f"{name}: {grad.shape}, expected {plain.grad.shape}"
        largest = plain.grad.abs().max().clamp_min(1e-6)
        worst = max(worst, ((grad - plain.grad).abs().max() / largest).item())
    return worst


def average(value: torch.Tensor) -> float:
    total = full(value).double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def rows_of(index: int, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A `share`: of `count` equal chunks of rows, this one."""
    return lambda whole: whole.chunk(count)[index]
