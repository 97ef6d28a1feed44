"""Architectures of transformers in our words: tables of settings and tensors, followed in both directions.

Light: no torch.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from pipeline.configuration import in_words
from pipeline.errors import UserError
from pipeline.files import read_json
from pipeline.model.config import PRESETS, Activation, Architecture, Family, Preset


@dataclass(frozen=True, kw_only=True)
class Form:
    """An architecture of transformers in our words."""

    model_type: str
    architecture: str
    """The class that gives logits."""
    base: str
    """The class without the output matrix, in whose files the names have no prefix."""
    prefix: str
    family: Family
    preset: Preset
    """What all models of this form have in common, but for what `differs`."""
    differs: dict[str, Any]
    settings: dict[str, tuple[str, Any]]
    """Their setting: ours, and its value where a file has none: None follows from others, `...` must be there."""
    activations: dict[str, Activation]
    even_heads: bool = True
    """Whether the number of heads must divide the width."""
    tensors: dict[str, str]
    """Our layer: theirs. `a.[b + c]` is a.b above a.c, `a.[b & c]` a.b plus the first row of a.c, `^T` transposed."""


PLAIN: dict[str, Activation] = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "relu_squared",
}  # fmt: skip
GATED: dict[str, Activation] = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh",
}  # fmt: skip


def blocks(side: str, theirs: str, parts: dict[str, str]) -> dict[str, str]:
    """The tensors of all blocks of one side: our part of a block, and theirs."""
    return {f"{side}.blocks.{{n}}.{ours}": f"{theirs}.{{n}}.{other}" for ours, other in parts.items()}


BERT = Form(
    model_type="bert", architecture="BertForMaskedLM", base="BertModel", prefix="bert.", family="encoder",
    preset="bert", differs={"decoder_layers": 0}, activations=PLAIN,
    settings={
        "hidden_size": ("width", ...), "num_hidden_layers": ("encoder_layers", ...),
        "num_attention_heads": ("heads", ...), "intermediate_size": ("feed_forward", None),
        "hidden_act": ("activation", "gelu"), "layer_norm_eps": ("norm_epsilon", 1e-12),
        "max_position_embeddings": ("max_positions", 512), "hidden_dropout_prob": ("dropout", 0.1),
        "attention_probs_dropout_prob": ("attention_dropout", 0.1), "initializer_range": ("initial_deviation", 0.02),
        "tie_word_embeddings": ("tie_embeddings", True),
    },
    tensors={
        "embedding": "bert.embeddings.word_embeddings",
        "encoder.positions.table": "bert.embeddings.[position_embeddings & token_type_embeddings]",
        "encoder.embedding_norm": "bert.embeddings.LayerNorm",
        **blocks("encoder", "bert.encoder.layer", {
            "attention.layer.query": "attention.self.query", "attention.layer.output": "attention.output.dense",
            "attention.layer.key_value": "attention.self.[key + value]", "attention.norm": "attention.output.LayerNorm",
            "feed_forward.layer.input": "intermediate.dense", "feed_forward.layer.output": "output.dense",
            "feed_forward.norm": "output.LayerNorm",
        }),
        "head.transform.linear": "cls.predictions.transform.dense",
        "head.transform.norm": "cls.predictions.transform.LayerNorm",
        "head.output": "cls.predictions.decoder",
    },
)  # fmt: skip

GPT2 = Form(
    model_type="gpt2", architecture="GPT2LMHeadModel", base="GPT2Model", prefix="transformer.", family="decoder",
    preset="gpt2", differs={"encoder_layers": 0}, activations=PLAIN,
    settings={
        "n_embd": ("width", ...), "n_layer": ("decoder_layers", ...), "n_head": ("heads", ...),
        "n_inner": ("feed_forward", None), "activation_function": ("activation", "gelu_new"),
        "layer_norm_epsilon": ("norm_epsilon", 1e-5), "n_positions": ("max_positions", 1024),
        "scale_attn_weights": ("attention_scale", True), "attn_pdrop": ("attention_dropout", 0.1),
        "embd_pdrop": ("dropout", 0.1), "resid_pdrop": ("dropout", 0.1),  # one rate here: the latter's
        "initializer_range": ("initial_deviation", 0.02), "tie_word_embeddings": ("tie_embeddings", True),
    },
    tensors={
        "embedding": "transformer.wte",
        "decoder.positions.table": "transformer.wpe",
        **blocks("decoder", "transformer.h", {
            "attention.norm": "ln_1", "attention.layer.[query + key_value]": "attn.c_attn ^T",
            "attention.layer.output": "attn.c_proj ^T", "feed_forward.norm": "ln_2",
            "feed_forward.layer.input": "mlp.c_fc ^T", "feed_forward.layer.output": "mlp.c_proj ^T",
        }),
        "decoder.norm": "transformer.ln_f",
        "head.output": "lm_head",
    },
)  # fmt: skip


def t5_side(side: str, layers: tuple[str, ...], inputs: str) -> dict[str, str]:
    """The tensors of one side of a T5, whose blocks have these layers."""
    attention = {"query": "q", "key_value": "[k + v]", "output": "o"}
    known = {
        "attention": ("SelfAttention", attention), "cross": ("EncDecAttention", attention),
        "feed_forward": ("DenseReluDense", {"input": inputs, "output": "wo"}),
    }  # fmt: skip
    parts = {f"{ours}.norm": f"layer.{number}.layer_norm" for number, ours in enumerate(layers)}
    for number, ours in enumerate(layers):
        theirs, tensors = known[ours]
        parts |= {f"{ours}.layer.{name}": f"layer.{number}.{theirs}.{other}" for name, other in tensors.items()}
    table = {f"{side}.positions.table": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"}
    return table | blocks(side, f"{side}.block", parts) | {f"{side}.norm": f"{side}.final_layer_norm"}


def t5_tensors(inputs: str) -> dict[str, str]:
    encoder = t5_side("encoder", ("attention", "feed_forward"), inputs)
    decoder = t5_side("decoder", ("attention", "cross", "feed_forward"), inputs)
    return {"embedding": "shared"} | encoder | decoder | {"head.output": "lm_head"}


T5 = Form(
    model_type="t5", architecture="T5ForConditionalGeneration", base="T5Model", prefix="", family="encoder-decoder",
    preset="t5", differs={"attention_dropout": None, "activation_dropout": None}, activations=PLAIN, even_heads=False,
    settings={
        "d_model": ("width", ...), "num_layers": ("encoder_layers", ...), "num_heads": ("heads", ...),
        "num_decoder_layers": ("decoder_layers", None), "d_kv": ("head_width", 64), "d_ff": ("feed_forward", None),
        "feed_forward_proj": ("activation", "relu"), "layer_norm_epsilon": ("norm_epsilon", 1e-6),
        "relative_attention_num_buckets": ("position_buckets", 32),
        "relative_attention_max_distance": ("position_distance", 128), "dropout_rate": ("dropout", 0.1),
        "tie_word_embeddings": ("output_scale", True),  # what it stands for; whether they are tied shows in the file
    },
    tensors=t5_tensors("wi"),
)  # fmt: skip

T5_GATED = replace(
    T5,
    activations={
        "gated-gelu": "geglu_tanh", "gated-gelu_new": "geglu_tanh", "gated-gelu_python": "geglu",
        "gated-silu": "swiglu",
    },
    tensors=t5_tensors("[wi_0 + wi_1]"),
)  # fmt: skip

LLAMA = Form(
    model_type="llama", architecture="LlamaForCausalLM", base="LlamaModel", prefix="model.", family="decoder",
    preset="llama", differs={"encoder_layers": 0}, activations=GATED,
    settings={
        "hidden_size": ("width", ...), "num_hidden_layers": ("decoder_layers", ...),
        "num_attention_heads": ("heads", ...), "num_key_value_heads": ("kv_heads", None),
        "head_dim": ("head_width", None), "intermediate_size": ("feed_forward", None),
        "hidden_act": ("activation", "silu"), "rms_norm_eps": ("norm_epsilon", 1e-6),
        "max_position_embeddings": ("max_positions", 2048), "rope_theta": ("rotary_base", 10_000.0),
        "attention_dropout": ("attention_dropout", 0.0), "initializer_range": ("initial_deviation", 0.02),
        "tie_word_embeddings": ("tie_embeddings", False),
    },
    tensors={
        "embedding": "model.embed_tokens",
        **blocks("decoder", "model.layers", {
            "attention.norm": "input_layernorm", "attention.layer.query": "self_attn.q_proj",
            "attention.layer.key_value": "self_attn.[k_proj + v_proj]", "attention.layer.output": "self_attn.o_proj",
            "feed_forward.norm": "post_attention_layernorm", "feed_forward.layer.output": "mlp.down_proj",
            "feed_forward.layer.input": "mlp.[gate_proj + up_proj]",
        }),
        "decoder.norm": "model.norm",
        "head.output": "lm_head",
    },
)  # fmt: skip

QWEN3 = replace(
    LLAMA,
    model_type="qwen3", architecture="Qwen3ForCausalLM", base="Qwen3Model",
    differs=LLAMA.differs | {"qk_norm": True}, even_heads=False,
    settings=LLAMA.settings | {"head_dim": ("head_width", 128), "max_position_embeddings": ("max_positions", 32_768)},
    tensors=LLAMA.tensors | blocks("decoder", "model.layers", {
        "attention.layer.query_norm": "self_attn.q_norm", "attention.layer.key_norm": "self_attn.k_norm",
    }),
)  # fmt: skip

APERTUS = replace(
    QWEN3,
    model_type="apertus", architecture="ApertusForCausalLM", base="ApertusModel", activations=PLAIN,
    settings=QWEN3.settings | {
        "head_dim": ("head_width", None), "hidden_act": ("activation", "xielu"), "rms_norm_eps": ("norm_epsilon", 1e-5),
        "max_position_embeddings": ("max_positions", 65_536),
    },
    tensors=QWEN3.tensors | blocks("decoder", "model.layers", {
        "attention.norm": "attention_layernorm", "feed_forward.norm": "feedforward_layernorm",
        "feed_forward.layer.input": "mlp.up_proj",
    }),
)  # fmt: skip

FORMS = (BERT, GPT2, T5, T5_GATED, LLAMA, QWEN3, APERTUS)


# --- Settings, theirs and ours -----------------------------------------------------------------------------------

# Settings of ours that change no logit of a trained model, or that act only where another one says so.
IDLE = {
    "dropout", "attention_dropout", "activation_dropout", "initialisation", "initial_deviation", "zero_output",
    "max_positions", "position_width", "relative_clip", "position_buckets", "position_distance", "rotary_base",
    "attention_rank", "attention_normalise", "cell", "bidirectional", "alignment", "tie_embeddings",
}  # fmt: skip
# Settings of theirs that change no logit. Any other that no table has must be null, false, zero or empty.
HARMLESS = re.compile(
    r"_.*|architectures|model_type|transformers_version|(torch_)?dtype|vocab_size|type_vocab_size|use_cache|prefix"
    r"|.*_token_ids?|gradient_checkpointing|output_.*|return_dict.*|summary_.*|pooler_.*|classifier_dropout"
    r"|directionality|initializer_.*|task_specific_params|finetuning_task|problem_type|id2label|label2id|num_labels"
    r"|tokenizer_class|n_ctx|n_positions|max_sequence_length|pretraining_tp|reorder_and_upcast_attn|is_llama_config"
    r"|sliding_window|max_window_layers|chunk_size_feed_forward|is_encoder_decoder|do_sample|early_stopping"
    r"|m(ax|in)_(length|new_tokens)|temperature|top_[kp]|typical_p|num_beam.*|num_return_sequences|.*_penalty"
    r"|.*no_repeat_ngram_size|bad_words_ids"
)


def read_config(path: Path) -> tuple[Form, dict[str, Any]]:
    """The form of a config.json and what it says, in which nothing is left that we cannot represent exactly."""
    if not path.is_file():
        raise UserError(f"{path.parent}: no bundle (meta.json), no model of transformers (config.json); or hf:NAME")
    config = read_json(path)
    kind = config.get("model_type") if isinstance(config, dict) else None
    forms = [form for form in FORMS if form.model_type == kind]
    if not forms:
        known = ", ".join(sorted({form.model_type for form in FORMS}))
        raise UserError(f"{path}: model_type {kind} cannot be imported, only {known}")
    config = spelled_out(config)
    form = forms[-1] if str(config.get("feed_forward_proj")).startswith("gated-") else forms[0]
    check_config(path, form, config)
    return form, config


def spelled_out(config: dict[str, Any]) -> dict[str, Any]:
    """A config in which the tables find what files of different ages say in different ways."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters", None) or config.pop("rope_scaling", None) or {})
    config["rope_theta"] = rope.pop("rope_theta", config.get("rope_theta"))
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    if config["model_type"] == "apertus":  # what it is where the file does not say, and what we have not
        config.setdefault("hidden_act", "xielu")
        kind = kind if config["rope_theta"] else "llama3"
    if kind != "default" or any(rope.values()):
        config["rope_scaling"] = {"rope_type": kind} | rope
    if config.get("position_embedding_type") == "absolute":
        del config["position_embedding_type"]
    if set(config.get("layer_types") or []) == {"full_attention"}:
        del config["layer_types"]
    if config["model_type"] == "t5":
        config["tie_word_embeddings"] = config.pop("scale_decoder_outputs", config.get("tie_word_embeddings"))
        gate, _, kind = str(config.get("feed_forward_proj", "relu")).rpartition("-")
        kind = config.pop("dense_act_fn", "gelu_new" if (gate, kind) == ("gated", "gelu") else kind)
        config["feed_forward_proj"] = f"gated-{kind}" if config.pop("is_gated_act", gate == "gated") else kind
    return config


