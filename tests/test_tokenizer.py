"""Tokenizers, compared with the library and with transformers, on any text there is."""

import json
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from pipeline.configuration import build
from pipeline.data.config import TokenizerConfig, TokenizerKind, TokenizerTrainConfig
from pipeline.errors import UserError
from pipeline.tokenizer import BLANK, PART, SENTINELS, SPECIAL, Role, Tokenizer, measure, pre_tokenizer, train
from pipeline.vocabulary import ALPHABET, count_pieces, score_of_rest
from tests.novels import novel

KINDS: tuple[TokenizerKind, ...] = get_args(TokenizerKind)
BYTE_LEVEL: tuple[TokenizerKind, ...] = ("bpe", "unigram", "byte")
TAGS = ["<en>", "<de>"]
TEXTS = [
    *(novel(seed) for seed in range(3)),
    "In 1848, at 10:45, he didn’t say “no” — it’s his way…\n" * 3,
    "One  two\n\n\nthree \n \t\n four.\n\n“Five,”\n— six\r\n\r\n\u3000seven"
    * 20,  # tokens to learn, were blanks joined
]
PROJECT = Path(__file__).parent.parent

# Whatever has been trouble: blanks of every sort, what normalisation changes, and what looks like our own tokens.
FRAGMENTS = [
    *"a|The|captain|’s|'ll|’T|didn’t|O’Brien|'dear|—|…|,”|“|’|1848|²|½|中文|नमस्ते|👩‍👩‍👧|🇩🇪|<|>|▁|##|Ġ".split("|"),
    *"é|e\u0301|\u0301|ﬁ|¨|ſ|İ|Σ|ΑΣ|ß|\u200b|\ufeff|\ufffd|\U0010ffff|\u0378|\0|\x7f".split("|"),
    *"<mask> <pad> </s> <extra_id_7> <de> [CLS] <|endoftext|>".split(),
]
BLANKS = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\r", "\v", "\f", "\x1c", "\x1f", "\x85", "\u00a0", "\u2003", "\u2028"]
EVERYTHING = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
many, few = settings(max_examples=200, deadline=None), settings(deadline=None)  # the first example waits for training
texts = st.text() | st.lists(st.sampled_from(FRAGMENTS + BLANKS)).map("".join)


VARIANTS: dict[str, dict[str, Any]] = {kind: {"kind": kind} for kind in KINDS} | {
    "folded": {"kind": "bpe", "normalise": "nfkc", "lowercase": True, "digits": "single"},
    "composed": {"kind": "unigram", "normalise": "nfc", "digits": "single"},
    "uncased": {"kind": "wordpiece", "normalise": "nfkc", "lowercase": True, "digits": "single"},
}


def config_of(name: str, **changes: Any) -> TokenizerConfig:
    values: dict[str, Any] = {"vocab_size": 600, "tags": TAGS, **VARIANTS[name], **changes}
    return TokenizerConfig(**values)


@cache
def trained(name: str) -> Tokenizer:
    return train(TEXTS, config_of(name))


def library_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


# --- Text to ids and back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
@many
@given(texts)
def test_ids_are_those_of_the_library(name: str, text: str) -> None:
    tokenizer = trained(name)
    assert tokenizer.encode(text) == library_ids(tokenizer, text)
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("name", VARIANTS)
@many
@given(texts, texts)
def test_text_can_be_cut_after_any_newline(name: str, before: str, after: str) -> None:
    tokenizer = trained(name)
    first = before + "\n"
    assert library_ids(tokenizer, first + after) == library_ids(tokenizer, first) + library_ids(tokenizer, after)
    assert tokenizer.encode(first + after) == tokenizer.encode(first) + tokenizer.encode(after)


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@many
@given(texts)
def test_byte_level_kinds_give_back_any_text_and_know_its_bytes(kind: TokenizerKind, text: str) -> None:
    tokenizer = trained(kind)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.decode(np.array(ids, np.uint16)) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


@pytest.mark.parametrize("kind", KINDS)
@few
@given(st.lists(st.sampled_from([*SPECIAL, *SENTINELS[:2], *TAGS, "</s>", " ", "x", "\n"])).map("".join))
def test_a_special_token_that_is_written_out_is_only_text(kind: TokenizerKind, text: str) -> None:
    tokenizer = trained(kind)
    special = set(tokenizer.special.values()) - {tokenizer.id("unknown")}
    ids = tokenizer.encode(text)
    assert special.isdisjoint(ids)
    assert ids == library_ids(tokenizer, text)
    if kind in BYTE_LEVEL:
        assert tokenizer.decode(ids) == text


