"""Actions that only some kinds of layers have a use for."""

import contextlib

from torch.nn.utils import parametrize

from .world import World, action

HOW = ("computed", "original", "whole")


@action(weight=0.3, draw=lambda rng: (rng.choice(HOW),))
def remove_parametrizations(w: World, how: str) -> None:
    """Weights are plain parameters again: the computed ones, also inside of `full_params`, or what they came from."""
    w.rest()
    whole = how == "whole" and w.system.name == "ours"
    names = [
        name for name, module in w.model.named_modules() if parametrize.is_parametrized(module, "weight")
    ]
    with w.system.api.full_params(w.model) if whole and names else contextlib.nullcontext():
        for module in map(w.model.get_submodule, names):
            several = hasattr(module.parametrizations["weight"], "original1")  # then there is no one weight
            parametrize.remove_parametrizations(
                module, "weight", leave_parametrized=how != "original" or several
            )
    if names:
        w.params = dict(w.model.named_parameters())
        w.optimizer = w.make_optimizer(w.named())
