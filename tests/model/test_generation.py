"""Writing on: against loops without a cache, exhaustive search, exact probabilities, and transformers."""

import itertools
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from pipeline.bundle import Bundle, Model, make_model
from pipeline.config import GenerationConfig
from pipeline.data.config import TokenizerConfig
from pipeline.errors import UserError
from pipeline.model import decoding
from pipeline.model.block import FeedForward
from pipeline.model.config import Activation, ModelConfig, resolve
from pipeline.model.generation import encode, generate
from pipeline.model.huggingface import export_model
from pipeline.model.packing import packed
from pipeline.model.sampling import Generated
from pipeline.model.transformer import Memory
from pipeline.tokenizer import train
from tests.novels import novel

END = 3
VOCABULARY = 30
PROMPTS = [[5, 6, 7, 8, 9, 4], [11], [12, 5, 8]]
SOURCES = [[8, 9, 10], [4, 5, 6, 7, 12, 13], [20, 21]]
FAMILIES = ["decoder", "encoder-decoder", "recurrent"]


def make(family: str, position: str | None = None, vocabulary: int = VOCABULARY, **changes: Any) -> Model:
    """A small model whose next token is never a foregone conclusion."""
    torch.manual_seed(4)
    shape: dict[str, Any] = {"width": 32, "heads": 4, "layers": 4, "feed_forward": 48, "max_positions": 64}
    weights: dict[str, Any] = {"initialisation": "normal", "initial_deviation": 0.25, "zero_output": False}
    config = ModelConfig(family=family, position=position, **shape | weights | changes)  # type: ignore[arg-type]
    model = make_model(resolve(config), vocabulary)
    nn.init.normal_(model.embedding.weight, std=0.6)
    return model.eval()


def prompts_of(model: Model) -> tuple[list[list[int]], Memory | None]:
    if model.architecture.family == "decoder":
        return PROMPTS, None
    return [[2]] * 3, encode(model, SOURCES)


@torch.no_grad()
def next_logits(model: Model, ids: list[int], source: list[int] | None) -> Tensor:
    memory = None if source is None else model.encode(torch.tensor([source]))
    return model.logits(model.decode(torch.tensor([ids]), memory=memory))[0, -1]


def sources_of(model: Model) -> list[list[int] | None]:
    return [None] * 3 if model.architecture.family == "decoder" else list(SOURCES)


