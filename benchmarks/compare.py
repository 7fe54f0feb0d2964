"""One recipe, several optimizers, several seeds: the same loop, side by side. Rows and a figure under results/.

python benchmarks/compare.py quickstart --replicas 2 --optimizers demo adamw --seeds 0 1 2
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from thinwire.bench.environment import environment
from thinwire.pages.styles import COLOURS
from thinwire.studies.figure import Page, line, room_for_labels, title
from thinwire.training.history import Row
from thinwire.training.logs import read_rows

RESULTS = Path(__file__).parent.parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--optimizers", nargs="+", default=["demo", "adamw"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--hardware", default="cpu", help="for the name of the folder with the results")
    parser.add_argument("--runs", type=Path, help="where the run folders are kept; those that are finished are not repeated")
    options, others = parser.parse_known_args()
    runs = options.runs or Path(tempfile.mkdtemp())
    folders = []
    for seed in options.seeds:
        for optimizer in options.optimizers:
            folder = runs / f"{options.recipe}-{optimizer}-{seed}"
            folders.append(folder)
            if not (folder / "summary.json").exists():
                command = [sys.executable, "-m", "thinwire", "train", options.recipe, "--optimizer", optimizer]
                command += ["--replicas", str(options.replicas), "--seed", str(seed), "--out", str(folder), *others]
                subprocess.run(command, check=True)
    facts = environment()
    out = RESULTS / options.recipe.replace("-", "_") / f"{facts['date']}_{options.hardware}"
    out.mkdir(parents=True, exist_ok=True)
    (out / "environment.json").write_text(json.dumps(facts, indent=1) + "\n")
    collect(folders, out)


def collect(folders: list[Path], out: Path) -> None:
    """Rows of all runs, a table, and the losses of each optimizer's first run as a figure."""
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    with (out / "rows.jsonl").open("w") as file:
        for summary in summaries:
            settings = summary.pop("settings")
            summary.pop("sample", None)
            summary["settings"] = {
                key: value for section in settings.values() for key, value in section.items() if key != "out"
            }
            file.write(json.dumps(summary) + "\n")
    first: dict[str, Path] = {}
    for folder, summary in zip(folders, summaries, strict=True):
        first.setdefault(summary["optimizer"], folder)
    draw_losses({name: read_rows(folder / "log.jsonl") for name, folder in first.items()}, out / "loss.png")
    print(table(summaries))


def table(summaries: list[dict]) -> str:
    """A markdown table: mean over seeds, with the least and the most."""
    lines = ["| optimizer | validation loss | seeds | sent per step | received per step |", "|" + " --- |" * 5]
    for name in dict.fromkeys(summary["optimizer"] for summary in summaries):
        group = [summary for summary in summaries if summary["optimizer"] == name]
        losses = [summary["last_validation_loss"] for summary in group]
        spread = f" ({min(losses):.3f} to {max(losses):.3f})" if len(losses) > 1 else ""
        sent, received = (group[0][f"{way}_bytes_per_step"] for way in ("sent", "received"))
        lines.append(
            f"| {name} | {sum(losses) / len(losses):.3f}{spread} | {len(losses)} | {sent:,.0f} B | {received:,.0f} B |"
        )
    return "\n".join(lines)


def draw_losses(runs: dict[str, list[Row]], path: Path) -> None:
    """Validation losses of some runs against steps, with the training loss faint behind; readable in grey."""
    page = Page(width=7.0)
    (axes,) = page.panels
    for index, (name, rows) in enumerate(runs.items()):
        steps, scores = (
            [(float(row["step"]), row["loss"]) for row in rows if row["kind"] == kind] for kind in ("step", "evaluation")
        )
        if steps:
            axes.plot(*zip(*steps, strict=True), color=COLOURS[index], alpha=0.25, linewidth=0.8)
        if scores:
            line(axes, scores, f"{name} {scores[-1][1]:.3f}", index)
    axes.set_yscale("log")
    axes.set_yticks([1, 1.5, 2, 3, 5], ["1", "1.5", "2", "3", "5"])
    axes.minorticks_off()
    room_for_labels(axes)
    title(axes, "validation loss (marks); training loss (faint)", "step", "loss (nats, log scale)")
    page.save(path)


if __name__ == "__main__":
    main()
