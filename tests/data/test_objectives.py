"""Objectives, compared with T5's own numbers, with what they were made from, and with chance."""

import pickle
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import chain, groupby
from math import sqrt
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.configuration import build
from pipeline.data.config import OBJECTIVES, Objective, ObjectiveConfig, TokenizerConfig, TokenizerKind, check_objective
from pipeline.data.objectives import (
    IGNORED,
    Example,
    Vocabulary,
    apart,
    count_spans,
    current,
    draw_noise,
    length_chances,
    make_example,
    random_parts,
    span_lengths,
)
from pipeline.data.shard import Integers
from pipeline.errors import UserError
from pipeline.model.config import Family
from pipeline.tokenizer import Tokenizer, train
from tests.novels import novel

PAIRS = [(family, name) for family, names in OBJECTIVES.items() for name in names]
MASKED: list[tuple[Family, Objective]] = [("encoder", "masked"), ("decoder", "masked")]
# A text in which each piece is one word; what they are cut into depends on the tokenizer.
WORDS = ['"', "The", " brother’s", " captain", " of", " Zubovelofeka", "!", "\n", "Nobody", " laughed", ",", " Gatemi"]


@cache
def tokenizer(kind: TokenizerKind = "bpe") -> Tokenizer:
    texts = [*(novel(seed) for seed in range(3)), '", !' * 5]
    return train(texts, TokenizerConfig(kind=kind, vocab_size=600))


@cache
def vocabulary(kind: TokenizerKind = "bpe") -> Vocabulary:
    return Vocabulary.of(tokenizer(kind))


def generator(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def ordinary_window(length: int, seed: int = 0) -> Integers:
    return generator(seed).choice(vocabulary().ordinary, length)


@st.composite
def windows(draw: st.DrawFn) -> Integers:
    """Any ordinary tokens, and special ones such as a store may hold."""
    special = [tokenizer().id("end"), tokenizer().id("unknown"), tokenizer().tag("<de>")]
    ordinary = st.sampled_from(vocabulary().ordinary.tolist())
    return np.array(draw(st.lists(ordinary | st.sampled_from(special), min_size=1, max_size=60)))


@st.composite
def objectives(draw: st.DrawFn, name: Objective) -> ObjectiveConfig:
    mask_share = draw(st.floats(0, 1))
    return ObjectiveConfig(
        name=name,
        rate=draw(st.floats(0.01, 0.99)),
        mask_share=mask_share,
        random_share=draw(st.floats(0, 1 - mask_share)),
        unit=draw(st.sampled_from(["token", "word", "span"])),
        span_length=draw(st.floats(1, 5.5)),
    )


# --- Every objective ---------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PAIRS), windows(), st.integers(0, 99), st.data())
def test_nothing_is_lost_and_nothing_is_out_of_place(
    pair: tuple[Family, Objective], ids: Integers, seed: int, data: st.DataObject
) -> None:
    family, name = pair
    example = make_example(ids, family, data.draw(objectives(name)), vocabulary(), generator(seed))
    assert example.tokens == len(ids)
    assert np.array_equal(restored(example), ids)
    assert (example.source is not None) == (family in ("encoder", "encoder-decoder"))
    assert (example.inputs is not None) == (family != "encoder")
    read = example.source if example.inputs is None else example.inputs
    assert read is not None and len(read) == len(example.targets)
    for part in (example.source, example.inputs, example.targets[example.targets != IGNORED]):
        if part is not None:
            assert part.dtype == np.int64
            assert np.all((part >= 0) & (part < len(vocabulary().is_ordinary)))
    assert 0 <= example.prefix <= len(read)


def restored(example: Example) -> Integers:
    """The window an example was made from, read out of it without a look at how it was made."""
    source, inputs, targets, prefix = example.source, example.inputs, example.targets, example.prefix
    if inputs is None:
        assert source is not None and source[0] == vocabulary().class_ and targets[0] == IGNORED
        return np.where(targets == IGNORED, source, targets)[1:]
    assert inputs[0] == vocabulary().begin
    if source is None:
        if prefix == len(inputs) > example.tokens:  # masked: what stands at a place is predicted at the one before
            assert targets[-1] == IGNORED
            return np.where(targets == IGNORED, np.append(inputs[1:], 0), targets)[:-1]
        return np.concatenate([inputs[1 : max(prefix, 1)], targets[max(prefix - 1, 0) :]])
    assert source[-1] == vocabulary().end
    spans: dict[int, list[int]] = {}
    if targets[-1] == vocabulary().end and targets[0] in vocabulary().sentinels:
        for token in targets[:-1].tolist():
            if token in vocabulary().sentinels:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        targets = targets[:0]
    front = [part for token in source[:-1].tolist() for part in spans.get(token, [token])]
    return np.array([*front, *targets[targets != IGNORED]])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([("decoder", "causal"), ("decoder", "prefix"), ("recurrent", "causal")]), windows(), st.data())
