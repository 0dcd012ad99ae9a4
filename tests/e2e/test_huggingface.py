"""Models of Hugging Face from a configuration file: captured whole, and computing what transformers computes.

Each configuration is made tiny, saved as transformers saves it, and read back through `hf:`. The graph,
interpreted with the model's weights, must give the loss and the gradients of the plain transformers model,
as it is and with every node cut into random shards.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.interpreter import at_random, loss_and_gradients, tensors_of
from torch import nn
from transformers import AutoConfig, MixtralForCausalLM

from soapstone.errors import CaptureError
from soapstone.frontends.capture import capture
from soapstone.frontends.losses import INNER, WithLoss
from soapstone.frontends.source import Source, load
from soapstone.graph import Role

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
CLIP_VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
WAVES = {
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}

MODELS: dict[str, dict[str, Any]] = {
    "bert": {**SIZES, **STILL},
    "deberta-v2": {**SIZES, **STILL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "xlnet": {"vocab_size": 48, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 32, "dropout": 0.0},
    "gpt2": {
        "vocab_size": 48,
        "n_positions": 32,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 4,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "bloom": {"vocab_size": 48, "hidden_size": 16, "n_layer": 2, "n_head": 4, "attention_dropout": 0.0},
    "llama": GROUPED,
    "gemma3_text": {**GROUPED, "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 6},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    "t5": {
        "vocab_size": 48,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 32,
        "num_layers": 1,
        "num_heads": 4,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
    },
    "bart": {**BART, "vocab_size": 48, "max_position_embeddings": 32},
    "whisper": {
        **BART,
        "vocab_size": 48,
        "num_mel_bins": 8,
        "max_source_positions": 8,
        "max_target_positions": 16,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "wav2vec2": {
        **SIZES,
        **WAVES,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "feat_proj_dropout": 0.0,
        "final_dropout": 0.0,
        "layerdrop": 0.1,
        "ctc_loss_reduction": "mean",
    },
    "vit": {**CLIP_VISION, **STILL},
    "swin": {
        **STILL,
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [2, 1],
        "num_heads": [2, 4],
        "window_size": 4,
        "drop_path_rate": 0.0,
    },
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
    "clip": {
        "text_config": {**SIZES, "bos_token_id": 0, "eos_token_id": 2},
        "vision_config": CLIP_VISION,
        "projection_dim": 16,
    },
    "llava": {
        "text_config": {**GROUPED, "model_type": "llama"},
        "vision_config": {**CLIP_VISION, "model_type": "clip_vision_model"},
        "image_token_index": 40,
    },
}
SETTLED = {"wav2vec2": {"layerdrop": 0.0, "apply_spec_augment": False}}
"""What Soapstone leaves out of a model, and says so."""

TOLERANCE = {"wav2vec2": 1e-4}
"""transformers computes the loss of wav2vec2 in single precision."""

LENGTHS = {"wav2vec2": 400, "resnet": None, "vit": None, "swin": None}


def saved(kind: str, folder: Path, **changes: Any) -> Path:
    """A directory with the tiny configuration of a type."""
    config = AutoConfig.for_model(kind, **{**MODELS[kind], **changes})
    config.save_pretrained(folder)
    return folder


def precise(source: Source) -> Source:
    """The same model and inputs in double precision."""
    inputs = tuple(x.double() if x.is_floating_point() else x for x in source.inputs)
    return replace(source, module=source.module.double(), inputs=inputs)


def plain(kind: str, source: Source) -> nn.Module:
    """The model as transformers makes it, with the same weights."""
    config = AutoConfig.for_model(kind, **{**MODELS[kind], **SETTLED.get(kind, {})})
    model = type(source.module.inner)._from_config(config, experts_implementation="eager")
    model.load_state_dict(source.module.inner.state_dict())
    return model.double().train()


@pytest.mark.parametrize("kind", MODELS)
def test_graph_computes_what_transformers_computes(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = precise(load(f"hf:{saved(kind, tmp_path)}", batch=2, length=LENGTHS.get(kind, 8), weights=True))
    captured = source.captured()
    graph = captured.graph
    assert not graph.opaque_nodes
    assert graph.loss is not None
    given = tensors_of(captured, source.module, source.inputs, source.prefix)
    model = plain(kind, source)
    named = dict(zip(source.module.names, source.inputs, strict=True))
    options = {"return_loss": True} if kind == "clip" else {}
    expected = model(**named, **options).loss
    expected.backward()
    parameters = dict(model.named_parameters())
    tolerance = TOLERANCE.get(kind, 1e-5)
    for split in ((), (at_random(seed=5),)):
        loss, gradients = loss_and_gradients(graph, given, *split)
        close(loss, expected.detach(), tolerance, "loss")
        for weight, gradient in gradients.items():
            own = next(parameters[s] for s in graph.value(weight).sources if s in parameters)
            if own.grad is None:
                assert gradient is None or not gradient.any(), weight
                continue
            close(gradient, own.grad.reshape(graph.value(weight).shape), tolerance, weight)


def close(found: torch.Tensor | None, wanted: torch.Tensor, tolerance: float, name: str) -> None:
    assert found is not None, name
    scale = max(float(wanted.abs().max()), 1e-3)
    difference = float((found - wanted).abs().max())
    assert difference <= tolerance * scale, f"{name}: off by {difference:.2g} at a scale of {scale:.2g}"


# -- what is left out, and said -------------------------------------------------------------------------


def test_random_skipping_and_masking_are_left_out_and_said(tmp_path: Path) -> None:
    notes = load(f"hf:{saved('wav2vec2', tmp_path)}", batch=2).captured().notes
    assert any("LayerDrop" in note for note in notes)
    assert any("SpecAugment" in note for note in notes)


def test_head_follows_the_configuration(tmp_path: Path) -> None:
    folder = saved("bert", tmp_path, architectures=["BertForSequenceClassification"], num_labels=5)
    source = load(f"hf:{folder / 'config.json'}", batch=2, length=8)
    assert type(source.module.inner).__name__ == "BertForSequenceClassification"
    assert [tuple(x.shape) for x in source.inputs] == [(2, 8), (2,)]


def test_unknown_architecture_is_said(tmp_path: Path) -> None:
    source = load(f"hf:{saved('gpt2', tmp_path, architectures=['MyOwnGPT'])}", batch=2, length=8)
    assert source.notes == ("transformers has no class MyOwnGPT: GPT2LMHeadModel was taken instead",)


def test_other_loss_takes_the_place_of_the_models_own(tmp_path: Path) -> None:
    captured = load(f"hf:{saved('vit', tmp_path)}", batch=2, loss="cross_entropy").captured()
    assert captured.graph.loss is not None
    assert [v.shape for v in captured.graph.with_role(Role.INPUT)] == [(2, 3, 8, 8), (2,)]


def test_images_fill_the_places_that_the_model_has_for_them(tmp_path: Path) -> None:
    source = load(f"hf:{saved('llava', tmp_path)}", batch=2, length=8, weights=True)
    named = dict(zip(source.module.names, source.inputs, strict=True))
    patches = (8 // 4) ** 2
    assert (named["input_ids"] == MODELS["llava"]["image_token_index"]).sum(1).tolist() == [patches] * 2
    source.module(*source.inputs)


def test_experts_may_be_split_over_devices(tmp_path: Path) -> None:
    """Tokens, experts and features are dims of their own, and tokens know their samples."""
    graph = load(f"hf:{saved('mixtral', tmp_path)}", batch=2, length=8).captured().graph
    nodes = [node for node in graph.nodes if node.op_name == "expert_linear"]
    assert len(nodes) == 2 * 2
    for node in nodes:
        assert set(graph.signature(node).splits) == {"t", "i", "e", "o"}
        assert graph.sample_dims[node.name]


def test_experts_of_a_model_made_elsewhere_are_captured_too() -> None:
    """As transformers runs them by itself: tokens sorted by expert, and a product for each group."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **MODELS["mixtral"], use_cache=False)
    model = MixtralForCausalLM(config)
    words = torch.randint(SIZES["vocab_size"], (2, 8))
    module = WithLoss(model, names=("input_ids", "labels"))
    captured = capture(module, (words, words), prefix=INNER)
    assert not captured.graph.opaque_nodes
    given = tensors_of(captured, module, (words, words), INNER)
    expected = module(words, words)
    expected.backward()
    loss, gradients = loss_and_gradients(captured.graph, given, at_random(seed=3))
    close(loss, expected.detach(), 1e-5, "loss")
    for weight, parameter in model.named_parameters():
        close(gradients[weight], parameter.grad, 1e-4, weight)


