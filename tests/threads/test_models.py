"""The models: as many layers as the config says, and layers that take the time they were given."""

import time

import pytest
import torch
from plain import CLASSIFIER, MLP, MODELS, SYNTHETIC, TRANSFORMER, build, mini_batch

from pipebench.config import SyntheticConfig
from pipebench.engine.backward import AutogradSplit
from pipebench.harness.memory import measure_memory
from pipebench.models import layer_sequence
from pipebench.models.synthetic import Sleep


@pytest.mark.parametrize("model", list(MODELS))
def test_the_config_counts_the_layers_that_are_built(model: str) -> None:
    assert layer_sequence(MODELS[model]).num_layers == MODELS[model].num_layers


def test_the_loss_of_a_whole_is_the_mean_of_its_samples_losses() -> None:
    for model in (TRANSFORMER, MLP, CLASSIFIER, SYNTHETIC):
        layers, loss_of = build(model)
        batch = mini_batch(model)
        x = batch.inputs
        for layer in layers:
            x = layer(x)
        each = [loss_of(x[i : i + 1], batch.targets[i : i + 1]) for i in range(len(x))]
        torch.testing.assert_close(torch.stack(each).mean(), loss_of(x, batch.targets))


def test_no_token_sees_a_later_one() -> None:
    layers, _ = build(TRANSFORMER)
    for layer in layers:
        layer.eval()
    tokens = mini_batch(TRANSFORMER).inputs
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    before, after = tokens, changed
    for layer in layers:
        before, after = layer(before), layer(after)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


def test_synthetic_layers_sleep_for_the_given_seconds_a_sample_and_the_last_one_longer() -> None:
    config = SyntheticConfig(
        name="s", layers=2, width=4, forward_s=0.005, backward_s=0.01, weight_share=0.5, imbalance=1.0
    )
    layers, _ = build(config)
    for layer, factor in zip(layers, [1.0, 2.0], strict=True):
        began = time.perf_counter()
        output = layer(torch.ones(4, 4))
        forward = time.perf_counter() - began
        began = time.perf_counter()
        output.sum().backward()
        backward = time.perf_counter() - began
        assert 4 * 0.005 * factor <= forward < 4 * 0.005 * factor + 1.0
        assert 4 * 0.01 * factor <= backward < 4 * 0.01 * factor + 1.0


def test_shape_inference_of_synthetic_layers_takes_no_time() -> None:
    config = SyntheticConfig(
        name="s", layers=1, width=4, forward_s=5.0, backward_s=5.0, weight_share=0.5, imbalance=0.0
    )
    [layer], _ = build(config)
    began = time.perf_counter()
    layer.to("meta")(torch.empty(4, 4, device="meta"))
    assert time.perf_counter() - began < 5.0


def test_a_synthetic_layer_sleeps_for_its_weights_when_their_gradient_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under torch's split too, where no queue puts the product off."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    layer = Sleep(4, forward_s=1.0, input_s=2.0, weight_s=3.0)
    split = AutogradSplit(layer.parameters())
    x = torch.ones(5, 4, requires_grad=True)
    root = split.root_of(layer(x))
    forward_s = pytest.approx(5.0, abs=0.5)  # its linear map takes its part of them
    assert slept == [forward_s]
    put_off = split.of_input([root], [x], [torch.ones(5, 4)])
    assert slept == [forward_s, 10.0]
    split.of_weights(put_off)
    assert slept == [forward_s, 10.0, 15.0]


def test_what_was_there_before_a_step_counts_in_its_peak() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    device = torch.device("cpu")

    def accumulate() -> None:
        (weight * 2).sum().backward()

    without, with_buffers = (measure_memory(accumulate, [weight], [], held, device) for held in (0, 1000))
    assert with_buffers.transfers_bytes == 1000
    assert with_buffers.activations_bytes == without.activations_bytes
    assert with_buffers.peak_bytes == without.peak_bytes + 1000
