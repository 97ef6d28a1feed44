"""Models of transformers, imported and exported: the same logits on both sides, or a refusal that says why."""

import errno
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from torch import Tensor, nn

from pipeline import cli
from pipeline.bundle import Bundle, Model, load_bundle, make_model, save_bundle
from pipeline.data.config import TokenizerConfig
from pipeline.errors import UserError
from pipeline.model.config import Architecture, Family, ModelConfig, Preset, Size, resolve
from pipeline.model.forms import IDLE, config_for, form_for, settings_from
from pipeline.model.huggingface import export_model, import_model
from pipeline.model.positions import Bucketed
from pipeline.tokenizer import Tokenizer, train
from tests.novels import novel

TOLERANCE = 1e-5
VOCABULARY = 99
COMMON = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 72}
ENDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
BERT = COMMON | ENDS | {"max_position_embeddings": 40, "type_vocab_size": 3, "layer_norm_eps": 1e-3}
GPT2 = ENDS | {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 70, "n_positions": 40, "layer_norm_epsilon": 1e-3}
T5 = ENDS | {
    "d_model": 48, "d_kv": 10, "d_ff": 70, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 14, "layer_norm_epsilon": 1e-3,
}  # fmt: skip
LLAMA = COMMON | ENDS | {"num_key_value_heads": 2, "rms_norm_eps": 1e-3}
QWEN3 = LLAMA | {"head_dim": 10}
APERTUS = LLAMA | {"hidden_act": "relu2", "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", BERT),
    "bert, tanh": ("BertForMaskedLM", BERT | {"hidden_act": "gelu_new"}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, no inner size": ("GPT2LMHeadModel", GPT2 | {"n_inner": None, "activation_function": "relu"}),
    "gpt2, unscaled scores": ("GPT2LMHeadModel", GPT2 | {"scale_attn_weights": False}),
    "gpt2, untied": ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False}),
    "t5 v1.0": ("T5ForConditionalGeneration", T5),
    "t5 v1.1": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5 swiglu": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-silu"}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama, tied": ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True, "head_dim": 16, "rope_theta": 500.0}),
    "qwen3": ("Qwen3ForCausalLM", QWEN3),
    "qwen3, tied": ("Qwen3ForCausalLM", QWEN3 | {"hidden_act": "gelu", "tie_word_embeddings": True}),
    "apertus, as modern": ("ApertusForCausalLM", APERTUS | {"tie_word_embeddings": True}),
    "apertus, untied": ("ApertusForCausalLM", APERTUS | {"hidden_act": "gelu", "head_dim": 10}),
}


def make(architecture: str, settings: dict[str, Any]) -> Any:
    """A random model of transformers; "t5 v1.1" gets an output matrix of its own, as the published ones have."""
    torch.manual_seed(1)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**settings))
    if architecture.startswith("T5For") and settings.get("tie_word_embeddings") is False:
        model.lm_head.weight = nn.Parameter(torch.empty(VOCABULARY, 48))
    return shaken(model)