def test_a_blank_is_the_same_to_us_as_to_the_library() -> None:
    """Python and the library disagree on what \\s is, and the parts of a text depend on it."""
    pieces = pre_tokenizers.Split(Regex(r"[^\S\n]"), "removed").pre_tokenize_str(EVERYTHING)
    assert "".join(piece for piece, _ in pieces) == re.sub(BLANK, "", EVERYTHING)


@pytest.mark.parametrize("form", [normalizers.NFC(), normalizers.NFKC(), normalizers.Lowercase()])
def test_normalisation_makes_no_newline_and_no_blank_at_an_end(form: normalizers.Normalizer) -> None:
    """Else parts that are normalised alone would not add up to the whole."""
    text = form.normalize_str("x".join(re.sub(rf"{BLANK}|\n", "", EVERYTHING)) + "x")
    assert not re.search(rf"{BLANK}x|\n", text)


def test_characters_come_back_and_rare_ones_are_unknown() -> None:
    tokenizer = train(["abc abc\n", "x"], TokenizerConfig(kind="character", vocab_size=200))
    assert tokenizer.decode(tokenizer.encode("cab\nba")) == "cab\nba"
    assert tokenizer.encode("axb") == [tokenizer.encode("a")[0], tokenizer.id("unknown"), tokenizer.encode("b")[0]]
    assert train(["ab ab"], TokenizerConfig(kind="character")).encode("\n") != [tokenizer.id("unknown")]


def test_a_character_vocabulary_keeps_the_most_frequent() -> None:
    tokenizer = train(["aaaa bbbb cc d"], TokenizerConfig(kind="character", vocab_size=110, tags=[], min_frequency=1))
    known = [character for character in "abcd \n" if tokenizer.encode(character) != [tokenizer.id("unknown")]]
    assert known == ["a", "b", "\n"]
    assert tokenizer.vocab_size == 110


def test_wordpiece_keeps_paragraphs_and_typography() -> None:
    tokenizer = trained("wordpiece")
    text = "“The captain didn’t say a word,” said the widow—the sea…\n\nIn 1848 (it’s ‘his way’): the storm."
    known = train([text] * 3, TokenizerConfig(kind="wordpiece"))
    assert known.decode(known.encode(text)) == text
    assert known.encode(text.replace(" ", " \t ")) == known.encode(text)
    assert tokenizer.encode("\n\n") == [tokenizer.encode("\n")[0]] * 2
    assert tokenizer.encode("中文") == [tokenizer.id("unknown")]


# --- Words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("“I don’t know,” he said.", "“|I| don|’t| know|,”| he| said|."),
        ("It's the dogs' dog’s 'dear'", "It|'s| the| dogs|'| dog|’s| '|dear|'"),
        ("YOU’LL go—O’Brien’s…", "YOU|’LL| go|—|O|’|Brien|’s|…"),
        ("a  b   \n\n c\t\td \n", "a| | b|   |\n|\n| c|\t|\t|d| |\n"),
        ("in 1848, 10:45", "in| 1848|,| 10|:|45"),
        ("’Tis\n’dear", "’|Tis|\n|’|dear"),
        ("e\u0301te\u0301 नमस्ते", "e\u0301te\u0301| नमस्ते"),
    ],
)
def test_words_of_novels(text: str, words: str) -> None:
    assert [text[start:end] for _, (start, end) in split_words("bpe", text)] == words.split("|")


def test_words_of_wordpiece_and_single_digits() -> None:
    words = [word for word, _ in split_words("wordpiece", "“I don’t,” he  said.\n\n1848")]
    assert words == ["“", "I", "don’t", ",", "”", "he", "said", ".", "\n", "\n", "1848"]
    assert [word for word, _ in split_words("wordpiece", "in 48", "single")] == ["in", "4", "8"]
    assert [word for word, _ in split_words("bpe", "in 48", "single")] == ["in", "Ġ", "4", "8"]


def split_words(kind: TokenizerKind, text: str, digits: str = "together") -> list[tuple[str, tuple[int, int]]]:
    return pre_tokenizer(kind, digits).pre_tokenize_str(text)


