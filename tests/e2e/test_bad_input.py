"""Whatever is wrong: one clear line, an exit code that is not 0, no traceback, and nothing half-written."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.cli import PROGRAM, TINY, free_port, replicas, torchrun_sets
from thinwire.cli import run

TRAIN = ["train", "quickstart", *TINY, "--steps", "3", "--eval-every", "3"]


def line_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run in this process, expect failure, and return its one line."""
    assert run(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("thinwire: ")
    return line


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset", "nowhere.txt"], "dataset='nowhere.txt': there is no such file or folder"),
        (["--dataset", "empty.txt"], "dataset='empty.txt' holds no text"),
        (["--dataset", "short.txt"], "one example needs 33; take more text, a shorter --sequence"),
        (["--dataset", "some.txt", "--batch", "512"], "the training data has 59 examples, a step of all replicas needs 512"),
        (["--dataset", "some.txt", "--tokenizer", "some.txt"], "tokenizer='some.txt' is not a tokenizer.json"),
        (["--dataset", "some.txt", "--architecture", "folder"], "architecture='folder' is not a model folder"),
        (["--architecture", "lama"], "did you mean 'llama'?"),
        (["--heads", "3"], "width=64 must be a multiple of heads=3"),
        (["--heads", "64"], "width=64 must be an even multiple of heads=64: llama turns pairs"),
        (["--beta2", "1", "--optimizer", "adamw"], "beta2 must be from 0 to below 1, got 1.0"),
        (["--delay", "2"], "delay=2 must be 0 or 1"),
        (["--look-ahead"], "look_ahead runs ahead of a delayed update: add --delay 1"),
        (["--on-nonfinite", "skip", "--optimizer", "adamw"], "on_nonfinite is an option of optimizer=demo, not of adamw"),
        (
            ["--architecture", "resnet", "--optimizer", "muon", "--dataset", "digits", "--dry-run"],
            "optimizer=muon has nothing to do",
        ),
        (["--out", "some.txt"], "replica 0 could not write some.txt/checkpoints: Not a directory"),
        (["--config", "nowhere.toml"], "--config nowhere.toml: No such file or directory"),
        (
            ["--config", "typo.toml"],
            "--config typo.toml: there is no setting 'momentum_decai'; did you mean 'momentum_decay'?",
        ),
        (["--resume", "nowhere"], "leave the recipe 'quickstart' out"),
        (["--elastic", "--optimizer", "adamw"], "replicas can come and go with optimizer=demo, not with adamw"),
        (["--elastic"], "elastic is for two replicas or more"),
        (["--elastic", "--delay", "1"], "delay=1 does not go with replicas that come and go"),
        (["--lighthouse", "here:1", "--replicas", "2", "--slot", "2"], "slot=2 must be below replicas=2"),
        (["--elastic", "--replicas", "2", "--min-replicas", "3"], "min_replicas=3 must be at most replicas=2"),
        (["--lighthouse", "nowhere", "--replicas", "2"], "lighthouse='nowhere' must be host:port"),
        (["--device", "cuda"], "device=cuda, but torch sees no CUDA device here"),
        (["--lr", "1e6", "--warmup-steps", "0", "--optimizer", "sgd", "--clip", "0"], "try a smaller --lr"),
        (["--wandb", "project"], "needs the package wandb"),
        (["--key-file", "nowhere"], "key_file='nowhere': there is no such file"),
        (["--key-file", "folder"], "key_file='folder': there is no such file"),
        (["--key-file", "short.key"], "key_file='short.key' holds 15 bytes, a key needs 16"),
        (["--key-file", "open.key"], "key_file='open.key' is open to other users (mode 640): chmod 600 open.key"),
        (["--key-file", "good.key", "--optimizer", "adamw"], "key_file cannot sign what optimizer=adamw"),
    ],
)
def test_one_line_says_what_is_wrong(
    arguments: list[str], words: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    (here / "empty.txt").write_text("")
    (here / "short.txt").write_text("too short")
    (here / "some.txt").write_text("some text\n" * 200)
    (here / "typo.toml").write_text("momentum_decai = 0.9\n")
    (here / "folder").mkdir()
    for name, mode, key in (("short", 0o600, "x" * 15 + " \n"), ("open", 0o640, "x" * 16), ("good", 0o600, "x" * 16)):
        (here / f"{name}.key").write_text(key)
        (here / f"{name}.key").chmod(mode)
    line = line_of([*TRAIN, "--out", "run", *arguments], capsys)
    assert words in line
    assert "xxx" not in line, "a key must not be shown"
    assert not list(here.rglob("*.safetensors"))


def test_debug_shows_where(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TRAIN, "--dataset", "nowhere.txt", "--debug"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_tokenizer_that_does_not_fit_the_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TRAIN, "--out", "first"]) == 0
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(999)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save("tokenizer.json")
    capsys.readouterr()
    model = str(here / "first" / "checkpoints" / "last" / "model")
    (here / "some.txt").write_text("w1 w2\n" * 2000)
    fit = ["--architecture", model, "--tokenizer", "tokenizer.json", "--dataset", "some.txt"]
    assert "has 1024 tokens, the model" in line_of([*TRAIN, *fit, "--out", "second"], capsys)


