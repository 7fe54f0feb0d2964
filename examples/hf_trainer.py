"""Hugging Face's Trainer with DeMo: torchrun --nproc-per-node 2 examples/hf_trainer.py --out runs/hf"""

import argparse
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from thinwire.integrations.transformers import DeMoTrainer


class Bytes(torch.utils.data.Dataset):
    """Pieces of this file."""

    def __init__(self, length: int = 32) -> None:
        text = torch.tensor(list(Path(__file__).read_bytes()))
        self._pieces = text[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        """Pieces."""
        return len(self._pieces)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        """A piece, as input and as target."""
        return {"input_ids": self._pieces[place], "labels": self._pieces[place]}


def main() -> None:
    """Train, save, and print a checksum of the parameters, which all ranks must share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    args = TrainingArguments(
        asked.out,
        max_steps=asked.steps,
        learning_rate=1e-3,
        per_device_train_batch_size=4,
        save_steps=10,
        logging_steps=5,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = DeMoTrainer(model, args, train_dataset=Bytes(), demo={"topk": 16, "timeout_seconds": 60})
    trainer.train(resume_from_checkpoint=asked.resume)
    values = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
    sent = trainer.demo.traffic.last_step.sent_bytes
    print(
        f"rank {args.process_index}: parameters {zlib.crc32(values.numpy().tobytes()):08x}, {sent} bytes per step",
        flush=True,
    )
    if dist.is_initialized():
        time.sleep(0.5)  # a gloo process may abort if it ends while its threads still run (pytorch issue 190489)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