# -- bad input ------------------------------------------------------------------------------------------

NO_CONFIGURATIONS = {
    "": "is not a Hugging Face configuration: JSONDecodeError",
    "layers: 2": "is not a Hugging Face configuration: JSONDecodeError",
    "[" * 100_000: "is not a Hugging Face configuration: RecursionError",
    "[1, 2]": "has no field 'model_type'",
    '{"hidden_size": 16}': "has no field 'model_type'",
    '{"model_type": 7}': "has no field 'model_type'",
    '{"model_type": "bertt"}': "the installed transformers has no model type 'bertt'",
    '{"model_type": "bert", "hidden_size": "many"}': "make no configuration of the type 'bert'",
    '{"model_type": "clip", "text_config": 7}': "make no configuration of the type 'clip'",
    '{"model_type": "bert", "hidden_size": 16, "num_attention_heads": 5}': "BertForMaskedLM cannot be built",
    '{"model_type": "bert", "vocab_size": -3}': "BertForMaskedLM cannot be built",
    '{"model_type": "gpt2", "vocab_size": 0}': "no example can be made up for its input 'input_ids'",
    '{"model_type": "edgetam_mask_decoder"}': "no model that can be built from the type",
}


@pytest.mark.parametrize("text", NO_CONFIGURATIONS, ids=lambda text: text[:40])
def test_bad_configuration_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CaptureError) as raised:
        load(f"hf:{tmp_path}")
    assert NO_CONFIGURATIONS[text] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bytes_are_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(bytes(range(128, 256)))
    with pytest.raises(CaptureError, match="is not a Hugging Face configuration"):
        load(f"hf:{tmp_path}")


@pytest.mark.parametrize("name", ["", "nowhere", "nowhere/config.json"])
def test_missing_configuration_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="there is no Hugging Face configuration at"):
        load(f"hf:{tmp_path / name}")


def test_decision_from_values_names_its_place(tmp_path: Path) -> None:
    fields = {"model_type": "longformer", **SIZES, "attention_window": [4, 4], "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(CaptureError, match=r"at modeling_longformer.py:\d+"):
        load(f"hf:{tmp_path}", batch=2, length=8).captured()
