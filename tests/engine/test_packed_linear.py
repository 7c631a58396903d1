"""Packed linear layers compute what torch's own do."""

import copy

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from paged import CacheConfig
from paged.engine import Engine, SamplingParams, pack_linear_layers
from paged.engine.packed_linear import PackedLinear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 40)])
def test_a_packed_layer_agrees_within_rounding(rows, bias):
    model = nn.Sequential(nn.Linear(24, 40, bias=bias))
    x = torch.randn(*rows, 24)
    truth = nn.functional.linear(
        x.double(), model[0].weight.double(), model[0].bias.double() if bias else None
    )
    assert pack_linear_layers(model) == 1
    with torch.no_grad():
        torch.testing.assert_close(model(x).double(), truth, rtol=1e-5, atol=1e-5)


def test_only_plain_float32_layers_are_packed():
    class Own(nn.Linear):
        pass

    shared = nn.Linear(8, 8)
    model = nn.ModuleList(
        [shared, shared, nn.Linear(8, 8).bfloat16(), Own(8, 8), nn.Conv1d(8, 8, 1)]
    )
    assert pack_linear_layers(model) == 1
    assert isinstance(model[0], PackedLinear)
    assert model[1] is model[0]
    assert [type(module) for module in model[2:]] == [nn.Linear, Own, nn.Conv1d]
    assert pack_linear_layers(model) == 0


def test_the_embedding_keeps_a_weight_that_is_tied():
    model = copy.deepcopy(tiny_model("llama"))
    model.lm_head.weight = model.model.embed_tokens.weight
    before = model.model.embed_tokens.weight.clone()
    assert pack_linear_layers(model) == 2 * 7 + 1
    assert torch.equal(model.model.embed_tokens.weight, before)


def test_a_packed_model_generates_the_same_tokens():
    prompts, params = [[5, 6, 7], list(range(30)), [9]], SamplingParams(max_tokens=12)
    tokens = []
    for packs in (False, True):
        model = copy.deepcopy(tiny_model("llama"))
        if packs:
            pack_linear_layers(model)
        outputs = Engine(model, cache_config=CacheConfig(num_gpu_blocks=20)).generate(
            prompts, params
        )
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"model is str; it must be a torch\.nn\.Module"):
        pack_linear_layers("model")
