"""What is written beside measurements: the commit is that of the source that ran."""

import subprocess
from pathlib import Path

import pytest

from thinwire.bench import environment as module


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_the_sources_and_says_if_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "thinwire" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.setattr(module, "_SOURCE", source)
    assert module.environment()["commit"] == "unknown", "no repository"
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "commit", "--quiet", "--allow-empty", "--message", "of something else")
    assert module.environment()["commit"] == "unknown", "a repository that has other files only"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "source")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert module.environment()["commit"] == head
    (tmp_path / "README").write_text("one")
    git(tmp_path, "add", "README")
    assert module.environment()["commit"] == head, "the source is what counts"
    source.write_text("changed = True")
    assert module.environment()["commit"] == f"{head}-dirty"


def test_a_machine_without_git_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert module.environment()["commit"] == "unknown"