@pytest.mark.parametrize(
    ("family", "position"),
    [
        *itertools.product(FAMILIES[:2], ["none", "sinusoidal", "learned", "relative", "t5", "rotary", "alibi"]),
        ("recurrent", "none"),
    ],
)
def test_greedy_takes_the_most_probable_token_each_time(family: str, position: str) -> None:
    model = make(family, position)
    prompts, memory = prompts_of(model)
    found = generate(model, prompts, GenerationConfig(max_new_tokens=12), end=END, memory=memory)
    for prompt, source, (written,) in zip(prompts, sources_of(model), found, strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and ids[-1] != END:
            ids.append(int(next_logits(model, ids, source).argmax()))
        assert written.ids == [token for token in ids[len(prompt) :] if token != END]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "config",
    [
        GenerationConfig(max_new_tokens=10),
        GenerationConfig(max_new_tokens=10, beams=4, sequences=3),
        GenerationConfig(max_new_tokens=10, temperature=1.0, sequences=2, seed=7),
    ],
    ids=["greedy", "beam", "random"],
)
def test_a_batch_gives_what_its_prompts_give_alone(family: str, config: GenerationConfig) -> None:
    model = make(family)
    prompts, memory = prompts_of(model)
    together = generate(model, prompts, config, end=END, memory=memory)
    for number, prompt in enumerate(prompts):
        own = None if memory is None else encode(model, [SOURCES[number]])
        (alone,) = generate(model, [prompt], config, end=END, memory=own, first=number)
        assert [one.ids for one in alone] == [one.ids for one in together[number]]
        assert [one.score for one in alone] == pytest.approx([one.score for one in together[number]], abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_log_probabilities_of_what_was_written(family: str) -> None:
    model = make(family)
    prompts, memory = prompts_of(model)
    config = GenerationConfig(max_new_tokens=6, beams=3, sequences=3, length_penalty=0.7)
    found = generate(model, prompts, config, end=END, memory=memory)
    for prompt, source, sequences in zip(prompts, sources_of(model), found, strict=True):
        for one in sequences:
            tokens = one.ids if len(one.ids) == 6 else [*one.ids, END]
            total = 0.0
            for place, token in enumerate(tokens):
                total += float(next_logits(model, [*prompt, *tokens[:place]], source).log_softmax(-1)[token])
            assert one.score == pytest.approx(total / len(tokens) ** 0.7, abs=1e-4)
        assert [one.score for one in sequences] == sorted((one.score for one in sequences), reverse=True)


def test_a_beam_as_wide_as_everything_is_exhaustive_search() -> None:
    model = make("decoder", vocabulary=5)
    config = GenerationConfig(max_new_tokens=3, beams=64, sequences=10, length_penalty=1.0)
    (found,) = generate(model, [[1, 2]], config, end=END)
    everything: list[Generated] = []
    for tokens in itertools.product(range(5), repeat=3):
        kept = tokens[: tokens.index(END) + 1] if END in tokens else tokens
        total = sum(
            float(next_logits(model, [1, 2, *kept[:place]], None).log_softmax(-1)[token])
            for place, token in enumerate(kept)
        )
        everything.append(Generated([token for token in kept if token != END], total / len(kept)))
    unique = {tuple(one.ids): one for one in everything}
    best = sorted(unique.values(), key=lambda one: one.score, reverse=True)[:10]
    assert [one.ids for one in found] == [one.ids for one in best]
    assert [one.score for one in found] == pytest.approx([one.score for one in best], abs=1e-4)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("decoder", {"position": "rotary", "kv_heads": 2, "qk_norm": True}),
        ("decoder", {"position": "alibi", "attention_window": 5}),
        ("encoder-decoder", {"position": "t5"}),
        ("encoder-decoder", {"position": "learned"}),
    ],
)
def test_tidying_the_cache_of_beams_changes_nothing_that_is_written(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths, of which some end before others."""
    model, held = make(family, **settings), []
    prompts, memory = prompts_of(model)
    config = GenerationConfig(max_new_tokens=40, min_new_tokens=20, beams=4, sequences=4)
    step = decoding.SharedDecoding.step

    def noted(self: decoding.SharedDecoding, ids_BN: Tensor) -> Tensor:
        logits_BNV = step(self, ids_BN)
        held.append(self.cache.length)
        return logits_BNV

    monkeypatch.setattr(decoding.SharedDecoding, "step", noted)
    found = {}
    for steps in (1000, 7, 1):
        monkeypatch.setattr(decoding, "TIDIED_EVERY", steps)
        held.clear()
        found[steps] = generate(model, prompts, config, end=END, memory=memory)
        grown = [after - before for before, after in itertools.pairwise(held)]
        assert set(grown) == {4} if steps == 1000 else min(grown) < 0
    for steps in (7, 1):
        for tidied, whole in zip(found[steps], found[1000], strict=True):
            assert [one.ids for one in tidied] == [one.ids for one in whole]
            assert [one.score for one in tidied] == pytest.approx([one.score for one in whole], abs=1e-5)


# --- transformers ---

SETTINGS: list[dict[str, Any]] = [
    {},
    {"no_repeat_ngram": 2},
    {"min_new_tokens": 9},
    {"beams": 4},
    {"beams": 4, "length_penalty": 0.0, "sequences": 3},
    {"beams": 3, "length_penalty": 2.0, "no_repeat_ngram": 2},
    {"beams": 3, "min_new_tokens": 8, "sequences": 2},
]


@pytest.fixture(scope="module", params=["gpt2", "t5"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    """A model of ours and the same as transformers loads it."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    folder: Path = tmp_path_factory.mktemp(request.param)
    tokenizer = train([novel(1)], TokenizerConfig(vocab_size=400))
    family = "decoder" if request.param == "gpt2" else "encoder-decoder"
    settings = {"preset": request.param, "vocabulary": tokenizer.vocab_size, "initial_deviation": 0.3}
    ours = make(family, **settings)
    export_model(Bundle(ours, tokenizer), folder)
    theirs = AutoModelForCausalLM if request.param == "gpt2" else AutoModelForSeq2SeqLM
    return ours, theirs.from_pretrained(folder).eval()


@pytest.mark.parametrize("changes", SETTINGS, ids=str)
def test_the_same_weights_write_the_same_in_transformers(pair: tuple[Model, Any], changes: dict[str, Any]) -> None:
    ours, theirs = pair
    config = GenerationConfig(max_new_tokens=14, **changes)
    prompts, memory = prompts_of(ours)
    found = generate(ours, prompts, config, end=END, memory=memory)
    for number, own in enumerate(found):
        inputs = torch.tensor([SOURCES[number] if memory else PROMPTS[number]])
        expected = theirs.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=14,
            min_new_tokens=config.min_new_tokens or None, num_beams=config.beams, length_penalty=config.length_penalty,
            no_repeat_ngram_size=config.no_repeat_ngram, num_return_sequences=config.sequences, eos_token_id=END,
            pad_token_id=0, decoder_start_token_id=2 if memory else None,
        )  # fmt: skip
        new = [row.tolist()[1 if memory else len(PROMPTS[number]) :] for row in expected]
        assert [one.ids for one in own] == [row[: row.index(END)] if END in row else row for row in new]


