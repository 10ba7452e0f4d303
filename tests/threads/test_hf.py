"""Hugging Face's models as layers: logits, loss and gradients are those of the library's own module."""

from importlib.util import find_spec

import pytest
import torch
from plain import SEED, assert_close, gradients
from ranks import Point, run
from torch import Tensor
from torch.nn import functional

from pipebench.config import HfConfig
from pipebench.data.batch import MiniBatch
from pipebench.models.hf import hf, layers_of, whole_model, with_defaults
from pipebench.seeds import Purpose, seed_of

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers (the extra hf)")

SMALL = {"layers": 2, "width": 16, "heads": 4, "feed_forward": 24, "vocabulary": 50, "sequence": 12, "dropout": 0.0}
GPT2 = HfConfig(name="gpt2", **SMALL)  # type: ignore[arg-type]
LLAMA = HfConfig(name="llama", key_value_heads=2, **SMALL)  # type: ignore[arg-type]


def text(step: int, num_samples: int) -> MiniBatch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(50, (num_samples, 11), generator=generator)
    return MiniBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_layers_train_as_the_whole_model_does(config: HfConfig, num_stages: int) -> None:
    torch.manual_seed(seed_of(SEED, Purpose.WEIGHTS))
    original = whole_model(config)
    batch = text(0, 5)
    assert isinstance(batch.targets, Tensor)
    loss = functional.cross_entropy(original(batch.inputs).logits.flatten(0, 1), batch.targets.flatten())
    loss.backward()
    point = Point(hf(with_defaults(config)), num_stages=num_stages, num_micro_batches=2, num_samples=5, data=text)
    outcome = run(point)
    assert outcome.losses == pytest.approx([float(loss.detach())])
    for layer, own in zip(layers_of(original), outcome.gradients, strict=True):
        found = {str(place): gradient for place, gradient in enumerate(own)}
        assert_close(found, {str(place): gradient for place, gradient in enumerate(gradients([layer]).values())})


def test_what_is_not_given_is_the_familys_own() -> None:
    gpt2 = with_defaults(HfConfig(name="gpt2"))
    found = (gpt2.layers, gpt2.width, gpt2.heads, gpt2.feed_forward, gpt2.vocabulary, gpt2.sequence, gpt2.num_layers)
    assert found == (12, 768, 12, 3072, 50257, 1024, 14)
    llama = with_defaults(HfConfig(name="llama", heads=8))
    assert (llama.layers, llama.width, llama.key_value_heads, llama.num_layers) == (32, 4096, 8, 34)
