"""Lightning with DeMo.

    trainer = Trainer(strategy=DeMoStrategy(), devices=8)

The module's ``configure_optimizers`` returns `DeMo`. The model is not wrapped, so nothing averages gradients.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from thinwire.integrations.replica_files import load_beside, remove_beside, save_beside
from thinwire.optimizer import DeMo


class DeMoStrategy(DDPStrategy):
    """Processes as `DDPStrategy` starts them, without `DistributedDataParallel`; checkpoints hold every rank's residual
    momentum, in a folder beside the file."""

    _checkpoint: Path | None = None

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
