"""The rules of the source tree, as tests."""

import ast
import hashlib
import inspect
import re
from pathlib import Path

import pytest

import thinwire
from thinwire.exchange.plan import Coding, TensorSpec, make_plan
from thinwire.wire.__main__ import table

SOURCE = Path(thinwire.__file__).parent
ROOT = SOURCE.parent.parent
# Each may import from itself and from what stands before it.
LAYERS = [
    "core",
    "pages",
    "wire",
    "kernels",
    "exchange",
    "slabs",
    "shared_island",
    "gradients",
    "stack_step",
    "ownership",
    "torch_stack",
    "fused",
    "fused_stack",
    "sealing",
    "local_step",
    "routes",
    "attempt",
    "overlap",
    "delay",
    "company",
    "drift",
    "options",
    "planning",
    "membership",
    "checkpoint",
    "optimizer",
    "hidden",
    "redistribution",
    "planner",
    "parallel",
    "integrations",
    "peers",
    "training",
    "lab",
    "__init__",
    "bench",
    "studies",
    "commands",
    "cli",
    "__main__",
]
# Files that may import what the core does not depend on, and what.
EXTRAS = {
    "kernels/balance.py": {"triton"},
    "kernels/bits.py": {"triton"},
    "kernels/checks.py": {"triton"},
    "kernels/decode.py": {"triton"},
    "kernels/encode.py": {"triton"},
    "kernels/selection.py": {"triton"},
    "kernels/table.py": {"triton"},
    "kernels/undo.py": {"triton"},
    "kernels/values.py": {"triton"},
    "integrations/accelerate.py": {"accelerate"},
    "integrations/lightning.py": {"lightning"},
    "integrations/transformers.py": {"transformers"},
    "parallel/elastic.py": {"torchft"},
    "parallel/launch.py": {"torchft"},
    "peers/published_code.py": {"pytorch_optimizer"},
    "planner/table.py": {"rich"},
    "planner/figure.py": {"matplotlib"},
    "planner/scale_figure.py": {"matplotlib"},
    "training/config_file.py": {"yaml"},
    "training/dry_run.py": {"rich"},
    "training/galore.py": {"galore_torch"},
    "training/logs.py": {"wandb"},
    "training/loop.py": {"rich", "transformers"},
    "training/methods.py": {"pytorch_optimizer"},
    "training/models.py": {"transformers"},
    "training/pictures.py": {"PIL", "sklearn"},
    "training/progress.py": {"rich"},
    "training/report.py": {"rich"},
    "training/reporter.py": {"rich"},
    "training/text.py": {"datasets", "tokenizers"},
    "lab/figure.py": {"matplotlib"},
    "studies/charts.py": {"matplotlib"},
    "studies/figure.py": {"matplotlib"},
    "studies/gradients.py": {"transformers"},
    "studies/labels.py": {"matplotlib"},
    "lab/worker.py": {"rich"},
    "bench/contenders.py": {"pytorch_optimizer"},
    "bench/figure.py": {"matplotlib"},
    "commands/bench.py": {"rich", "tyro"},
    "commands/lab.py": {"rich", "tyro"},
    "commands/lab_compare.py": {"rich", "tyro"},
    "commands/page.py": {"tyro"},
    "commands/plan.py": {"rich", "tyro"},
    "commands/scale.py": {"rich", "tyro"},
    "commands/study.py": {"rich", "tyro"},
    "commands/train.py": {"rich", "tyro"},
}
# Layers that may know of process groups.
DISTRIBUTED = ("exchange", "company", "optimizer", "parallel", "integrations")
FILES = sorted(SOURCE.rglob("*.py"))


def layer_of(module: str) -> int:
    parts = module.split(".")
    return LAYERS.index(parts[1] if len(parts) > 1 else "__init__")


def imports(path: Path) -> list[str]:
    """Modules imported at run time, not those for types alone."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += names if node.module == "thinwire" else [node.module]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downwards_only(path: Path) -> None:
    here = layer_of(".".join(("thinwire", *path.relative_to(SOURCE).with_suffix("").parts)))
    for module in imports(path):
        if module.split(".")[0] == "thinwire":
            assert layer_of(module) <= here, f"{path.name} imports {module}"
        if module.startswith("torch.distributed") or module == "torch.nn.parallel":
            assert LAYERS[here] in ("exchange", "company", "optimizer", "parallel", "integrations"), (
                f"{path.name} imports {module}"
            )
        extras = EXTRAS.get(path.relative_to(SOURCE).as_posix(), set())
        allowed = {"thinwire", "torch", "numpy"} | extras | set(__import__("sys").stdlib_module_names)
        assert module.split(".")[0] in allowed, f"{path.name} imports {module}, which the core does not depend on"


def test_files_with_extras_exist_and_import_them() -> None:
    for name, modules in EXTRAS.items():
        assert {module.split(".")[0] for module in imports(SOURCE / name)} >= modules, f"{name} does not need {modules}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_short_and_say_what_they_hold(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
    assert path.stem not in ("utils", "helpers", "common", "misc")


def test_every_public_name_is_documented() -> None:
    readme = (ROOT / "README.md").read_text()
    docs = readme + "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    for name in thinwire.__all__:
        assert getattr(thinwire, name).__doc__, f"{name} has no docstring"
        assert name in docs, f"{name} is in no document"


def test_every_option_is_in_the_docstring_and_in_its_table() -> None:
    options = list(inspect.signature(thinwire.DeMo.__init__).parameters)[1:]
    page = (ROOT / "docs" / "options.md").read_text()
    for option in options:
        assert re.search(rf"^ +{option}: ", thinwire.DeMo.__doc__ or "", re.MULTILINE), f"{option} is not in the docstring"
        assert f"| `{option}` | " in page, f"{option} is in no table of docs/options.md"


def test_the_table_in_the_docs_is_the_one_the_program_prints() -> None:
    assert table(4096) in (ROOT / "docs" / "wire-format.md").read_text()


def test_the_digest_in_the_docs_is_the_one_that_is_compared() -> None:
    tensors = [TensorSpec("a", (64, 10), "torch.float32", 0), TensorSpec("b", (10,), "torch.float32", 0)]
    plan = make_plan(tensors, [Coding(64, 32, "sign", "adaptive", 4096)])
    (stated,) = re.findall(
        r"```text\n(number of tensors.*?)\n```", (ROOT / "docs" / "wire-format.md").read_text(), re.DOTALL
    )
    assert hashlib.sha256(stated.encode()).digest()[:16] == plan.digest


def test_the_changelog_has_this_version() -> None:
    assert f"## {thinwire.__version__}" in (ROOT / "CHANGELOG.md").read_text()