def test_no_token_is_predicted_where_it_is_seen(
    pair: tuple[Family, Objective], ids: Integers, data: st.DataObject
) -> None:
    split = data.draw(st.none() | st.integers(0, len(ids) - 1))
    example = make_example(ids, pair[0], ObjectiveConfig(name=pair[1]), vocabulary(), generator(0), split)
    assert example.inputs is not None and example.inputs[1:].tolist() == ids[:-1].tolist()
    predicted = np.flatnonzero(example.targets != IGNORED)
    assert predicted.tolist() == list(range(predicted[0], len(ids)))  # from the split on, all
    assert split is None or predicted[0] == split
    assert example.prefix in ((0,) if pair[1] == "causal" else (predicted[0] + 1,))
    assert np.all(predicted + 1 >= example.prefix)  # where the token to predict is read


@pytest.mark.parametrize(("family", "name"), PAIRS)
@pytest.mark.parametrize("unit", ["token", "word", "span"])
def test_one_token_and_nothing_but_ends_make_examples(family: Family, name: Objective, unit: Any) -> None:
    end = tokenizer().id("end")
    for ids in ([vocabulary().ordinary[3]], [end], [end] * 7):
        objective = ObjectiveConfig(name=name, unit=unit)
        example = make_example(np.array(ids, np.uint16), family, objective, vocabulary(), generator(0))
        assert np.array_equal(restored(example), ids)
        if name in ("causal", "prefix"):
            assert example.targets[-1] == ids[-1]
        if name == "span" or (name == "masked" and end in ids):
            assert np.all(example.targets == IGNORED)


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_an_example_is_a_function_of_its_seed(family: Family, name: Objective) -> None:
    ids = ordinary_window(300).astype(np.uint16)
    ids.flags.writeable = False  # as in a store
    objective = ObjectiveConfig(name=name)
    sent = pickle.dumps(vocabulary())
    one, same, other = (
        make_example(ids, family, objective, known, generator(seed))
        for seed, known in ((5, vocabulary()), (5, pickle.loads(sent)), (6, vocabulary()))
    )
    assert as_lists(one) == as_lists(same)
    assert (as_lists(one) == as_lists(other)) == (name == "causal")
    assert len(sent) < 10_000


def as_lists(example: Example) -> list[Any]:
    parts = (example.source, example.inputs, example.targets)
    return [example.prefix, *(None if part is None else part.tolist() for part in parts)]


# --- The next token ----------------------------------------------------------------------------------------------


def test_a_source_is_continued() -> None:
    ids, end, begin = ordinary_window(10), tokenizer().id("end"), tokenizer().id("begin")
    example = make_example(ids, "encoder-decoder", ObjectiveConfig(name="prefix"), vocabulary(), generator(0), split=5)
    assert example.source is not None and example.source.tolist() == [*ids[:5], end]
    assert example.inputs is not None and example.inputs.tolist() == [begin, *ids[5:9]]
    assert example.targets.tolist() == ids[5:].tolist()


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_every_split_is_drawn_equally_often(family: Family) -> None:
    ids, draw = ordinary_window(9), generator(1)
    makes = [make_example(ids, family, ObjectiveConfig(name="prefix"), vocabulary(), draw) for _ in range(4000)]
    splits = [9 - int(np.sum(example.targets != IGNORED)) for example in makes]
    check_uniform(np.bincount(splits, minlength=9)[1:])


