"""transformers: a mixin for its `Trainer`, and `from_pretrained(distributed_config=...)` onto ragged parameters.

    class MyTrainer(RaggedTrainer, Trainer): ...

    args = TrainingArguments(..., fsdp=True, fsdp_config={...})       as for FSDP2
    trainer = MyTrainer(model, args, ..., shard_options={"block_policy": block_policies.rows(32)})
    trainer.train(resume_from_checkpoint=...)                         sharded and full checkpoints

    with sharded_loading(block_policy=...):                           or sharded while it is loaded
        model = AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=8))

Tried with transformers 5.23 and accelerate 1.15.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_runtime import FSDPModule, fully_shard
from fsdp_runtime.integrations import accelerate
from ragged_shard import RaggedDTensor, held_boxes, raise_on_all_ranks, same_on_all_ranks

from ._replaced import replaced


class RaggedTrainer:
    """Mix it in before transformers' `Trainer`: with `fsdp=True` the model is sharded by fsdp_runtime.

    The model is sharded by `integrations.accelerate.shard`, with the trainer's `fsdp_config`, before the optimizer is
    made or the first evaluation, which needs no training before it. Clipping, accumulation and saving are the
    trainer's own. Without `fsdp` nothing is changed.
    """

    def __init__(self, *args: Any, shard_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """`Trainer`'s arguments, and `shard_options`: of `fully_shard` that `fsdp_config` does not know."""
        self.shard_options = dict(shard_options or {})
        self._own_params: list[list[nn.Parameter]] = []
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Shard the model, then as the trainer does."""
        self._shard()
        if self._sharded:
            for module in self._trainer.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # an evaluation leaves some gathered
        parent: Any = super()
        optimizer = parent.create_optimizer(model)
        self._own_params = [list(group["params"]) for group in optimizer.param_groups]
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As the trainer does, after the optimizer that Accelerate has prepared got its own parameters back.

        Accelerate tells parameters by their memory's address, which those have in common that a rank holds nothing of.
        """
        if self._sharded:
            for group, params in zip(self._trainer.optimizer.param_groups, self._own_params, strict=True):
                group["params"] = params
        parent: Any = super()
        return parent.create_scheduler(num_training_steps, optimizer)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the trainer does; before training too, where Accelerate's FSDP2 asks for an optimizer."""
        self._shard()
        trainer = self._trainer
        parent: Any = super()
        enabled = trainer.is_fsdp_enabled
        if self._sharded:
            trainer.is_fsdp_enabled = False  # so that the model alone is prepared
        try:
            return parent.evaluation_loop(*args, **kwargs)
        finally:
            trainer.is_fsdp_enabled = enabled

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the trainer does; sharded, ranks agree on the checkpoint first, and each has read its files.

        Communicates one all-gather of pickled objects, under 200 bytes a rank, before training.

        Raises:
            OSError, RuntimeError, ValueError: on every rank, with the name of the rank: the checkpoint or a file in it
                is missing or cannot be read; ranks have another checkpoint, or other files of it.
        """
        if self._trainer.is_fsdp_enabled:
            resume_from_checkpoint = self._agreed(resume_from_checkpoint)
        parent: Any = super()
        return parent.train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        with accelerate.full_state_dicts():
            return super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        with accelerate.full_state_dicts():
            return super()._load_optimizer_and_scheduler(*args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self, *args: Any, **kwargs: Any) -> Any:
        if self._sharded:
            folder, problem = Path(self._trainer.state.best_model_checkpoint), None
            try:
                _check_readable(folder, ["{model}.bin"] if self._rank == 0 else [])
            except Exception as error:  # the other ranks must not wait for this one
                problem = error
            raise_on_all_ranks(problem, "load_best_model_at_end")
        with accelerate.full_state_dicts():
            return super()._load_best_model(*args, **kwargs)  # type: ignore[misc]

    def _agreed(self, checkpoint: Any) -> str | None:
        """The checkpoint that all ranks resume from; see `train`."""
        from transformers.trainer_utils import get_last_checkpoint

        folder, files, problem = None, [], None
        try:
            if checkpoint is True:
                folder = get_last_checkpoint(self._trainer.args.output_dir)
                if folder is None:
                    raise FileNotFoundError(f"there is no checkpoint in {self._trainer.args.output_dir}")
            elif checkpoint:
                folder = str(checkpoint)
            if folder is not None:
                files = self._check_files(Path(folder))
        except Exception as error:  # the other ranks must not wait for this one
            problem = error
        checkpoints = {"the checkpoint": f"{Path(folder).name if folder else None} with {files}"}
        same_on_all_ranks(checkpoints, error=problem, caller="resume_from_checkpoint")
        return folder

    def _check_files(self, folder: Path) -> list[str]:
        """Read what this rank will read by itself, mapped. Returns what decides about how the trainer goes on."""
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder")
        json.loads((folder / "trainer_state.json").read_text())
        ranks = self._trainer.args.world_size
        own = ["scheduler.pt", "scaler.pt", f"rng_state_{self._rank}.pth" if ranks > 1 else "rng_state.pth"]
        _check_readable(folder, [*own, "{model}.bin", "optimizer.bin"] if self._rank == 0 else own)
        kinds = ("pytorch_model*", "optimizer*", "scheduler.pt", "scaler.pt", "*.safetensors")
        return sorted(path.name for kind in kinds for path in folder.glob(kind))

    @property
    def _rank(self) -> int:
        return int(self._trainer.args.process_index)

    @property
    def _trainer(self) -> Any:
        return self

    @property
    def _plain_model(self) -> nn.Module:
        """The model; inside of what torch.compile made of it, if that is the trainer's."""
        model: nn.Module = self._trainer.model
        return self._trainer.accelerator.unwrap_model(model, keep_torch_compile=False)  # type: ignore[no-any-return]

    @property
    def _sharded(self) -> bool:
        return self._trainer.is_fsdp_enabled and isinstance(self._plain_model, FSDPModule)

    def _shard(self) -> None:
        trainer = self._trainer
        if not trainer.is_fsdp_enabled or self._sharded:
            return
        accelerator = trainer.accelerator
        mesh = getattr(accelerator, "torch_device_mesh", None)
        if mesh is not None:
            mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
        accelerate.shard(trainer.model, accelerator.state.fsdp_plugin, mesh, **self.shard_options)


