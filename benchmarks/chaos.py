"""A run of `thinwire train --elastic` that things happen to: processes killed or stopped, connections cut, a full disk.

    python benchmarks/chaos.py --faults 100 --out results/chaos/DATE_HARDWARE

Faults come at random times, one of a random kind to a random replica. The full disk needs root, for a small file system of
its own. Beside the disturbed run, undisturbed ones with all and with fewer replicas say what loss so many gradients give.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from thinwire.bench.environment import environment
from thinwire.training.checkpoints import available_steps
from thinwire.training.logs import read_rows

KINDS = ("kill", "stop", "drop", "half-close", "full disk")
AGENT = Path(__file__).parent / "chaos_agent"
DISK_BYTES = 64 << 20
REPLICAS = 4
MODEL = ["--layers", "1", "--width", "64", "--heads", "2", "--sequence", "64", "--batch", "96", "--warmup-steps", "20"]
RUN = [
    "--eval-every",
    "100",
    "--checkpoint-every",
    "100",
    "--check-drift-every",
    "10",
    "--no-tensorboard",
    "--sample-tokens",
    "0",
]


@dataclass
class Fault:
    """What happened to whom, and when."""

    kind: str
    slot: int
    seconds: float
    step: int


class Chaos:
    """One disturbed run."""

    def __init__(self, folder: Path, seed: int, steps: int, device: str) -> None:
        self.run, self.orders = folder / "disk" / "run", folder / "orders"
        self.orders.mkdir()
        (folder / "disk").mkdir()
        mounted = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder / "disk")]
        self.has_disk = subprocess.run(mounted, capture_output=True, check=False).returncode == 0
        self._disk = folder / "disk"
        self._random = random.Random(seed)
        command = [
            "--elastic",
            "--replicas",
            str(REPLICAS),
            "--min-replicas",
            "2",
            "--steps",
            str(steps),
            "--device",
            device,
        ]
        command += ["--timeout-seconds", "4", "--meet-every-seconds", "1", "--out", str(self.run), "--seed", str(seed)]
        environ = {
            **os.environ,
            "PYTHONPATH": f"{AGENT}:{os.environ.get('PYTHONPATH', '')}",
            "CHAOS_ORDERS": str(self.orders),
        }
        self._log = (folder / "output.txt").open("w")
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "thinwire", "train", "quickstart", *command, *MODEL, *RUN],
            env=environ,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.faults: list[Fault] = []

    @property
    def kinds(self) -> list[str]:
        """Those that can be made here."""
        return [kind for kind in KINDS if kind != "full disk" or self.has_disk]

    @property
    def step(self) -> int:
        """How far the run has come."""
        rows = read_rows(self.run / "log.jsonl")
        return max((row["step"] for row in rows), default=0)

    def workers(self) -> dict[int, int]:
        """The process of every replica that is alive, by slot; launchers are left alone."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if f"--out={self.run}".encode() in words and any(b"cli import main" in word for word in words):
                slot = next(word for word in words if word.startswith(b"--slot="))
                found[int(slot.removeprefix(b"--slot="))] = int(path.parent.name)
        return found

    def disturb(self) -> None:
        """One fault, and what ends it."""
        workers = self.workers()
        if not workers:
            return
        kind, slot = self._random.choice(self.kinds), self._random.choice(sorted(workers))
        pid = workers[slot]
        self.faults.append(Fault(kind, slot, round(time.monotonic() - self._began, 1), self.step))
        try:
            if kind == "kill":
                os.kill(pid, signal.SIGKILL)
            elif kind == "stop":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(self._random.uniform(5, 9))  # longer than the deadline
                os.kill(pid, signal.SIGCONT)
            elif kind == "full disk":
                self._fill(self._random.uniform(4, 9))
            else:
                (self.orders / str(pid)).write_text(kind)
        except ProcessLookupError:
            self.faults.pop()

    def _fill(self, seconds: float) -> None:
        filler = self._disk / "filler"
        try:
            with filler.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
        except OSError:
            pass
        time.sleep(seconds)
        filler.unlink()

    def close(self) -> None:
        """End it, and give the disk back."""
        self.process.kill()
        self._log.close()
        if self.has_disk:
            time.sleep(1)
            subprocess.run(["umount", "-l", str(self._disk)], check=False)