def test_hybrid_is_causal_in_its_share_of_sequences() -> None:
    objective, draw = ObjectiveConfig(name="hybrid", causal_share=0.3), generator(2)
    makes = [make_example(ordinary_window(20), "decoder", objective, vocabulary(), draw) for _ in range(4000)]
    causal = [example for example in makes if example.prefix == 0]
    assert abs(len(causal) - 1200) < 4 * sqrt(4000 * 0.3 * 0.7)
    assert {len(example.targets) for example in causal} == {20}
    assert {example.prefix for example in makes} == {0, 21}


# --- Masked tokens -----------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(MASKED), windows(), st.integers(0, 99), st.data())
def test_as_many_tokens_are_masked_as_the_rate_says_and_no_special_one(
    pair: tuple[Family, Objective], ids: Integers, seed: int, data: st.DataObject
) -> None:
    objective = data.draw(objectives("masked"))
    example = make_example(ids, pair[0], objective, vocabulary(), generator(seed))
    read, targets = read_and_targets(example)
    special = np.isin(ids, list(tokenizer().special.values()))
    assert read[special].tolist() == ids[special].tolist()
    assert np.all(targets[special] == IGNORED)
    maskable = int(np.sum(~special))
    budget = max(1, round(objective.rate * maskable)) if maskable else 0
    masked = int(np.sum(targets != IGNORED))
    if objective.unit == "token":
        assert masked == budget
    else:
        assert budget <= masked <= maskable
    if objective.unit == "span":
        assert masked < budget + 10


def read_and_targets(example: Example) -> tuple[Integers, Integers]:
    """What is read in place of each token of the window, and what is to be predicted for it."""
    if example.inputs is None:
        assert example.source is not None
        return example.source[1:], example.targets[1:]
    return example.inputs[1:], example.targets[:-1]


@pytest.mark.parametrize(("family", "name"), MASKED)
def test_masking_statistics_on_100_000_tokens(family: Family, name: Objective) -> None:
    places = np.zeros(500, np.int64)
    fates = {"mask": 0, "random": 0, "same": 0}
    for number in range(200):
        ids = ordinary_window(500, number)
        example = make_example(ids, family, ObjectiveConfig(name=name, rate=0.3), vocabulary(), generator(1, number))
        read, targets = read_and_targets(example)
        chosen = targets != IGNORED
        places += chosen
        fates["mask"] += int(np.sum(read[chosen] == vocabulary().mask))
        fates["same"] += int(np.sum(read[chosen] == ids[chosen]))
        fates["random"] += int(np.sum((read[chosen] != ids[chosen]) & (read[chosen] != vocabulary().mask)))
        assert np.array_equal(read[~chosen], ids[~chosen])
    assert sum(fates.values()) == places.sum() == 30_000
    lucky = 0.1 / len(vocabulary().ordinary)  # a random token that happens to be the same
    for fate, share in {"mask": 0.8, "random": 0.1 - lucky, "same": 0.1 + lucky}.items():
        assert abs(fates[fate] - 30_000 * share) < 4 * sqrt(30_000 * share * (1 - share)), fate
    check_uniform(places, variance=0.7)


def test_random_tokens_are_drawn_from_the_whole_ordinary_vocabulary_not_from_the_window() -> None:
    ordinary = vocabulary().ordinary
    objective = ObjectiveConfig(rate=0.9, mask_share=0.0, random_share=1.0)
    ids = np.full(50_000, ordinary[0])  # the lowest there is
    read, targets = read_and_targets(make_example(ids, "encoder", objective, vocabulary(), generator(3)))
    counts = np.bincount(read[targets != IGNORED], minlength=len(vocabulary().is_ordinary))
    assert counts.sum() == counts[ordinary].sum() == 45_000
    check_uniform(counts[ordinary])


def check_uniform(counts: npt.NDArray[np.integer], variance: float = 1.0) -> None:
    """Chi-square within four deviations; `variance` is that of a count as a share of its mean."""
    expected, freedom = counts.mean(), len(counts) - 1
    statistic = float(np.sum((counts - expected) ** 2)) / expected / variance
    assert abs(statistic - freedom) < 4 * sqrt(2 * freedom), f"{statistic} at {freedom} degrees of freedom"


