"""torch.compile of sharded models: the losses of eager, in as many graphs as with FSDP2."""

import functools

import pytest
from bench import tracing as compiled

from ragged_shard._torch_compat import SUBCLASSES_DTENSOR

pytestmark = [
    pytest.mark.long,  # programs with compiled layers are not
    pytest.mark.skipif(not SUBCLASSES_DTENSOR, reason="torch < 2.12: torch.compile takes no such subclass"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch's own, on importing inductor
    # Dynamo looks at the gradient of every input, also of those that are no leaves.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
eager = functools.cache(lambda system: compiled.train(system, None)["losses"])


@pytest.mark.parametrize("how", compiled.HOW)
def test_a_compiled_model_has_the_losses_of_eager_and_the_graphs_of_fsdp2(how):
    ours, fsdp2 = (compiled.train(system, how) for system in ("ours", "fsdp2"))
    assert compiled.agree(ours["losses"], eager("ours"))
    assert ours["graphs"] == fsdp2["graphs"] > 0
    assert ours["breaks"] == fsdp2["breaks"]


def test_inductor_gives_the_losses_of_eager():
    found = compiled.train("ours", "blocks, after", "inductor")
    assert compiled.agree(found["losses"], eager("ours"))
    assert found["graphs"] > 0
