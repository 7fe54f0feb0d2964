"""Break each invariant on purpose and see its test fail: the tests can fail, and for the right reason."""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import thinwire
from tests.ranks import forkserver

SOURCE = Path(thinwire.__file__).parent
ROOT = SOURCE.parent.parent


@dataclass(frozen=True)
class Mutation:
    """``old`` in ``file`` becomes ``new``, and ``test`` must notice."""

    name: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation(
        "an owner forgets what it did not send",
        "ownership.py",
        "residual.copy_(after)",
        "residual.zero_()",
        "tests/unit/test_owners.py::test_nothing_is_lost_between_sender_owner_and_receivers[int8]",
    ),
    Mutation(
        "what went to an owner without a sound answer is lost",
        "routes.py",
        "self._return_slices_(bucket, room, refused)",
        "pass",
        "tests/unit/test_owners.py::test_what_went_to_an_owner_whose_answer_was_damaged_returns_to_the_momentum",
    ),
    Mutation(
        "an island adds its gradients up and does not divide",
        "shared_island.py",
        "return mean_S.div_(self._inside.num_ranks)",
        "return mean_S",
        "tests/unit/test_shared_island.py::test_islands_equal_replicas_with_the_mean_gradients[2-8-options4]",
    ),
    Mutation(
        "a share ends inside a chunk",
        "core/layout.py",
        'return 1 if layout == "adaptive" and is_stack(shape, chunk) else whole.row_edge',
        "return 1",
        "tests/unit/exchange/test_dealing.py::test_shares_cover_every_tensor_once_and_keep_its_chunks",
    ),
    Mutation(
        "the fused kernels keep one tied coefficient too few",
        "kernels/selection.py",
        "is_tied & (num_so_far <= num_wanted)",
        "is_tied & (num_so_far < num_wanted)",
        "tests/numerics/test_backends.py::test_indices_are_the_oracles[cpu-5-one size]",
    ),
    Mutation(
        "the fused kernels count a vote against as one for",
        "kernels/decode.py",
        "tl.where(value < 0, COUNTER_BITS, 0)",
        "tl.where(value < 0, 0, 0)",
        "tests/numerics/test_backends.py::test_any_number_of_replicas[cpu-16-256-2]",
    ),
    Mutation(
        "the fused check lets an index come twice",
        "kernels/checks.py",
        "is_next = (index > before)",
        "is_next = (index >= before)",
        "tests/unit/test_sealing.py::test_an_index_that_comes_twice_is_found",
    ),
    Mutation(
        "what a replica received is forgotten at a meeting",
        "membership.py",
        "(one.content, one.received) != (best.content, best.received)",
        "one.content != best.content",
        "tests/unit/test_membership.py::test_that_a_replica_received_other_bytes_is_not_forgotten_at_a_meeting",
    ),
    Mutation(
        "half a copy of another's state counts as whole",
        "membership.py",
        "self._is_torn = own in copiers",
        "self._is_torn = False",
        "tests/unit/test_membership.py::test_a_copy_that_broke_off_is_made_anew_and_never_trained_with",
    ),
    Mutation(
        "ties go to the higher index",
        "core/selection.py",
        "torch.sort(magnitude_CE, dim=1, descending=True, stable=True).indices",
        "magnitude_CE.shape[1] - 1 - torch.sort(magnitude_CE.flip(1), dim=1, descending=True, stable=True).indices",
        "tests/unit/core/test_selection.py::test_ties_go_to_the_lower_index_and_zeros_are_void",
    ),
    Mutation(
        "replicas are combined in reverse",
        "core/combine.py",
        "    for indices_CK, values_CK in messages:\n        combined_CE",
        "    for indices_CK, values_CK in reversed(messages):\n        combined_CE",
        "tests/unit/core/test_combine.py::test_replicas_are_summed_in_replica_order",
    ),
    Mutation(
        "a zero counts as a vote",
        "core/combine.py",
        "(values_CK != 0).to(torch.int16)",
        "torch.ones_like(values_CK, dtype=torch.int16)",
        "tests/unit/core/test_combine.py::test_means_over_senders_and_over_replicas",
    ),
    Mutation(
        "alone, a vote keeps its size",
        "torch_stack.py",
        ' and decoding.combine != "majority_vote"',
        "",
        "tests/numerics/test_oracle.py::test_votes_and_clipped_values_with_every_codec[float32-1]",
    ),
    Mutation(
        "sizes count in a vote",
        "core/combine.py",
        "(values_CK.sign() if is_majority else values_CK)",
        "values_CK",
        "tests/unit/core/test_combine.py::test_most_replicas_decide_a_vote_whatever_the_sizes",
    ),
    Mutation(
        "the fused kernels count a value of 0 as a vote",
        "kernels/decode.py",
        "live = live & (value != 0)",
        "live = live & (value == value)",
        "tests/numerics/test_exact.py::test_a_value_of_0_is_no_vote",
    ),
    Mutation(
        "half of the replicas can raise the median",
        "core/robust.py",
        "(len(squared_norms) - 1) // 2",
        "len(squared_norms) // 2",
        "tests/unit/core/test_robust.py::test_factors_scale_down_to_the_median_and_leave_the_rest_alone",
    ),
    Mutation(
        "each part of a stack is clipped by itself",
        "torch_stack.py",
        "[before + squared_norm(mine) for",
        "[squared_norm(mine) for",
        "tests/numerics/test_clipping.py::test_no_cut_and_no_order_of_chunks_changes_a_bit[cpu-float32]",
    ),
    Mutation(
        "what was sent stays in the momentum",
        "core/selection.py",
        "part.scatter_add_(1, where, negative.to(part.dtype))",
        "part.scatter_add_(1, where, negative.to(part.dtype) * 0)",
        "tests/numerics/test_conservation.py::test_decayed_momentum_plus_gradient_is_sent_plus_kept",
    ),
    Mutation(
        "the unrounded value is taken out instead of what the peers see",
        "wire/codec.py",
        "sent = codec.decode(codes, scale)",
        "sent = values_CK.clone()",
        "tests/contracts/test_codecs.py::test_records_hold_what_was_sent_and_nothing_is_lost",
    ),
    Mutation(
        "the header is not compared",
        "wire/payload.py",
        "        if found != wanted:",
        '        if found != wanted and name == "magic":',
        "tests/unit/wire/test_payload.py::test_every_field_of_the_header_is_compared",
    ),
    Mutation(
        "the checksum leaves a word out",
        "wire/payload.py",
        "    weights[2 * CHECKSUM_WORD : 2 * CHECKSUM_WORD + 2] = 0",
        "    weights[2 * CHECKSUM_WORD : 2 * CHECKSUM_WORD + 3] = 0",
        "tests/unit/wire/test_payload.py::test_every_single_bit_is_guarded",
    ),
    Mutation(
        "indices out of order are accepted",
        "wire/indices.py",
        "return indices_CK.clamp(max=num_elements), in_order & ",
        "return indices_CK.clamp(max=num_elements), ",
        "tests/contracts/test_codecs.py::test_index_codecs_take_any_bits_without_leaving_the_range",
    ),
    Mutation(
        "a failed exchange is not undone",
        "attempt.py",
        "        self._local.set_verdict_(Verdict.REFUSED)\n        for bucket, encoding in self._buckets:",
        "        self._local.set_verdict_(Verdict.REFUSED)\n        for bucket, encoding in self._buckets[:0]:",
        "tests/contracts/test_transports.py::test_a_damaged_payload_stops_the_step_before_anything_changes[70-checksum]",
    ),
    Mutation(
        "the fused step is applied against the verdict",
        "kernels/decode.py",
        "tl.load(verdict_ptr) == 0",
        "tl.load(verdict_ptr) >= 0",
        "tests/numerics/test_backends.py::test_nothing_is_applied_if_the_verdict_says_so[cpu-adamw-1]",
    ),
    Mutation(
        "the device does not compare digests",
        "kernels/checks.py",
        "differs & ((column == 1) | (column == 2))",
        "differs & (column < 0)",
        "tests/unit/test_sealing.py::test_damage_and_what_a_sender_says_stop_a_step[cpu-True]",
    ),
    Mutation(
        "all replicas see the same examples",
        "training/examples.py",
        "        first += self.replica * share\n",
        "",
        "tests/unit/training/test_examples.py::test_a_pass_holds_every_example_once",
    ),
    Mutation(
        "a damaged checkpoint is loaded",
        "parallel/listing.py",
        "        if _fingerprint(path) != wanted:",
        "        if False:",
        "tests/unit/training/test_checkpoints.py::test_damaged_files_are_refused",
    ),
    Mutation(
        "a resumed run takes the checkpoint's settings",
        "training/settings.py",
        "        group.update(settings)",
        "        pass",
        "tests/unit/training/test_methods.py::test_a_resumed_run_has_the_settings_it_was_started_with",
    ),
    Mutation(
        "the relay lets frames overtake each other",
        "lab/relay.py",
        "due = max(due, self._latest.get((source, target), 0.0))",
        "due = max(due, 0.0)",
        "tests/unit/lab/test_relay.py::test_chance_delays_within_its_bounds_and_never_changes_the_order_of_a_way",
    ),
    Mutation(
        "what is left of a frame says it were its beginning",
        "lab/relay.py",
        "(sequence + first * size) & 0xFFFFFFFF",
        "sequence & 0xFFFFFFFF",
        "tests/unit/lab/test_relay.py::test_lost_packets_are_cut_out_of_their_frame[0-1449]",
    ),
]


def run(source: Path, test: str, log: Path) -> int:
    """The exit code of one test against other sources, in a process whose torch is imported already."""
    process = forkserver().Process(target=_run, args=(str(source), test, str(log)), daemon=False)
    process.start()
    process.join(200)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode or 0


def _run(source: str, test: str, log: str) -> None:
    with open(log, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(ROOT)
    os.environ["PYTHONPATH"] = source  # for processes that the test starts
    sys.path.insert(0, source)
    for name in [name for name in sys.modules if name.split(".")[0] in ("thinwire", "tests")]:
        del sys.modules[name]  # this very module has imported the sound sources
    os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu", test]))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_broken_invariant_is_noticed(mutation: Mutation, tmp_path: Path) -> None:
    package = tmp_path / "thinwire"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, "the mutation does not fit the source any more"
    file.write_text(text.replace(mutation.old, mutation.new))
    log = tmp_path / "log"
    # 1: tests ran and failed; a source that cannot be imported would give 2.
    assert run(tmp_path, mutation.test, log) == 1, f"no test noticed:\n{log.read_text()}"
