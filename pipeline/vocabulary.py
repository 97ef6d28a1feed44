"""What a tokenizer learns from counted words: a model of the library, identical for identical counts."""

import math
from collections import Counter
from collections.abc import Mapping

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from pipeline.data.config import TokenizerConfig

Words = Mapping[str, int]  # how often each word occurs, written as the model will see it

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())  # a visible character for each of the 256 bytes
CONTINUED = "##"  # what WordPiece puts before a piece that does not begin a word
UNREACHABLE = -1e6  # the score of a piece that a Unigram model must not choose


def learn(words: Words, special: list[str], config: TokenizerConfig) -> models.Model:
    """Learn a vocabulary that begins with the special tokens in their order."""
    room = config.vocab_size - len(special)
    if config.kind == "unigram":
        scores = unigram_scores(words, room, config.min_frequency)
        return models.Unigram([*((token, UNREACHABLE) for token in special), *scores], special.index("<unk>"))
    if config.kind == "wordpiece":
        pieces = wordpiece_pieces(words, room, config.min_frequency)
        return models.WordPiece(numbered([*special, *pieces]), unk_token="<unk>")
    if config.kind == "bpe":
        model: models.BPE = fit_bpe(words, special, config.vocab_size, config.min_frequency).model
        return model
    symbols = ALPHABET if config.kind == "byte" else frequent_symbols(words, "", room, config.min_frequency)
    return models.BPE(numbered([*special, *symbols]), [], unk_token="<unk>")


def numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def fit_bpe(words: Words, special: list[str], vocab_size: int, min_frequency: int) -> Backend:
    """Byte-level BPE, which the library trains the same each time."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=special,
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    return fit(words, models.BPE(), trainer)


def fit(words: Words, model: models.Model, trainer: trainers.Trainer) -> Backend:
    """Hand counted words to a trainer of the library, which takes nothing but text."""
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    bounded = ((word, min(1000, count - done)) for word, count in words.items() for done in range(0, count, 1000))
    backend.train_from_iterator((" ".join([word] * count) for word, count in bounded), trainer)
    return backend


# --- Unigram -----------------------------------------------------------------------------------------------------


def unigram_scores(words: Words, room: int, min_frequency: int) -> list[tuple[str, float]]:
    """Prune a large BPE vocabulary, keeping the pieces whose loss would cost most (Kudo 2018).

    Only the best split of each word counts, so that all sums are of integers. The library's own trainer adds
    fractions in the order of a hash table: its scores differ each time, and it needs more tokens for the same text.
    """
    seed = fit_bpe(words, [], 4 * room, min_frequency).get_vocab()
    scores = dict.fromkeys(sorted(seed), -1.0)
    while True:
        found = count_pieces(words, scores)
        counts = {piece: max(count, 1) for piece, count in found.items() if count or len(piece) == 1}
        total = math.log(sum(counts.values()))
        scores = {piece: math.log(count) - total for piece, count in counts.items()}
        if len(scores) <= room:
            return sorted(scores.items(), key=lambda item: -item[1])
        longer = [piece for piece in scores if len(piece) > 1]
        cost = {piece: counts[piece] * (scores[piece] - score_of_rest(piece, scores)) for piece in longer}
        longer.sort(key=lambda piece: -cost[piece])
        kept = longer[: max(room - len(ALPHABET), len(longer) * 3 // 4)]
        scores = {piece: scores[piece] for piece in (*ALPHABET, *kept)}


def count_pieces(words: Words, scores: dict[str, float]) -> dict[str, int]:
    """How often each piece occurs in the best splits of the words."""
    model = models.Unigram(list(scores.items()))
    counts = dict.fromkeys(scores, 0)
    for word, count in words.items():
        for token in model.tokenize(word):
            counts[token.value] += count
    return counts


def score_of_rest(piece: str, scores: dict[str, float]) -> float:
    """The score of the best split of a piece into other pieces."""
    best = [0.0]
    for end in range(1, len(piece) + 1):
        starts = range(end) if end < len(piece) else range(1, end)
        best.append(max(best[start] + scores.get(piece[start:end], -math.inf) for start in starts))
    return best[-1]


# --- WordPiece and characters ------------------------------------------------------------------------------------


def wordpiece_pieces(words: Words, room: int, min_frequency: int) -> list[str]:
    """The alphabet, then what the library's merges make of it.

    Ids break ties between merges, and the library numbers the alphabet in the order of a hash table. So we hand it
    the alphabet first, in order, as if it were special tokens.
    """
    alphabet = frequent_symbols(words, CONTINUED, room, min_frequency)
    known = set(alphabet) - {"\n"}
    usable = {word: count for word, count in words.items() if known.issuperset(symbols(word, CONTINUED))}
    trainer = trainers.WordPieceTrainer(
        vocab_size=room, min_frequency=min_frequency, special_tokens=alphabet, show_progress=False
    )
    learned = fit(usable, models.WordPiece(), trainer).get_vocab()
    return sorted(learned, key=learned.__getitem__)


def frequent_symbols(words: Words, prefix: str, room: int, min_frequency: int) -> list[str]:
    """A newline and the most frequent of the other symbols, sorted."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for symbol in symbols(word, prefix):
            counts[symbol] += count
    others = [symbol for symbol, count in counts.items() if count >= min_frequency and symbol != "\n"]
    others.sort(key=lambda symbol: (-counts[symbol], symbol))
    return sorted(["\n", *others[: room - 1]])


def symbols(word: str, prefix: str) -> list[str]:
    """The characters of a word, with a prefix on all but the first."""
    return [word[0], *(prefix + character for character in word[1:])]
