"""Measure the steps of the frontier's methods and settings on a thin link: two hosts, real sockets and packets.

sudo python benchmarks/frontier_links.py --size medium --out results/frontier_links/DATE_HARDWARE_SIZE

The settings are those that `thinwire study run frontier` trains at that size: k, codecs, rules, peers. Rows are appended as
they are measured; what is there is not measured again. `thinwire study report` then draws losses against time, too.
"""

import argparse
import json
from pathlib import Path

from thinwire.bench.environment import environment
from thinwire.lab import support
from thinwire.lab.compare import Comparison, run
from thinwire.lab.methods import LabMethod
from thinwire.planner.link_spec import parse_link
from thinwire.studies.frontier import LINK, contenders, timed_as
from thinwire.studies.study import MEDIUM, SIZES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default=MEDIUM)
    parser.add_argument("--steps", type=int, default=20, help="to measure of each, in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    support.require()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / "environment.json").exists():
        (options.out / "environment.json").write_text(json.dumps(environment(), indent=1) + "\n")
    known = [one for one in contenders(options.size) if timed_as(one.name) == one.name]
    methods = {one.name: LabMethod(one.trial.optimizer, {**one.trial.all_settings, "lr": one.rate}) for one in known}
    recipes = {one.trial.recipe for one in known}
    assert len(recipes) == 1, "a comparison has one recipe"
    comparison = Comparison(recipes.pop(), methods, (2,), (parse_link(LINK),), options.steps, num_rounds=options.rounds)
    total = len(comparison.keys())
    cells = run(comparison, options.out / "rows.jsonl", lambda what, done: print(f"{done} of {total} {what}", flush=True))
    failed = {cell.method: cell.error for cell in cells if cell.error}
    if failed:
        raise SystemExit("\n".join(f"{method}: {error}" for method, error in failed.items()))


if __name__ == "__main__":
    main()