@pytest.mark.parametrize("digits", ["together", "single"])
@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
@many
@given(texts, texts)
def test_no_word_crosses_a_newline_or_the_end_of_a_part(
    kind: TokenizerKind, digits: str, before: str, after: str
) -> None:
    """Vocabularies hide most words that do, because nothing was learnt from them."""

    def words(text: str) -> list[str]:
        return [word for word, _ in split_words(kind, text, digits)]

    assert words(before + "\n" + after) == words(before) + words("\n") + words(after)
    assert words(before + after) == [word for part in PART.findall(before + after) for word in words(part)]


@pytest.mark.parametrize("name", ["folded", "composed", "uncased"])
def test_single_digits_are_always_the_same_ten_tokens(name: str) -> None:
    tokenizer = trained(name)
    assert tokenizer.encode("1848")[-4:] == [tokenizer.encode(digit)[-1] for digit in "1848"]
    assert tokenizer.encode(" 1848")[-4:] == tokenizer.encode("1848")[-4:]


def test_normalisation_and_case() -> None:
    assert trained("folded").decode(trained("folded").encode("ÉTÉ ﬁn")) == "été fin"
    assert trained("composed").decode(trained("composed").encode("e\u0301 ﬁ")) == "é ﬁ"
    assert train(["AA"], config_of("character", lowercase=True)).encode("a") != [trained("character").id("unknown")]
    assert trained("uncased").encode("THE SEA") == trained("uncased").encode("the sea")


