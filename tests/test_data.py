"""Text to token batches: what is read, in which order, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zplan.planner.errors import ZplanError
from zplan.runtime import data
from zplan.runtime.data import Batches, Corpus, check_enough, find_files, prepare, shuffled
from zplan.runtime.tokenizer import ByteTokenizer, find_tokenizer


def corpus_of(tmp_path: Path, name: str, content: str | bytes) -> Corpus:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return prepare([path], ByteTokenizer(), tmp_path)


def tokens(corpus: Corpus) -> list[int]:
    return np.fromfile(corpus.path, dtype=corpus.dtype).tolist()


@pytest.fixture
def counting(tmp_path):
    """A corpus whose token k is k: 41 samples of 10."""
    path = tmp_path / "tokens.uint16"
    np.arange(412, dtype=np.uint16).tofile(path)
    return Corpus(path, "uint16", 412, 1, 1)


def test_a_text_file_is_its_bytes_and_one_end(tmp_path):
    assert tokens(corpus_of(tmp_path, "a.txt", "né\r\n")) == [*"né\r\n".encode(), 256]


def test_jsonl_rows_are_documents_and_blank_ones_are_none(tmp_path):
    rows = [{"text": "a"}, {"text": ""}, {"text": "bc", "id": 3}]
    corpus = corpus_of(tmp_path, "a.jsonl", "\n\n".join(map(json.dumps, rows)))
    assert tokens(corpus) == [97, 256, 98, 99, 256]
    assert corpus.num_documents == 2


@pytest.mark.parametrize("text", ["ä€𝄞\n" * 40, "no line end " * 30, "x" * 64], ids=["multibyte", "one line", "exact"])
def test_chunks_lose_nothing(tmp_path, monkeypatch, text):
    monkeypatch.setattr(data, "CHUNK", 16)
    assert tokens(corpus_of(tmp_path, "a.txt", text)) == [*text.encode(), 256]


def test_a_folder_is_its_text_files_in_name_order(tmp_path):
    for name in ("b.txt", "a/z.jsonl", "c.md", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [str(f.relative_to(tmp_path)) for f in find_files(tmp_path)] == ["a/z.jsonl", "b.txt"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            '{"text": "x"}\n{"text": 3}\n',
            r'a.jsonl:2` has no string under the key "text": there it has the number 3',
        ),
        ("a.jsonl", '{"txt": "x"}', r'a.jsonl:1` has no string under the key "text": its keys are txt'),
        ("a.jsonl", "[1]", "a.jsonl:1` has no string .* not an object"),
        ("a.jsonl", '{"text": "x"}\n\n{"text": ', "a.jsonl:3` is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', "a.jsonl:2` is not UTF-8 text: byte 0xff"),
        ("a.jsonl", r'{"text": "\ud800"}', "a.jsonl:1` holds half of a surrogate pair"),
        ("a.txt", b"abc\n" * 9 + b"d\xe9f", "a.txt` at byte 37 is not UTF-8 text: byte 0xe9"),
        ("a.txt", b"abc\xc3", "the end of `.*a.txt` is not UTF-8 text: byte 0xc3"),
        ("a.txt", b"", "there is no text in `.*a.txt`"),
        ("a.jsonl", b"\n\n", "there is no text in `.*a.jsonl`"),
    ],
)
def test_bad_text_is_one_sentence_with_its_place(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(data, "CHUNK", 16)
    with pytest.raises(ZplanError, match=message):
        corpus_of(tmp_path, name, content)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("none", "no file or folder"), ("empty", "holds no .txt or .jsonl"), ("a.json", "one JSON document")],
)
def test_bad_paths(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ZplanError, match=message):
        find_files(tmp_path / name)


def test_a_full_disk_is_told_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(data.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100})())
    with pytest.raises(ZplanError, match="80 bytes of text can take 160 bytes and .* has 100 free"):
        corpus_of(tmp_path, "a.txt", "x" * 80)


def test_a_write_that_fails_leaves_no_token_file(tmp_path, monkeypatch):
    class Failing(ByteTokenizer):
        def encode(self, text):
            raise OSError(28, "No space left on device")

    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ZplanError, match="cannot be written: No space left on device"):
        prepare([tmp_path / "a.txt"], Failing(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_too_little_text_says_how_much_is_there(tmp_path):
    corpus = corpus_of(tmp_path, "a.txt", "x" * 100)
    check_enough(corpus, tmp_path / "a.txt", seq=10, global_batch=10)
    with pytest.raises(ZplanError, match="is 101 tokens, 10 sequences of 10; one step takes 11 sequences") as caught:
        check_enough(corpus, tmp_path / "a.txt", seq=10, global_batch=11)
    assert "at least 111 tokens" in caught.value.hint


def test_labels_are_the_next_tokens_and_storages_are_exact(counting):
    ids, labels = Batches(counting, 10, 2, 1, 1, 0).batch(0, 0)
    assert (labels == ids + 1).all()
    assert (ids[:, 1:] == ids[:, :-1] + 1).all()
    for x in (ids, labels):
        assert x.shape == (2, 10) and x.untyped_storage().nbytes() == 2 * 10 * 8
    assert ids.untyped_storage().data_ptr() != labels.untyped_storage().data_ptr()


@pytest.mark.parametrize(("world_size", "micro_batch", "accumulation"), [(1, 8, 1), (2, 2, 2), (4, 1, 2), (8, 1, 1)])
def test_order_depends_on_the_global_batch_alone(counting, world_size, micro_batch, accumulation):
    def step(s):
        return [
            sample
            for a in range(accumulation)
            for r in range(world_size)
            for sample in Batches(counting, 10, micro_batch, accumulation, world_size, r, seed=3).samples(s, a)
        ]

    one = Batches(counting, 10, 8, 1, 1, 0, seed=3)
    for s in (0, 4, 5, 6):  # 41 samples: step 5 crosses into the second epoch
        assert step(s) == one.samples(s, 0)
    assert len(set(step(0))) == 8


@settings(max_examples=50)
@given(st.integers(1, 200), st.integers(0, 2**32), st.integers(0, 5))
def test_every_epoch_is_a_permutation(n, seed, epoch):
    assert sorted(shuffled(epoch * n + i, n, seed) for i in range(n)) == list(range(n))


def test_epochs_and_seeds_differ():
    def order(seed, epoch):
        return [shuffled(epoch * 100 + i, 100, seed) for i in range(100)]

    orders = [order(0, 0), order(0, 1), order(1, 0), list(range(100))]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    assert order(0, 0)[:5] == [56, 97, 41, 24, 45]


def make_tokenizer(folder: Path, **config) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"<end>": 0, "a": 1, "b": 2, "[UNK]": 3}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(exist_ok=True)
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("config", [{"eos_token": "<end>"}, {"eos_token": {"content": "<end>"}}, {"eos_token_id": [0]}])
def test_a_folders_tokenizer_and_its_end_token(tmp_path, config):
    tokenizer = find_tokenizer(make_tokenizer(tmp_path / "model", **config), vocab=4)
    (tmp_path / "a.txt").write_text("a b\nb c")
    assert tokens(prepare([tmp_path / "a.txt"], tokenizer, tmp_path)) == [1, 2, 2, 3, 0]


def test_tokenizers_that_cannot_be_used(tmp_path):
    with pytest.raises(ZplanError, match="has no tokenizer.json"):
        find_tokenizer(tmp_path, vocab=300)
    with pytest.raises(ZplanError, match="gives ids up to 256 and the model has only 256 rows"):
        find_tokenizer(None, vocab=256)
    model = make_tokenizer(tmp_path / "model", eos_token="</s>")
    with pytest.raises(ZplanError, match="names no end-of-text token"):
        find_tokenizer(model, vocab=4)
    with pytest.raises(ZplanError, match="ids up to 3 and the model has only 3 rows"):
        find_tokenizer(make_tokenizer(model, eos_token="<end>"), vocab=3)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ZplanError, match="is not a tokenizer"):
        find_tokenizer(model, vocab=4)
