"""What is trained: models and batches by name, the same for every system.

dense     Llama, 29.9M parameters, 8 blocks            the everyday case
counts    Llama, 31.6M parameters, 9 groups, 75 tensors: exact counts, few tokens
moe       24 experts of three small linears a block, top 2: 603 tensors
prime     every dimension a prime number: nothing divides
stacked   experts in one tensor with biases, as GPT-OSS holds them; fewer experts than ranks at 4 ranks
tiny      seconds, for tests and dry runs
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .models import Shape


@dataclass(frozen=True)
class Workload:
    """A model and the batch that each rank gets.

    Attributes:
        sizes: arguments of `models.Shape`.
        batch, length: sequences and tokens a sequence, for each rank and step.
    """

    name: str
    sizes: tuple[tuple[str, Any], ...]
    batch: int
    length: int

    @property
    def shape(self) -> "Shape":
        """The model's sizes."""
        from .models import Shape

        return Shape(**dict(self.sizes))

    @property
    def tokens(self) -> int:
        """Tokens of one rank in one step."""
        return self.batch * self.length

    def model(self, device: str = "cpu") -> "nn.Module":
        """A new model, its weights the same in every process with this kind of device."""
        import torch

        from .models import build

        with torch.device(device):
            return build(self.shape)


def _workload(name: str, batch: int, length: int, **sizes: Any) -> Workload:
    return Workload(name, tuple(sizes.items()), batch, length)


_STACKED: dict[str, Any] = {"stacked": True}
WORKLOADS = {
    w.name: w
    for w in (
        _workload("dense", 4, 128, dim=512, layers=8, heads=8, inner=1408, vocab=4096),
        _workload("counts", 1, 64, dim=512, layers=8, heads=8, inner=1376, vocab=6144),
        _workload("moe", 4, 128, dim=384, layers=8, heads=6, inner=256, vocab=4096, experts=24, plain_norms=True),
        _workload("prime", 4, 61, dim=251, layers=4, heads=1, inner=661, vocab=2003),
        _workload("stacked", 4, 64, dim=180, layers=4, heads=6, inner=180, vocab=2048, experts=3, **_STACKED),
        # Sizes whose rows share no small multiple, for the ablation.
        _workload("ablation", 2, 64, dim=360, layers=4, heads=6, inner=340, vocab=2048, experts=8, **_STACKED),
        _workload("tiny", 2, 16, dim=48, layers=2, heads=3, inner=96, vocab=128),
        _workload("tiny-moe", 2, 16, dim=48, layers=2, heads=3, inner=32, vocab=128, experts=5),
        # For the committed counts: what matters is structure, not size.
        _workload("gate", 1, 16, dim=64, layers=3, heads=4, inner=176, vocab=512),
        _workload("gate-stacked", 1, 16, dim=60, layers=2, heads=4, inner=60, vocab=256, experts=3, **_STACKED),
        _workload("gate-prime", 1, 16, dim=61, layers=2, heads=1, inner=127, vocab=251),
        # For GPUs: the layer sizes of an 8B model, few of them, and stacked experts.
        _workload("gpu-small", 4, 2048, dim=4096, layers=2, heads=32, inner=14336, vocab=16384),
        _workload("gpu-dense", 4, 2048, dim=4096, layers=4, heads=32, inner=14336, vocab=16384),
        _workload("gpu-stacked", 2, 1024, dim=2880, layers=4, heads=64, inner=2880, vocab=32768, experts=16,
                  **_STACKED),
    )
}  # fmt: skip


def batch_of(workload: Workload, step: int, rank: int, device: str = "cpu") -> "tuple[Tensor, Tensor]":
    """Tokens and targets, (batch, length) each: a noisy rule that can be learnt, so that the loss falls."""
    import torch

    vocab = workload.shape.vocab
    rng = torch.Generator().manual_seed(1_000_003 * step + rank)
    rows = torch.empty(workload.batch, workload.length + 1, dtype=torch.long)
    rows[:, 0] = torch.randint(vocab, (workload.batch,), generator=rng)
    noise = torch.randint(8, rows.shape, generator=rng)
    for column in range(1, rows.shape[1]):
        rows[:, column] = (7 * rows[:, column - 1] + 3 + noise[:, column]) % vocab
    return rows[:, :-1].to(device), rows[:, 1:].to(device)


def describe(workload: Workload) -> dict[str, Any]:
    """What a results file says about a workload."""
    parameters = list(workload.model("meta").parameters())
    return {
        "name": workload.name,
        "parameters": sum(p.numel() for p in parameters),
        "tensors": len(parameters),
        "tokens_per_rank": workload.tokens,
        **dict(workload.sizes),
    }
