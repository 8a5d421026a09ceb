"""The state that torch's own code reads from a sharded module: pipelining, composable APIs, trainers.

    torch.distributed.pipelining    fully_shard.state(m)._state_ctx.all_states[*]._fsdp_param_groups[*].post_backward()
                                    and ..._root_post_backward_final_callback(), after the last microbatch
    register_fsdp_forward_method    m._get_fsdp_state()._pre_forward(...), ._post_forward(...)
    share_comm_ctx                  sets _comm_ctx and _fsdp_param_groups[*].comm_ctx: means nothing here
    any of these on torch 2.11      _fsdp_param_group instead of _fsdp_param_groups
    replicate()                     an entry in the registry of composable APIs

The objects below answer with this package's units. They hold no other state.
"""

from typing import Any

from torch import nn

from .. import _torch_compat as compat
from .hooks import after_forward, before_forward
from .model import Member, member_of


class StateForTorch:
    """A unit, as torch takes it for the state of a module, and for its only group of parameters."""

    _comm_ctx: Any = None
    comm_ctx: Any = None

    def __init__(self, member: Member) -> None:
        self._member = member

    @property
    def _state_ctx(self) -> "StateForTorch":
        return self

    @property
    def all_states(self) -> "list[StateForTorch]":
        """One for each unit of the model."""
        members = [member_of(unit.modules[0]) for unit in self._member.passes.units]
        return [StateForTorch(member) for member in members if member is not None]

    @property
    def _fsdp_param_groups(self) -> "list[StateForTorch]":
        return [self]

    @property
    def _fsdp_param_group(self) -> "StateForTorch":
        return self

    def post_backward(self) -> None:
        """Free the parameters and start reducing the gradients, also ones written past autograd's hooks."""
        self._member.passes.leave_backward_by_hand(self._member.unit)

    def _root_post_backward_final_callback(self) -> None:
        self._member.passes.finish_backward()

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return before_forward(self._member, module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        return after_forward(self._member, module, output)


def attach(member: Member) -> None:
    """Let torch find a unit on its modules."""
    for module in member.unit.modules:
        compat.set_fsdp_state(module, StateForTorch(member))