# --- At random ---


def drawn(config: GenerationConfig, model: Model, count: int) -> Tensor:
    """How often each token comes first."""
    found = generate(model, [[5, 6]] * count, config, end=END)
    firsts = [one.ids[0] if one.ids else END for (one,) in found]
    return torch.bincount(torch.tensor(firsts), minlength=VOCABULARY) / count


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.6}], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_probable(changes: dict[str, Any]) -> None:
    model, count, changes = make("decoder"), 4000, {"temperature": 1.0} | changes
    exact = (next_logits(model, [5, 6], None) / changes["temperature"]).softmax(-1).detach()
    order = exact.argsort(descending=True)
    if "top_k" in changes:
        exact[order[4:]] = 0
    if "top_p" in changes:
        needed = int((exact[order].cumsum(0) < 0.6).sum()) + 1
        exact[order[needed:]] = 0
    exact = exact / exact.sum()
    found = drawn(GenerationConfig(max_new_tokens=1, **changes), model, count)
    assert (found[exact == 0] == 0).all()
    assert ((found - exact).abs() < 5 * (exact * (1 - exact) / count).sqrt() + 1e-9).all()


def test_what_is_drawn_follows_from_the_seed() -> None:
    model = make("decoder")
    config = GenerationConfig(max_new_tokens=20, temperature=1.0)
    assert generate(model, PROMPTS, config, end=END) == generate(model, PROMPTS, config, end=END)
    other = GenerationConfig(max_new_tokens=20, temperature=1.0, seed=1)
    assert generate(model, PROMPTS, config, end=END) != generate(model, PROMPTS, other, end=END)


def test_no_n_gram_comes_twice_and_the_end_waits() -> None:
    model = make("decoder")
    config = GenerationConfig(max_new_tokens=30, min_new_tokens=25, no_repeat_ngram=2)
    for prompt, (one,) in zip(PROMPTS, generate(model, PROMPTS, config, end=END), strict=True):
        ids = [*prompt, *one.ids]
        pairs = list(itertools.pairwise(ids))
        assert len(pairs) == len(set(pairs)) and len(one.ids) >= 25


