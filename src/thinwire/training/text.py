"""Text as token numbers: Python source, files and folders, token shards, tokenizers, Hugging Face datasets."""

import hashlib
import os
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thinwire.core.errors import first_line
from thinwire.training.config import DataConfig
from thinwire.training.errors import TrainingError
from thinwire.training.examples import Array, Examples, TokenWindows

# What modded-nanogpt writes before the tokens: 256 int32, of which the first three are magic, version and count.
_SHARD_MAGIC = 20240520
_SHARD_HEADER_INTS = 256
_GPT2_VOCAB_SIZE = 50304
_IS_VALIDATION = re.compile(r"(^|[_.-])val(id|idation)?([_.-]|\d|$)")
# Cut long texts here and there, so that a tokenizer can work on pieces.
_PIECE_BYTES = 1 << 20
# Of the source of installed packages: enough that no byte of it is seen twice in 5,000 steps of 64 x 256.
_MOST_PACKAGE_BYTES = 128_000_000
_IS_SHARD = re.compile(r"train|val")
_NO_SOURCE = ("__pycache__",)
_NO_LIBRARY = (*_NO_SOURCE, "site-packages", "dist-packages", "test", "tests")


@dataclass(frozen=True)
class TextData:
    """Training and validation windows. ``decode`` turns tokens back into text, where a tokenizer is known."""

    train: Examples
    validation: Examples
    vocab_size: int
    decode: Callable[[list[int]], str] | None
    description: str


def is_shards(config: DataConfig) -> bool:
    """Whether the data are token shards."""
    path = Path(config.dataset)
    return config.dataset.endswith(".bin") or (path.is_dir() and any(path.glob("*.bin")))


def vocab_size_of(config: DataConfig) -> int:
    """The size of the vocabulary, without reading the data."""
    if config.vocab_size:
        return config.vocab_size
    return _GPT2_VOCAB_SIZE if is_shards(config) else _tokenizer(config)[0]


def load_text(config: DataConfig, cache: Path) -> TextData:
    """The data set that ``config.dataset`` names."""
    if is_shards(config):
        return _load_shards(config)
    text = read_text(config)
    vocab_size, decode, encode = _tokenizer(config)
    tokens = encode(text) if config.tokenizer == "bytes" else _cached(text, Path(config.tokenizer), encode, cache)
    if config.vocab_size and config.vocab_size < vocab_size:
        raise TrainingError(f"vocab_size={config.vocab_size} is less than the {vocab_size} tokens of {config.tokenizer}")
    cut = int(len(tokens) * (1 - config.validation))
    return _windows(config, [tokens[:cut]], [tokens[cut:]], config.vocab_size or vocab_size, decode)


def _windows(
    config: DataConfig,
    train: list[Array],
    validation: list[Array],
    vocab_size: int,
    decode: Callable[[list[int]], str] | None,
) -> TextData:
    for name, parts in (("training", train), ("validation", validation)):
        longest = max((len(part) for part in parts), default=0)
        if longest <= config.sequence:
            raise TrainingError(
                f"dataset={config.dataset}: the {name} part has {longest} tokens in a row, one example needs "
                f"{config.sequence + 1}; take more text, a shorter --sequence or another --validation share"
            )
    total = [sum(map(len, parts)) for parts in (train, validation)]
    description = f"{config.dataset}: {total[0]:,} training and {total[1]:,} validation tokens"
    return TextData(
        TokenWindows(train, config.sequence, vocab_size),
        TokenWindows(validation, config.sequence, vocab_size),
        vocab_size,
        decode,
        description,
    )


