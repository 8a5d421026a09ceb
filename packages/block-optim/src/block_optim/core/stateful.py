"""The parameters, options and states of an optimizer: torch's contract.

    param_groups    read in each step: parameters, and options
    states          made when a parameter is added that trains, or begins to train (so that checkpoints have where to
                    load to before the first step), in the parameter's placement; again if the user removed or
                    assigned some of them, with the values that were assigned
    state dicts     copied into the states that are there, which keep their memory

Nothing here communicates.
"""

from collections import defaultdict
from copy import deepcopy
from itertools import chain
from typing import Any

import torch

from block_optim.core._torch_compat import load_hooks, local_of
from block_optim.core.algorithm import Algorithm
from block_optim.core.options import EXECUTION_OPTIONS, check_lr, check_lr_value
from block_optim.core.params import Group, Param, same_objects
from ragged_shard import distribute_like
from ragged_shard.dist import DISTRIBUTED


class Stateful(Algorithm, torch.optim.Optimizer):
    """Base of `BlockOptimizer`, without a step."""

    def _reset(self) -> None:
        self._params: dict[torch.Tensor, Param] = {}  # all in the groups, in their order
        self._frozen: list[torch.Tensor] = []  # parameters without states
        self._made: list[tuple[Param, str, torch.Tensor]] = []  # all states, and their addresses
        self._addresses: list[int] = []
        # Groups and their parameters at the last look; kept, so that ids stay theirs.
        self._look: list[Any] = []
        super()._reset()

    def _algorithm_of(self, group: Group) -> Algorithm:
        """The algorithm of a group, which is in the optimizer or was."""
        return self

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, optionally with other options; states of trained ones exist when this returns.

        Raises:
            ValueError: an option or a parameter that does not fit, named; the optimizer is as it was.
        """
        super().add_param_group(param_group)
        try:
            self._read_groups()
            self._read_states()
        except BaseException:
            for tensor in self.param_groups.pop()["params"]:
                self.state.pop(tensor, None)
            self._read_groups()
            self._bind()
            raise

    def _read_groups(self) -> None:
        """Take over the groups' parameters, also added, moved and removed ones. Raises before it changes anything."""
        params: dict[torch.Tensor, Param] = {}
        moved: list[tuple[Param, Group]] = []
        for group in self.param_groups:
            algorithm, is_new = self._algorithm_of(group), id(group) not in self.known_options
            for key, value in algorithm.defaults.items() if is_new else ():
                group.setdefault(key, value)
            before, fresh = len(params), []
            for i, tensor in enumerate(group["params"]):
                param = self._params.get(tensor)
                if param is None:
                    param = self._param(group, i, before)
                    fresh.append(param)
                elif param.group is not group:
                    how = f"{param.name} was moved to a group with"
                    algorithm.check_format(self.known_options[id(param.group)], group, how)
                    fresh.append(param)
                    moved.append((param, group))
                params[tensor] = param
            if fresh or is_new:
                algorithm.check(group, fresh)
                check_lr_value(group["lr"])
        for param, group in moved:
            param.group = group
        for group in self.param_groups:
            if "param_names" in group:
                group["param_names"] = [params[tensor].name for tensor in group["params"]]
        for tensor in self._params.keys() - params.keys():
            self._params[tensor].states = None
            for key, value in self.state.get(tensor, {}).items():  # out of the memory of its neighbors' runs
                self.state[tensor][key] = value.clone() if isinstance(value, torch.Tensor) else value
        self._params, self.members = params, list(params.values())
        known = self.known_options
        self.known_options = {id(g): known.get(id(g)) or self._options_of(g) for g in self.param_groups}
        self._look = [*self._members(), None]  # None: until their states are made, too

    def _members(self) -> list[Any]:
        return [member for group in self.param_groups for member in (group, *group["params"])]

    def _options_of(self, group: Group) -> Group:
        """A group's options, except ``lr``; an option that it lacks is ``...``."""
        names = self._algorithm_of(group).defaults
        return {name: deepcopy(group.get(name, ...)) for name in names if name != "lr"}

    def _param(self, group: Group, i: int, before: int) -> Param:
        """Parameter ``i`` of a group that comes after ``before`` parameters of other groups."""
        tensor, names = group["params"][i], group.get("param_names")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a group has {tensor!r} among its parameters: expected a tensor")
        name = names[i] if names else f"parameter {before + i} of shape {tuple(tensor.shape)}"
        return Param(tensor, name, group, self._algorithm_of(group).replicas_of(tensor, name))

    # ---------------------------------------------------------------- each step

    def _sync(self) -> None:
        """Read groups and states, which the user may have edited; KeyError or ValueError where they do not fit."""
        self._sync_options()
        state: Any = self.state  # torch's is a defaultdict; the user may have assigned another mapping
        self.state = state if isinstance(state, defaultdict) else defaultdict(dict, state)
        edited = not same_objects(self._members(), self._look)
        if edited or self._changed() or any(map(_trains, self._frozen)):
            self._read_groups()
            self._read_states()
        elif self._state_addresses() != self._addresses:
            self._bind()

    def _changed(self) -> set[torch.Tensor]:
        """The parameters of whose state a tensor was removed, or replaced by another object."""
        get = self.state.get
        return {p.tensor for p, key, value in self._made if get(p.tensor, {}).get(key) is not value}

    def _state_addresses(self) -> list[int]:
        return [local_of(value).data_ptr() for _, _, value in self._made]

    def _sync_options(self) -> None:
        """Check options that were edited."""
        for group in self.param_groups:
            known = self.known_options.get(id(group))
            if known is None:
                continue  # a new group, which `_read_groups` checks
            group["lr"] = check_lr(group["lr"])
            if {name: group.get(name, ...) for name in known} != known:
                algorithm = self._algorithm_of(known)
                algorithm.check_format(known, group, "a group was given")
                algorithm.check(group, [p for p in self.members if p.group is group])
                self.known_options[id(group)] = self._options_of(group)

    def _read_states(self) -> None:
        """Make the states of parameters that begin to train, and of those whose states were assigned or removed."""
        changed = self._changed()
        begin = [p for p in self.members if _trains(p.tensor) and (p.states is None or p.tensor in changed)]
        self._make_states(begin)
        for param in self.members:
            if param.tensor in changed and not _trains(param.tensor):
                param.states = None
        self._bind()

    def _make_states(self, params: list[Param]) -> None:
        """Make the states of parameters; values that the user put into their place are copied into them."""
        assigned = {p.tensor: self.state.pop(p.tensor) for p in params if self.state.get(p.tensor)}
        try:
            for group in self.param_groups:
                if members := [p for p in params if p.group is group]:
                    self._algorithm_of(group).make_states(group, members)
            for p in params:
                if p.tensor in assigned:
                    own = self.state[p.tensor]
                    put_values(own, own_values(p.name, own, assigned[p.tensor]))
        except BaseException:
            for p in params:
                self.state.pop(p.tensor, None)
            self.state.update(assigned)
            raise
        for p in params:
            own = p.states = dict(self.state[p.tensor])
            others = assigned.get(p.tensor, {}).items()
            self.state[p.tensor].update((key, value) for key, value in others if key not in own)

    def _bind(self) -> None:
        """Renew references to the memory of parameters and states."""
        self.trained = [p for p in self.members if p.states is not None]
        self._frozen = [p.tensor for p in self.members if p.states is None]
        self.invalidate()  # first: what it refuses is refused again in the next step
        self._look = self._members()
        states = [(p, p.states) for p in self.trained]
        self._made = [(p, k, v) for p, own in states for k, v in own.items() if isinstance(v, torch.Tensor)]
        self._addresses = self._state_addresses()

    # ---------------------------------------------------------------- state

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's states, by name; also of numbers of a parameter: 4 of "step", 8 of a "format"."""
        result: dict[str, int] = defaultdict(int)
        for state in self.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    result[name] += local_of(value).nbytes
        return dict(result)

    def state_dict(self) -> dict[str, Any]:
        """Torch's state dict, without states of parameters that have left the groups.

        Distributed checkpoints take counts, such as ``step``, from ranks that hold elements of the parameter: where
        others had no gradient, they have counted fewer steps.
        """
        self._sync()
        for param in self.members:  # an update may have added states
            for key, value in self.state.get(param.tensor, {}).items():
                param.check_state(key, value)
        gone = [t for t in self.state if isinstance(t, torch.Tensor) and t not in self._params]
        left = {tensor: self.state.pop(tensor) for tensor in gone}
        try:
            result = super().state_dict()
        finally:
            self.state.update(left)
        for number, param in enumerate(self.members):
            if number in result["state"] and param.numel and not param.local.numel():
                own = result["state"][number]
                result["state"][number] = {key: _counted_elsewhere(value) for key, value in own.items()}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict into the states that are there, which keep their memory, dtype and placement.

        Takes the result of `state_dict`, of this class or of torch's optimizer with the same rule: local tensors in
        the same placement, or full plain tensors, of which each rank takes its elements. A parameter without saved
        state starts again; a frozen one gets states if some were saved. Options that the state dict leaves out stay,
        and so do ``fused`` and ``foreach``: how a step is computed is chosen where an optimizer is built.
        Communicates nothing.

        Raises:
            ValueError: groups, options, keys, shapes, placements or a format that do not fit; nothing was changed.
        """
        state_dict = state_dict.copy()
        for hook in load_hooks(self, "pre"):
            state_dict = hook(self, state_dict) or state_dict
        self._sync()
        saved_groups = state_dict["param_groups"]
        options = self._loaded_options(saved_groups)
        saved_ids = chain.from_iterable(g["params"] for g in saved_groups)
        own_params = chain.from_iterable(g["params"] for g in self.param_groups)
        ids = dict(zip(saved_ids, own_params, strict=True))
        saved = state_dict["state"]
        known = dict(zip(map(id, self.param_groups), saved_groups, strict=True))
        self._load_states({ids[key]: entry for key, entry in saved.items() if key in ids}, known)
        self.state.update((key, deepcopy(entry)) for key, entry in saved.items() if key not in ids)
        for group, new in zip(self.param_groups, options, strict=True):
            group.update(new)
        self._sync_options()
        for hook in load_hooks(self, "post"):
            hook(self)

    def _load_states(
        self, saved: dict[torch.Tensor, dict[str, Any]], saved_groups: dict[int, Group] | None = None
    ) -> None:
        """Copy states: those of a copy or, with ``saved_groups`` (of a state dict, by ids of groups), loaded ones."""
        frozen = [p for p in self.members if p.states is None and saved.get(p.tensor)]
        self._make_states(frozen)
        trained = [p for p in self.members if p.states is not None]
        try:
            values = {}
            for param in trained:
                if entry := saved.get(param.tensor):
                    if saved_groups is not None:
                        options = saved_groups[id(param.group)]
                        entry = self._algorithm_of(param.group).read_saved(param, entry, options)
                    values[param.tensor] = own_values(
                        param.name, param.states, entry, saved=saved_groups is not None
                    )
        except BaseException:
            for param in frozen:
                del self.state[param.tensor]
                param.states = None
            raise
        for tensor in [p.tensor for p in trained]:
            if tensor in values:
                own = self.state[tensor]
                put_values(own, values[tensor])
                own.update((k, v) for k, v in saved[tensor].items() if k not in own)
            else:
                del self.state[tensor]
        self._read_states()

    def _loaded_options(self, saved_groups: list[Group]) -> list[Group]:
        """The groups' options after loading, checked."""
        sizes = [len(g["params"]) for g in self.param_groups]
        saved_sizes = [len(g["params"]) for g in saved_groups]
        if sizes != saved_sizes:
            raise ValueError(
                f"the state dict has groups of {saved_sizes} parameters, this optimizer of {sizes}; build it with the "
                "same groups"
            )
        loaded = []
        for i, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            algorithm = self._algorithm_of(group)
            left_out = ("params", *EXECUTION_OPTIONS, *algorithm.recorded_options)
            options = {key: deepcopy(value) for key, value in saved.items() if key not in left_out}
            new = {**{key: value for key, value in group.items() if key != "params"}, **options}
            try:
                algorithm.check_format(group, new, "the state dict was saved with")
                algorithm.check(new, [p for p in self.members if p.group is group])
                check_lr_value(new["lr"])
            except ValueError as error:
                raise ValueError(f"param_groups[{i}] of the state dict: {error}") from error
            loaded.append(new)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        self._sync()
        return {**super().__getstate__(), **self.copied_attributes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo `__getstate__` (pickle, deepcopy): states are made again and filled with the old values."""
        super().__setstate__(state)
        groups, values = self.param_groups, self.state
        self.param_groups, self.state = [], defaultdict(dict)
        self._reset()
        for group in groups:
            Stateful.add_param_group(self, group)  # without the checks of subclasses, which it has passed
        self._load_states(dict(values))
        self.state.update((key, value) for key, value in values.items() if key not in self._params)


def _trains(tensor: torch.Tensor) -> bool:
    """Whether a parameter is to be updated: it requires gradients, or was given one."""
    return tensor.requires_grad or tensor.grad is not None


class _Count(torch.Tensor):
    """A number of which other ranks' value goes into distributed checkpoints; it shares the state's memory."""

    def __create_write_items__(self, fqn: str, object: object) -> list[Any]:
        """Nothing, for torch.distributed.checkpoint."""
        return []

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickles are of plain tensors
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Count":
        return self.clone().detach().as_subclass(_Count)


def _counted_elsewhere(value: Any) -> Any:
    """The value for a state dict, of a parameter of which this rank holds no elements."""
    return value.as_subclass(_Count) if type(value) is torch.Tensor and not value.ndim else value


# ---------------------------------------------------------------- values of states


def own_values(
    name: str, own: dict[str, Any], values: dict[str, Any], *, saved: bool = False
) -> dict[str, Any]:
    """Select this rank's elements of each entry of an assigned state or, with ``saved``, of a loaded one.

    An entry of a loaded state that lies on other ranks of the same mesh is redistributed, on all ranks: which rank
    keeps the state of a whole matrix depends on the parameters that were trained when the optimizer was made. Raises
    ValueError, naming parameter and key, for a key that is missing (or, if loaded, too much), and for another shape or
    placement.
    """
    if saved and set(values) != set(own):
        raise ValueError(
            f"{name}: the saved state has {sorted(values)}, this optimizer needs {sorted(own)}; states of another "
            "optimizer or format cannot be loaded"
        )
    if missing := sorted(set(own) - set(values)):
        raise ValueError(
            f"{name}: its state has no {', '.join(map(repr, missing))} any more, this optimizer needs {sorted(own)}; "
            "remove all of it to begin again, or none"
        )
    return {
        key: _own_elements(value, values[key], f"{name}: state {key!r}", move=saved)
        if isinstance(value, torch.Tensor)
        else values[key]
        for key, value in own.items()
    }


def put_values(own: dict[str, Any], values: dict[str, Any]) -> None:
    """Copy the result of `own_values` into a state."""
    for key, value in values.items():
        if isinstance(own[key], torch.Tensor):
            local_of(own[key]).copy_(value)
        else:
            own[key] = value


def _own_elements(target: torch.Tensor, value: Any, what: str, *, move: bool) -> torch.Tensor:
    """The elements of ``value`` for ``target``'s local tensor."""
    if value is target:
        return local_of(value)
    if not isinstance(value, torch.Tensor):
        value = torch.as_tensor(value)
    if tuple(value.shape) != tuple(target.shape):
        raise ValueError(f"{what} has shape {tuple(value.shape)}, expected {tuple(target.shape)}")
    if value.dtype in (torch.uint8, torch.int8) and target.is_floating_point():
        raise ValueError(f"{what} is {value.dtype}, expected {target.dtype}: 8-bit codes are not values")
    if not isinstance(value, DISTRIBUTED):
        return local_of(distribute_like(value, target, src_data_rank=None))
    distributed: Any = target if isinstance(target, DISTRIBUTED) else None
    expected = "a plain tensor" if distributed is None else tuple(distributed.placements)
    if move and distributed is not None and value.device_mesh == distributed.device_mesh:
        moved: Any = value.to(target.device)
        value = moved.redistribute(placements=distributed.placements)
    if tuple(value.placements) != expected:
        raise ValueError(
            f"{what} has placements {tuple(value.placements)}, this optimizer's is {expected}; load it through "
            "torch.distributed.checkpoint, which fits any layout, or redistribute it"
        )
    return local_of(value)
