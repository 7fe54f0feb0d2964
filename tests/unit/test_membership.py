"""Replicas that come and go, as threads: what they hold after a meeting."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training import build, flat, train_step
from thinwire import AgreementError, DeMo, ExchangeError, ThinwireError, torch_stack
from thinwire.exchange.loopback import LoopbackHub
from thinwire.exchange.transport import Pending
from thinwire.membership import TornStateError

NUM_STEPS = 6
OPTIONS: dict[str, Any] = {"chunk": 16, "topk": 8, "dense_below": 0, "num_buckets": 2, "update": "adamw"}


class Town:
    """Where replicas meet: whose names each meeting has is known beforehand."""

    def __init__(self, *meetings: str) -> None:
        self.meetings = [tuple(names) for names in meetings]
        self.hubs = [LoopbackHub(len(names), timeout_seconds=20) for names in self.meetings]
        self.mail: dict[tuple[int, str, int], queue.Queue[Tensor]] = {}
        self.lock = threading.Lock()

    def box(self, meeting: int, what: str, target: int) -> "queue.Queue[Tensor]":
        with self.lock:
            return self.mail.setdefault((meeting, what, target), queue.Queue())


class Citizen:
    """An end of the wire. ``loses`` names exchanges that fail here, though the others get everything."""

    def __init__(self, town: Town, name: str, loses: Sequence[str] = ()) -> None:
        self._town, self._name, self.loses = town, name, list(loses)
        self.replica, self.num_replicas, self.meeting, self.members = 0, 1, 0, (name,)
        self.is_meeting_due = False
        self._hub: Any = None

    def meet(self, is_broken: bool, is_running: bool) -> bool:
        self.leave()
        later = range(self.meeting, len(self._town.meetings))
        found = next((number for number in later if self._name in self._town.meetings[number]), None)
        if found is None:
            raise RuntimeError(f"{self._name} must not come to another meeting")
        self.meeting, self.members = found + 1, self._town.meetings[found]
        self.replica, self.num_replicas = self.members.index(self._name), len(self.members)
        self._hub, self._wire = self._town.hubs[found], self._town.hubs[found].transport(self.replica)
        return True

    def leave(self) -> None:
        if self._hub is not None:
            self._hub.leave(self.replica)

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Pending:
        return self._or_lost(self._wire.start_all_gather_(messages_RB, what), what)

    def start_all_to_all_(self, sent_RB: Tensor, received_RB: Tensor, what: str) -> Pending:
        return self._or_lost(self._wire.start_all_to_all_(sent_RB, received_RB, what), what)

    def _or_lost(self, pending: Pending, what: str) -> Pending:
        if what in self.loses:
            self.loses.remove(what)

            def fail() -> None:
                raise ExchangeError(f"{what}: lost")

            pending.wait = fail  # type: ignore[method-assign]
        return pending

    def broadcast_(self, tensor: Tensor, what: str, source: int = 0) -> None:
        self._wire.broadcast_(tensor, what, source)

    def copy_(self, tensor: Tensor, what: str, source: int, targets: Sequence[int]) -> None:
        if self.replica == source:
            for target in targets:
                self._town.box(self.meeting, what, target).put(tensor.clone())
        elif self.replica in targets:
            tensor.copy_(self._town.box(self.meeting, what, self.replica).get(timeout=20))


def run_town(works: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Every name's work in a thread of its own; the first error is raised."""
    results: dict[str, Any] = {}
    errors: list[BaseException] = []

    def run(name: str) -> None:
        try:
            results[name] = works[name]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a replica hangs"
    return results


def momenta(optimizer: DeMo) -> list[Tensor]:
    return [state["momentum"].clone() for state in optimizer.state.values()]


def train(
    citizen: Citizen, seed: int, share: int, until: int = NUM_STEPS, carried: Sequence[Tensor] = (), **more: Any
) -> tuple[Tensor, list[Tensor], DeMo]:
    """Train until so many steps are taken, with the data of one share."""
    model = build(seed)
    optimizer = DeMo(model.parameters(), lr=1e-2, transport=citizen, **{**OPTIONS, **more})
    optimizer.meet(carried)
    while optimizer.num_steps < until:
        train_step(model, optimizer, optimizer.num_steps, share)
    citizen.leave()
    return flat(model).clone(), momenta(optimizer), optimizer


def both(town: Town, loses: Sequence[str], **options: Any) -> dict[str, Any]:
    ends = {"a": Citizen(town, "a"), "b": Citizen(town, "b", loses)}
    return run_town({name: lambda name=name: train(ends[name], ord(name), ord(name), **options) for name in ends})