def _check_readable(folder: Path, names: list[str]) -> None:
    """Raise where one of these files is there and torch cannot read it."""
    from accelerate.utils.constants import FSDP_MODEL_NAME
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        for name in names:
            path = folder / name.format(model=FSDP_MODEL_NAME)
            if path.is_file():
                accelerate.read_mapped(path, torch.load, weights_only=True)


@contextmanager
def sharded_loading(**options: Any) -> Iterator[None]:
    """Inside, `from_pretrained(distributed_config=...)` of transformers makes models that fsdp_runtime has sharded.

    Units, mesh and precision are those of the configuration. Each rank reads its own ranges of the files; of parameters
    that transformers converts (experts that files keep one by one) it reads all, one parameter at a time, and keeps its
    ranges. Nothing is sent. Replaces names in four of transformers' modules and puts them back. Not for folders that
    `save_pretrained(distributed_checkpoint=True)` wrote.

    Args:
        options: of `fully_shard` that the configuration does not know, such as `block_policy`.

    Raises:
        ImportError: a version of transformers that has other names.
        ValueError: (on leaving) parameters that the model ties and that differ in the files.
    """
    made: list[tuple[nn.Module, dict[str, str]]] = []
    with _replaced(
        (
            "distributed.mixin",
            "apply_fully_sharded_data_parallelism",
            lambda old: _sharding_by_us(old, options, made),
        ),
        ("core_model_loading", "DtensorShardOperation", _read_own_or),
        ("core_model_loading", "set_param_for_module", _cut_before),
        ("core_model_loading", "_dtensor_from_local_like", _wrap_or),
        ("modeling_utils", "_dtensor_from_local_like", _wrap_or),
    ):
        yield
    for model, ties in made:
        for target, source in ties.items():
            if model.get_parameter(target) is not model.get_parameter(source):
                raise ValueError(
                    f"sharded_loading: {target} and {source} are one parameter by the model's configuration and differ "
                    "in the files; load it with tie_word_embeddings=False"
                )


