"""The zoo's modules are the published ones: their sizes, their names, their losses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soapstone.errors import CaptureError
from soapstone.frontends.zoo import ZOO, zoo_model
from soapstone.frontends.zoo.moe import MixtureOfExperts, MoESizes

BATCH = 4
MODELS = sorted(ZOO)

# Published by torchvision and Hugging Face; the rest follows from the sizes in the models' docstrings.
PARAMETERS = {
    "lenet": 61_706,
    "alexnet": 61_100_840,
    "inception_v3": 27_161_264,
    "resnet101": 44_549_160,
    "rnntc": 52_807_682,
    "rnnlm": 108_111_632,
    "nmt": 135_068_928,
    "resnext50": 25_028_904,
    "bert_large": 336_226_108,
    "dlrm": 4_323_978_753,
    "xdl": 256_131_584,
    "candle_uno": 820_948_704,
    "mlp": 2**30,
    "gpt2": 124_439_808,
    "llama_1b": 1_235_814_400,
    "llama_8b": 8_030_261_248,
    "vit_l": 304_326_632,
    "moe": 1_516_930_048,
    "unet": 31_037_698,
}


def parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def on_meta(name: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return zoo_model(name).build(**options)


def cells(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, nn.LSTMCell)]


@pytest.mark.parametrize("name", MODELS)
def test_the_full_model_has_the_published_number_of_parameters(name: str) -> None:
    assert parameter_count(on_meta(name)) == PARAMETERS[name]


def test_parts_and_variants_have_the_published_number_of_parameters() -> None:
    assert parameter_count(on_meta("inception_v3", auxiliary=False)) == 23_834_568
    assert parameter_count(on_meta("bert_large").get_submodule("bert")) == 335_141_888
    assert parameter_count(on_meta("rnnlm", steps=2)) == PARAMETERS["rnnlm"]
    assert parameter_count(on_meta("mlp", towers=2)) == 2**30


@pytest.mark.parametrize("name", MODELS)
def test_the_full_model_accepts_its_full_batch_on_the_meta_device(name: str) -> None:
    model = zoo_model(name)
    with torch.device("meta"):
        inputs = model.inputs(model.batch_per_device)
    assert {tensor.device.type for tensor in inputs} == {"meta"}
    assert {tensor.shape[0] for tensor in inputs} == {model.batch_per_device}
    loss = on_meta(name)(*inputs)
    assert loss.shape == ()


@pytest.mark.parametrize("name", MODELS)
def test_the_tiny_model_trains_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    model = zoo_model(name)
    module = model.build(tiny=True)
    assert module.training
    assert parameter_count(module) < 200_000
    loss = module(*model.inputs(BATCH, tiny=True))
    assert loss.shape == ()
    assert math.isfinite(loss.item())
    loss.backward()
    for parameter_name, parameter in module.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), parameter_name


@pytest.mark.parametrize("name", MODELS)
def test_inputs_depend_on_the_seed_alone(name: str) -> None:
    model = zoo_model(name)
    first, again, other = (model.inputs(BATCH, tiny=True, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["alexnet", "bert_large", "gpt2", "inception_v3"])
def test_dropout_can_be_turned_off(name: str) -> None:
    model = zoo_model(name)
    assert model.options["dropout"] != 0
    module = model.build(tiny=True, dropout=0)
    inputs = model.inputs(BATCH, tiny=True, dropout=0)
    assert torch.equal(module(*inputs), module(*inputs))


@pytest.mark.parametrize(
    ("name", "embedding", "head"),
    [
        ("gpt2", "transformer.wte", "lm_head"),
        ("llama_1b", "model.embed_tokens", "lm_head"),
        ("bert_large", "bert.embeddings.word_embeddings", "cls.predictions.decoder"),
    ],
)
def test_tied_heads_share_the_embedding(name: str, embedding: str, head: str) -> None:
    for module in (on_meta(name), zoo_model(name).build(tiny=True)):
        weights = module.get_submodule(embedding).weight, module.get_submodule(head).weight
        assert weights[0] is weights[1]


def test_the_larger_llama_has_a_head_of_its_own() -> None:
    module = on_meta("llama_8b")
    assert module.get_submodule("lm_head").weight is not module.get_submodule("model.embed_tokens").weight


@pytest.mark.parametrize(("name", "layers"), [("rnntc", 4), ("rnnlm", 2), ("nmt", 4)])
def test_unrolled_steps_share_one_cell_per_layer(name: str, layers: int) -> None:
    """A layer has one cell, called once per step."""
    model = zoo_model(name)
    steps = 5
    module = model.build(tiny=True, steps=steps)
    calls: list[nn.Module] = []
    for cell in cells(module):
        cell.register_forward_hook(lambda called, *_: calls.append(called))
    module(*model.inputs(BATCH, tiny=True, steps=steps))
    assert len(cells(module)) == layers
    assert len(calls) == layers * steps


def test_the_language_model_predicts_each_next_word() -> None:
    """The mean over steps of the steps' means is the mean over all words."""
    model = zoo_model("rnnlm")
    module = model.build(tiny=True)
    words, targets = model.inputs(BATCH, tiny=True)
    scores: list[Tensor] = []
    module.get_submodule("decoder").register_forward_hook(
        lambda _module, _inputs, score: scores.append(score)
    )
    loss = module(words, targets)
    assert torch.equal(words[:, 1:], targets[:, :-1])
    torch.testing.assert_close(
        loss, F.cross_entropy(torch.stack(scores, dim=1).flatten(0, 1), targets.flatten())
    )


