import io
import math
from pathlib import Path

import matplotlib.image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from thinwire.exchange.plan import Coding, TensorSpec, make_plan
from thinwire.options import DEFAULT_DENSE_BELOW, DEFAULT_OVERLAPPED_BUCKETS
from thinwire.planner.cost import DEVICES, DeviceCosts
from thinwire.planner.figure import draw
from thinwire.planner.links import Link
from thinwire.planner.report import OVERLAPPED_BUCKETS, Report, make_report, recommend, tensors_from_count
from thinwire.planner.table import print_report

SPECS = [TensorSpec("w", (256, 640), "torch.float32", 3), TensorSpec("b", (640,), "torch.float32", 1)]
MODEL = tensors_from_count(320_000_000)


def report_of(bits_per_second: float, num_replicas: int = 8, compute_seconds: float = 0.3, **options: object) -> Report:
    link = Link(bits_per_second, 0.001, window_bytes=None)
    return make_report(MODEL, num_replicas, link, compute_seconds, **options)  # type: ignore[arg-type]


def test_the_muon_rule_costs_more_in_thinwires_rows_alone() -> None:
    plain, muon = (report_of(1e8, update=rule, device="cpu") for rule in ("sign", "muon"))
    extra = DEVICES["cpu"].rule_seconds("muon", [spec.shape for spec in MODEL], 64)
    assert extra > 1
    for before, after in zip(plain.predictions, muon.predictions, strict=True):
        more = extra if before.method == "Thinwire DeMo" else 0.0
        assert after.optimizer_seconds == pytest.approx(before.optimizer_seconds + more)
    assert muon.title == f"{plain.title}, Thinwire with the muon rule"
    with pytest.raises(ValueError, match="update='muom'"):
        report_of(1e8, update="muom")


def test_rows_are_exact_to_the_byte() -> None:
    options = {"topks": (8, 32), "values": ("sign", "int8"), "exchange": "all_gather"}
    report = make_report(SPECS, 4, Link(1e8, 0.01), 0.1, **options)  # type: ignore[arg-type]
    labels = [row.label for row in report.predictions]
    ours = [f"Thinwire DeMo, k={topk}, {values}" for topk in (8, 32) for values in ("sign", "int8")]
    assert labels == ["DDP AdamW, fp32", "DDP AdamW, bf16", "published DeMo, k=32, float32", *ours]
    dense, half, published, *rest = report.predictions
    assert dense.received_bytes == 2 * half.received_bytes == (256 * 640 + 640) * 4 * 3 // 2
    # Chunks of 64 x 64 for the matrix and of 64 for the vector, 32 coefficients of 12 bytes each.
    assert published.sent_bytes == (40 + 10) * 32 * 12
    for row in rest:
        assert row.topk is not None
        assert row.values is not None
        specs = [TensorSpec(spec.name, spec.shape, spec.dtype, 0) for spec in SPECS]
        plan = make_plan(specs, [Coding(64, row.topk, row.values, "adaptive", 4096)])
        assert row.sent_bytes == plan.payload_bytes
        assert row.received_bytes == 3 * row.sent_bytes


def test_gradients_in_bfloat16_have_one_row() -> None:
    report = report_of(1e8, gradient_bytes_per_element=2)
    assert [row.label for row in report.predictions if row.topk is None] == ["DDP AdamW, bf16"]


def test_the_default_of_dense_below_is_the_optimizers() -> None:
    default = make_report(SPECS, 2, Link(1e8, 0.0), 0.1)
    assert default == make_report(SPECS, 2, Link(1e8, 0.0), 0.1, dense_below=DEFAULT_DENSE_BELOW)
    assert default != make_report(SPECS, 2, Link(1e8, 0.0), 0.1, dense_below=0)


def test_overlap_hides_most_of_the_exchange_and_adds_a_header_per_bucket() -> None:
    assert OVERLAPPED_BUCKETS == DEFAULT_OVERLAPPED_BUCKETS
    options = {"topks": (32,), "values": ("sign",), "exchange": "all_gather", "bits_per_second": 1e9, "compute_seconds": 2.0}
    late, early = (report_of(**options, overlap=overlap).predictions[-1] for overlap in (False, True))
    assert early.sent_bytes == late.sent_bytes + 7 * 64
    assert late.exposed_seconds == late.network_seconds
    latency = 7 * 0.001
    assert early.exposed_seconds == pytest.approx((early.network_seconds - latency) / 8 + latency)
    assert report_of(1e9, overlap=True).title.endswith("Thinwire with overlap")
    assert report_of(1e9, overlap=True).predictions[:3] == report_of(1e9).predictions[:3], "the others are as before"