@pytest.mark.parametrize("kind", get_args(TokenizerKind))
def test_a_word_is_masked_in_full_or_not_at_all(kind: TokenizerKind) -> None:
    known, end = vocabulary(kind), tokenizer(kind).id("end")
    words = [tokenizer(kind).encode(word) for word in WORDS]
    assert list(chain(*words)) == tokenizer(kind).encode("".join(WORDS))
    pieces = [*words, [end], *words[2:], *words, *words[:6], [end], *words[8:]]
    ids, sizes = np.concatenate(pieces), np.array([len(piece) for piece in pieces])
    word_of = np.repeat(np.arange(len(pieces)), sizes)
    budget = round(0.2 * int(np.sum(ids != end)))
    shares = []
    for seed in range(100):
        example = make_example(ids, "encoder", ObjectiveConfig(unit="word", rate=0.2), known, generator(seed))
        masked = read_and_targets(example)[1] != IGNORED
        shares.append(np.bincount(word_of, masked) / sizes)
        assert budget <= masked.sum() < budget + sizes.max()
    assert sizes.max() > 2
    assert set(np.concatenate(shares)) == {0.0, 1.0}
    assert np.all(np.any(np.diff(shares, axis=1), axis=0))  # no two neighbours always together


def test_masked_spans_have_the_mean_length() -> None:
    objective = ObjectiveConfig(unit="span", rate=0.02, span_length=4.0)
    ids = ordinary_window(100_000)
    _, targets = read_and_targets(make_example(ids, "encoder", objective, vocabulary(), generator(5)))
    runs = [len(list(run)) for chosen, run in groupby((targets != IGNORED).tolist()) if chosen]
    assert sum(runs) in range(2000, 2010)
    assert abs(np.mean(runs) - 4.0 * 1.02) < 4 * 2.6 / sqrt(500)  # one in fifty is followed by another
    assert max(runs[:100]) <= 20


@pytest.mark.parametrize("mean", [1.0, 1.7, 3.0, 5.5])
def test_span_lengths_are_geometric_with_the_given_mean(mean: float) -> None:
    chances = length_chances(mean)
    assert len(chances) == 10 and chances.sum() == pytest.approx(1)
    assert chances @ np.arange(1, 11) == pytest.approx(mean)
    assert np.allclose(chances[2:] * chances[:-2], chances[1:-1] ** 2)


def test_span_lengths_are_those_of_spanbert() -> None:
    chances = length_chances(3.797)  # SpanBERT: p = 0.2, at most 10, "a mean span length of 3.8"
    assert np.allclose(chances[1:] / chances[:-1], 0.8, atol=1e-3)


# --- Spans: the expected values of t5/data/preprocessors_test.py (google-research, Apache-2.0) -------------------


@pytest.mark.parametrize(("mean", "source", "raw", "targets"), [(2.0, 64, 70, 22), (1.0, 64, 63, 27)])
def test_lengths_are_the_inverse_of_t5s_helper(mean: float, source: int, raw: int, targets: int) -> None:
    assert span_lengths(raw, 0.2, mean) == (source, targets)
    assert span_lengths(raw + 1, 0.2, mean)[0] > source  # the helper gives the longest that fits


def test_noise_is_counted_as_t5_does() -> None:
    assert count_spans(32, 0.25, 2.0, 100) == (8, 4)
    for seed in range(50):
        noise = draw_noise(32, 8, 4, generator(seed))
        assert noise.sum() == 8 and not noise[0] and noise[-1]
        assert sum(chosen for chosen, _ in groupby(noise.tolist())) == 4


def test_sentinels_are_t5s() -> None:
    ids, noise = np.arange(10, 16), np.array([1, 1, 0, 0, 1, 0], np.bool_)
    kept, cut = apart(ids, noise, np.arange(999, 900, -1))
    assert kept.tolist() == [999, 12, 13, 998, 15]
    assert cut.tolist() == [999, 10, 11, 998, 14]


def test_an_example_is_t5s() -> None:
    ids = np.array([3, 2, 20, 4, 3, 2, 8, 13, 2, 3, 2, 23, 7, 19, 22, 3, 2, 7, 2])
    noise = np.zeros(19, np.bool_)
    noise[8:9] = noise[14:19] = True
    kept, cut = apart(ids, noise, np.arange(25, 0, -1))
    assert kept.tolist() == [3, 2, 20, 4, 3, 2, 8, 13, 25, 3, 2, 23, 7, 19, 24]
    assert cut.tolist() == [25, 2, 24, 22, 3, 2, 7, 2]