def shaken(model: Any) -> Any:
    """A model each of whose parameters matters: none is near zero, no norm near one."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.3, generator=generator)
    return model.eval()


def save(model: Any, folder: Path, shard: str = "1GB") -> str:
    """A folder as people find it: weights, config and tokenizer."""
    model.save_pretrained(folder, max_shard_size=shard)
    special = ["<pad>", "<unk>", "<bos>", "<eos>"]
    words = {word: number for number, word in enumerate([*special, *(f"w{number}" for number in range(90))])}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)


def batch(side: str, sequences: int = 3) -> tuple[Tensor, Tensor]:
    """Ids and which of them are real, padded on one side."""
    ids_BT = torch.randint(4, VOCABULARY, (sequences, 17), generator=torch.Generator().manual_seed(3))
    real_BT = torch.arange(17) < torch.tensor([[17], [11], [2]])[:sequences]
    return ids_BT, real_BT.flip(1) if side == "left" else real_BT


@torch.no_grad()
def their_logits(model: Any, ids_BT: Tensor, real_BT: Tensor) -> Tensor:
    """The logits at real tokens. Only for learned positions transformers must be told where the text begins."""
    words: dict[str, Tensor] = {"input_ids": ids_BT, "attention_mask": real_BT.long()}
    if model.config.is_encoder_decoder:
        real_BT = real_BT.flip(0)
        words |= {"decoder_input_ids": ids_BT.flip(0), "decoder_attention_mask": real_BT.long()}
    elif model.config.model_type in ("bert", "gpt2"):
        words["position_ids"] = (real_BT.cumsum(1) - 1).clamp(min=0)
    logits: Tensor = model(**words).logits
    return logits[real_BT]


@torch.no_grad()
def our_logits(model: Model, ids_BT: Tensor, real_BT: Tensor) -> Tensor:
    model.eval()
    if model.encoder and model.decoder:
        states = model.decode(ids_BT.flip(0), real_BT.flip(0), model.encode(ids_BT, real_BT))
        return model.logits(states[real_BT.flip(0)])
    states = model.encode(ids_BT, real_BT).states_BSC if model.encoder else model.decode(ids_BT, real_BT)
    return model.logits(states[real_BT])


def assert_same(ours: Model, theirs: Any) -> None:
    """The same logits, alone and in a batch, with padding on either side."""
    for side, sequences in (("right", 3), ("left", 3), ("right", 1)):
        torch.testing.assert_close(
            our_logits(ours, *batch(side, sequences)),
            their_logits(theirs, *batch(side, sequences)),
            rtol=0,
            atol=TOLERANCE,
        )


def auto(folder: Path) -> Any:
    """What transformers makes of a folder: by itself, and with nothing missing and nothing left over."""
    names = {"masked": "MaskedLM", "causal": "CausalLM", "encoder-decoder": "Seq2SeqLM"}
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    kind = "encoder-decoder" if "T5" in architecture else "masked" if "Masked" in architecture else "causal"
    loader = getattr(transformers, f"AutoModelFor{names[kind]}")
    model, info = loader.from_pretrained(folder, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def refusal(action: Callable[[], object]) -> str:
    """The one line with which something is refused."""
    with pytest.raises(UserError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- Import and back ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_gives_their_logits_and_goes_back_unchanged(name: str, tmp_path: Path) -> None:
    theirs = make(*MODELS[name])
    bundle = import_model(save(theirs, tmp_path / "theirs"))
    assert_same(bundle.model, theirs)
    export_model(bundle, tmp_path / "again")
    again = auto(tmp_path / "again")
    assert_same(bundle.model, again)
    stored, written = theirs.state_dict(), again.state_dict()
    assert stored.keys() == written.keys()
    changed = {key for key, tensor in stored.items() if not torch.equal(tensor, written[key])}
    folded = {f"bert.embeddings.{kind}_embeddings.weight" for kind in ("position", "token_type")}
    assert changed == (folded if name.startswith("bert") else set())


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 14), (7, 200)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_puts_any_distance_into_their_bucket(buckets: int, furthest: int, bidirectional: bool) -> None:
    theirs = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    ours = Bucketed(1, buckets, furthest, bidirectional)
    with torch.no_grad():
        ours.table.weight[:, 0] = torch.arange(float(buckets))
        (found,) = ours.biases(1, torch.arange(300), torch.arange(500))
    distances = torch.arange(500) - torch.arange(300)[:, None]
    assert found is not None and torch.equal(found[0].long(), theirs(distances, bidirectional, buckets, furthest))


def test_what_counts_here_are_the_settings_not_their_defaults(tmp_path: Path) -> None:
    bundle = import_model(save(make("LlamaForCausalLM", LLAMA | {"rope_theta": 77.0}), tmp_path))
    model = bundle.model.architecture
    assert (model.kv_heads, model.norm_epsilon, model.rotary_base, model.tie_embeddings) == (2, 1e-3, 77.0, False)


def test_a_bundle_does_not_overwrite_a_model_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(save(make(*MODELS["bert"]), tmp_path / "theirs"))
    before = (folder / "model.safetensors").read_bytes()
    assert cli.main(["import", str(folder), str(folder)]) == 2
    assert "holds what another command made, or other files; choose another folder" in capsys.readouterr().err
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["bert", "t5 v1.1", "llama, tied"])
def test_an_imported_model_lives_in_a_bundle(name: str, tmp_path: Path) -> None:
    theirs = make(*MODELS[name])
    save_bundle(import_model(save(theirs, tmp_path / "theirs")), tmp_path / "bundle")
    loaded = load_bundle(tmp_path / "bundle")
    assert_same(loaded.model, theirs)
    assert loaded.meta["imported_from"] == str(tmp_path / "theirs")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = make("BertForMaskedLM", BERT).to(dtype)
    model = import_model(save(theirs, tmp_path)).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert_same(model, theirs.float())


def test_shards_are_read(tmp_path: Path) -> None:
    theirs = make("LlamaForCausalLM", LLAMA)
    folder = save(theirs, tmp_path, shard="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert_same(import_model(folder).model, theirs)
    shards[0].unlink()
    assert shards[0].name in refusal(lambda: import_model(folder))


# --- Files of another age ----------------------------------------------------------------------------------------


def rewrite(folder: Path, rename: Callable[[str], str], extra: dict[str, Tensor] | None = None) -> None:
    tensors = {rename(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors | (extra or {}), folder / "model.safetensors", {"format": "pt"})


def edit(folder: Path, **changes: Any) -> None:
    """Change settings of a config.json; `...` takes one away."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def test_old_bert_files_are_read(tmp_path: Path) -> None:
    theirs = make("BertForPreTraining", BERT | {"layer_norm_eps": 1e-12})
    folder = save(theirs, tmp_path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    embedding = theirs.bert.embeddings.word_embeddings.weight.detach().clone()
    rewrite(
        tmp_path,
        lambda name: re.sub(r"LayerNorm\.\w+", lambda found: old[found[0]], name),
        {"bert.embeddings.position_ids": torch.arange(40)[None], "cls.predictions.decoder.weight": embedding},
    )
    edit(
        tmp_path,
        architectures=["BertForMaskedLM"],
        layer_norm_eps=...,
        tie_word_embeddings=...,
        position_embedding_type="absolute",
        gradient_checkpointing=False,
        directionality="bidi",
        pooler_fc_size=768,
        torch_dtype="float32",
    )
    masked = transformers.BertForMaskedLM(theirs.config).eval()
    masked.load_state_dict(theirs.state_dict(), strict=False)
    assert_same(import_model(folder).model, masked)


def test_old_gpt2_files_are_read(tmp_path: Path) -> None:
    theirs = make("GPT2LMHeadModel", GPT2 | {"layer_norm_epsilon": 1e-5})
    folder = save(theirs, tmp_path)
    buffers = {f"h.{layer}.attn.bias": torch.ones(1, 1, 40, 40).tril() for layer in range(3)}
    rewrite(tmp_path, lambda name: name.removeprefix("transformer."), buffers)
    edit(
        tmp_path,
        n_ctx=40,
        layer_norm_epsilon=...,
        scale_attn_weights=...,
        tie_word_embeddings=...,
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
    )
    assert_same(import_model(folder).model, theirs)


def test_old_t5_files_are_read(tmp_path: Path) -> None:
    settings = T5 | {"num_decoder_layers": 3, "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6}
    theirs = make("T5ForConditionalGeneration", settings)
    folder = save(theirs, tmp_path)
    shared = theirs.shared.weight.detach()
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = {f"{side}coder.embed_tokens.weight": shared.clone() for side in ("en", "de")}
    rewrite(tmp_path, str, copies | {bias: torch.ones(8, 4), "lm_head.weight": shared.clone()})
    gone = ["num_decoder_layers", "relative_attention_max_distance", "feed_forward_proj", "dense_act_fn"]
    gone += ["is_gated_act", "scale_decoder_outputs", "tie_word_embeddings"]
    edit(tmp_path, n_positions=512, output_past=True, **dict.fromkeys(gone, ...))
    model = import_model(folder).model
    assert model.architecture.tie_embeddings
    assert_same(model, theirs)


def test_published_t5_v1_1_files_are_read(tmp_path: Path) -> None:
    theirs = make(*MODELS["t5 v1.1"])
    folder = save(theirs, tmp_path)
    edit(tmp_path, tie_word_embeddings=False, scale_decoder_outputs=..., dense_act_fn=..., is_gated_act=...)
    assert_same(import_model(folder).model, theirs)
    edit(
        tmp_path, feed_forward_proj="gated-relu", dense_act_fn="gelu_new", is_gated_act=True
    )  # what transformers obeys
    assert_same(import_model(folder).model, theirs)


def test_old_llama_files_are_read(tmp_path: Path) -> None:
    theirs = make("LlamaForCausalLM", LLAMA | {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "rope_theta": 300.0})
    folder = save(theirs, tmp_path)
    rewrite(tmp_path, str, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    gone = ["rope_parameters", "head_dim", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "mlp_bias"]
    edit(tmp_path, rope_theta=300.0, rope_scaling=None, max_length=4096, **dict.fromkeys(gone, ...))
    assert_same(import_model(folder).model, theirs)


def test_tied_on_paper_but_not_in_the_file_is_untied_as_in_transformers(tmp_path: Path) -> None:
    folder = save(make("LlamaForCausalLM", LLAMA), tmp_path)
    edit(tmp_path, tie_word_embeddings=True)
    model = import_model(folder).model
    assert not model.architecture.tie_embeddings
    assert_same(model, transformers.LlamaForCausalLM.from_pretrained(folder).eval())


def test_a_base_model_gets_a_new_head_the_same_every_time(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    theirs = make("BertModel", BERT)
    folder = save(theirs, tmp_path)
    first = import_model(folder).model
    torch.rand(1)
    second = import_model(folder).model
    ids, real = batch("right")
    with torch.no_grad():
        states = theirs(ids, attention_mask=real.long()).last_hidden_state
        torch.testing.assert_close(first.encode(ids, real).states_BSC[real], states[real], rtol=0, atol=TOLERANCE)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), second.parameters(), strict=True))
    assert "BertModel has no language head" in capfd.readouterr().err
    import_model(save(make("GPT2Model", GPT2), tmp_path / "gpt2"))  # its head is the embedding
    assert capfd.readouterr().err.count("no language head") == 0
    edit(tmp_path, architectures=["BertForMaskedLM"])
    assert "cls.predictions" in refusal(lambda: import_model(folder))


# --- Our models --------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"width": 48, "heads": 4, "feed_forward": 70, "max_positions": 40}
PRESETS: list[tuple[Preset, Family, dict[str, Any]]] = [
    ("bert", "encoder", {"layers": 3}),
    ("gpt2", "decoder", {"layers": 3}),
    ("t5", "encoder-decoder", {"encoder_layers": 1, "decoder_layers": 2}),
    ("llama", "decoder", {"layers": 3}),
    ("modern", "decoder", {"layers": 3}),
]


@cache
def our_tokenizer() -> Tokenizer:
    return train([novel(1)], TokenizerConfig(kind="bpe", vocab_size=400))


def our_bundle(config: ModelConfig) -> Bundle:
    return Bundle(shaken(make_model(resolve(config), our_tokenizer().vocab_size + 3)), our_tokenizer())


@pytest.mark.parametrize(("preset", "family", "layers"), PRESETS)
def test_presets_export_and_work_with_auto_classes(
    preset: Preset, family: Family, layers: dict[str, Any], tmp_path: Path
) -> None:
    bundle = our_bundle(ModelConfig(preset=preset, family=family, **SMALL, **layers))
    export_model(bundle, tmp_path)
    theirs, tokenizer = auto(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_same(bundle.model, theirs)
    texts = ["The widow waited.", "Nobody looked at the grey sea, or at the empty house."]
    words = tokenizer(texts, padding=True, return_tensors="pt")
    ids, real = words["input_ids"], words["attention_mask"].bool()
    assert [row[keep].tolist() for row, keep in zip(ids, real, strict=True)] == [*map(bundle.tokenizer.encode, texts)]
    if family == "encoder-decoder":
        words["decoder_input_ids"], words["decoder_attention_mask"] = ids.flip(0), real.flip(0).long()
    with torch.no_grad():
        logits = theirs(**words).logits[real.flip(0) if family == "encoder-decoder" else real]
    torch.testing.assert_close(our_logits(bundle.model, ids, real), logits, rtol=0, atol=TOLERANCE)
    assert "token_type_ids" not in json.loads((tmp_path / "tokenizer_config.json").read_text())["model_input_names"]
    specials = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "mask_token": "<mask>"}
    assert {name: getattr(tokenizer, name) for name in specials} == specials
    assert (theirs.config.pad_token_id, theirs.config.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


@pytest.mark.parametrize("size", get_args(Size))
@pytest.mark.parametrize(("preset", "family"), [preset[:2] for preset in PRESETS])
def test_presets_export_at_any_size(preset: Preset, family: Family, size: Size) -> None:
    model = resolve(ModelConfig(preset=preset, family=family, size=size))
    form = form_for(model)
    assert form.model_type == {"modern": "apertus"}.get(preset, preset)
    read = settings_from(form, config_for(form, model))
    assert {name: value for name, value in asdict(model).items() if read.get(name, value) != value}.keys() <= IDLE


KINDS = get_type_hints(Architecture)
CHOICES = ("norm", "norm_place", "activation", "position", "initialisation", "prefix_attention")
CHANGES: list[dict[str, Any]] = [
    *({name: choice} for name in CHOICES for choice in get_args(KINDS[name])),
    *({name: choice} for name, kind in KINDS.items() if kind is bool for choice in (True, False)),
    {"kv_heads": 2}, {"head_width": 10}, {"heads": 5, "head_width": 10}, {"norm_epsilon": 0.01}, {"logit_soft_cap": 2},
    {"attention": "argmax"}, {"attention_window": 2}, {"rotary_base": 50.0}, {"max_positions": 30}, {"dropout": 0.3},
    {"position_buckets": 6, "position_distance": 9}, {"relative_clip": 3}, {"attention_rank": 5},
    {"output_scale": True, "tie_embeddings": False}, {"output_scale": False, "tie_embeddings": True},
]  # fmt: skip
NEVER_IN_THE_WAY = {"norm_epsilon", "dropout", "initialisation", "zero_output", "rotary_base", "max_positions"}
NEVER_IN_THE_WAY |= {"position_buckets", "relative_clip", "attention_rank", "bidirectional", "tie_embeddings"}


@pytest.mark.parametrize(("preset", "family", "layers"), PRESETS)
def test_any_changed_setting_is_exported_exactly_or_named(
    preset: Preset, family: Family, layers: dict[str, Any], tmp_path: Path
) -> None:
    exported = 0
    plain = ModelConfig(preset=preset, family=family, **SMALL, **layers)
    for number, change in enumerate(CHANGES):
        config = replace(plain, **change)
        if resolve(config) == resolve(plain):
            continue
        bundle, folder = our_bundle(config), tmp_path / str(number)
        try:
            export_model(bundle, folder)
        except UserError as error:
            assert any(f"model.{name} " in str(error) for name in change), (change, str(error))
            assert not change.keys() <= NEVER_IN_THE_WAY
            continue
        exported += 1
        assert_same(bundle.model, auto(folder))
        said = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
        assert (
            said
            or {"lm_head.weight", "cls.predictions.decoder.weight"} & load_file(folder / "model.safetensors").keys()
        )
        again = import_model(str(folder)).model
        assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in bundle.model.state_dict().items())
    assert exported > 10


def test_a_decoder_that_reads_its_source_both_ways_is_refused(tmp_path: Path) -> None:
    config = ModelConfig(preset="gpt2", family="decoder", prefix_attention="bidirectional", **SMALL)
    assert "model.prefix_attention" in refusal(lambda: export_model(our_bundle(config), tmp_path))


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    bundle = our_bundle(ModelConfig(family="recurrent", preset="original", layers=2, **SMALL))
    assert "recurrent" in refusal(lambda: export_model(bundle, tmp_path))


@pytest.mark.parametrize(
    ("preset", "family", "nearest", "settings"),
    [
        ("original", "encoder", "BertForMaskedLM", "embedding_scale position embedding_norm"),
        ("original", "decoder", "GPT2LMHeadModel", "norm_place embedding_scale position"),
        ("original", "encoder-decoder", "T5ForConditionalGeneration", "norm norm_place bias position"),
        ("modern", "encoder", "BertForMaskedLM", "norm norm_place qk_norm position bias"),
        ("modern", "encoder-decoder", "T5ForConditionalGeneration", "qk_norm position"),
        ("llama", "encoder", "BertForMaskedLM", "norm position"),
    ],
)
def test_a_model_without_a_native_architecture_is_refused(
    preset: Preset, family: Family, nearest: str, settings: str, tmp_path: Path
) -> None:
    bundle = our_bundle(ModelConfig(preset=preset, family=family, size="tiny"))
    line = refusal(lambda: export_model(bundle, tmp_path / "folder"))
    assert nearest in line
    assert all(f"model.{name} " in line for name in settings.split())
    assert not (tmp_path / "folder").exists()


# --- What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("bert", "hidden_act", "quick_gelu"),
        ("bert", "is_decoder", True),
        ("bert", "add_cross_attention", True),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "glyph_embedding_dim", 1728),
        ("bert", "pruned_heads", {"0": [1]}),
        ("gpt2", "activation_function", "silu"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "add_cross_attention", True),
        ("t5 v1.0", "feed_forward_proj", "gated-tanh"),
        ("t5 v1.0", "tie_encoder_decoder", True),
        ("llama", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "hidden_act", "relu"),
        ("llama", "quantization_config", {"quant_method": "awq"}),
        ("llama", "auto_map", {"AutoModel": "code.Model"}),
        ("llama", "per_layer_config", {"1": {"head_dim": 8}}),
        ("qwen3", "use_sliding_window", True),
        ("apertus, as modern", "hidden_act", ...),
        ("apertus, as modern", "rope_scaling", ...),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("bert", "hidden_size", "48"),
        ("bert", "num_attention_heads", 0),
        ("bert", "layer_norm_eps", "small"),
        ("gpt2", "n_embd", None),
        ("gpt2", "n_layer", ...),
        ("gpt2", "vocab_size", ...),
        ("llama", "model_type", "mamba"),
        ("llama", "model_type", ...),
    ],
)
def test_a_setting_that_we_cannot_represent_is_refused_by_name(name: str, key: str, value: Any, tmp_path: Path) -> None:
    folder = save(make(*MODELS[name]), tmp_path)
    edit(tmp_path, **({"dense_act_fn": ...} if name.startswith("t5") else {}), rope_parameters=..., **{key: value})
    assert key in refusal(lambda: import_model(folder))