def test_the_docs_example_of_overlap() -> None:
    document = (Path(__file__).parents[3] / "docs" / "planner.md").read_text()
    options = {"topks": (32,), "values": ("sign",), "exchange": "all_gather"}
    model, link = tensors_from_count(10**9), Link(1e9, 0.02)
    late, early = (make_report(model, 8, link, 1.0, **options, overlap=on).predictions[-1] for on in (False, True))
    assert f"{late.exposed_seconds:.2f} s exposed without overlap, {early.exposed_seconds:.2f} s with" in document


def test_costs_can_be_replaced_and_the_link_exchanged() -> None:
    costs = DeviceCosts(0.0, 0.0, 0.0, ddp_overlap=0.0)
    report = report_of(1e8, costs=costs)
    assert all(row.optimizer_seconds == 0 for row in report.predictions)
    faster = report.at(Link(1e12, 0.0))
    assert faster == make_report(MODEL, 8, Link(1e12, 0.0), 0.3, costs=costs)
    assert all(new.step_seconds < old.step_seconds for new, old in zip(faster.predictions, report.predictions, strict=True))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_replicas": 0}, "num_replicas must be an integer >= 1, got 0"),
        ({"compute_seconds": 0.0}, "compute_seconds=0.0 must be a finite number above 0"),
        ({"compute_seconds": math.nan}, "compute_seconds=nan"),
        ({"gradient_bytes_per_element": 3}, "gradient_bytes_per_element=3 must be one of 8, 4, 2"),
        ({"device": "gpus"}, "device='gpus' is not one of cpu, gpu; did you mean 'gpu'"),
        ({"topks": ()}, "topks and values must each name at least one"),
        ({"topks": (0,)}, "topks must be an integer >= 1"),
        ({"values": ("signs",)}, "did you mean 'sign'"),
        ({"chunk": 0}, "chunk must be"),
        ({"dense_below": -1}, "dense_below must be"),
        ({"exchange": "owners"}, "exchange='owners' is not one of all_gather, auto, owner; did you mean 'owner'"),
        ({"owner_topk": 0}, "owner_topk must be an integer >= 1"),
        ({"tensors": []}, "tensors hold no elements"),
    ],
)
def test_bad_questions_are_refused(change: dict[str, object], complaint: str) -> None:
    question: dict[str, object] = {"tensors": SPECS, "num_replicas": 2, "link": Link(1e8, 0.0), "compute_seconds": 0.1}
    with pytest.raises(ValueError, match=complaint):
        make_report(**{**question, **change})  # type: ignore[arg-type]


def test_ddp_is_enough_on_a_fast_link() -> None:
    advice = recommend(report_of(400e9))
    assert advice.prediction.label == "DDP AdamW, fp32"
    assert "Plain DDP is enough" in advice.reason


def test_half_the_bytes_may_be_enough() -> None:
    advice = recommend(report_of(50e9))
    assert advice.prediction.label == "DDP AdamW, bf16"
    assert advice.prediction.efficiency >= 0.95


def test_the_largest_useful_topk_that_fits_is_taken() -> None:
    report = report_of(10e9, exchange="all_gather")
    chosen = recommend(report).prediction
    signs = {row.topk: row for row in report.predictions if row.values == "sign"}
    assert chosen == signs[32]
    assert signs[32].network_share <= 0.10 < signs[64].network_share
    assert "topk=32" in recommend(report).reason


def test_no_more_than_64_coefficients_are_advised() -> None:
    report = report_of(1e8, num_replicas=2, compute_seconds=10.0)
    assert {row.topk: row.network_share < 0.1 for row in report.predictions if row.values == "sign"}[128]
    assert recommend(report).prediction.label == "Thinwire DeMo, k=64, sign"


def test_on_a_thin_wire_the_smallest_topk_is_taken() -> None:
    advice = recommend(report_of(10e6))
    assert advice.prediction.label == "Thinwire DeMo, k=8, sign"
    assert "times as long" in advice.reason
    assert (
        recommend(report_of(10e6, topks=(64, 16), values=("float32", "int8"))).prediction.label
        == "Thinwire DeMo, k=16, int8"
    )