def check_config(path: Path, form: Form, config: dict[str, Any]) -> None:
    """Refuse settings that have no place in our model, or values that cannot be."""
    kinds = get_type_hints(Architecture) | {"activation": str}
    for key, value in config.items():
        if key not in form.settings:
            if value and not HARMLESS.fullmatch(key):
                raise UserError(f"{path}: {key} {value!r:.80} cannot be imported; only models without it can")
            continue
        ours = form.settings[key][0]
        if ours == "activation" and str(value) not in form.activations:
            raise UserError(f"{path}: {key} {value!r} cannot be imported, only {', '.join(form.activations)}")
        kind = int | float if kinds[ours] is float else kinds[ours]
        if value is not None and (not isinstance(value, kind) or (kind is int and value < 1)):
            raise UserError(f"{path}: {key} must be {in_words(kinds[ours])}, not {value!r}")
    for key in ("vocab_size", *(theirs for theirs, (_, default) in form.settings.items() if default is ...)):
        if not isinstance(config.get(key), int):
            raise UserError(f"{path}: {key} must be a whole number, not {config.get(key)!r}")


def settings_from(form: Form, config: dict[str, Any]) -> dict[str, Any]:
    """Our settings of a model: what its config says, else what its form says, else what follows from these."""
    found = PRESETS[form.preset] | form.differs | {"family": form.family}
    for theirs, (ours, default) in form.settings.items():
        value = config.get(theirs)
        found[ours] = default if value is None else value
    found["activation"] = form.activations.get(found["activation"])
    following = {
        "kv_heads": found["heads"], "head_width": found["width"] // found["heads"], "feed_forward": 4 * found["width"],
        "decoder_layers": found["encoder_layers"], "attention_dropout": found["dropout"],
        "activation_dropout": found["dropout"],
    }  # fmt: skip
    return following | {name: value for name, value in found.items() if value is not None}