def test_all_start_from_one_and_stay_alike() -> None:
    results = both(Town("ab"), [])
    assert torch.equal(results["a"][0], results["b"][0])
    assert results["b"][2].membership.num_copies == 1
    assert results["a"][2].membership.num_copies == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bucket", [0, 1])
def test_who_lacks_a_step_that_others_took_gets_its_payloads_and_nothing_is_lost(bucket: int, overlap: bool) -> None:
    undisturbed = both(Town("ab"), [], overlap=overlap)
    results = both(Town("ab", "ab"), [f"exchange of step 4, bucket {bucket}"], overlap=overlap)
    for name in "ab":
        assert torch.equal(results[name][0], undisturbed[name][0])
    # b kept what it had sent out of its momentum, to the bit; a had begun step 5 and took it back, to rounding.
    for found, expected in zip(results["b"][1], undisturbed["b"][1], strict=True):
        assert torch.allclose(found, expected, atol=1e-6)
    assert results["b"][2].membership.num_copies == 1, "only the first copy, of a's first parameters"


def owned(optimizer: DeMo) -> list[Tensor]:
    return [state["owner_residual"] for state in optimizer.state.values()]


def test_who_lacks_a_step_gets_the_answers_of_its_owners() -> None:
    undisturbed = both(Town("ab"), [], exchange="owner")
    results = both(Town("ab", "ab"), ["exchange of step 4, bucket 1, answers"], exchange="owner")
    for name in "ab":
        assert torch.equal(results[name][0], undisturbed[name][0])
        for found, expected in zip(owned(results[name][2]), owned(undisturbed[name][2]), strict=True):
            assert torch.allclose(found, expected, atol=1e-6)
    assert results["b"][2].membership.num_copies == 1


@pytest.mark.parametrize(
    ("exchange", "lost"),
    [
        ("all_gather", "exchange of step 4, bucket 1"),
        ("owner", "exchange of step 4, bucket 1"),
        ("owner", "exchange of step 4, bucket 1, answers"),
    ],
)
def test_what_nobody_took_is_tried_again(exchange: str, lost: str) -> None:
    undisturbed = both(Town("ab"), [], exchange=exchange)
    town = Town("ab", "ab")
    ends = {name: Citizen(town, name, [lost]) for name in "ab"}
    works = {name: lambda name=name: train(ends[name], ord(name), ord(name), exchange=exchange) for name in ends}
    results = run_town(works)
    assert torch.equal(results["a"][0], results["b"][0])
    assert torch.allclose(results["a"][0], undisturbed["a"][0], atol=1e-4)
    for name in "ab":
        for found, expected in zip(results[name][1], undisturbed[name][1], strict=True):
            assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("exchange", ["all_gather", "owner"])
def test_the_others_go_on_without_one_that_died_and_let_it_in_again(exchange: str) -> None:
    options = {**OPTIONS, "exchange": exchange}
    town = Town("abc", "ab", "abc")
    ends = {name: Citizen(town, name) for name in "abc"}
    again = Citizen(town, "c")
    again.meeting = 2
    may_return = threading.Event()

    def dies_and_returns() -> tuple[Tensor, list[Tensor], DeMo]:
        train(ends["c"], 3, 3, until=2, carried=[torch.zeros(2)], exchange=exchange)
        may_return.wait(20)
        model = build(99)
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=again, **options)
        for state in optimizer.state.values():
            state["momentum"].normal_()
        counter = torch.zeros(2)
        optimizer.meet(tensor for tensor in [counter])  # such as model.buffers(), which can be read once
        assert counter.tolist() == [7.0, 8.0], "what is carried along"
        assert optimizer.num_steps == 4
        assert all(not momentum.any() for momentum in momenta(optimizer)), "no residual of its own"
        if exchange == "owner":
            assert [len(residual) for residual in owned(optimizer)] != [0] * len(optimizer.state)
        while optimizer.num_steps < NUM_STEPS:
            train_step(model, optimizer, optimizer.num_steps, 3)
        return flat(model).clone(), momenta(optimizer), optimizer

    def stays(name: str) -> tuple[Tensor, list[Tensor], DeMo]:
        model = build(ord(name))
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=ends[name], **options)
        optimizer.meet([torch.tensor([7.0, 8.0])])
        while optimizer.num_steps < NUM_STEPS:
            # Only the first replica calls a meeting, and all come to it before the next step.
            ends[name].is_meeting_due = optimizer.num_steps == 3 and ends[name].meeting == 2
            if ends[name].is_meeting_due:
                may_return.set()
            train_step(model, optimizer, optimizer.num_steps, ord(name))
        return flat(model).clone(), momenta(optimizer), optimizer

    results = run_town({"a": lambda: stays("a"), "b": lambda: stays("b"), "c": dies_and_returns})
    assert torch.equal(results["a"][0], results["b"][0])
    assert torch.equal(results["a"][0], results["c"][0])
    assert [results[name][2].membership.num_copies for name in "abc"] == [0, 1, 1]