def undisturbed(folder: Path, replicas: int, seed: int, steps: int, device: str) -> float:
    """The last validation loss. Fewer replicas see fewer examples, each as many as in the disturbed run."""
    out = folder / f"plain-{replicas}-{seed}"
    model = [*MODEL]
    model[model.index("--batch") + 1] = str(96 // REPLICAS * replicas)
    command = ["--replicas", str(replicas), "--steps", str(steps), "--seed", str(seed), "--out", str(out)]
    command += ["--device", device]
    subprocess.run(
        [sys.executable, "-m", "thinwire", "train", "quickstart", *command, *model, *RUN],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return float(json.loads((out / "summary.json").read_text())["last_validation_loss"])


def disturbed(folder: Path, asked: argparse.Namespace) -> dict[str, object]:
    """A row about the disturbed run."""
    chaos = Chaos(folder, asked.seed, asked.steps, asked.device)
    generator = random.Random(asked.seed + 1)
    try:
        while chaos.step < 5 and chaos.process.poll() is None:
            time.sleep(0.5)
        while len(chaos.faults) < asked.faults and chaos.process.poll() is None:
            time.sleep(generator.uniform(*asked.gap))
            chaos.disturb()
            if len(chaos.faults) % 10 == 0:
                print(f"{len(chaos.faults)} faults, step {chaos.step}", flush=True)
        code = chaos.process.wait(timeout=asked.patience)
        rows = [row for row in read_rows(chaos.run / "log.jsonl") if row["kind"] == "step"]
        summary_file = chaos.run / "summary.json"
        summary = json.loads(summary_file.read_text()) if summary_file.exists() else {}
        newest = available_steps(chaos.run)
        kinds = {kind: sum(fault.kind == kind for fault in chaos.faults) for kind in KINDS}
        with (asked.out / "faults.jsonl").open("w") as file:
            file.writelines(json.dumps(asdict(fault)) + "\n" for fault in chaos.faults)
        return {
            "kind": "disturbed",
            "device": asked.device,
            "exit_code": code,
            "steps": asked.steps,
            "num_faults": len(chaos.faults),
            "faults": kinds,
            "newest_checkpoint": newest[0] if newest else None,
            "validation_loss": summary.get("last_validation_loss"),
            "logged_steps": len(rows),
            "mean_replicas": statistics.mean(row["replicas"] for row in rows) if rows else None,
            "seconds": round(time.monotonic() - chaos._began),
        }
    finally:
        output = (folder / "output.txt").read_text()
        (asked.out / "output_tail.txt").write_text("\n".join(output.splitlines()[-40:]) + "\n")
        chaos.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--gap", type=float, nargs=2, default=(2.0, 8.0), help="least and most seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--patience", type=float, default=600.0, help="seconds for the run to end after the last fault")
    parser.add_argument("--plain", default="4:0,4:1,4:2,3:0,3:1,3:2", help="undisturbed runs, replicas:seed")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
    with tempfile.TemporaryDirectory() as name, (asked.out / "rows.jsonl").open("a") as file:
        if asked.faults:
            row = disturbed(Path(name), asked)
            print(json.dumps(row), flush=True)
            file.write(json.dumps(row) + "\n")
        for pair in filter(None, asked.plain.split(",")):
            replicas, seed = map(int, pair.split(":"))
            loss = undisturbed(Path(name), replicas, seed, asked.steps, asked.device)
            row = {"kind": "undisturbed", "replicas": replicas, "seed": seed, "steps": asked.steps, "validation_loss": loss}
            print(json.dumps(row), flush=True)
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