# --- Spans of our own --------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(windows(), st.data(), st.integers(1, 8))
def test_sentinels_come_in_order_and_special_tokens_stay(ids: Integers, data: st.DataObject, sentinels: int) -> None:
    objective = data.draw(objectives("span"))
    known = replace(vocabulary(), sentinels=vocabulary().sentinels[:sentinels])
    example = make_example(ids, "encoder-decoder", objective, known, generator(0))
    source, inputs, targets = example.source, example.inputs, example.targets
    assert source is not None and inputs is not None
    used = [token for token in source.tolist() if token in known.sentinels]
    assert used == list(known.sentinels[: len(used)])
    assert [token for token in targets.tolist() if token in known.sentinels] == used
    if used:
        assert targets[-1] == known.end
        assert known.is_ordinary[targets[~np.isin(targets, [*known.sentinels, tokenizer().id("end")])]].all()
        assert list(targets).count(known.end) == 1
        assert inputs.tolist() == [known.begin, *targets[:-1]]
    else:
        assert np.all(targets == IGNORED)
        assert known.is_ordinary[ids].sum() < 2
    assert len(source) <= len(ids) + 1
    if known.is_ordinary[ids].all():
        assert (len(source), len(targets)) == span_lengths(len(ids), objective.rate, objective.span_length, sentinels)


def test_spans_that_ends_divide_do_not_run_out_of_sentinels() -> None:
    ids, end = ordinary_window(60), tokenizer().id("end")
    ids[::5] = end
    few = replace(vocabulary(), sentinels=vocabulary().sentinels[:4])
    objective = ObjectiveConfig(rate=0.9)
    example = make_example(ids, "encoder-decoder", objective, few, generator(0))
    assert np.isin(few.sentinels, example.targets).all()
    assert restored(example).tolist() == ids.tolist()
    assert (
        restored(make_example(ids, "encoder-decoder", objective, vocabulary(), generator(0))).tolist() == ids.tolist()
    )


def test_span_statistics_on_100_000_tokens() -> None:
    objective, ids = ObjectiveConfig(name="span"), ordinary_window(500)
    noise = np.zeros(500, np.int64)
    lengths: list[int] = []
    for number in range(200):
        mask = draw_noise(500, *count_spans(500, objective.rate, objective.span_length, 100), generator(6, number))
        noise += mask
        lengths += [len(list(run)) for chosen, run in groupby(mask.tolist()) if chosen]
        example = make_example(ids, "encoder-decoder", objective, vocabulary(), generator(6, number))
        assert example.source is not None and len(example.source) == 500 - 75 + 25 + 1
        assert len(example.targets) == 75 + 25 + 1
    assert noise.sum() == 15_000
    assert np.mean(lengths) == 3.0
    assert abs(np.mean(np.array(lengths) == 1) - 24 / 74) < 0.03  # of all ways to cut 75 into 25, what begins with 1
    assert abs(noise[100:400].mean() - 30) < 4 * sqrt(200 * 0.15 * 0.85 * 3 / 300)


def test_all_ways_to_cut_are_equally_likely() -> None:
    draw = generator(7)
    parts = [tuple(random_parts(6, 3, draw).tolist()) for _ in range(5000)]
    assert all(sum(part) == 6 and min(part) > 0 for part in parts)
    ways, counts = np.unique(parts, axis=0, return_counts=True)
    assert len(ways) == 10
    check_uniform(counts)


# --- Settings ----------------------------------------------------------------------------------------------------


def test_the_schedule_and_the_rate_follow_the_run() -> None:
    objective = ObjectiveConfig(rate=0.4, final_rate=0.1, schedule={"causal": 0.25, "masked": 0.5, "hybrid": 0.25})
    names = [current(objective, progress).name for progress in (0, 0.2499, 0.25, 0.7499, 0.75, 1)]
    assert names == ["causal", "causal", "masked", "masked", "hybrid", "hybrid"]
    assert [current(objective, progress).rate for progress in (0, 0.5, 1)] == pytest.approx([0.4, 0.25, 0.1])
    moment = current(objective, 0.5)
    assert (moment.final_rate, moment.schedule) == (None, {})
    with pytest.raises(AssertionError, match="current"):
        make_example(ordinary_window(5), "decoder", objective, vocabulary(), generator(0))


