"""The parameters, options and states of an optimizer, and what users edit of them between steps.

    add_param_group, unfreezing   states are made, in the parameter's placement
    edits                         of groups and states are looked for in every step, and taken (see `core.edits`)
    state dicts                   are copied into the states that are there, which keep their memory

Nothing here communicates.
"""

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from itertools import chain
from typing import Any, ClassVar

import torch

from block_optim.core._torch_compat import load_post_hooks, load_pre_hooks, local_of
from block_optim.core.edits import Seen, by_group, trains
from block_optim.core.load import check_keys, own_values, put_values
from block_optim.core.options import (
    answer_torch_options,
    check_known,
    check_lr,
    check_lr_value,
    rename,
    says_nothing,
)
from block_optim.core.params import Group, Param
from block_optim.core.precision import MASTER, check_precision, make_masters


class Stateful(torch.optim.Optimizer):
    """Base of `BlockOptimizer`, without a step. A subclass may define the methods up to `synchronize`.

    Attributes:
        format_options, shared_options, aliases: see `BlockOptimizer`.
    """

    format_options: ClassVar[tuple[str, ...]] = ()
    shared_options: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[Mapping[str, str]] = {}

    def _begin(self) -> None:
        self._params: dict[torch.Tensor, Param] = {}
        self._trained: list[Param] = []
        self._mastered: list[Param] = []  # of these, those that have an fp32 copy
        self._seen = Seen()
        self.setup()

    # ---------------------------------------------------------------- what a subclass may define

    def check_options(self, group: Group) -> None:
        """Raise ValueError, naming it, where an option does not fit; called again when a group's options change.

        May put options into their final form in ``group``.
        """

    def check_group(self, group: Group, params: list[Param]) -> None:
        """Raise ValueError, naming it, where a parameter does not fit its group; states are not there yet."""

    def init_states(self, group: Group, params: list[Param]) -> None:
        """Fill ``self.state[p.tensor]``, a dict, for every `Param`. Called when parameters of a group begin to train.

        Make states of a parameter's shape by ``p.zeros(dtype)``: they lie as it does, and checkpoints reshard them; of
        other shapes by ``p.zeros(dtype, shape=...)``. A plain tensor of one dimension or more is refused.
        """
        raise NotImplementedError

    def reset_state(self, param: Param) -> None:
        """Put a parameter's states back to what `init_states` made; here: zeros."""
        for value in self.state[param.tensor].values():
            if isinstance(value, torch.Tensor):
                local_of(value).zero_()
        if param.master is not None:
            param.master.copy_(local_of(param.tensor).detach())

    def drop_states(self, params: list[Param]) -> None:
        """Drop what is kept of parameters that have left the groups."""

    def options_changed(self, group: Group, names: set[str]) -> None:
        """Called when options of a group were changed, which have been checked; `update` reads groups in each step."""

    def setup(self) -> None:
        """Make the fields that states and plans live in: before parameters are added, when built or unpickled."""

    def invalidate(self) -> None:
        """Drop what is derived from parameters, groups or the addresses of states, which have changed."""

    def synchronize(self) -> None:
        """Complete work that runs next to the training step; called before states are saved, loaded or copied."""

    def states_moved(self) -> None:
        """Go on with states that lie at other addresses than before, with their values: as after offloading them."""
        self._forget()

    def _complete(self) -> None:
        """Bring states to where the last step leaves them."""
        self.synchronize()

    # ---------------------------------------------------------------- parameters

    @property
    def trained(self) -> list[Param]:
        """The parameters that have states, in the groups' order: those that require gradients, or were given one."""
        return self._trained

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, with options of their own if need be; states of those that train exist when this returns.

        Raises:
            ValueError: an option or a parameter that does not fit, named; the optimizer is as it was.
        """
        if isinstance(param_group, dict):
            rename(param_group, self.aliases)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_options(group)
            check_lr_value(group["lr"])
            params = [self._param(group, i, len(self._params)) for i in range(len(group["params"]))]
            self.check_group(group, params)
            self._check_precision(group, params)
            self._params.update((param.tensor, param) for param in params)
            self._train([p for p in params if trains(p.tensor)])
        except BaseException:
            self.param_groups.pop()
            for p in group["params"]:
                self._params.pop(p, None)
                self.state.pop(p, None)
            raise
        self._forget()

    def _param(self, group: Group, i: int, before: int) -> Param:
        """A parameter of a group by its number, with so many parameters in the groups before."""
        tensor, names = group["params"][i], group.get("param_names")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a group has {tensor!r} among its parameters: expected a tensor")
        name = names[i] if names else f"parameter {before + i} of shape {tuple(tensor.shape)}"
        return Param(tensor, name, group)

    def _train(self, params: list[Param]) -> None:
        """Make the states of parameters that begin to train; values that the user put into their place are taken."""
        given = {p.tensor: self.state.pop(p.tensor) for p in params if self.state.get(p.tensor)}
        try:
            for group, members in by_group(params):
                if group.get("master_weights") and "master_weights" in self.defaults:
                    make_masters(members)
                self.init_states(group, members)
            for p in params:
                for key, value in self.state[p.tensor].items():
                    p.check_state(key, value)
                if p.master is not None:
                    self.state[p.tensor][MASTER] = p.wrap(p.local)
                if p.tensor in given:
                    own = self.state[p.tensor]
                    put_values(own, own_values(p.name, own, given[p.tensor]))
        except BaseException:
            self.drop_states(params)
            for p in params:
                self.state.pop(p.tensor, None)
                p.master = None
            self.state.update(given)
            raise
        for p in params:
            self._seen.states[p.tensor] = dict(self.state[p.tensor])
            extra = given.get(p.tensor, {}).items()
            self.state[p.tensor].update(
                (key, value) for key, value in extra if key not in self.state[p.tensor]
            )
        self._trained = [p for p in self._params.values() if p.tensor in self._seen.states]

    def _forget(self) -> None:
        self._seen.note(self.param_groups, self._params)
        self._mastered = [param for param in self._trained if param.master is not None]
        self.invalidate()

    # ---------------------------------------------------------------- edits

    def _check_options(self, group: Group) -> None:
        """Raise ValueError where an option of a group does not fit or is not known."""
        rename(group, self.aliases)
        group["lr"] = check_lr(group["lr"])
        answer_torch_options(group, set(self.defaults) - {"amsgrad"})
        check_known(group, self.defaults, type(self).__name__)
        self.check_options(group)

    def _check_precision(self, group: Group, params: list[Param]) -> None:
        if "stochastic_rounding" in self.defaults:
            check_precision(group, params)

    def _host(self, group: Group) -> "Stateful":
        """The optimizer whose options a group has: this one, but in `Mixed`."""
        return self

    def _follow(self, *, states: bool = True) -> None:
        """Take what the user edited since the last look, or raise; ``states=False`` puts edited states back."""
        for group in self.param_groups:
            changed = self._seen.changed(group) if self._seen.options(group) is not None else set()
            if changed:
                self._take_options(group, changed)
        current = self._seen.is_current(self.param_groups, self.state)
        if self._seen.has_more:
            for tensor, param in self._params.items():
                for key, value in self.state.get(tensor, {}).items():
                    param.check_state(key, value)
            self._seen.has_more = False
        if not current:
            self._complete()
            state: Any = self.state  # torch's is a defaultdict; a user may have assigned another
            self.state = state if isinstance(state, defaultdict) else defaultdict(dict, state)
            self._take_edits(states)
            self._forget()

    def _take_edits(self, states: bool) -> None:
        self._take_params()
        self._seen.check_memory(self._params)
        if states:
            for param in self._seen.take_states(self._params, self.state):
                self.reset_state(param)
        else:
            self.state.update((tensor, dict(own)) for tensor, own in self._seen.states.items())
        self._train([p for t, p in self._params.items() if t not in self._seen.states and trains(t)])

    def _take_options(self, group: Group, changed: set[str]) -> None:
        before = self._seen.options(group) or {}
        if changed <= {"lr"} and "lr" in group:
            group["lr"] = check_lr(group["lr"])
        else:
            host = self._host(before)
            for alias, name in host.aliases.items():
                if alias in group and name not in changed:
                    group[name] = group.pop(alias)
            known = {*self.defaults, *host.defaults}
            if gone := sorted(key for key in changed if key in known and key not in group):
                raise ValueError(f"{', '.join(map(repr, gone))}: removed from a group; give it a value")
            self._check_format(before, group, "a group was given")
            host._check_options(group)
            host._check_precision(group, [p for p in host._params.values() if p.group is group])
            self.options_changed(group, changed)
        self._seen.note_options(group)

    def _take_params(self) -> None:
        """Parameters that were put into groups, moved or removed. Raises before it changes anything."""
        params: dict[torch.Tensor, Param] = {}
        fresh: list[Param] = []
        moved: list[tuple[Param, Group]] = []
        for group in self.param_groups:
            if self._seen.options(group) is None:
                for key, value in self.defaults.items():
                    group.setdefault(key, value)
                self._check_options(group)
            before = len(params)
            for i, tensor in enumerate(group["params"]):
                param = self._params.get(tensor)
                if param is None:
                    fresh.append(self._param(group, i, before))
                    param = fresh[-1]
                elif param.group is not group:
                    self._check_format(
                        self._seen.options(param.group) or {},
                        group,
                        f"{param.name} was moved to a group with",
                    )
                    moved.append((param, group))
                params[tensor] = param
        for group in self.param_groups:
            members = [param for param in fresh if param.group is group]
            if members or self._seen.options(group) is None:
                self.check_group(group, members)
                self._check_precision(group, members)
        for param, group in moved:
            self._check_precision(group, [param])
        for param, group in moved:
            param.group = group
        removed = [param for tensor, param in self._params.items() if tensor not in params]
        self._params = params
        self.drop_states(removed)
        for param in removed:
            self._seen.states.pop(param.tensor, None)
        self._trained = [p for p in params.values() if p.tensor in self._seen.states]
        for group in self.param_groups:
            if "param_names" in group:
                group["param_names"] = [params[tensor].name for tensor in group["params"]]

    # ---------------------------------------------------------------- state

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's states, by name; the 4 bytes of each step counter under "step"."""
        found: dict[str, int] = defaultdict(int)
        for state in self.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[name] += local_of(value).nbytes
        return dict(found)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, after `synchronize`; without states of parameters that have left the groups."""
        self._complete()
        self._follow()
        left = {
            t: self.state.pop(t)
            for t in list(self.state)
            if isinstance(t, torch.Tensor) and t not in self._params
        }
        try:
            return super().state_dict()
        finally:
            self.state.update(left)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict into the states that are there, which keep their memory, dtype and placement.

        Takes what `state_dict` gave, here or from torch's optimizer of the same rule: local tensors in the same
        placement, or full plain tensors, of which each rank takes its own elements. A parameter without saved state
        starts again; a frozen one gets states if some were saved. Options that the state dict leaves out stay, and so
        do ``fused`` and ``foreach``: how a step is computed is chosen where an optimizer is built.
        Communicates nothing.

        Raises:
            ValueError: groups, options, keys, shapes, placements or a format that do not fit; nothing was changed.
        """
        state_dict = state_dict.copy()
        for hook in load_pre_hooks(self):
            state_dict = hook(self, state_dict) or state_dict
        self._follow(states=False)
        saved_groups = state_dict["param_groups"]
        options = self._loaded_options(saved_groups)
        ids = dict(
            zip(
                chain.from_iterable(g["params"] for g in saved_groups),
                chain.from_iterable(g["params"] for g in self.param_groups),
                strict=True,
            )
        )
        self._load_states({ids[key]: entry for key, entry in state_dict["state"].items() if key in ids})
        self.state.update(
            (key, deepcopy(value)) for key, value in state_dict["state"].items() if key not in ids
        )
        for group, new in zip(self.param_groups, options, strict=True):
            group.update(new)
        self._forget()
        for hook in load_post_hooks(self):
            hook(self)

    def _load_states(self, saved: dict[torch.Tensor, dict[str, Any]], *, strict: bool = True) -> None:
        self._complete()
        frozen = [p for t, p in self._params.items() if t not in self._seen.states and saved.get(t)]
        self._train(frozen)
        try:
            values = {}
            for param in self._trained:
                if entry := saved.get(param.tensor):
                    own = self._seen.states[param.tensor]
                    if strict:
                        check_keys(param.name, own, entry)
                    values[param.tensor] = own_values(param.name, own, entry)
        except BaseException:
            self._untrain(frozen)
            raise
        for param in self._trained:
            own = self.state[param.tensor]
            if param.tensor in values:
                put_values(own, values[param.tensor])
                own.update((k, v) for k, v in saved[param.tensor].items() if k not in own)
            else:
                self.reset_state(param)
        self._forget()

    def _untrain(self, params: list[Param]) -> None:
        """Take back that parameters began to train."""
        self.drop_states(params)
        for param in params:
            del self.state[param.tensor], self._seen.states[param.tensor]
            param.master = None
        self._trained = [p for p in self._params.values() if p.tensor in self._seen.states]

    def _loaded_options(self, saved_groups: list[Group]) -> list[Group]:
        """The groups' options after loading, checked."""
        sizes = [len(g["params"]) for g in self.param_groups]
        saved_sizes = [len(g["params"]) for g in saved_groups]
        if sizes != saved_sizes:
            raise ValueError(
                f"the state dict has groups of {saved_sizes} parameters, this optimizer of {sizes}; build it with the "
                "same groups"
            )
        found = []
        for i, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            left_out = ("params", "foreach", "fused")
            options = {key: deepcopy(value) for key, value in saved.items() if key not in left_out}
            host = self._host(group)
            rename(options, host.aliases)
            new = {**{key: value for key, value in group.items() if key != "params"}, **options}
            try:
                added = {key: value for key, value in options.items() if key not in group}
                check_known(added, host.defaults, type(host).__name__, strict=True)
                self._check_format(group, new, "the state dict was saved with")
                host._check_options(new)
                host._check_precision(new, [p for p in host._params.values() if p.group is group])
                check_lr_value(new["lr"])
            except ValueError as error:
                raise ValueError(f"param_groups[{i}] of the state dict: {error}") from error
            found.append({key: value for key, value in new.items() if key in group or not says_nothing(key)})
        return found

    def _check_format(self, own: Group, new: Group, how: str) -> None:
        """Raise ValueError where options on which the format of states depends differ."""
        ours, theirs = self.format_of(own), self.format_of(new)
        for key in ours:
            if key in theirs and ours[key] != theirs[key]:
                raise ValueError(
                    f"{how} {key}={theirs[key]!r}, this optimizer has {key}={ours[key]!r}; the format of the states "
                    "depends on it, so build an optimizer with the one that you want"
                )

    def format_of(self, group: Group) -> dict[str, Any]:
        """What the format of states depends on."""
        return {key: group[key] for key in self.format_options if key in group}

    def __getstate__(self) -> dict[str, Any]:
        self._complete()
        self._follow()
        kept = {name: getattr(self, name) for name in self.shared_options}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Undo `__getstate__` (pickle, deepcopy): states are made again and filled with the old values."""
        super().__setstate__(state)
        groups, values = self.param_groups, self.state
        self.param_groups, self.state = [], defaultdict(dict)
        self._begin()
        for group in groups:
            self.add_param_group(group)
        self._load_states(dict(values), strict=False)
        self.state.update((key, value) for key, value in values.items() if key not in self._params)