# --- Special tokens ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_fixed_ids(kind: TokenizerKind) -> None:
    tokenizer = trained(kind)
    assert list(tokenizer.special.items()) == list(zip([*SPECIAL, *SENTINELS, *TAGS], range(109), strict=True))
    assert [tokenizer.id(role) for role in get_args(Role)] == list(range(7))
    assert tokenizer.sentinels == list(range(7, 107))
    assert [tokenizer.tag(tag) for tag in TAGS] == [107, 108]
    sizes = tokenizer.token_bytes()
    assert (sizes[:109] == 0).all() and (sizes[109:] > 0).all() and len(sizes) == tokenizer.vocab_size
    assert tokenizer.decode([5, *tokenizer.encode("the sea"), 3]) == "the sea"
    assert "<cls>" in tokenizer.decode([5, *tokenizer.encode("the sea"), 3], skip_special=False)
    with pytest.raises(UserError, match="<fr>: the tokenizer has no such tag"):
        tokenizer.tag("<fr>")
    with pytest.raises(UserError, match="no such tag"):
        tokenizer.tag("a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 364}, "vocab_size: 364 is too small for kind bpe; use 365 or more"),
        ({"vocab_size": 364, "kind": "unigram"}, "use 365 or more"),
        ({"vocab_size": 110, "kind": "wordpiece"}, "use 111 or more"),
        ({"vocab_size": 110, "kind": "character"}, "use 111 or more"),
        ({"tags": ["de"]}, "tags: 'de' is not a name in angle brackets"),
        ({"tags": ["<d e>"]}, "tags: '<d e>' is not"),
        ({"tags": ["<>"]}, "tags: '<>' is not"),
        ({"tags": ["<de>\n"]}, "is not a name"),
        ({"tags": ["<de>", "<en>", "<de>"]}, "tags: <de> is there twice"),
        ({"tags": ["<mask>"]}, "tags: <mask> is there twice or a special token already"),
        ({"tags": ["<extra_id_3>"]}, "tags: <extra_id_3> is there twice"),
        ({"min_frequency": 0}, "min_frequency: 0 is too small"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_any_text_is_read(changes: dict[str, Any], message: str) -> None:
    def unread() -> Iterator[str]:
        raise AssertionError("the text was read")
        yield ""

    with pytest.raises(UserError, match=re.escape(message)) as failure:
        train(unread(), TokenizerConfig(**{"tags": TAGS, **changes}))
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nothing", [[], ["", ""]])
def test_no_text_is_an_error(kind: TokenizerKind, nothing: list[str]) -> None:
    with pytest.raises(UserError, match="the training text is empty"):
        train(nothing, TokenizerConfig(kind=kind))


# --- Training ----------------------------------------------------------------------------------------------------


def test_bpe_is_what_the_library_learns_from_the_text() -> None:
    expected = Backend(models.BPE())
    expected.pre_tokenizer = pre_tokenizer("bpe", "together")
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        min_frequency=2,
        special_tokens=[*SPECIAL, *SENTINELS, *TAGS],
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    many = TEXTS * 5
    expected.train_from_iterator(many, trainer)
    expected.decoder = decoders.ByteLevel()
    assert json.loads(train(many, config_of("bpe")).text) == json.loads(expected.to_str())


def test_unigram_needs_no_more_tokens_than_the_trainer_of_the_library() -> None:
    expected = Backend(models.Unigram())
    expected.pre_tokenizer = pre_tokenizer("unigram", "together")
    trainer = trainers.UnigramTrainer(vocab_size=600 - 109, initial_alphabet=ALPHABET, show_progress=False)
    expected.train_from_iterator(TEXTS, trainer)
    text = novel(99)
    assert len(trained("unigram").encode(text)) <= len(expected.encode(text).ids)


def test_unigram_scores_are_the_shares_of_pieces_that_occur_often_enough() -> None:
    tokenizer = train(TEXTS, config_of("unigram", min_frequency=5))
    scores = dict(json.loads(tokenizer.text)["model"]["vocab"][109:])
    assert abs(sum(np.exp(list(scores.values()))) - 1) < 1e-9
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    words = [word for text in TEXTS for word, _ in split_words("unigram", text)]
    longer = [piece for piece in scores if len(piece) > 1]
    assert len(longer) > 100
    assert all(sum(piece in word for word in words) >= 5 for piece in longer)


@few
@given(st.text("ab", min_size=2, max_size=7), st.dictionaries(st.text("ab", min_size=1, max_size=4), st.floats(-9, -1)))
def test_best_splits_are_those_found_by_trying_all(word: str, longer: dict[str, float]) -> None:
    scores = {"a": -5.0, "b": -6.0} | longer
    splits = [
        [word[start:end] for start, end in zip((0, *cuts), (*cuts, len(word)), strict=True)]
        for number in range(len(word))
        for cuts in combinations(range(1, len(word)), number)
    ]
    values = {tuple(split): sum(scores[piece] for piece in split) for split in splits if scores.keys() >= set(split)}
    counts = count_pieces({word: 3}, scores)
    found = sum(count * scores[piece] for piece, count in counts.items())
    assert found == pytest.approx(3 * max(values.values()))
    others = [value for split, value in values.items() if len(split) > 1]
    assert score_of_rest(word, scores) == pytest.approx(max(others))


def test_wordpiece_needs_as_many_tokens_as_that_of_the_library() -> None:
    expected = Backend(models.WordPiece(unk_token="<unk>"))
    expected.pre_tokenizer = pre_tokenizer("wordpiece", "together")
    trainer = trainers.WordPieceTrainer(
        vocab_size=600 - 108, min_frequency=2, special_tokens=["<unk>"], show_progress=False
    )
    expected.train_from_iterator(TEXTS, trainer)
    text = novel(99)
    assert len(trained("wordpiece").encode(text)) == pytest.approx(len(expected.encode(text).ids), rel=0.02)


def test_the_order_of_the_texts_does_not_matter() -> None:
    for kind in KINDS:
        backwards = train(reversed(TEXTS), config_of(kind))
        assert backwards.text == trained(kind).text
        assert backwards.meta == trained(kind).meta


SCRIPT = """
from pipeline.data.config import TokenizerConfig
from pipeline.tokenizer import train
from tests.novels import novel
for kind in ("bpe", "unigram", "wordpiece", "character", "byte"):
    tokenizer = train([novel(1, 200), novel(2, 200)], TokenizerConfig(kind=kind, vocab_size=900))
    print(tokenizer.fingerprint, tokenizer.meta)
"""


def test_result_depends_neither_on_the_hash_seed_nor_on_the_number_of_threads() -> None:
    def output(seed: str, threads: str) -> str:
        environment = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-c", SCRIPT]
        return subprocess.run(command, cwd=PROJECT, env=environment, check=True, capture_output=True, text=True).stdout

    first = output("0", "1")
    assert first.count("\n") == len(KINDS)
    assert {output("1", "2"), output("2", "4")} == {first}


def test_memory_grows_with_distinct_words_not_with_text() -> None:
    def peak(repeats: int) -> int:
        tracemalloc.start()
        train((TEXTS[0] for _ in range(repeats)), TokenizerConfig(kind="character"))
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    assert peak(100) < 1.1 * peak(10)


def test_a_smaller_vocabulary_is_noted_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train(["the sea the sea"], TokenizerConfig(vocab_size=5000))
    assert tokenizer.vocab_size < 400
    assert f"tokenizer: {tokenizer.vocab_size} tokens, not 5,000: the text gives no more\n" in capsys.readouterr().err


# --- Measures and meta.json --------------------------------------------------------------------------------------


def test_measure_by_hand() -> None:
    measured = measure(trained("byte"), ["a é\n", "b"])
    assert asdict(measured) == {"tokens": 6, "bytes_per_token": 6 / 6, "fertility": 6 / 3, "unknown_share": 0}
    characters = train(["aa"], TokenizerConfig(kind="character"))
    assert measure(characters, ["abab"]).unknown_share == 0.5
    assert measure(characters, []).bytes_per_token == 0


@pytest.mark.parametrize("kind", KINDS)
def test_meta_describes_the_tokenizer_and_its_training_text(kind: TokenizerKind) -> None:
    config = TokenizerTrainConfig(kind=kind, vocab_size=600, tags=TAGS, corpus=["a.txt"], output="b")
    tokenizer = train(TEXTS, config, "c0ffee")
    measured = measure(tokenizer, TEXTS)
    meta = tokenizer.meta
    assert meta["tokenizer_fingerprint"] == tokenizer.fingerprint == trained(kind).fingerprint
    assert meta["corpus_fingerprint"] == "c0ffee"
    assert meta["settings"] == asdict(config_of(kind))
    assert meta["bytes_per_token"] == pytest.approx(measured.bytes_per_token, abs=1e-4)
    assert meta["fertility"] == pytest.approx(measured.fertility, abs=1e-4)
    assert meta["unknown_share"] == pytest.approx(measured.unknown_share, abs=1e-6)
    assert len(meta["longest_tokens"]) == 20 and 20 <= len(meta["sample_tokens"]) <= 50
    assert tokenizer.kind == kind


def test_tokens_in_meta_are_for_people() -> None:
    longest = trained("bpe").meta["longest_tokens"]
    assert " brother" in longest and len(longest[0]) >= len(longest[-1])
    assert not {"Ġ", "\ufffd"} & set("".join(longest + trained("bpe").meta["sample_tokens"]))


# --- Files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_a_saved_tokenizer_is_the_same_when_loaded(name: str, tmp_path: Path) -> None:
    tokenizer = trained(name)
    tokenizer.save(tmp_path / "new")
    loaded = Tokenizer.load(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["meta.json", "tokenizer.json"]
    assert (loaded.fingerprint, loaded.meta, loaded.kind) == (tokenizer.fingerprint, tokenizer.meta, tokenizer.kind)
    assert loaded.encode(TEXTS[-1] + "<mask>") == tokenizer.encode(TEXTS[-1] + "<mask>")
    assert loaded.ours


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_reads_our_file_and_gives_the_same_ids(name: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = trained(name)
    tokenizer.save(tmp_path)
    other = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert len(other) == tokenizer.vocab_size
    text = "".join([novel(7), *TEXTS[-2:], "Zoë’s naïve café — 中文 \t\n"])
    assert other(text)["input_ids"] == tokenizer.encode(text)
    assert other.convert_tokens_to_ids("<mask>") == tokenizer.id("mask")


def test_the_tokenizer_of_a_bundle_is_checked_against_the_meta_of_the_bundle(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained("bpe").text)
    meta = {"format": 3, "tokenizer_fingerprint": trained("bpe").fingerprint, "metrics": {}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert Tokenizer.load(tmp_path).ours
    (tmp_path / "tokenizer.json").write_text(trained("byte").text)
    with pytest.raises(UserError, match="not what meta.json beside it describes"):
        Tokenizer.load(tmp_path)


def test_the_fingerprint_is_of_the_content_not_of_its_layout(tmp_path: Path) -> None:
    trained("bpe").save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7, sort_keys=True))
    assert Tokenizer.load(tmp_path).fingerprint == trained("bpe").fingerprint
    assert len({trained(name).fingerprint for name in VARIANTS}) == len(VARIANTS)


def break_file(path: Path, damage: str) -> None:
    text = path.read_text()
    broken = {
        "cut": text[:500],
        "empty": "",
        "other": "[]",
        "nothing": "{}",
        "changed": text.replace('"<sep>"', '"<xyz>"'),
    }
    path.write_text(broken[damage])


@pytest.mark.parametrize("name", ["tokenizer.json", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "other", "nothing", "changed"])
def test_damaged_files_are_named_in_one_line(name: str, damage: str, tmp_path: Path) -> None:
    tokenizer = train(["the <sep> sea"], TokenizerConfig(tags=[]))
    tokenizer.meta["tokenizer_fingerprint"] = (
        '"<sep>"' if (name, damage) == ("meta.json", "changed") else tokenizer.fingerprint
    )
    tokenizer.save(tmp_path)
    break_file(tmp_path / name, damage)
    with pytest.raises(UserError, match=r"(tokenizer|meta)\.json: .*; .*again") as failure:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(failure.value)


def test_a_missing_tokenizer_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no tokenizer.json in it; make one with `triptych tokenizer train`"):
        Tokenizer.load(tmp_path / "nowhere")


# --- Tokenizers from elsewhere -----------------------------------------------------------------------------------


def saved(backend: Backend, folder: Path) -> Tokenizer:
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


def bert() -> Backend:
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    backend.enable_padding(length=50)
    backend.enable_truncation(20)
    return backend


def gpt2() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=ALPHABET, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


def t5() -> Backend:
    letters = [(character, -6.0) for character in "▁abcdehnstx</>"]
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁the", -2.0), ("<0x0A>", -9.0), *letters]
    backend = Backend(models.Unigram(vocabulary, 2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<pad>", "</s>", "<unk>", *reversed(SENTINELS)])
    return backend


def llama() -> Backend:
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<s>", "</s>", "<", "s", ">", "s>", "/", "▁"])}
    backend = Backend(models.BPE(vocabulary, [("s", ">"), ("<", "s>")], unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def test_a_tokenizer_like_that_of_bert(tmp_path: Path) -> None:
    tokenizer = saved(bert(), tmp_path)
    assert tokenizer.kind == "wordpiece" and not tokenizer.ours
    assert [tokenizer.id(role) for role in ("pad", "unknown", "class", "separator", "mask")] == [0, 1, 2, 3, 4]
    assert (tokenizer.id("begin"), tokenizer.id("end")) == (2, 3)
    text = "The captain remembered the garden gate, and the storm, and the grey sea; nobody laughed about a letter."
    ids = tokenizer.encode(text)
    assert len(ids) > 20 and not {0, 2, 3} & set(ids)
    assert not {2, 3, 4} & set(tokenizer.encode("[CLS] a [MASK] [SEP]"))
    assert tokenizer.sentinels == []


def test_a_tokenizer_like_that_of_gpt2(tmp_path: Path) -> None:
    tokenizer = saved(gpt2(), tmp_path)
    assert tokenizer.id("begin") == tokenizer.id("end") == tokenizer.vocab_size - 1
    with pytest.raises(UserError, match="no mask token"):
        tokenizer.id("mask")
    text = "the sea\n\n<|endoftext|>  the sea"
    assert tokenizer.id("end") not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert list(tokenizer.pieces(text)) == [text]
    assert tokenizer.token_bytes()[tokenizer.encode(text)].sum() == len(text)
    assert measure(tokenizer, [text]).unknown_share == 0


def test_a_tokenizer_like_that_of_t5(tmp_path: Path) -> None:
    tokenizer = saved(t5(), tmp_path)
    assert (tokenizer.kind, tokenizer.id("end")) == ("unigram", 1)
    assert tokenizer.sentinels == sorted(tokenizer.sentinels, reverse=True) and len(tokenizer.sentinels) == 100
    assert 1 in t5().encode("the</s>").ids
    assert tokenizer.encode("the</s>") == [
        tokenizer.backend.token_to_id(token) for token in ("▁the", "<", "/", "s", ">")
    ]
    assert tokenizer.encode("the cab") == t5().encode("the cab").ids
    sizes = tokenizer.token_bytes()
    assert [sizes[tokenizer.backend.token_to_id(token) or 0] for token in ("▁the", "<0x0A>", "x")] == [4, 1, 1]
    tokenizer.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").fingerprint == tokenizer.fingerprint


def test_a_tokenizer_like_that_of_llama(tmp_path: Path) -> None:
    tokenizer = saved(llama(), tmp_path)
    plain = llama()
    plain.encode_special_tokens = True
    assert plain.encode("<s>").ids == [1]
    assert tokenizer.encode("<s>") == [3, 6]


# --- Configs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((PROJECT / "configs" / "tokenizer").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_trains(path: Path) -> None:
    config = build(TokenizerConfig, [path], {})
    tokenizer = train(TEXTS, config)
    assert tokenizer.kind == config.kind
    assert measure(tokenizer, TEXTS).unknown_share < 0.01