def read_text(config: DataConfig) -> bytes:
    """All the text of a data set, in an order that depends on the files' names alone."""
    if config.dataset == "digits":
        raise TrainingError("dataset=digits holds images: it needs an image model, such as --architecture vit")
    if config.dataset.startswith("hf:"):
        text = b"\n".join(_hugging_face_texts(config))
    elif config.dataset == "stdlib":
        text = _read_folder(Path(sysconfig.get_path("stdlib")), "*.py", _NO_LIBRARY)
    elif config.dataset == "packages":
        text = _read_packages()
    else:
        path = Path(config.dataset)
        if not path.exists():
            raise TrainingError(f"dataset={config.dataset!r}: there is no such file or folder, nor a data set of this name")
        text = _read_folder(path, "*", skip=()) if path.is_dir() else path.read_bytes()
    if not text:
        raise TrainingError(f"dataset={config.dataset!r} holds no text")
    return text


def _read_packages() -> bytes:
    """The source of the standard library and of all installed packages, each text once: copies of a file in several packages
    would be known from training when they come up in validation."""
    files = _files(Path(sysconfig.get_path("stdlib")), "*.py", _NO_LIBRARY)
    for folder in {sysconfig.get_path(name) for name in ("purelib", "platlib")}:
        files |= _files(Path(folder), "*.py", _NO_SOURCE)
    found: dict[bytes, bytes] = {}
    num_bytes = 0
    for text in _texts(files):
        digest = hashlib.sha256(text).digest()
        num_bytes += 0 if digest in found else len(text)
        if num_bytes > _MOST_PACKAGE_BYTES:
            break
        found[digest] = text
    return b"\n".join(found.values())


def _read_folder(folder: Path, pattern: str, skip: tuple[str, ...]) -> bytes:
    return b"\n".join(_texts(_files(folder, pattern, skip)))


