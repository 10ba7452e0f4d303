"""Causal language models of Hugging Face's transformers as layers: embedding, blocks, head (an extra, `pip install
'pipebench[hf]'`).

Built from a configuration with random weights: nothing is downloaded. The library builds the whole model; its own
modules are then put into layers that call them as the model itself does, causal and without a cache. Attention masks
are left to scaled_dot_product_attention, which needs none where every token is valid.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipebench.config import HfConfig
from pipebench.errors import ConfigError
from pipebench.models.layers import LayerSequence
from pipebench.models.losses import next_token
from pipebench.seeds import Purpose, seed_of
from pipebench.target import told


class Gpt2Embedding(nn.Module):
    """Token plus learned position embedding."""

    ties = {"wte.weight": "embedding"}  # noqa: RUF012

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = model.transformer.wte, model.transformer.wpe, model.transformer.drop

    def forward(self, tokens_BT: Tensor) -> Tensor:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD: Tensor = self.drop(self.wte(tokens_BT) + self.wpe(positions_T))
        return x_BTD


class Gpt2Block(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD: Tensor = self.block(x_BTD)
        return y_BTD


class Gpt2Head(nn.Module):
    """Final norm and the embedding's transpose."""

    ties = {"lm_head.weight": "embedding"}  # noqa: RUF012

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.ln_f, self.lm_head = model.transformer.ln_f, model.lm_head

    def forward(self, x_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self.lm_head(self.ln_f(x_BTD))
        return logits_BTV


class LlamaEmbedding(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens = model.model.embed_tokens

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD: Tensor = self.embed_tokens(tokens_BT)
        return x_BTD


class LlamaBlock(nn.Module):
    """A decoder layer with rotary position embeddings of its own; the original computes them once for all layers."""

    def __init__(self, model: Any, index: int) -> None:
        super().__init__()
        self.block = model.model.layers[index]
        self.rotary_emb = type(model.model.rotary_emb)(config=model.config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        positions_1T = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None]
        y_BTD: Tensor = self.block(x_BTD, position_embeddings=self.rotary_emb(x_BTD, position_ids=positions_1T))
        return y_BTD


class LlamaHead(nn.Module):
    """Final norm and projection to the vocabulary, not tied to the embedding."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, x_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self.lm_head(self.norm(x_BTD))
        return logits_BTV


def hf(config: HfConfig) -> LayerSequence:
    def build(indices: Sequence[int], seed: int) -> list[nn.Module]:
        torch.manual_seed(seed_of(seed, Purpose.WEIGHTS))
        layers = layers_of(whole_model(config))
        return [layers[index] for index in indices]

    return LayerSequence(config.num_layers, build, next_token.mean, next_token.count, next_token.metrics)


def with_defaults(config: HfConfig) -> HfConfig:
    """Return the config with the family's own values where none is given; raise ConfigError where they do not fit."""
    chosen, names = _family_config(config), _NAMES[config.name]
    found = {ours: getattr(chosen, theirs) for ours, theirs in names.items()}
    if config.name == "gpt2" and found["feed_forward"] is None:
        found["feed_forward"] = 4 * chosen.hidden_size  # as the block itself reads it
    return dataclasses.replace(config, **found, num_layers=found["layers"] + 2)


def whole_model(config: HfConfig) -> Any:
    """Return the library's own model, in training mode."""
    family = _family_config(config)
    try:
        return _library().AutoModelForCausalLM.from_config(family, attn_implementation="sdpa").train()
    except Exception as error:
        raise _not_possible(config, error) from error


def layers_of(model: Any) -> list[nn.Module]:
    """Return the modules of the library's model as layers."""
    return _LAYERS[model.config.model_type](model)


def _gpt2(model: Any) -> list[nn.Module]:
    return [Gpt2Embedding(model), *map(Gpt2Block, model.transformer.h), Gpt2Head(model)]


def _llama(model: Any) -> list[nn.Module]:
    blocks = [LlamaBlock(model, index) for index in range(len(model.model.layers))]
    return [LlamaEmbedding(model), *blocks, LlamaHead(model)]


_LAYERS: dict[str, Callable[[Any], list[nn.Module]]] = {"gpt2": _gpt2, "llama": _llama}

_NAMES = {
    "gpt2": {
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "feed_forward": "n_inner",
        "vocabulary": "vocab_size",
        "sequence": "n_positions",
        "dropout": "resid_pdrop",
    },
    "llama": {
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "key_value_heads": "num_key_value_heads",
        "feed_forward": "intermediate_size",
        "vocabulary": "vocab_size",
        "sequence": "max_position_embeddings",
        "dropout": "attention_dropout",
    },
}
"""The families' words for ours."""


def _family_config(config: HfConfig) -> Any:
    """Return the library's configuration. Tokens that begin or end a text have no meaning here."""
    transformers = _library()
    family = {"gpt2": transformers.GPT2Config, "llama": transformers.LlamaConfig}[config.name]
    names = _NAMES[config.name]
    written = {
        entry.name: getattr(config, entry.name)
        for entry in dataclasses.fields(config)
        if getattr(config, entry.name) is not None and not entry.metadata and entry.name not in ("kind", "name")
    }
    unknown = [ours for ours in written if ours not in names]
    if unknown:
        raise ConfigError(f"model.{unknown[0]}={written[unknown[0]]}: expected null with model.name={config.name}")
    if config.name == "gpt2" and config.dropout is not None:
        rates = {"embd_pdrop": config.dropout, "attn_pdrop": config.dropout}
    else:
        rates = {}
    in_their_words = {names[ours]: value for ours, value in written.items()}
    try:
        return family(**in_their_words, **rates, bos_token_id=None, eos_token_id=None)
    except Exception as error:
        raise _not_possible(config, error) from error


def _not_possible(config: HfConfig, error: Exception) -> ConfigError:
    return ConfigError(f"model.name={config.name}: transformers cannot build it: {told(error)}")


def _library() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ConfigError("model=hf: transformers is not installed: pip install 'pipebench[hf]'") from error
    return transformers
