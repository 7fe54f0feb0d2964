"""Lightning with DeMo.

    trainer = Trainer(strategy=DeMoStrategy(), devices=8)

The module's ``configure_optimizers`` returns `DeMo`. The model is not wrapped, so nothing averages gradients.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins import precision
from lightning.pytorch.strategies import DDPStrategy

from thinwire.integrations.replica_files import load_beside, remove_beside, save_beside
from thinwire.optimizer import DeMo


class MixedPrecision(precision.MixedPrecision):
    """Gradients are unscaled before they are clipped. Lightning leaves that to optimizers that know a scaler, and refuses to
    clip; DeMo knows it so that all replicas skip a step together. Its name is that by which Lightning keeps the scaler's
    state in checkpoints."""

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **options: Any
    ) -> Any:
        """As Lightning's."""

        def unscaled() -> Any:
            result = closure()
            if self.scaler is not None and (result is not None or not model.automatic_optimization):
                self.scaler.unscale_(optimizer)
            return result

        return super().optimizer_step(optimizer, model=model, closure=unscaled, **options)

    def clip_gradients(self, *arguments: Any, **options: Any) -> None:
        """As without mixed precision."""
        precision.Precision.clip_gradients(self, *arguments, **options)


class DeMoStrategy(DDPStrategy):
    """Processes as `DDPStrategy` starts them, without `DistributedDataParallel`; checkpoints hold every rank's residual
    momentum, in a folder beside the file."""

    _checkpoint: Path | None = None

    @property
    def precision_plugin(self) -> precision.Precision:
        """As the trainer has set it, with gradients that can be clipped."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: precision.Precision | None) -> None:
        if type(plugin) is precision.MixedPrecision:  # who has a class of one's own knows what it does
            plugin = MixedPrecision(plugin.precision, plugin.device, plugin.scaler)  # type: ignore[arg-type]
        self._precision_plugin = plugin

    def configure_ddp(self) -> None:
        """Leave the model as it is. DeMo copies replica 0's parameters to all."""

    def setup_optimizers(self, trainer: Any) -> None:
        """As the module says; all of them must be DeMo."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self._check(optimizer)

    @staticmethod
    def _check(optimizer: Any) -> DeMo:
        if not isinstance(optimizer, DeMo):
            found = type(optimizer).__name__
            raise TypeError(f"DeMoStrategy averages no gradients, so every optimizer must be thinwire.DeMo, got {found}")
        return optimizer

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """The file, by rank 0, and each rank's optimizer beside it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        for place, optimizer in enumerate(self.optimizers):
            save_beside(self._check(optimizer), Path(f"{filepath}.{place}"))

    def remove_checkpoint(self, filepath: Any) -> None:
        """The file, by rank 0, and each rank's optimizer beside it."""
        super().remove_checkpoint(filepath)
        for place, _ in enumerate(self.optimizers):
            remove_beside(Path(f"{filepath}.{place}"))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """The file; the optimizers' part follows."""
        # ``ModelCheckpoint(save_last="link")`` makes a link to the file, and none to what lies beside it.
        self._checkpoint = Path(checkpoint_path).resolve()
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
        return found

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Each rank's own."""
        for place, optimizer in enumerate(self.optimizers):
            load_beside(self._check(optimizer), Path(f"{self._checkpoint}.{place}"))
