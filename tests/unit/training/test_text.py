"""Text data: every source, and what is wrong with some of them."""

import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import thinwire.training.text as text_module
from thinwire.training.config import DataConfig
from thinwire.training.errors import TrainingError
from thinwire.training.text import load_text, read_text, vocab_size_of


def data(dataset: object, **options: object) -> DataConfig:
    return DataConfig(dataset=str(dataset), **{"sequence": 8, **options})  # type: ignore[arg-type]


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 3, trainers.BpeTrainer(vocab_size=40, special_tokens=["?"]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_the_standard_library_is_there_and_always_the_same(tmp_path: Path) -> None:
    first, second = read_text(data("stdlib")), read_text(data("stdlib"))
    assert first == second
    assert len(first) > 5_000_000
    assert b"def main(" in first
    loaded = load_text(data("stdlib", sequence=64), tmp_path)
    assert loaded.vocab_size == 256
    assert len(loaded.train) > 10 * len(loaded.validation) > 1000
    window = loaded.train.fetch(np.array([0]))
    assert loaded.decode is not None
    assert loaded.decode(window.inputs[0].tolist()) == first[:64].decode(errors="replace")


def test_packages_are_read_once_and_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "stdlib/one.py": "library",
        "stdlib/tests/left_out.py": "tests of the library",
        "stdlib/site-packages/other.py": "of another interpreter",
        "packages/mine/tests/two.py": "tests of mine",
        "packages/mine/copy.py": "library",
        "packages/mine/page.txt": "no source",
        "binaries/three.py": "for this platform",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    places = {"stdlib": "stdlib", "purelib": "packages", "platlib": "binaries"}
    monkeypatch.setattr(text_module.sysconfig, "get_path", lambda name: str(tmp_path / places[name]))
    lines = read_text(data("packages")).decode().split("\n")
    assert sorted(lines) == ["for this platform", "library", "tests of mine"]
    monkeypatch.setattr(text_module, "_MOST_PACKAGE_BYTES", len("\n".join(lines[:2])))
    assert read_text(data("packages")).decode().split("\n") == lines[:2], "the same ones first"


def test_folders_skip_what_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("a" * 50)
    (tmp_path / "deep" / "b.md").write_text("b" * 50)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_text("c" * 50)
    (tmp_path / "empty.txt").write_text("")
    assert sorted(read_text(data(tmp_path)).split(b"\n")) == [b"a" * 50, b"b" * 50]


def test_validation_is_the_end_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(bytes(range(200)))
    loaded = load_text(data(tmp_path / "text.txt", validation=0.1), tmp_path)
    assert loaded.train.fetch(np.array([0])).inputs[0].tolist() == list(range(8))
    assert loaded.validation.fetch(np.array([0])).inputs[0].tolist() == list(range(180, 188))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "holds no text"), (b"short", "the training part has 4 tokens in a row, one example needs 9")],
)
def test_too_little_text(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(TrainingError, match=words):
        load_text(data(tmp_path / "text.txt"), tmp_path)


def test_missing_files() -> None:
    with pytest.raises(TrainingError, match="there is no such file or folder"):
        read_text(data("/no/such/place"))
    with pytest.raises(TrainingError, match="No such file"):
        load_text(data("/no/such/shard.bin"), Path())


def write_shard(path: Path, tokens: np.ndarray, header: bool, claim: int | None = None) -> None:
    with path.open("wb") as file:
        if header:
            numbers = np.zeros(256, dtype="<i4")
            numbers[:3] = 20240520, 1, len(tokens) if claim is None else claim
            file.write(numbers.tobytes())
        file.write(tokens.astype("<u2").tobytes())


@pytest.mark.parametrize("header", [True, False])
def test_token_shards(header: bool, tmp_path: Path) -> None:
    write_shard(tmp_path / "train_000.bin", np.arange(1000), header)
    write_shard(tmp_path / "train_interval.bin", np.arange(2000, 2700), header)
    write_shard(tmp_path / "val_000.bin", np.arange(5000, 5600), header)
    loaded = load_text(data(tmp_path, sequence=100), tmp_path)
    assert (len(loaded.train), len(loaded.validation), loaded.vocab_size) == (9 + 6, 5, 50304)
    assert loaded.train.fetch(np.array([9])).inputs[0, :3].tolist() == [2000, 2001, 2002]
    assert loaded.validation.fetch(np.array([0])).inputs[0, 0].item() == 5000
    alone = load_text(data(tmp_path / "train_000.bin", sequence=20, validation=0.1), tmp_path)
    assert alone.validation.fetch(np.array([0])).inputs[0, 0].item() == 900


def test_shards_are_not_mistaken_for_what_lies_among_texts(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("some text\n" * 100)
    write_shard(tmp_path / "thumbnail.bin", np.arange(1000), header=False)
    with pytest.raises(TrainingError, match=r"has texts \(input.txt\) and thumbnail.bin, which may be a token shard or not"):
        load_text(data(tmp_path, sequence=20), tmp_path)
    write_shard(tmp_path / "thumbnail.bin", np.arange(1000), header=True)
    assert load_text(data(tmp_path, sequence=20), tmp_path).vocab_size == 50304
    (tmp_path / "thumbnail.bin").unlink()
    write_shard(tmp_path / "train.bin", np.arange(1000), header=False)
    assert load_text(data(tmp_path, sequence=20), tmp_path).vocab_size == 50304


def test_names_need_not_be_utf_8(tmp_path: Path) -> None:
    for name in (b"\xff\xfe.txt", b"a.txt"):
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_text("some text\n" * 50)
    assert len(load_text(data(tmp_path, sequence=20), tmp_path).train) == 950 // 20


def test_damaged_shards(tmp_path: Path) -> None:
    write_shard(tmp_path / "cut.bin", np.arange(1000), True, claim=2000)
    with pytest.raises(TrainingError, match=r"header says version 1 and 2,000 tokens, the file has room for 1,000"):
        load_text(data(tmp_path / "cut.bin"), tmp_path)
    (tmp_path / "odd.bin").write_bytes(b"abc")
    with pytest.raises(TrainingError, match="has 3 bytes; a token shard holds 2 bytes per token"):
        load_text(data(tmp_path / "odd.bin"), tmp_path)


def test_a_tokenizer_and_its_cache(tokenizer_file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 100)
    config, cache = data(tmp_path / "text.txt", tokenizer=str(tokenizer_file)), tmp_path / "cache"
    first = load_text(config, cache)
    (kept,) = cache.glob("*.npy")
    assert not list(cache.glob("*.partial"))
    stamp = kept.stat().st_mtime_ns
    second = load_text(config, cache)
    assert kept.stat().st_mtime_ns == stamp
    assert first.vocab_size == 64
    assert first.decode is not None
    tokens = second.train.fetch(np.array([0])).inputs[0].tolist()
    assert first.decode(tokens).replace(" ", "").startswith("thecatsat")


def test_a_tokenizers_truncation_is_not_the_datas(tokenizer_file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 100)
    whole = load_text(data(tmp_path / "text.txt", tokenizer=str(tokenizer_file)), tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(20)
    tokenizer.save(str(tmp_path / "short.json"))
    short = load_text(data(tmp_path / "text.txt", tokenizer=str(tmp_path / "short.json")), tmp_path / "cache")
    assert len(short.train) == len(whole.train)


def test_the_vocabulary_is_known_without_reading(tokenizer_file: Path, tmp_path: Path) -> None:
    assert vocab_size_of(data("stdlib")) == 256
    assert vocab_size_of(data("nowhere.bin")) == 50304
    assert vocab_size_of(data("nowhere", tokenizer=str(tokenizer_file))) == 64
    assert vocab_size_of(data("nowhere", vocab_size=99)) == 99


def test_tokenizers_that_do_not_fit(tokenizer_file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 100)
    with pytest.raises(TrainingError, match="vocab_size=10 is less than the 64 tokens"):
        load_text(data(tmp_path / "text.txt", tokenizer=str(tokenizer_file), vocab_size=10), tmp_path / "cache")
    with pytest.raises(TrainingError, match=r"use bytes or the path of a tokenizer\.json"):
        load_text(data(tmp_path / "text.txt", tokenizer="nowhere.json"), tmp_path)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(TrainingError, match=r"is not a tokenizer\.json"):
        load_text(data(tmp_path / "text.txt", tokenizer=str(tmp_path / "broken.json")), tmp_path)


def test_hugging_face_datasets_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.csv").write_text("text,other\n" + "hello world,1\n" * 30)
    assert read_text(data(f"hf:{folder}")) == b"\n".join([b"hello world"] * 30)
    with pytest.raises(TrainingError, match="has no column 'story', but text, other"):
        read_text(data(f"hf:{folder}", text_column="story"))
    with pytest.raises(TrainingError, match="cannot be loaded"):
        read_text(data(f"hf:{tmp_path / 'nowhere'}"))