@pytest.mark.parametrize("changed", [{"rope_type": "yarn", "factor": 4.0}, {"partial_rotary_factor": 0.5}])
def test_scaled_rotations_are_refused_in_new_files_too(changed: dict[str, Any], tmp_path: Path) -> None:
    folder = save(make("LlamaForCausalLM", LLAMA), tmp_path)
    edit(tmp_path, rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"} | changed)
    assert "rope_scaling" in refusal(lambda: import_model(folder))


def damaged(name: str, folder: Path, harm: Callable[[dict[str, Tensor]], object]) -> str:
    source = save(make(*MODELS[name]), folder)
    tensors = load_file(folder / "model.safetensors")
    harm(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return refusal(lambda: import_model(source))


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    missing, wrong, extra = (
        "transformer.h.1.mlp.c_fc.bias",
        "model.layers.2.self_attn.v_proj.weight",
        "classifier.weight",
    )
    assert missing in damaged("gpt2", tmp_path / "1", lambda tensors: tensors.pop(missing))
    line = damaged("llama", tmp_path / "2", lambda tensors: tensors.update({wrong: torch.ones(25, 48)}))
    assert "model.layers.2.self_attn.k_proj" in line and "(49, 48)" in line and "(48, 48)" in line
    assert extra in damaged("bert", tmp_path / "3", lambda tensors: tensors.update({extra: torch.ones(2, 48)}))
    other = {"encoder.embed_tokens.weight": torch.ones(VOCABULARY, 48)}
    assert "embed_tokens" in damaged("t5 v1.0", tmp_path / "4", lambda tensors: tensors.update(other))
    assert "lm_head.weight" in damaged("llama", tmp_path / "5", lambda tensors: tensors.pop("lm_head.weight"))
    assert "word_embeddings" in damaged(
        "bert", tmp_path / "6", lambda tensors: tensors.pop("bert.embeddings.word_embeddings.weight")
    )


def test_a_damaged_or_incomplete_folder_is_refused(tmp_path: Path) -> None:
    folder = save(make("LlamaForCausalLM", LLAMA), tmp_path)
    weights, tokenizer = tmp_path / "model.safetensors", tmp_path / "tokenizer.json"
    whole = weights.read_bytes()
    for broken in (whole[:-100], whole[:50], b"", b"\x80\x04pickle"):
        weights.write_bytes(broken)
        assert "model.safetensors: missing or damaged" in refusal(lambda: import_model(folder))
    weights.unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../model-1.safetensors"}}')
    assert str(tmp_path / "model-1.safetensors") in refusal(lambda: import_model(folder))
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "index.json" in refusal(lambda: import_model(folder))
    weights.write_bytes(whole)
    tokenizer.rename(tmp_path / "elsewhere")
    assert "AutoTokenizer" in refusal(lambda: import_model(folder))
    tokenizer.write_text("{}")
    assert "tokenizer.json" in refusal(lambda: import_model(folder))
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in refusal(lambda: import_model(folder))
    (tmp_path / "config.json").unlink()
    assert "config.json" in refusal(lambda: import_model(folder))


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    folder = save(make("GPT2LMHeadModel", GPT2 | {"vocab_size": 93}), tmp_path)
    assert "94 tokens" in refusal(lambda: import_model(folder))


def test_pickles_are_never_read(tmp_path: Path) -> None:
    folder = save(make("GPT2LMHeadModel", GPT2), tmp_path)
    (tmp_path / "model.safetensors").unlink()

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path / "sprung").touch, ()

    torch.save({"transformer.wte.weight": Trap()}, tmp_path / "pytorch_model.bin")
    assert "save_pretrained" in refusal(lambda: import_model(folder))
    assert not (tmp_path / "sprung").exists()


# --- Tokenizers, the hub and files -------------------------------------------------------------------------------


def test_the_tokenizer_is_kept(tmp_path: Path) -> None:
    folder = save(make("LlamaForCausalLM", LLAMA), tmp_path / "theirs")
    original = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json",
        eos_token="w7",
        unk_token="<unk>",
        pad_token="<pad>",
        padding_side="left",
    )
    original.save_pretrained(folder)
    save_bundle(import_model(folder), tmp_path / "bundle")
    export_model(load_bundle(tmp_path / "bundle"), tmp_path / "again")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert (tmp_path / "again/tokenizer.json").read_bytes() == (tmp_path / "theirs/tokenizer.json").read_bytes()
    assert (again.eos_token, again.pad_token, again.padding_side) == ("w7", "<pad>", "left")
    assert again("w1 w2 oh w7").input_ids == original("w1 w2 oh w7").input_ids