def config_for(form: Form, model: Architecture) -> dict[str, Any]:
    """What a config.json says of a model, as far as the form has words for it."""
    words = {ours: theirs for theirs, ours in reversed(form.activations.items())}  # of several, the first
    config: dict[str, Any] = {"architectures": [form.architecture], "model_type": form.model_type, "dtype": "float32"}
    for theirs, (ours, _) in form.settings.items():
        config[theirs] = words.get(model.activation) if ours == "activation" else getattr(model, ours)
    if "rope_theta" in config:  # as transformers 4 reads it, and as 5 does
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return config


def form_for(model: Architecture) -> Form:
    """The form that is exactly this model; if there is none, say what stands in the way of the nearest."""
    wrong = [(form, obstacles(form, model)) for form in FORMS if form.family == model.family]
    least = min(len(settings) for _, settings in wrong)
    nearest = [(form, settings) for form, settings in wrong if len(settings) == least]
    if least:
        ways = "; ".join(f"{form.architecture}: {', '.join(settings)}" for form, settings in nearest)
        raise UserError(f"no architecture of transformers is exactly this model; in the way of the nearest, {ways}")
    return nearest[0][0]


def obstacles(form: Form, model: Architecture) -> list[str]:
    """The settings that would change if a model was written in a form and read again."""
    settings = settings_from(form, config_for(form, model))
    wrong = [
        f"model.{name} {getattr(model, name)} (it has {settings.get(name)})"
        for name in get_type_hints(Architecture)
        if name not in IDLE and getattr(model, name) != settings.get(name)
    ]
    if form.even_heads and model.width % model.heads:
        wrong.append(f"model.heads {model.heads} (it must divide the width {model.width})")
    return wrong
