"""A parameter of Muon on this rank, as flat tensors: its elements, its states, and in a step its gradient."""

from collections.abc import Sequence

import torch

from block_optim.core._torch_compat import foreach_lerp_, local_of
from block_optim.core.holding import Holding
from block_optim.core.params import Param
from block_optim.muon.matrices import matrices_in
from ragged_shard import RaggedShard, StridedRaggedShard


class LocalParam:
    """One parameter's memory on this rank; `holding` has the elements on each rank that exchanges it."""

    def __init__(self, index: int, param: Param, holding: Holding) -> None:
        self.index, self.param, self.holding = index, param, holding
        matrices = matrices_in(param)
        self.columns = matrices[0].columns if matrices else 1  # of its matrices
        self.local = param.local.view(-1)  # this rank's elements of it, 1-D
        self.grad: torch.Tensor = self.local  # in a step its gradient, 1-D, in the buffer's dtype
        self.bind()

    def bind(self) -> None:
        """Use the memory that the states have now."""
        state = self.param.states
        self.momentum = local_of(state["momentum_buffer"]).view(-1)
        self.steps: torch.Tensor | None = state.get("step")  # number of updates, with stochastic rounding
        self._rows = local_of(state["second_moment"]).view(-1) if "second_moment" in state else None

    def refresh(self) -> None:
        """Renew `local` if the parameter has another address."""
        local = self.param.local
        if local.data_ptr() != self.local.data_ptr():
            self.local = local.view(-1)

    def rows(self, low: int, high: int) -> torch.Tensor:
        """NorMuon's second moments of the rows in local elements [low, high)."""
        assert self._rows is not None
        return self._rows[low // self.columns : high // self.columns]


def update_momenta(params: Sequence[LocalParam], mu: float) -> None:
    """m <- mu m + (1 - mu) g, as torch.optim.Muon has it, for parameters of one group."""
    for dtype in {p.momentum.dtype for p in params}:
        same = [p for p in params if p.momentum.dtype == dtype]
        foreach_lerp_([p.momentum for p in same], [p.grad for p in same], 1 - mu)


def muon_state(param: Param) -> dict[str, torch.Tensor]:
    """A parameter's states, zero: momentum in its dtype as in torch, with stochastic rounding at least in fp32."""
    if param.group["stochastic_rounding"]:
        wide = torch.promote_types(param.dtype, torch.float32)
        state = {"momentum_buffer": param.zeros(wide), "step": torch.zeros((), dtype=torch.float32)}
    else:
        state = {"momentum_buffer": param.zeros()}
    if param.group["normuon"]:
        state["second_moment"] = _row_state(param)
    return state


def _row_state(param: Param) -> torch.Tensor:
    """A zero fp32 state with a number for each row of the matrices; ValueError if a rank's elements end inside one."""
    matrices = matrices_in(param)
    columns = matrices[0].columns if matrices else max(int(param.shape[-1]), 1)
    flat = columns != param.shape[-1]  # flattened: rows are the first dimension alone
    shape = (param.shape[0], 1) if flat else (*param.shape[:-1], 1)
    if any(p.first % columns or p.width % columns for pieces in param.holding.by_rank for p in pieces):
        raise ValueError(
            f"{param.name}: placements {param.placements} of shape {tuple(param.shape)} cut inside rows, but "
            "NorMuon keeps a number for each row; lay it out with whole rows (a block policy of Rows(1), "
            "tensor parallelism along the first dimension), or leave the option off"
        )
    local_shape = (*param.local.shape[: 1 if flat else -1], 1)
    placements = list(param.placements)
    for axis, placement in enumerate(placements):
        # A cut between elements is now one between rows.
        if isinstance(placement, RaggedShard) and len(placement.dims) >= len(shape):
            placements[axis] = _with_dims(placement, len(shape) - 1)
            local_shape = (-1, 1)
    rows = param.local.numel() // columns
    local = torch.zeros(rows, dtype=torch.float32, device=param.device)
    return param.wrap(local.view(local_shape), shape, placements)


def _with_dims(placement: RaggedShard, count: int) -> RaggedShard:
    """A placement with the same shares of fewer leading dimensions."""
    if isinstance(placement, StridedRaggedShard):
        return StridedRaggedShard(range(count), placement.local_units, placement.split_factor)
    return RaggedShard(range(count), placement.local_units)
