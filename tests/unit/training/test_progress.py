"""What a person sees: plain lines in a file, a display in a terminal, nothing from the other replicas."""

import dataclasses
import io

from rich.console import Console

from thinwire.training.progress import LiveDisplay, PlainLines, Silent, Status, choose_progress, describe, format_clock

STATUS = Status(
    step=50,
    num_steps=200,
    loss=2.5,
    validation_loss=2.75,
    per_second=12345.6,
    unit="tokens",
    sent_bytes=16900,
    received_bytes=33800,
    wait_share=0.25,
    seconds_left=75.0,
)


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=130), out


def test_a_line_says_everything() -> None:
    line = describe(STATUS)
    for words in ("step 50/200", "loss 2.5000", "validation 2.7500", "tokens/s 12,346", "sent/step 16.9 kB"):
        assert words in line
    assert line.endswith("received/step 33.8 kB  network wait 25%  left 1:15")
    assert "network wait unknown" in describe(dataclasses.replace(STATUS, wait_share=None))
    assert "validation" not in describe(dataclasses.replace(STATUS, validation_loss=None))


def test_plain_lines_come_every_so_many_steps_and_at_the_end() -> None:
    here, out = console(terminal=False)
    lines = PlainLines(here, print_every=20)
    for step in range(1, 51):
        lines.update(dataclasses.replace(STATUS, step=step, num_steps=50))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["20/50", "40/50", "50/50"]
    lines.close()


def test_plain_lines_come_at_once_and_then_with_the_clock() -> None:
    here, out = console(terminal=False)
    lines = PlainLines(here, print_every=0)
    for step in (1, 2, 3):
        lines.update(dataclasses.replace(STATUS, step=step))
    assert len(out.getvalue().splitlines()) == 1


def test_a_terminal_is_redrawn_in_place() -> None:
    here, out = console(terminal=True)
    display = choose_progress(here, is_first=True, print_every=0)
    assert isinstance(display, LiveDisplay)
    display.update(STATUS)
    display.say("step 50: validation loss 2.7500")
    display.close()
    text = out.getvalue()
    assert "step 50/200" in text
    assert "network wait" in text
    assert "16.9 kB" in text
    assert "validation loss 2.7500\n" in text.replace("\r", "")
    assert "\x1b[" in text


def test_who_gets_which_display() -> None:
    here, out = console(terminal=False)
    assert isinstance(choose_progress(here, True, 0), PlainLines)
    silent = choose_progress(here, False, 0)
    assert isinstance(silent, Silent)
    silent.update(STATUS)
    silent.say("nothing")
    silent.close()
    assert out.getvalue() == ""


def test_clocks() -> None:
    assert [format_clock(seconds) for seconds in (0, 59.6, 3661, 200_000)] == ["0:00", "1:00", "1:01:01", "2 days"]