def test_who_was_left_behind_takes_over_what_the_others_hold_and_keeps_its_momentum() -> None:
    """c loses step 3, which the others take, and comes back only when they are at step 5: even if it had taken step 3 in
    another company, the later meeting counts."""
    town = Town("abc", "ab", "abc")
    ends = {"a": Citizen(town, "a"), "b": Citizen(town, "b"), "c": Citizen(town, "c", ["exchange of step 3, bucket 1"])}
    before: list[list[Tensor]] = []

    def late() -> tuple[Tensor, list[Tensor], DeMo]:
        model = build(3)
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=ends["c"], **OPTIONS)
        optimizer.meet()
        for step in range(2):
            train_step(model, optimizer, step, 3)
        before.append(momenta(optimizer))
        train_step(model, optimizer, 2, 3)  # fails, and meets when the others do
        assert optimizer.num_steps == 5
        before.append(momenta(optimizer))
        train_step(model, optimizer, 5, 3)
        return flat(model).clone(), momenta(optimizer), optimizer

    def stays(name: str) -> tuple[Tensor, list[Tensor], DeMo]:
        model = build(ord(name))
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=ends[name], **OPTIONS)
        optimizer.meet()
        while optimizer.num_steps < NUM_STEPS:
            ends[name].is_meeting_due = optimizer.num_steps == 4 and ends[name].meeting == 2
            train_step(model, optimizer, optimizer.num_steps, ord(name))
        return flat(model).clone(), momenta(optimizer), optimizer

    results = run_town({"a": lambda: stays("a"), "b": lambda: stays("b"), "c": late})
    assert all(torch.equal(results["a"][0], results[name][0]) for name in "bc")
    assert all(bool(momentum.any()) for momentum in before[1])
    assert any(not torch.equal(old, new) for old, new in zip(*before, strict=True)), "it has the gradient of the lost step"
    assert results["c"][2].membership.num_copies == 2


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "combine": ({"combine": "mean_over_senders"}, r"combine: 'mean_over_replicas'.*combine: 'mean_over_senders'"),
    "rule": ({"update": "lion", "values": "sign_scale"}, r"group 0 update: 'adamw'.*group 0 update: 'lion'"),
    "carried more": ({"carried": [torch.zeros(2)]}, r"\[nothing\].*copied tensor \d+: shape \(2,\), \S+ # carried"),
}


@pytest.mark.parametrize(("options", "words"), OTHERS.values(), ids=OTHERS)
def test_a_newcomer_that_trains_something_else_is_turned_away_and_the_others_go_on(
    options: dict[str, Any], words: str
) -> None:
    town = Town("abc", "ab")
    ends = {name: Citizen(town, name) for name in "abc"}

    def stranger() -> str:
        with pytest.raises(AgreementError, match=words):
            train(ends["c"], 3, 3, **options)
        ends["c"].leave()
        return "turned away"

    works: dict[str, Callable[[], Any]] = {name: lambda name=name: train(ends[name], ord(name), ord(name)) for name in "ab"}
    results = run_town({**works, "c": stranger})
    assert results["c"] == "turned away"
    assert torch.equal(results["a"][0], results["b"][0])


def test_delay_is_refused() -> None:
    with pytest.raises(ValueError, match=r"delay=1 does not go with"):
        DeMo(build().parameters(), transport=Citizen(Town("a"), "a"), delay=1)


class Damaging(Citizen):
    """``damages``: rows of an exchange that arrive here with a bit flipped."""

    def __init__(self, town: Town, name: str, loses: Sequence[str] = ()) -> None:
        super().__init__(town, name, loses)
        self.damages: dict[str, list[int]] = {}

    def start_all_gather_(self, messages_RB: Tensor, what: str) -> Pending:
        pending = super().start_all_gather_(messages_RB, what)
        wait = pending.wait

        def wait_and_damage() -> None:
            wait()
            for row in self.damages.get(what, []):
                messages_RB[row, 70] ^= 1

        pending.wait = wait_and_damage  # type: ignore[method-assign]
        return pending


