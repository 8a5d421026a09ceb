"""Assignment, memory and step of Muon's parameters, apart from the optimizer's options and states."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from block_optim.core.assign import digest
from block_optim.core.exchange import GradientPresence, TransferStream
from block_optim.core.gradients import StepGradients
from block_optim.core.holding import Holding
from block_optim.core.params import Group, Param, same_objects
from block_optim.core.scratch import Scratch
from block_optim.muon.assignment import AssignedMatrix, Assignment, DomainAssignment, assign_domain
from block_optim.muon.bucket import Bucket, Orthogonalize, run_pipeline
from block_optim.muon.layout import BucketLayout
from block_optim.muon.local import LocalParam, update_momenta
from block_optim.muon.matrices import matrices_in
from block_optim.muon.newton_schulz import flops_of, steps_of
from ragged_shard.dist import movable


@dataclass
class _Domain:
    """The matrices that one process group exchanges, on one device."""

    device: torch.device
    holding: Holding  # of one of its parameters: the group, and this rank in it
    lane: TransferStream
    matrices: list[AssignedMatrix] = field(default_factory=list)


class MuonEngine:
    """Built from all parameters and their options; built again when either changes.

    Building it communicates one all_reduce of 16 bytes for each process group, and raises ValueError on ranks whose
    assignments differ.
    """

    def __init__(self, params: Sequence[Param], bucket_bytes: int, orthogonalize: Orthogonalize) -> None:
        self.params, self._steps = list(params), _steps(params)
        self._orthogonalize = orthogonalize
        self._index = {id(param.tensor): i for i, param in enumerate(params)}
        self._group_of = [p.group for p in params]
        self._groups = list({id(group): group for group in self._group_of}.values())
        self._locals: list[LocalParam] = []
        domains = self._find_domains(params)
        assignments = [assign_domain(d.matrices, d.holding.num_ranks, bucket_bytes) for d in domains]
        self.assignment = Assignment(tuple(assignments))
        for domain, assigned in zip(domains, assignments, strict=True):
            _check_equal(digest(assigned.fingerprint, _options(self._groups)), domain)
        # Laid out once without memory, so that every buffer is allocated at its largest.
        devices = dict.fromkeys(d.device for d in domains)
        measured = {device: Scratch(torch.device("meta")) for device in devices}
        self._make_buckets(domains, assignments, measured)
        self._scratch = {device: Scratch(device) for device in devices}
        for device, scratch in self._scratch.items():
            scratch.reserve(measured[device])
        self._buckets = self._make_buckets(domains, assignments, self._scratch)
        # For each process group: the all_reduce of which gradients exist, and the parameters that are exchanged.
        self._presence: list[tuple[GradientPresence, list[int]]] = []
        for domain, assigned in zip(domains, assignments, strict=True):
            exchanged = sorted({m.param for m in assigned.matrices if m.bytes_sent})
            group = domain.holding.group
            if group is not None and exchanged:
                copies = [params[i].name for i in exchanged] if domain.holding.copies else []
                presence = GradientPresence(group, len(exchanged), domain.device, copies)
                self._presence.append((presence, exchanged))

    def _find_domains(self, params: Sequence[Param]) -> list[_Domain]:
        domains: dict[tuple[torch.device, str | None, bool], _Domain] = {}
        numbers = {id(group): i for i, group in enumerate(self._groups)}
        for i, param in enumerate(params):
            device, matrices = param.device, matrices_in(param)
            holding = param.work_holding([[m.range] for m in matrices])
            self._locals.append(LocalParam(i, param, holding))
            key = (device, None if holding.group is None else holding.group.group_name, holding.copies)
            if key not in domains:
                domains[key] = _Domain(device, holding, TransferStream(device))
            steps = steps_of(param.group["ns_coefficients"], param.group["ns_steps"])
            for k, m in enumerate(matrices):
                holders = holding.holders(m.range)
                copies = holding.num_ranks if holding.copies else 0
                if holders or copies:  # else it is on other ranks, along an axis without exchange
                    name = param.name if len(matrices) == 1 else f"{param.name}[{k}]"
                    flops = flops_of(m.rows, m.columns, steps)
                    number = numbers[id(param.group)]
                    domains[key].matrices.append(AssignedMatrix(name, i, number, m, holders, flops, copies))
        return list(domains.values())

    def _make_buckets(
        self, domains: list[_Domain], assigned: list[DomainAssignment], scratches: dict[torch.device, Scratch]
    ) -> list[Bucket]:
        buckets: list[Bucket] = []
        for domain, assignment in zip(domains, assigned, strict=True):
            by_bucket: list[list[AssignedMatrix]] = [[] for _ in range(assignment.num_buckets)]
            for m in assignment.matrices:
                by_bucket[m.bucket].append(m)
            for matrices in by_bucket:
                matrices.sort(key=lambda m: (m.matrix.rows, m.matrix.columns))
                group = self._groups[matrices[0].group]
                layout = BucketLayout(
                    matrices,
                    self._locals,
                    domain.holding,
                    normuon=group["normuon"],
                    number=len(buckets),
                    scratch=scratches[domain.device],
                )
                buckets.append(Bucket(layout, group, self._orthogonalize, domain.lane))
        return buckets

    def fits(self, params: Sequence[Param]) -> bool:
        """Whether it was built for these parameters, in these groups, and for the options that they have now."""
        grouped = same_objects([p.group for p in params], self._group_of)
        return same_objects(list(params), self.params) and grouped and _steps(params) == self._steps

    def bind(self) -> None:
        """Use the memory that the states have now."""
        for local in self._locals:
            local.bind()

    def step(self, gradients: StepGradients) -> None:
        """One update of the parameters that have gradients on some rank."""
        local_grads = {self._index[id(param.tensor)]: grad for param, grad in gradients}
        active = self._agree(local_grads)
        by_group: dict[int, list[LocalParam]] = {}
        for i in sorted(active):
            local = self._locals[i]
            local.refresh()
            if local.steps is not None:
                local.steps += 1
            grad = local_grads.get(i)
            if grad is None:  # another rank has a gradient for it; this rank contributes zeros
                grad = torch.zeros_like(local.local)
            local.grad = grad.reshape(-1).to(local.momentum.dtype)
            by_group.setdefault(id(local.param.group), []).append(local)
        for some in by_group.values():
            update_momenta(some, some[0].param.group["momentum"])
        # Tensors are copied to the CPU, so that the host waits once; arithmetic stays in their dtype, as in torch.
        rates = {id(g): g["lr"] for g in self._groups}
        rates |= {key: lr.detach().cpu() for key, lr in rates.items() if isinstance(lr, torch.Tensor)}
        run_pipeline(self._buckets, active, rates)
        for i in active:  # release the gradients
            self._locals[i].grad = self._locals[i].local

    def _agree(self, grads: Mapping[int, torch.Tensor]) -> frozenset[int]:
        """The parameters to update: those with a gradient on this rank, or, if exchanged, on any rank."""
        results = [(flag.all_reduce([i in grads for i in params]), params) for flag, params in self._presence]
        active = set(grads)
        for result, params in results:
            active.update(i for i, exists in zip(params, result(), strict=True) if exists)
        return frozenset(active)


def _steps(params: Sequence[Param]) -> list[Any]:
    """Copies of the options on which the owners depend, of each group."""
    groups = {id(p.group): p.group for p in params}.values()
    return [deepcopy([group["ns_coefficients"], group["ns_steps"]]) for group in groups]


def _options(groups: list[Group]) -> list[str]:
    """Options of groups, without parameters and without options that may be tensors."""
    left_out = ("params", "param_names", "lr", "initial_lr")
    return [repr(sorted((k, str(v)) for k, v in group.items() if k not in left_out)) for group in groups]


def _check_equal(mark: int, domain: _Domain) -> None:
    group = domain.holding.group
    if group is None or domain.device.type == "meta":  # of a plan, whose ranks cannot differ
        return
    both = movable(torch.tensor([mark, -mark], dtype=torch.int64, device=domain.device), group)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    highest, lowest = both.tolist()
    if highest != -lowest:
        raise ValueError(
            "the ranks of a process group assign Muon's matrices differently: their parameters, groups or options "
            "differ; build the optimizer from the same parameters in the same order with the same options on every rank"
        )