def test_a_hub_name_fetches_only_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = make("GPT2LMHeadModel", GPT2)
    folder = save(theirs, tmp_path)
    asked: list[Any] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.extend([name, allow_patterns])
        return folder

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert_same(import_model("hf:someone/model").model, theirs)
    assert asked[0] == "someone/model"
    assert all(pattern.endswith((".json", ".safetensors")) for pattern in asked[1])


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "hf:nobody/nothing" in refusal(lambda: import_model("hf:nobody/nothing"))
    assert "hf:no such name" in refusal(lambda: import_model("hf:no such name"))


def test_export_never_leaves_half_a_folder_or_harms_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = our_bundle(ModelConfig(preset="gpt2", family="decoder", layers=1, **SMALL))
    save_bundle(bundle, tmp_path / "bundle")
    assert "bundle" in refusal(lambda: export_model(bundle, tmp_path / "bundle"))
    load_bundle(tmp_path / "bundle")
    export_model(bundle, tmp_path / "folder")
    export_model(bundle, tmp_path / "folder")
    weights = (tmp_path / "folder/model.safetensors").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr("pipeline.model.huggingface.save_file", full)
    with pytest.raises(OSError, match="no space"):
        export_model(bundle, tmp_path / "folder")
    assert (tmp_path / "folder/model.safetensors").read_bytes() == weights
    assert not (tmp_path / "folder/config.json").exists()


def test_transformers_is_not_needed() -> None:
    program = "import sys, pipeline.model.huggingface; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
