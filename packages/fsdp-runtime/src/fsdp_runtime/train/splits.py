"""The ranks of each kind of parallelism: numbers only, checked before any process is started.

ranks = pp x hsdp x fsdp x cp x tp          the last one changes fastest from rank to rank
          |    |      |     |    |
          |    |      |     |    +-- matrices are cut by rows or columns, activations between them by positions
          |    |      |     +------- sequences are cut; each attention gathers keys and values
          |    |      +------------- what is left: sequences are dealt out, parameters are sharded
          |    +-------------------- copies of all that
          +------------------------- layers are dealt out

dense parameters are sharded over fsdp x cp, experts over fsdp x cp x tp / ep, and then dealt out over ep.
"""

from dataclasses import dataclass

from .errors import TrainError
from .model import ModelConfig

AXES = ("hsdp", "tp", "pp", "cp", "ep")
# Stages on each rank, whether they go back and forth (the first and the last stage on one rank), torch's class.
SCHEDULES: dict[str, tuple[int, bool, str]] = {
    "gpipe": (1, False, "ScheduleGPipe"),
    "1f1b": (1, False, "Schedule1F1B"),
    "interleaved": (2, False, "ScheduleInterleaved1F1B"),
    "interleaved-zb": (2, False, "ScheduleInterleavedZeroBubble"),
    "zbv": (2, True, "ScheduleZBVZeroBubble"),
    "dualpipev": (2, True, "ScheduleDualPipeV"),
}


@dataclass(frozen=True)
class Splits:
    """How many ranks each axis has; `fsdp` is what the others leave."""

    fsdp: int
    hsdp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    schedule: str = "1f1b"

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.pp * self.hsdp * self.fsdp * self.cp * self.tp

    @property
    def readers(self) -> int:
        """How many sets of ranks read different sequences."""
        return self.hsdp * self.fsdp

    @property
    def shards(self) -> int:
        """Ranks that a dense parameter is sharded over."""
        return self.fsdp * self.cp

    @property
    def slices(self) -> int:
        """Runs of positions that a sequence is cut into between matrices."""
        return self.cp * self.tp

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * SCHEDULES[self.schedule][0] if self.pp > 1 else 1

    @property
    def one_mesh(self) -> bool:
        """True if experts are sharded over the same ranks as all other parameters."""
        return self.ep == 1 and self.tp == 1

    @property
    def plain(self) -> bool:
        """True if there is no split except fsdp."""
        return all(getattr(self, axis) == 1 for axis in AXES)

    def __str__(self) -> str:
        shown = [f"{axis} {getattr(self, axis)}" for axis in ("fsdp", *AXES) if getattr(self, axis) > 1]
        return " x ".join(shown) or "fsdp 1"

    def stages_of(self, pp_rank: int) -> list[int]:
        """The stages of one rank of the pipeline, in the order of their layers."""
        per_rank, there_and_back, _ = SCHEDULES[self.schedule]
        if self.pp == 1 or per_rank == 1:
            return [pp_rank]
        return [pp_rank, 2 * self.pp - 1 - pp_rank if there_and_back else self.pp + pp_rank]

    def rank_of_stage(self, stage: int) -> int:
        """The rank of the pipeline that has a stage."""
        return next(rank for rank in range(self.pp) if stage in self.stages_of(rank))

    def passes_held(self, pp_rank: int, accumulate: int) -> int:
        """How many microbatches' activations, a stage each, a rank keeps at most until their backward."""
        per_rank, there_and_back, _ = SCHEDULES[self.schedule]
        if self.pp == 1:
            return 1
        if self.schedule == "gpipe":
            return accumulate
        after = self.pp - 1 - pp_rank
        most = self.pp * 2 if there_and_back else (per_rank - 1) * self.pp + per_rank * after + 1
        return min(per_rank * accumulate, most)

    def bubble(self, accumulate: int) -> float:
        """The share of a step that ranks of the pipeline wait for each other, backward as long as two forwards.

        Stages of a rank shorten it; schedules that split backward fill it with the weights' gradients.
        """
        per_rank, there_and_back, _ = SCHEDULES[self.schedule]
        if self.pp == 1:
            return 0.0
        filled = 3 if there_and_back or self.schedule.endswith("-zb") else 1
        return (self.pp - 1) / (per_rank * accumulate * filled + self.pp - 1)

    def layers_of(self, stage: int, num_layers: int) -> range:
        """The layers of one stage; the first stages have one more where they do not divide."""
        each, more = divmod(num_layers, self.stages)
        start = stage * each + min(stage, more)
        return range(start, start + each + (stage < more))


