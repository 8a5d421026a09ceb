"""One algorithm of an optimizer: its options, its states, its update.

A `BlockOptimizer` has one, which it is itself; a `Mixed` has several.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from block_optim.core.gradients import StepGradients
from block_optim.core.options import check_lr, reject_unsupported
from block_optim.core.params import Group, Param
from block_optim.core.policy import BlockRequest, Policy, make_policy
from block_optim.core.rounding import check_precision
from layout_planner import Block
from ragged_shard.dist import DISTRIBUTED


class Algorithm:
    """The methods and attributes that a subclass of `BlockOptimizer` may define; the attributes are described there."""

    format_options: ClassVar[tuple[str, ...]] = ()
    recorded_options: ClassVar[tuple[str, ...]] = ()
    shared_options: ClassVar[tuple[str, ...]] = ()
    requires_blocks: ClassVar[bool] = False
    divides_copies: ClassVar[bool] = False
    replicate_mesh: DeviceMesh | None = None
    defaults: dict[str, Any]  # the options of a group and their defaults
    state: Any  # the states of the optimizer's parameters

    def _reset(self) -> None:
        self.members: list[Param] = []  # the algorithm's parameters, in the groups' order
        self.trained: list[Param] = []  # those with states: they require gradients, or have had one
        self.known_options: dict[int, Group] = {}  # when groups were last checked, by the group's id
        self.setup()

    # ---------------------------------------------------------------- methods that a subclass may define

    def check_options(self, group: Group) -> None:
        """Raise ValueError, naming it, if an option does not fit; called again when a group's options change.

        May put options into their final form in ``group``.
        """

    def check_group(self, group: Group, params: list[Param]) -> None:
        """Raise ValueError, naming it, if a new parameter does not fit its group; it has no states yet."""

    def init_states(self, group: Group, params: list[Param]) -> None:
        """Fill ``self.state[p.tensor]``, a dict, for every `Param`. Called when parameters of a group begin to train.

        Make states of a parameter's shape by ``p.zeros(dtype)``: they are placed as it is, and checkpoints reshard
        them; of other shapes by ``p.zeros(dtype, shape=...)``. A plain tensor of one dimension or more is refused if
        the parameter is sharded.
        """
        raise NotImplementedError

    def update(self, active: StepGradients) -> None:
        """Update the parameters that have gradients; `StepGradients` iterates over (`Param`, this rank's gradient).

        A parameter's options are in ``p.group``, its memory is ``p.local``, and a state's memory is
        ``local_of(self.state[p.tensor][name])``.
        """
        raise NotImplementedError

    def read_saved(self, param: Param, saved: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's state from a state dict, in the form that `init_states` gives it.

        ``options`` are those of its group in the state dict. Raises ValueError, naming the parameter, for a state that
        this optimizer cannot read.
        """
        return saved

    @classmethod
    def block_of(cls, name: str, param: torch.Tensor, options: Mapping[str, Any]) -> Block | None:
        """The block of ``param`` that must not be split across ranks under these options, or None."""
        return None

    def setup(self) -> None:
        """Initialize fields that `init_states` and `update` use; before parameters are added, and when unpickled."""

    def prepare(self) -> None:
        """Called once when the constructor has added all groups. May communicate; `update` must not rely on it."""

    def invalidate(self) -> None:
        """Drop or renew everything derived from parameters, groups or the memory of states, which have changed."""

    def format_of(self, group: Group) -> dict[str, Any]:
        """The properties of a group's options on which the format of states depends."""
        return {key: group[key] for key in self.format_options if key in group}

    def check_blocks(self, params: list[Param]) -> None:
        """Raise ValueError if ranks cut a block of `block_of`; called if the optimizer `requires_blocks`."""
        for param in params:
            block = self.block_of(param.name, param.tensor, {**self.defaults, **param.group})
            if block is not None and param.numel:
                param.check_whole(block, type(self).__name__)

    # ---------------------------------------------------------------- block policy

    @classmethod
    def block_policy(
        cls,
        units: Iterable[torch.nn.Module] | None = None,
        world_size: int | None = None,
        *,
        max_padding: float = 0.05,
        **options: Any,
    ) -> Policy:
        """A policy ``(name, parameter) -> block or None`` for ``fully_shard(block_policy=...)``.

        Under it blocks are whole on a rank, so that this optimizer needs no communication for them. Without ``units``
        all do. With them, blocks that the optimizer can do without are kept whole only where they pad their unit by no
        more than ``max_padding``, the largest given up first. Communicates nothing.

        Args:
            units: the modules that `fully_shard` is called on, inner ones first.
            world_size: ranks over which a unit is sharded; needed with ``units``.
            max_padding: padding that whole blocks are worth, as a share of a unit's elements.
            options: the options that the optimizer is going to have.

        Raises:
            TypeError: an option that the optimizer does not have.
            ValueError: units without world_size.
        """
        chosen = cls.all_options(options)

        def request(name: str, param: torch.Tensor) -> BlockRequest:
            block = cls.block_of(name, param, chosen)
            return BlockRequest(name, tuple(param.shape), block, optional=not cls.requires_blocks)

        return make_policy(request, units, world_size, max_padding)

    @classmethod
    def all_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The constructor's options: these, and the defaults of the others. Raises TypeError for one that it lacks."""
        args = inspect.signature(cls).parameters.values()
        defaults = {a.name: a.default for a in args if a.name != "params" and a.kind is not a.VAR_KEYWORD}
        if unknown := sorted(options.keys() - defaults.keys()):
            raise TypeError(f"{cls.__name__} has no option {', '.join(map(repr, unknown))}")
        return {**defaults, **options}

    # ---------------------------------------------------------------- called by the optimizer

    def copied_attributes(self) -> dict[str, Any]:
        """The attributes that copies and pickles keep, besides groups and states."""
        return {name: getattr(self, name) for name in self.shared_options}

    def check(self, group: Group, params: list[Param]) -> None:
        """Raise ValueError if an option of a group does not fit, or one of these parameters of it."""
        group["lr"] = check_lr(group["lr"])
        reject_unsupported(group, self.defaults)
        self.check_options(group)
        self.check_group(group, params)
        if "stochastic_rounding" in self.defaults:
            check_precision(group, params)

    def check_format(self, own: Group, new: Group, how: str) -> None:
        """Raise ValueError if options on which the format of states depends differ."""
        expected, other = self.format_of(own), self.format_of(new)
        for key in expected:
            if key in other and expected[key] != other[key]:
                raise ValueError(
                    f"{how} {key}={other[key]!r}, this optimizer has {key}={expected[key]!r}; the format of the states "
                    "depends on it, so build an optimizer with the one that you want"
                )

    def replicas_of(self, tensor: torch.Tensor, name: str) -> DeviceMesh | None:
        """The mesh whose ranks divide the work on a parameter where each of them holds all of it."""
        if not self.divides_copies:
            return None
        if isinstance(tensor, DISTRIBUTED):
            return tensor.device_mesh
        mesh = self.replicate_mesh
        if mesh is not None and mesh.device_type != tensor.device.type:
            raise ValueError(
                f"{name} is on {tensor.device}, replicate_mesh is of {mesh.device_type!r} devices; give a mesh of the "
                "parameters' device"
            )
        return mesh

    def make_states(self, group: Group, params: list[Param]) -> None:
        """Make the states of parameters of one group; ValueError for a parameter or a placement that does not fit."""
        if self.requires_blocks:
            self.check_blocks(params)
        self.init_states(group, params)
        for param in params:
            for key, value in self.state[param.tensor].items():
                param.check_state(key, value)