def test_run_folders_and_checkpoints(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*TRAIN, "--out", "run"]) == 0
    capsys.readouterr()
    assert "already holds a run: go on with --resume run" in line_of([*TRAIN, "--out", "run"], capsys)
    assert "is at its last step, 3; --steps can add more" in line_of(["train", "--resume", "run"], capsys)
    fewer = line_of(["train", "--resume", "run", "--steps", "2"], capsys)
    assert "has taken 3 steps, more than 2; --steps can add more" in fewer
    more = ["train", "--resume", "run", "--steps", "5"]
    assert "cannot change in a resumed run" in line_of([*more, "--width", "32"], capsys)
    assert line_of([*more, "--exchange", "owner"], capsys).count("residual") == 1
    assert "use exact or zero" in line_of([*more, "--elastic", "--replicas", "2", "--residual", "sum"], capsys)
    state = next((here / "run" / "checkpoints" / "last" / "replica-0" / "state").glob("*.safetensors"))
    whole = state.read_bytes()
    state.write_bytes(whole[:-7] + b"damaged")
    assert "is damaged: its length or SHA-256 is not what was written" in line_of(more, capsys)
    state.write_bytes(whole)
    assert run(more) == 0
    capsys.readouterr()
    shutil.rmtree(here / "run" / "checkpoints")
    (here / "tokens.bin").write_bytes(bytes(range(256)) * 20)
    too_small = ["--dataset", "tokens.bin", "--vocab-size", "300"]
    assert "no checkpoint is there for all replicas" in line_of(["train", "--resume", "run", "--steps", "9"], capsys)
    assert "already holds a run: it has no checkpoint; name another folder" in line_of([*TRAIN, "--out", "run"], capsys)
    # What failed before its first step leaves its folder to the next try.
    assert "the tokenizer does not fit the data" in line_of([*TRAIN, *too_small, "--out", "new"], capsys)
    assert (here / "new" / "config.toml").exists()
    assert run([*TRAIN, "--out", "new"]) == 0
    capsys.readouterr()
    (here / "other").mkdir()
    assert "this is not a run folder" in line_of(["train", "--resume", "other"], capsys)


def test_data_may_move_but_not_change_in_a_resumed_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(f"line {number}\n" for number in range(300))
    (here / "some.txt").write_text(text)
    assert run([*TRAIN, "--dataset", "some.txt", "--out", "run"]) == 0
    (here / "other.txt").write_text(text.replace("line 77", "LINE 77"))
    (here / "shorter.txt").write_text(text[:-100])
    more = ["train", "--resume", "run", "--steps", "4"]
    capsys.readouterr()
    for name in ("other.txt", "shorter.txt"):
        line = line_of([*more, "--dataset", name], capsys)
        assert f"dataset='{name}' is not what the run was trained on: it has " in line
        assert "and that had 2,460 training and 130 validation tokens, fingerprint " in line
    (here / "some.txt").rename(here / "moved.txt")
    assert run([*more, "--dataset", "moved.txt"]) == 0
    assert 'dataset = "moved.txt"' in (here / "run" / "config.toml").read_text()