@pytest.mark.parametrize("beams", [1, 3])
def test_an_answer_may_say_again_what_its_source_says(beams: int) -> None:
    """A decoder has the source in its prompt, an encoder-decoder has not: the same rule must hold for both."""
    model = make("decoder")
    config = GenerationConfig(max_new_tokens=8, min_new_tokens=8, no_repeat_ngram=1, beams=beams)
    prompts = [list(range(4, VOCABULARY - 9))]  # so that nearly every token is one of the prompt's
    (barred,), (free,) = (generate(model, prompts, config, end=END, answer=answer)[0] for answer in (False, True))
    assert not set(barred.ids) & set(prompts[0])
    assert set(free.ids) & set(prompts[0]) and len(set(free.ids)) == 8 and free.score > barred.score
    if beams == 1:
        ids: list[int] = []
        for _ in range(8):
            logits = next_logits(model, [*prompts[0], *ids], None).detach()
            logits[[END, *ids]] = -torch.inf
            ids.append(int(logits.argmax()))
        assert free.ids == ids


def test_training_goes_on_where_it_was() -> None:
    model = make("decoder", dropout=0.5).train()
    config = GenerationConfig(max_new_tokens=5)
    assert generate(model, PROMPTS, config, end=END) == generate(model, PROMPTS, config, end=END)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: 0 must be at least 1"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "more than max_new_tokens"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p"),
        ({"top_k": 5}, "need a temperature"),
        ({"temperature": 1.0, "beams": 2}, "beam search draws nothing"),
        ({"sequences": 3}, "need as many beams"),
        ({"temperature": -1.0}, "must not be negative"),
    ],
)
def test_contradictions_fail_when_the_config_is_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        GenerationConfig(**settings)


def test_what_cannot_be_written_is_one_line() -> None:
    config = GenerationConfig(max_new_tokens=10)
    with pytest.raises(UserError, match="cannot write"):
        generate(make("encoder"), PROMPTS, config, end=END)
    with pytest.raises(UserError, match="an empty prompt"):
        generate(make("decoder"), [[]], config, end=END)
    with pytest.raises(UserError, match="from a source"):
        generate(make("encoder-decoder"), [[2]], config, end=END)
    with pytest.raises(UserError, match="an empty source"):
        encode(make("encoder-decoder"), [[]])
    with pytest.raises(UserError, match="a prompt of 60 tokens and 10 new ones, but the model has 64 positions"):
        generate(make("decoder", "learned"), [[5] * 60], config, end=END)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(8, 64, True), (5, 33, False), (16, 3, True), (7, 1, True)])
def test_packed_weights_give_the_same_products_and_leave_no_trace(
    inputs: int, outputs: int, bias: bool, rows: int
) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(inputs, outputs, bias=bias)
    for shape in ((1, inputs), (16, 1, inputs), (3, 2, inputs)):  # of the last a row is not beside the next
        x = torch.randn(shape)
        x = x[:, -1] if len(shape) > 2 else x
        with torch.no_grad(), packed(linear, rows=rows):
            fast = linear(x)
        assert "forward" not in vars(linear)
        torch.testing.assert_close(fast, linear(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("rows", [1, 16])
def test_a_packed_feed_forward_layer_activates_as_before(activation: Activation, rows: int) -> None:
    torch.manual_seed(0)
    layer = FeedForward(resolve(ModelConfig(size="tiny", activation=activation))).eval()
    x = torch.randn(16, 1, layer.input.in_features)
    with torch.no_grad(), packed(layer, rows=rows):
        fast = layer(x)
    assert "widen" not in vars(layer)
    torch.testing.assert_close(fast, layer(x), rtol=1e-5, atol=1e-6)


def test_a_compiled_model_writes_without_being_compiled_for_every_length() -> None:
    model = make("decoder")
    config = GenerationConfig(max_new_tokens=3)
    expected = generate(model, PROMPTS, config, end=END)
    assert model.decoder is not None
    model.decoder.compile()
    assert [one[0].ids for one in generate(model, PROMPTS, config, end=END)] == [one[0].ids for one in expected]