def test_without_schedule_and_final_rate_nothing_changes() -> None:
    objective = ObjectiveConfig(name="prefix", rate=0.3)
    assert current(objective, 0.0) == current(objective, 0.7) == current(objective, 1.0) == objective


@pytest.mark.parametrize(
    ("family", "name"), [("encoder", "masked"), ("decoder", "causal"), ("encoder-decoder", "span")]
)
def test_a_family_does_what_it_is_known_for(family: Family, name: Objective) -> None:
    ids = ordinary_window(30)
    default, named = (
        make_example(ids, family, ObjectiveConfig(name=choice), vocabulary(), generator(8)) for choice in (None, name)
    )
    assert as_lists(default) == as_lists(named)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"rate": 0.0}, "rate"),
        ({"rate": 1.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"final_rate": -0.1}, "final_rate"),
        ({"mask_share": 1.1}, "mask_share"),
        ({"random_share": -0.1}, "random_share"),
        ({"mask_share": 0.8, "random_share": 0.3}, "mask_share"),
        ({"span_length": 0.5}, "span_length"),
        ({"span_length": 6.0, "unit": "span"}, "span_length"),
        ({"causal_share": 2.0}, "causal_share"),
        ({"schedule": {"causal": 0.5, "masked": 0.4}}, "schedule"),
        ({"schedule": {"causal": 1.5, "masked": -0.5}}, "schedule"),
        ({"schedule": {"random": 1.0}}, "schedule"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"^objective\.{key}: [^\n]+$"):
        ObjectiveConfig(**settings)


def test_a_schedule_can_be_typed() -> None:
    objective = build(ObjectiveConfig, [], {"schedule": "{causal: 0.25, masked: 0.75}", "final_rate": "0.3"})
    assert objective == ObjectiveConfig(schedule={"causal": 0.25, "masked": 0.75}, final_rate=0.3)


def test_settings_and_objectives_do_not_need_torch() -> None:
    code = "import sys, pipeline.data.objectives; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_shares_need_not_be_exact_in_binary() -> None:
    shares = {"causal": 0.7, "prefix": 0.2, "masked": 0.1}
    assert sum(shares.values()) != 1  # as floats add up
    assert ObjectiveConfig(schedule=shares, mask_share=0.9, random_share=0.1).schedule == shares


@pytest.mark.parametrize("family", get_args(Family))
def test_a_family_is_refused_what_it_cannot_do(family: Family) -> None:
    for name in get_args(Objective):
        objective = ObjectiveConfig(name=name)
        if name in OBJECTIVES[family]:
            check_objective(objective, family)
            check_objective(ObjectiveConfig(schedule={name: 1.0}), family)
            continue
        with pytest.raises(UserError, match=rf"^objective\.name: family {family} cannot .* {name}; use [^\n]+$"):
            check_objective(objective, family)
        with pytest.raises(UserError, match="^objective\\.schedule: "):
            check_objective(ObjectiveConfig(schedule={OBJECTIVES[family][0]: 0.5, name: 0.5}), family)
        with pytest.raises(UserError):
            make_example(ordinary_window(5), family, objective, vocabulary(), generator(0))


def test_a_missing_token_is_an_error_only_for_what_needs_it() -> None:
    ids, bare = ordinary_window(20), replace(vocabulary(), class_=None, mask=None, sentinels=())
    make_example(ids, "decoder", ObjectiveConfig(), bare, generator(0))
    make_example(ids, "encoder-decoder", ObjectiveConfig(name="prefix"), bare, generator(0))
    with pytest.raises(UserError, match="no mask token"):
        make_example(ids, "encoder", ObjectiveConfig(), bare, generator(0))
    with pytest.raises(UserError, match="no class token"):
        make_example(ids, "encoder", ObjectiveConfig(), replace(bare, mask=0), generator(0))
    with pytest.raises(UserError, match="sentinels"):
        make_example(ids, "encoder-decoder", ObjectiveConfig(), bare, generator(0))


def test_a_decoder_without_begin_token_reads_padding_first() -> None:
    text = tokenizer().text.replace('"<bos>"', '"<nothing>"')
    known = Vocabulary.of(Tokenizer(text))
    assert known.begin == tokenizer().id("pad") != vocabulary().begin == tokenizer().id("begin")