def test_experts_with_room_for_all_answer_like_a_loop_over_tokens() -> None:
    """Dispatch and combination are the sum over the chosen experts of weight times answer."""
    torch.manual_seed(0)
    sizes = MoESizes(
        hidden=8, heads=2, key_value_heads=2, feed_forward=4, experts=4, sequence=6, capacity_factor=2.0
    )
    assert sizes.capacity == sizes.sequence
    mixture = MixtureOfExperts(sizes).double()
    x = torch.randn(2, sizes.sequence, sizes.hidden, dtype=torch.float64)
    w1, w2, w3 = mixture.experts.w1, mixture.experts.w2, mixture.experts.w3
    expected = torch.zeros_like(x)
    probabilities = mixture.gate(x).softmax(dim=-1)
    for sample in range(2):
        for position in range(sizes.sequence):
            weights, experts = probabilities[sample, position].topk(sizes.chosen)
            token = x[sample, position]
            for weight, expert in zip(weights / weights.sum(), experts.tolist(), strict=True):
                answer = (F.silu(token @ w1[expert]) * (token @ w3[expert])) @ w2[expert]
                expected[sample, position] += weight * answer
    answers, imbalance = mixture(x)
    torch.testing.assert_close(answers, expected)
    assert imbalance >= 0


def test_full_experts_drop_the_latest_tokens() -> None:
    """With room for one token per expert, the first token of the sequence is served and the last is not."""
    sizes = MoESizes(hidden=8, heads=2, key_value_heads=2, feed_forward=4, experts=2, chosen=1, sequence=6)
    mixture = MixtureOfExperts(sizes)
    mixture.capacity = 1
    token = torch.randn(8)
    answers, _ = mixture(token.expand(1, 6, 8))
    assert answers[0, 0].any()
    assert not answers[0, 1:].any()


SHARED_SIZES = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}


def published_gpt2(transformers: Any) -> Any:
    sizes = {"vocab_size": 128, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    words = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(embd_pdrop=0, attn_pdrop=0, resid_pdrop=0, **words, **sizes)
    return transformers.GPT2LMHeadModel(config)


def published_llama(transformers: Any, tied: bool) -> Any:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        num_attention_heads=8,
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        rope_parameters=rope,
        tie_word_embeddings=tied,
        **SHARED_SIZES,
    )
    return transformers.LlamaForCausalLM(config)