def test_that_a_replica_received_other_bytes_is_not_forgotten_at_a_meeting() -> None:
    town = Town("abc", "abc")
    ends = {name: Damaging(town, name, ["exchange of step 4, bucket 0"]) for name in "abc"}
    ends["a"].damages = {"exchange of step 3, bucket 0": [1]}
    works = {name: lambda name=name: train(ends[name], ord(name), ord(name), check_drift_every=0) for name in ends}
    results = run_town(works)
    assert results["a"][2].refused_payloads == {1: 1}
    assert all(torch.equal(results["b"][0], results[name][0]) for name in "ac")
    assert [results[name][2].membership.num_copies for name in "abc"] == [1, 1, 1], "a took over what the others hold"


def test_who_lacks_a_step_in_which_its_own_payload_was_left_out_follows_and_keeps_it() -> None:
    town = Town("abc", "abc")
    ends = {name: Damaging(town, name) for name in "abc"}
    ends["a"].damages = ends["b"].damages = {"exchange of step 4, bucket 0": [2]}
    ends["c"].loses = ["exchange of step 4, bucket 0"]
    results = run_town({name: (lambda name=name: _train_to_meeting(ends[name], name)) for name in ends})
    assert all(torch.equal(results["a"][0], results[name][0]) for name in "bc")
    # What c could not send is still in its momentum: more than what it kept at the steps before.
    before, after = results["c"][1]
    assert sum(float(m.abs().sum()) for m in after) > sum(float(m.abs().sum()) for m in before)


def _train_to_meeting(citizen: Citizen, name: str) -> tuple[Tensor, Any]:
    model = build(ord(name))
    optimizer = DeMo(model.parameters(), lr=1e-2, transport=citizen, **{**OPTIONS, "values": "float32"})
    optimizer.meet()
    for step in range(3):
        train_step(model, optimizer, step, ord(name))
    before = momenta(optimizer)
    train_step(model, optimizer, 3, ord(name))
    after = momenta(optimizer)
    train_step(model, optimizer, 4, ord(name))
    citizen.leave()
    return flat(model).clone(), (before, after)


def test_payloads_come_from_one_that_has_them() -> None:
    """f lacks step 4, which s took; a, which copied s's state since, comes before s, but has no payloads to give."""
    town = Town("fs", "as", "afs")
    ends = {"f": Citizen(town, "f", ["exchange of step 4, bucket 1"]), "s": Citizen(town, "s"), "a": Citizen(town, "a")}
    lost = "exchange of step 5, bucket 0"
    ends["a"].meeting, ends["a"].loses, ends["s"].loses = 1, [lost], [lost, lost]
    results = run_town({name: lambda name=name: train(ends[name], ord(name), ord(name)) for name in ends})
    assert all(torch.equal(results["s"][0], results[name][0]) for name in "af")
    assert results["f"][2].membership.num_copies == 0, "f was the first, and then followed"


class Interrupted(Citizen):
    """Copies break off after two tensors, at the second meeting."""

    def copy_(self, tensor: Tensor, what: str, source: int, targets: Sequence[int]) -> None:
        if self.meeting == 2 and what.startswith("copy") and int(what.split()[-1]) >= 2:
            raise ExchangeError(f"{what}: lost")
        super().copy_(tensor, what, source, targets)


def test_a_copy_that_broke_off_is_made_anew_and_never_trained_with() -> None:
    town = Town("st", "ast", "at")
    ends = {"s": Interrupted(town, "s"), "t": Interrupted(town, "t"), "a": Interrupted(town, "a")}
    ends["a"].meeting = 1

    def dies() -> None:
        model = build(1)
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=ends["s"], **OPTIONS)
        optimizer.meet()
        ends["s"].is_meeting_due = True
        train_step(model, optimizer, 0, 1)
        with pytest.raises(RuntimeError, match="must not come"):
            train_step(model, optimizer, 1, 1)
        ends["s"].leave()

    works: dict[str, Callable[[], Any]] = {"s": dies}
    works |= {name: lambda name=name: train(ends[name], ord(name), ord(name)) for name in "at"}
    results = run_town(works)
    assert torch.equal(results["a"][0], results["t"][0])

    town = Town("s", "as", "a")
    alone = Interrupted(town, "a")
    alone.meeting = 1
    source = Interrupted(town, "s")

    def gives_half() -> None:
        model = build(1)
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=source, **OPTIONS)
        optimizer.meet()
        train_step(model, optimizer, 0, 1)
        with pytest.raises(RuntimeError, match="must not come"):
            optimizer.meet()
        source.leave()

    def gets_half() -> None:
        with pytest.raises(TornStateError, match="in the middle of a copy"):
            train(alone, 5, 5)

    run_town({"s": gives_half, "a": gets_half})