def find_splits(asked: dict[str, int], schedule: str, world_size: int) -> Splits:
    """The splits of a run of `world_size` ranks.

    Args:
        asked: a number for each of `AXES`.
        schedule: of the pipeline, one of `SCHEDULES`.
        world_size: number of ranks.

    Raises:
        TrainError: they do not divide the ranks.
    """
    for axis, size in asked.items():
        if size < 1:
            raise TrainError(f"--{axis} {size}: expected at least 1")
    if schedule not in SCHEDULES:
        raise TrainError(f"--pp-schedule {schedule!r}: expected one of {', '.join(SCHEDULES)}")
    product = asked["hsdp"] * asked["tp"] * asked["pp"] * asked["cp"]
    if world_size % product:
        sizes = " x ".join(f"--{axis} {n}" for axis, n in asked.items() if n > 1 and axis != "ep")
        near = -(-world_size // product) * product
        raise TrainError(f"{sizes} is {product} ranks, of which there are {world_size}: use --ranks {near}")
    splits = Splits(fsdp=world_size // product, **asked, schedule=schedule)
    over = splits.shards * splits.tp
    if over % splits.ep:
        raise TrainError(
            f"--ep {splits.ep} does not divide the {over} ranks that experts lie on (fsdp {splits.fsdp} x "
            f"cp {splits.cp} x tp {splits.tp}): use a divisor of {over}"
        )
    return splits


def check_splits(splits: Splits, model: ModelConfig, seq_len: int, accumulate: int) -> None:
    """Check that a model and its batches can be divided.

    Raises:
        TrainError: heads, positions, experts, layers or microbatches that do not divide.
    """
    tp, cp, ep = splits.tp, splits.cp, splits.ep
    sizes = {"--heads": model.num_heads, "--kv-heads": model.num_kv_heads, "--vocab-size": model.vocab_size}
    sizes |= {} if model.num_experts else {"--ff-dim": model.ff_dim}
    for flag, size in sizes.items():
        if size % tp:
            raise TrainError(f"--tp {tp} does not divide {flag} {size}")
    if seq_len % splits.slices:
        raise TrainError(
            f"--seq-len {seq_len} does not divide by cp {cp} x tp {tp}: use --seq-len "
            f"{-(-seq_len // splits.slices) * splits.slices}"
        )
    if ep > 1 and not model.num_experts:
        raise TrainError(f"--ep {ep}: the model has no experts; use --preset small-moe or --experts N")
    if ep > 1 and model.num_experts % ep:
        raise TrainError(f"--ep {ep} does not divide --experts {model.num_experts}")
    if splits.pp > 1:
        _check_pipeline(splits, model, accumulate)


_BYTE_LEAST = 4096  # elements of the smallest tensor of which AdamW8bit has 8-bit states


def check_optimizer(optimizer: str, tp: int, model: ModelConfig) -> None:
    """Check that tensor parallelism does not cut through blocks of 8-bit states, of matrices cut by columns.

    Raises:
        TrainError: it does; names the matrix.
    """
    widths = {"wo": model.dim} | ({} if model.num_experts else {"w_down": model.ff_dim})
    cut = [name for name, width in widths.items() if width * model.dim >= _BYTE_LEAST]
    if optimizer == "adamw8bit" and tp > 1 and cut:
        raise TrainError(
            f"--optimizer adamw8bit with --tp {tp}: {cut[0]} is cut by columns, and its 8-bit states have a scale for "
            "each run of rows; use adamw"
        )


def _check_pipeline(splits: Splits, model: ModelConfig, accumulate: int) -> None:
    pp, stages, schedule = splits.pp, splits.stages, splits.schedule
    what = f"--pp {pp} --pp-schedule {schedule}"
    if model.tied:
        raise TrainError(f"--pp {pp}: embedding and head are one parameter, on two stages; add --no-tied")
    if model.num_layers < stages:
        raise TrainError(f"{what} has {stages} stages for {model.num_layers} layers: add --layers {stages}")
    if accumulate < (stages if schedule in ("1f1b", "dualpipev") else 2):
        least = stages if schedule in ("1f1b", "dualpipev") else 2
        raise TrainError(
            f"{what} takes its microbatches from --accumulate {accumulate}: expected at least {least}"
        )
    rounds = max(1, accumulate // pp)
    if schedule.startswith("interleaved") and accumulate % rounds:
        raise TrainError(
            f"{what}: --accumulate {accumulate} does not divide into {rounds} rounds: use {rounds * pp}"
        )