def test_ddp_is_advised_where_demo_would_be_slower() -> None:
    slow_optimizer = DeviceCosts(0.0, 10.0, 30.0, ddp_overlap=0.0)
    advice = recommend(report_of(100e9, costs=slow_optimizer))
    assert advice.prediction.label == "DDP AdamW, bf16"
    assert "is faster here" in advice.reason


@pytest.mark.parametrize("device", DEVICES)
def test_one_replica_needs_no_wire(device: str) -> None:
    report = report_of(1e6, num_replicas=1, device=device)
    assert all(row.network_seconds == 0 for row in report.predictions)
    assert "nothing crosses a wire" in recommend(report).reason


@given(num_parameters=st.integers(1, 10**12))
def test_shapes_from_a_count(num_parameters: int) -> None:
    specs = tensors_from_count(num_parameters)
    assert all(edge % 64 == 0 and edge > 0 for spec in specs for edge in spec.shape)
    found = sum(math.prod(spec.shape) for spec in specs)
    assert abs(found - num_parameters) <= 32 * specs[0].shape[1] or (found == 4096 and num_parameters < 4096)
    assert len({spec.name for spec in specs}) == len(specs)


def test_a_guessed_model_costs_what_the_papers_does() -> None:
    dim = 2048
    shapes = [(50304, dim), *([(3 * dim, dim), (dim, dim), (8 * dim, dim), (dim, 4 * dim)] * 16)]
    paper = [TensorSpec(str(index), shape, "torch.float32", 0) for index, shape in enumerate(shapes)]
    guessed = tensors_from_count(sum(math.prod(shape) for shape in shapes))
    for known, guess in zip(
        *(make_report(specs, 8, Link(1e9, 0), 1.0).predictions for specs in (paper, guessed)), strict=True
    ):
        assert guess.sent_bytes == pytest.approx(known.sent_bytes, rel=0.01)


def test_a_count_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="num_parameters must be an integer >= 1, got 0"):
        tensors_from_count(0)


@pytest.mark.parametrize("width", [80, 118, 150])
def test_no_cell_is_cut_short(width: int) -> None:
    output = io.StringIO()
    print_report(report_of(1e6, num_replicas=512), Console(file=output, width=width))
    assert "…" not in output.getvalue()
    assert max(map(len, output.getvalue().splitlines())) <= width


@pytest.mark.parametrize("num_replicas", [1, 8])
def test_the_table_has_every_row_and_the_advice(num_replicas: int) -> None:
    output = io.StringIO()
    report = report_of(1e9, num_replicas=num_replicas)
    print_report(report, Console(file=output, width=400))
    lines = [line for line in output.getvalue().splitlines() if line.startswith("│")]
    assert len(lines) == len(report.predictions)
    for row in report.predictions:
        (line,) = [line for line in lines if f" {row.label} " in line]
        assert f"{100 * row.efficiency:.1f} %" in line
        assert ("> " in line) == (row == recommend(report).prediction)
    assert recommend(report).reason in output.getvalue()
    assert "320 M parameters" in output.getvalue()


@pytest.mark.parametrize(("num_replicas", "rate"), [(1, 1e6), (8, 1e9), (64, 50e9), (8, 5e12)])
def test_the_figure_is_a_png_with_something_on_it(num_replicas: int, rate: float, tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    draw(report_of(rate, num_replicas=num_replicas), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(path)[..., :3]
    assert (pixels < 0.9).any(axis=-1).sum() > 1000


def test_ddp_is_not_taken_for_faster_where_fewer_coefficients_are() -> None:
    report = make_report(tensors_from_count(10_000_000), 32, Link(3e9, 0.02), 1.0)
    advice = recommend(report)
    fastest = min(report.predictions, key=lambda row: row.step_seconds)
    assert (advice.prediction.topk is None) == (fastest.topk is None)


def test_where_fewer_coefficients_save_nothing_more_are_taken() -> None:
    report = make_report(tensors_from_count(1_000_000), 2, Link(1e8, 0.04), 0.1)
    steps = {row.topk: row.step_seconds for row in report.predictions if row.values == "sign"}
    assert steps[64] < 1.05 * steps[8]
    advice = recommend(report)
    assert advice.prediction.network_share > 0.1
    assert advice.prediction.label == "Thinwire DeMo, k=64, sign"
    assert "fewer coefficients would hardly be faster" in advice.reason