@contextmanager
def _replaced(*names: tuple[str, str, Callable[[Any], Any]]) -> Iterator[None]:
    """Inside, names in modules of transformers are what is made of them."""
    with ExitStack() as stack:
        for path, name, make in names:
            module = import_module(f"transformers.{path}")
            if not hasattr(module, name):
                raise ImportError(
                    f"sharded_loading: this version of transformers has no {path}.{name}; 5.23 is known to work"
                )
            stack.enter_context(replaced(module, **{name: make(getattr(module, name))}))
        yield


def _sharding_by_us(
    theirs: Callable[..., Any], options: Mapping[str, Any], made: list[tuple[nn.Module, dict[str, str]]]
) -> Callable[..., Any]:
    """Parameters are tied before sharding, not after loading."""

    def shard(module: Any, **theirs_options: Any) -> Any:
        return fully_shard(module, **{**theirs_options, **options})

    def apply(model: Any, *args: Any, **kwargs: Any) -> Any:
        made.append((model, dict(model.all_tied_weights_keys)))
        model.tie_weights(recompute_mapping=False)
        with _replaced(("distributed.fsdp", "fully_shard", lambda _: shard)):
            return theirs(model, *args, **kwargs)

    return apply


def _read_own_or(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda param: (_ReadOwn if isinstance(_plain(param), RaggedDTensor) else theirs)(param)


def _wrap_or(theirs: Callable[[torch.Tensor, Any], Any]) -> Callable[[torch.Tensor, Any], Any]:
    def wrap(local: torch.Tensor, like: Any) -> Any:
        like = _plain(like)
        if not isinstance(like, RaggedDTensor):
            return theirs(local, like)
        return RaggedDTensor.from_local(
            local.contiguous(), like.device_mesh, like.placements, shape=like.shape
        )

    return wrap


def _cut_before(theirs: Callable[..., None]) -> Callable[..., None]:
    """What conversions made is whole: keep this rank's ranges of it."""

    def set_param(
        model: nn.Module, target_name: str, param_value: torch.Tensor, *others: Any, **more: Any
    ) -> None:
        path, _, name = target_name.rpartition(".")
        like = _plain(getattr(model.get_submodule(path), name, None))
        if isinstance(like, RaggedDTensor) and param_value.shape == like.shape:
            param_value = _own_ranges(param_value, like, param_value.device, param_value.dtype)
        theirs(model, target_name, param_value, *others, **more)

    return set_param


class _ReadOwn:
    """How transformers reads a parameter: this rank's ranges, or whole tensors that are still to be converted."""

    def __init__(self, param: Any) -> None:
        self._like = _plain(param)

    def shard_tensor(
        self, source: Any, tensor_idx: int | None = None, device: Any = None, dtype: Any = None
    ) -> torch.Tensor:
        if tensor_idx is not None:
            whole: torch.Tensor = source[...]
            return whole.to(device=device, dtype=dtype)
        return _own_ranges(source, self._like, device, dtype)


def _own_ranges(source: Any, like: RaggedDTensor, device: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """This rank's local tensor, from a tensor or a slice of a safetensors file."""
    local = like.to_local()
    out = torch.empty(local.shape, dtype=dtype or like.dtype, device=device)
    flat, first = out.view(-1), 0
    mesh = like.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for offsets, sizes in held_boxes(like.shape, mesh.shape, like.placements, coordinate):
        index = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
        values = source[index] if index else source[...]
        flat[first : first + values.numel()].copy_(values.reshape(-1))
        first += values.numel()
    return out


def _plain(param: Any) -> Any:
    """What a parameter holds: `nn.Parameter` of a distributed tensor is one itself."""
    return param.data if isinstance(param, nn.Parameter) else param