def published_bert(transformers: Any) -> Any:
    config = transformers.BertConfig(
        num_attention_heads=4,
        max_position_embeddings=16,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
        **SHARED_SIZES,
    )
    return transformers.BertForPreTraining(config)


@pytest.mark.parametrize("name", ["gpt2", "llama_1b", "llama_8b"])
def test_language_models_give_the_published_loss(name: str) -> None:
    """Hugging Face's modules take our weights under our names and compute the same loss."""
    transformers = pytest.importorskip("transformers")
    model = zoo_model(name)
    if name == "gpt2":
        theirs, ours = published_gpt2(transformers), model.build(tiny=True, dropout=0.0)
    else:
        theirs, ours = published_llama(transformers, tied=name == "llama_1b"), model.build(tiny=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    words, targets = model.inputs(BATCH, tiny=True)
    expected = F.cross_entropy(theirs(words).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(ours(words, targets), expected)


def test_bert_gives_the_published_loss() -> None:
    theirs = published_bert(pytest.importorskip("transformers"))
    ours = zoo_model("bert_large").build(tiny=True, dropout=0.0)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    words, segments, labels, follows = zoo_model("bert_large").inputs(BATCH, tiny=True)
    expected = theirs(words, token_type_ids=segments, labels=labels, next_sentence_label=follows).loss
    torch.testing.assert_close(ours(words, segments, labels, follows), expected)


def test_attention_written_out_for_dropout_equals_the_fused_one() -> None:
    for name in ("gpt2", "bert_large"):
        model = zoo_model(name)
        fused = model.build(tiny=True, dropout=0.0).eval()
        written_out = model.build(tiny=True).eval()
        written_out.load_state_dict(fused.state_dict())
        inputs = model.inputs(BATCH, tiny=True)
        torch.testing.assert_close(written_out(*inputs), fused(*inputs))


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("alexnet", {"features.10.weight", "classifier.6.bias"}),
        ("resnet101", {"layer3.22.bn3.running_var", "layer4.0.downsample.1.weight", "fc.weight"}),
        ("inception_v3", {"Mixed_7c.branch3x3dbl_3b.bn.weight", "AuxLogits.conv1.conv.weight"}),
        ("vit_l", {"encoder.layers.encoder_layer_23.mlp.3.bias", "heads.head.weight", "class_token"}),
        ("dlrm", {"emb_l.25.weight", "bot_l.4.weight", "top_l.8.bias"}),
        ("unet", {"inc.double_conv.0.weight", "down4.maxpool_conv.1.double_conv.4.bias", "up1.up.weight"}),
    ],
)
def test_parameters_have_the_published_names(name: str, names: set[str]) -> None:
    assert names <= on_meta(name).state_dict().keys()


def test_an_unknown_model_is_answered_with_a_near_one() -> None:
    with pytest.raises(CaptureError, match=r"no built-in model 'resnet10'; did you mean resnet101"):
        zoo_model("resnet10")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 2}, "rnnlm has no option 'step'; did you mean steps?"),
        ({"steps": 0}, "option steps of rnnlm cannot be 0; it is 40 by default"),
        ({"steps": "two"}, "option steps of rnnlm cannot be 'two'; it is 40 by default"),
        ({"dropout": 2.0}, "rnnlm cannot have these sizes: dropout probability"),
    ],
)
def test_bad_options_are_refused_with_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        zoo_model("rnnlm").build(**options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bert_large", {"heads": 3}),
        ("gpt2", {"sequence": 2048}),
        ("llama_8b", {"key_value_heads": 3}),
        ("mlp", {"towers": 3}),
        ("dlrm", {"width": 64}),
        ("unet", {"image": 100}),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match=f"{name} cannot have these sizes"):
        zoo_model(name).build(**options)


def test_a_batch_has_at_least_one_sample() -> None:
    with pytest.raises(CaptureError, match="at least one sample, not 0"):
        zoo_model("lenet").inputs(0)
