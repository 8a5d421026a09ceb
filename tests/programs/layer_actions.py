"""Actions: what only some kinds of layers have."""

from torch.nn.utils import parametrize

from .world import World, action, coin


@action(weight=0.3, draw=coin)
def remove_parametrizations(w: World, computed: bool) -> None:
    """Weights are plain parameters again: the computed ones, or those that they were computed from."""
    w.rest()
    removed = False
    for module in [*w.model.modules()]:
        if parametrize.is_parametrized(module, "weight"):
            several = hasattr(module.parametrizations["weight"], "original1")  # then there is no one weight
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=computed or several)
            removed = True
    if removed:
        w.params = dict(w.model.named_parameters())
        w.optimizer = w.make_optimizer(w.named())