def _files(folder: Path, pattern: str, skip: tuple[str, ...]) -> dict[str, Path]:
    """By their names inside the folder."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob(pattern)
        if path.is_file() and not any(part in skip or part.startswith(".") for part in path.relative_to(folder).parts)
    }


def _texts(files: dict[str, Path]) -> Iterator[bytes]:
    """Shuffled by name, so that the validation part at the end is like the rest."""
    for name in sorted(files, key=lambda name: hashlib.sha256(os.fsencode(name)).digest()):
        text = files[name].read_bytes()
        if text and b"\0" not in text:
            yield text


def _hugging_face_texts(config: DataConfig) -> Iterator[bytes]:
    for row in hugging_face_split(config, "train", (config.text_column,)):
        yield str(row[config.text_column]).encode()


def hugging_face_split(config: DataConfig, split: str, columns: tuple[str, ...]) -> "list[dict[str, object]]":
    """One split of a Hugging Face data set (by name or local folder), with these columns."""
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise TrainingError(f"dataset={config.dataset!r} needs the package datasets: pip install datasets") from None
    name = config.dataset.removeprefix("hf:")
    try:
        loaded = datasets.load_dataset(name, split=split)
    except Exception as error:  # it raises many kinds
        raise TrainingError(f"dataset={config.dataset!r} cannot be loaded: {first_line(error)}") from error
    for column in columns:
        if column not in loaded.column_names:
            raise TrainingError(f"dataset={config.dataset!r} has no column {column!r}, but {', '.join(loaded.column_names)}")
    return loaded  # type: ignore[no-any-return]


Encode = Callable[[bytes], Array]


def _tokenizer(config: DataConfig) -> tuple[int, Callable[[list[int]], str], Encode]:
    """Size of the vocabulary, decoder and encoder."""
    if config.tokenizer == "bytes":
        decode = lambda tokens: bytes(token for token in tokens if token < 256).decode(errors="replace")  # noqa: E731
        return 256, decode, lambda text: np.frombuffer(text, dtype=np.uint8)
    from tokenizers import Tokenizer

    path = Path(config.tokenizer)
    if not path.is_file():
        raise TrainingError(
            f"tokenizer={config.tokenizer!r}: there is no such file; use bytes or the path of a tokenizer.json"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise TrainingError(f"tokenizer={config.tokenizer!r} is not a tokenizer.json: {error}") from error

    def encode(text: bytes) -> Array:
        pieces = (piece.decode(errors="replace") for piece in _pieces(text))
        ids = (tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces)
        return np.concatenate([np.asarray(part, dtype=np.uint32) for part in ids])

    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Sizes that are multiples of 64 cut well and multiply fast.
    vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
    return vocab_size, tokenizer.decode, encode


def _pieces(text: bytes) -> Iterator[bytes]:
    """The text in pieces that end at line ends."""
    first = 0
    while first < len(text):
        end = text.find(b"\n", first + _PIECE_BYTES)
        end = len(text) if end < 0 else end + 1
        yield text[first:end]
        first = end


def _cached(text: bytes, tokenizer: Path, encode: Encode, cache: Path) -> Array:
    """Tokens of a text, kept in a folder from run to run: encoding gigabytes takes minutes."""
    key = hashlib.sha256(hashlib.sha256(text).digest() + hashlib.sha256(tokenizer.read_bytes()).digest()).hexdigest()
    path = cache / f"{key[:32]}.npy"
    if not path.exists():
        encoded = encode(text)
        cache.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: several replicas may do this at once, and none may read half a file.
        with tempfile.NamedTemporaryFile(dir=cache, suffix=".partial", delete=False) as file:
            np.save(file, encoded)
        os.replace(file.name, path)
    tokens: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    return tokens


def _load_shards(config: DataConfig) -> TextData:
    path = Path(config.dataset)
    files = sorted(path.glob("*.bin")) if path.is_dir() else [path]
    if path.is_dir():
        _check_kind(path, files)
    validation = [file for file in files if _IS_VALIDATION.search(file.stem)]
    train = [file for file in files if file not in validation]
    vocab_size = config.vocab_size or _GPT2_VOCAB_SIZE
    train_parts, validation_parts = [_read_shard(file) for file in train], [_read_shard(file) for file in validation]
    if train_parts and not validation_parts:
        last = train_parts.pop()
        cut = int(len(last) * (1 - config.validation))
        train_parts, validation_parts = [*train_parts, last[:cut]], [last[cut:]]
    return _windows(config, train_parts, validation_parts, vocab_size, None)


def _check_kind(folder: Path, files: list[Path]) -> None:
    """Refuse a folder of texts among which there is some .bin file. Shards with texts beside them, as nanoGPT has them, are
    told by their names or headers."""
    texts = sorted(_files(folder, "*.txt", skip=()))
    if texts and not any(_IS_SHARD.search(file.stem) or _has_header(file) for file in files):
        raise TrainingError(
            f"dataset: {folder} has texts ({texts[0]}) and {files[0].name}, which may be a token shard or not: keep shards "
            "apart from texts, or have train or val in their names"
        )


def _has_header(path: Path) -> bool:
    first: list[int] = np.fromfile(path, dtype="<i4", count=1).tolist()
    return first == [_SHARD_MAGIC]


def _read_shard(path: Path) -> Array:
    """Tokens of one file: uint16, after modded-nanogpt's header if there is one."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise TrainingError(f"dataset: {path}: {error.strerror}") from error
    if size == 0 or size % 2:
        raise TrainingError(f"dataset: {path} has {size} bytes; a token shard holds 2 bytes per token")
    header_bytes = 4 * _SHARD_HEADER_INTS
    if size >= header_bytes:
        header = np.fromfile(path, dtype="<i4", count=_SHARD_HEADER_INTS)
        if header[0] == _SHARD_MAGIC:
            if header[1] != 1 or size != header_bytes + 2 * int(header[2]):
                raise TrainingError(
                    f"dataset: {path} is damaged: its header says version {header[1]} and {header[2]:,} tokens, "
                    f"the file has room for {(size - header_bytes) // 2:,}"
                )
            return np.memmap(path, dtype="<u2", mode="r", offset=header_bytes)
    return np.memmap(path, dtype="<u2", mode="r")