def test_a_run_that_diverges_leaves_checkpoints_of_use(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--optimizer", "adamw", "--checkpoint-every", "1", "--out", "run"]
    assert run([*TRAIN, "--steps", "2", *common]) == 0
    capsys.readouterr()
    kept = {name: os.readlink(here / "run" / "checkpoints" / name) for name in ("last", "best")}
    back = "--resume run goes on after step 2 (after step 1 without run/checkpoints/step-000002)"
    resume = ["train", "--resume", "run", "--steps", "9", "--lr", "1e39"]
    line = line_of([*resume, "--eval-every", "100"], capsys)
    assert f"the parameters have NaN or Inf after step 3: try a smaller --lr or a longer warm-up; {back}" in line
    line = line_of([*resume, "--eval-every", "1"], capsys)
    assert f"the validation loss after step 3 is nan: try a smaller --lr or a longer warm-up; {back}" in line
    assert kept == {name: os.readlink(here / "run" / "checkpoints" / name) for name in ("last", "best")}
    assert run(["train", "--resume", "run", "--steps", "4", "--lr", "1e-3"]) == 0


def test_a_full_disk(tmp_path: Path) -> None:
    """The operating system refuses to write more than 100 kB into a file: as a full disk would, in the middle of one."""
    good = replicas(*TRAIN, "--out", "run", cwd=tmp_path, number=1)
    assert good.returncode == 0, good.stderr
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    done = subprocess.run(
        [*PROGRAM, "train", "--resume", "run", "--steps", "6"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("thinwire: no checkpoint at step 6: replica 0 could not write run/checkpoints: ")
    assert "File too large" in line
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before
    again = replicas("train", "--resume", "run", "--steps", "6", cwd=tmp_path, number=1)
    assert again.returncode == 0, again.stderr


def test_a_port_in_use(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = line_of([*TRAIN, "--replicas", "2", "--port", port, "--out", "run"], capsys)
    assert f"port={port} cannot be used" in line
    assert "leave it out to take a free one" in line


def test_replicas_that_cannot_reach_each_other(tmp_path: Path) -> None:
    port = free_port()
    done = subprocess.run(
        [*PROGRAM, *TRAIN, "--timeout-seconds", "3", "--out", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **torchrun_sets(1, 2, port, machines=2)},
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("thinwire: ")]
    assert len(lines) == 1, done.stderr
    assert f"replica 1 of 2 could not join the others at localhost:{port} within 3 s" in lines[0]
    assert "Traceback" not in done.stderr


def test_replicas_with_other_settings(tmp_path: Path) -> None:
    """torchrun on two machines, with a different flag on each: both say which."""
    port, processes = free_port(), []
    for rank, lr in enumerate(("0.1", "0.2")):
        command = [*PROGRAM, *TRAIN, "--timeout-seconds", "60", "--out", f"run-{rank}", "--lr", lr]
        environment = {**os.environ, **torchrun_sets(rank, 2, port, machines=2)}
        processes.append(
            subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "replica 0 has [lr = 0.1], replica 1 has [lr = 0.2]" in errors


def test_replicas_that_torchrun_has_not_started(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in torchrun_sets(0, 2, 1, machines=2).items():
        monkeypatch.setenv(name, value)
    line = line_of([*TRAIN, "--replicas", "4"], capsys)
    assert "replicas=4, but torchrun has started 2: leave --replicas out" in line


def test_print_config_is_a_file_that_can_be_used(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "cnn", "--steps", "7", "--print-config"]) == 0
    text = capsys.readouterr().out
    (here / "mine.toml").write_text(text)
    assert run(["train", "--config", "mine.toml", "--print-config"]) == 0
    assert capsys.readouterr().out == text
    assert "steps = 7\n" in text
    assert not (here / "runs").exists()


def test_the_settings_of_a_run_folder_name_no_recipe(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run").mkdir()
    assert run(["train", "cnn", "--print-config"]) == 0
    whole = capsys.readouterr().out
    (here / "run" / "config.toml").write_text(whole)
    assert run(["train", "--resume", "run", "--print-config"]) == 0
    assert whole == 'recipe = "cnn"\n\n' + capsys.readouterr().out


def test_dry_run_trains_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "paper-300m", "--dry-run", "--replicas", "8"]) == 0
    out = capsys.readouterr().out
    assert "olmo: 319,946,752 parameters in 113 tensors" in out
    assert "3.12 MB sent, 21.9 MB received" in out
    assert not list(here.iterdir())
    assert run(["train", "paper-300m"]) == 1
    assert "name yours with --dataset" in capsys.readouterr().err


def test_summaries_are_json(here: Path) -> None:
    assert run([*TRAIN, "--out", "run", "--eval-every", "1"]) == 0
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["settings"]["schedule"]["steps"] == 3
