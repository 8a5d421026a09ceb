"""layout-planner: how long planning a whole model takes, and how much its layouts pad.

python -m bench planner        the same figures as a table, medians of 5 rounds
"""

import statistics
import time

from layout_planner import Layout, load_model, parse_block, plan, separate_experts

from . import store
from .recorded import recorded_as

MODELS = ["deepseek-v3", "deepseek-v3 separate", "gpt-oss-120b", "llama-3-70b"]
BLOCKS = ["rows:1", "rows:16", "rows:32", "rows:128"]
WORLD_SIZE = 1024


def plan_model(name: str, block: str) -> list[tuple[int, Layout]]:
    """Every group of the model, groups of the same shape once, with how often each occurs."""
    base, _, experts = name.partition(" ")
    model = separate_experts(load_model(base)) if experts else load_model(base)
    chosen = parse_block(block)
    return [(group.count, plan(group.specs(chosen), WORLD_SIZE)) for group in model.groups]


@recorded_as("planner", track_padding_percent="%", track_gap_percent="% above the proven bound")
class Plan:
    """All layers of a model at 1024 ranks. To stay under 0.3 s for each block size."""

    params = (MODELS, BLOCKS)
    param_names = ("model", "block")

    def time_plan(self, name: str, block: str) -> None:
        plan_model(name, block)

    def track_padding_percent(self, name: str, block: str) -> float:
        layouts = plan_model(name, block)
        padding = sum(count * layout.padding for count, layout in layouts)
        return 100 * padding / sum(count * layout.numel for count, layout in layouts)

    def track_gap_percent(self, name: str, block: str) -> float:
        layouts = plan_model(name, block)
        padded = sum(count * layout.padded_numel for count, layout in layouts)
        return 100 * (padded / sum(count * layout.lower_bound for count, layout in layouts) - 1)


@recorded_as("planner")
class Fingerprint:
    """What every rank pays once to check that all agree."""

    def setup(self) -> None:
        self.layouts = [layout for _, layout in plan_model("deepseek-v3", "rows:16")]

    def time_fingerprint(self) -> None:
        for layout in self.layouts:
            layout.fingerprint()


def main(arguments: list[str]) -> int:
    """Print the table."""
    store.parser_of("planner", __doc__).parse_args(arguments)
    rows = []
    for name in MODELS:
        for block in BLOCKS:
            rounds = []
            for _ in range(5):
                start = time.perf_counter()
                plan_model(name, block)
                rounds.append(time.perf_counter() - start)
            padding = Plan().track_padding_percent(name, block)
            rows.append([name, block, f"{1000 * statistics.median(rounds):.0f} ms", f"{padding:.2f} %"])
    print(store.table(["model", "block", f"plan all layers, {WORLD_SIZE} ranks", "padding"], rows))
    return 0
