"""Test that results load strictly into models of the `transformers` library, made from tiny configurations."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import syncline as sl
from tests.integration.small_runs import launched

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
DECODER = {**TEXT, "num_key_value_heads": 1, "head_dim": 8}
GPT = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
PAIR: dict[str, Any] = {
    **{
        "vocab_size": 32,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "max_position_embeddings": 64,
    },
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")},
}
IMAGE = {**TEXT, "image_size": 16, "patch_size": 8}
T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": TEXT,
    "RobertaForMaskedLM": TEXT,
    "ElectraForPreTraining": {**TEXT, "embedding_size": 16},
    "AlbertForMaskedLM": {**TEXT, "embedding_size": 8},
    "DebertaV2ForMaskedLM": TEXT,
    "DistilBertForMaskedLM": {"vocab_size": 32, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "GPT2LMHeadModel": GPT,
    "GPTNeoForCausalLM": {
        **{
            "vocab_size": 32,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "max_position_embeddings": 64,
        },
        "attention_types": [[["global", "local"], 1]],
    },
    "GPTNeoXForCausalLM": TEXT,
    "GPTJForCausalLM": {**GPT, "rotary_dim": 4},
    "BloomForCausalLM": {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "OPTForCausalLM": {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16},
    "LlamaForCausalLM": {**DECODER, "tie_word_embeddings": True},
    "MistralForCausalLM": DECODER,
    "Qwen2ForCausalLM": DECODER,
    "GemmaForCausalLM": DECODER,
    "T5ForConditionalGeneration": T5,
    "BartForConditionalGeneration": PAIR,
    "ViTForImageClassification": IMAGE,
    "ConvNextForImageClassification": {
        "hidden_sizes": [8, 8, 8, 8],
        "depths": [1, 1, 1, 1],
        "image_size": 32,
    },
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]},
    "SwinForImageClassification": {
        **{"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]},
        "window_size": 4,
    },
}


def made(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs the extra `models`")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model: nn.Module = kind(kind.config_class(**ARCHITECTURES[name]))
    return model


def inputs(name: str, rank: int) -> dict[str, Tensor]:
    if name.endswith("ImageClassification"):
        size = ARCHITECTURES[name].get("image_size", 32)
        return {"pixel_values": torch.randn(2, 3, size, size)}
    words = torch.arange(8).reshape(2, 4) + rank
    return {"input_ids": words, **({"decoder_input_ids": words} if "Conditional" in name else {})}


def learner(session: sl.Session, name: str) -> dict[str, Tensor]:
    model = made(name)
    optimizer = session.optimizer(model, partial(SGD, lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        model(**inputs(name, session.rank))[0].square().mean().backward()
        optimizer.step()
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.long
@pytest.mark.parametrize("topology", ["servers:2", "allreduce"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_result_loads_into_the_model_it_came_from(name: str, topology: str) -> None:
    fresh = made(name)
    before = {key: value.clone() for key, value in fresh.state_dict().items()}
    result = launched(learner, name, learners=2, sync="hardsync", engine="sim", topology=topology)
    state, own = result.state_dict(), result.returned[0]
    fresh.load_state_dict(state)  # strictly
    assert list(state) == list(before) and any(not torch.equal(state[key], before[key]) for key in state)
    for key, value in own.items():
        if "running" not in key:  # which is the mean over the learners
            assert torch.equal(state[key], value), key


@pytest.mark.long
def test_it_does_so_from_processes() -> None:
    fresh = made("BertForMaskedLM")
    result = launched(learner, "BertForMaskedLM", learners=2, sync="hardsync", engine="local")
    fresh.load_state_dict(result.state_dict())