def test_who_has_another_key_leaves_and_the_others_go_on() -> None:
    town = Town("abc", "ab")
    ends = {name: Citizen(town, name) for name in "abc"}

    def stranger() -> str:
        with pytest.raises(AgreementError, match="does not have the same key"):
            train(ends["c"], 3, 3, secret=b"another key of 16 bytes")
        ends["c"].leave()
        return "left"

    secret = b"the key of the others"
    works: dict[str, Callable[[], Any]] = {
        name: lambda name=name: train(ends[name], ord(name), ord(name), secret=secret) for name in "ab"
    }
    results = run_town({**works, "c": stranger})
    assert torch.equal(results["a"][0], results["b"][0])


def test_frozen_parameters_are_copied_too() -> None:
    town = Town("ab")

    def work(name: str) -> Tensor:
        model = build(ord(name))
        model.wide.weight.requires_grad_(False)
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=Citizen(town, name), **OPTIONS)
        optimizer.meet()
        return model.wide.weight.detach().clone()

    results = run_town({name: lambda name=name: work(name) for name in "ab"})
    assert torch.equal(results["a"], results["b"])


def test_after_a_restart_of_all_each_keeps_the_residual_of_its_checkpoint() -> None:
    first = both(Town("ab"), [])
    states = {name: first[name][2].state_dict() for name in "ab"}
    town = Town("ab")

    def again(name: str) -> tuple[list[Tensor], Tensor]:
        model = build(99)
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=Citizen(town, name), **OPTIONS)
        optimizer.load_state_dict(states[name], residual="keep")
        optimizer.meet()
        assert optimizer.num_steps == NUM_STEPS
        return momenta(optimizer), flat(model).clone()

    results = run_town({name: lambda name=name: again(name) for name in "ab"})
    for name in "ab":
        assert all(torch.equal(kept, old) for kept, old in zip(results[name][0], first[name][1], strict=True))
    assert torch.equal(results["a"][1], results["b"][1])
    assert any(not torch.equal(a, b) for a, b in zip(results["a"][0], results["b"][0], strict=True))


@pytest.mark.parametrize("loses", [["exchange of step 4, bucket 1"], []], ids=["as it catches up", "as it applies"])
def test_half_an_update_is_mended_at_the_next_meeting_and_what_was_sent_is_not_sent_again(
    loses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """b has no memory left for the second stack of step 4, which a has taken."""
    town = Town(*["ab"] * (2 + len(loses)))
    ends = {"a": Citizen(town, "a"), "b": Citizen(town, "b", loses)}
    decode, turns = torch_stack._directions, iter(range(1, 100))
    fails_for: list[threading.Thread] = []

    def failing(*arguments: Any) -> Any:
        if threading.current_thread() in fails_for and next(turns) == 2:
            raise torch.OutOfMemoryError("no memory left")
        return decode(*arguments)

    monkeypatch.setattr(torch_stack, "_directions", failing)

    def unlucky() -> tuple[Tensor, list[Tensor], DeMo]:
        model = build(2)
        optimizer = DeMo(model.parameters(), lr=1e-2, transport=ends["b"], **OPTIONS)
        optimizer.meet()
        while optimizer.num_steps < 3:
            train_step(model, optimizer, optimizer.num_steps, 2)
        fails_for.append(threading.current_thread())
        with pytest.raises(torch.OutOfMemoryError):
            train_step(model, optimizer, 3, 2)
        with pytest.raises(ThinwireError, match="has ended the last step halfway"):
            optimizer.state_dict()
        before = momenta(optimizer)
        optimizer.meet()
        assert all(torch.equal(old, new) for old, new in zip(before, momenta(optimizer), strict=True))
        while optimizer.num_steps < NUM_STEPS:
            train_step(model, optimizer, optimizer.num_steps, 2)
        ends["b"].leave()
        return flat(model).clone(), momenta(optimizer), optimizer

    results = run_town({"a": lambda: train(ends["a"], 1, 1), "b": unlucky})
    assert torch.equal(results["a"][0], results["b"][0])
    assert results["b"][2].membership.num_copies == 2
