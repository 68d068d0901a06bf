"""The shipped profiles: exact sizes, and their use."""

from __future__ import annotations

import pytest

from bytescheduler.simulate import load_profile, profile_names

PARAMETERS = {
    "vgg16": 138_357_544,
    "resnet50": 25_575_912,
    "mobilenet_v2": 3_504_960,
    "bert-base": 110_106_428,
    "gpt2-small": 124_439_808,
    "recommender": 540_677_217,
}


def test_all_profiles_ship() -> None:
    assert set(profile_names()) == set(PARAMETERS)


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_sizes_are_those_of_the_models(name: str) -> None:
    assert load_profile(name).gradient_bytes == PARAMETERS[name] * 4


def test_compute_can_be_given_or_derived() -> None:
    assert load_profile("vgg16", compute_s=0.25).compute_s == pytest.approx(0.25)
    twice = load_profile("vgg16", batch=64).compute_s / load_profile("vgg16", batch=32).compute_s
    assert twice == pytest.approx(2.0)


def test_shrinking_divides_sizes_and_keeps_every_layer() -> None:
    full, small = load_profile("resnet50"), load_profile("resnet50").shrunk(100.0)
    assert len(small.layers) == len(full.layers)
    assert small.gradient_bytes == pytest.approx(full.gradient_bytes / 100, rel=0.01)
    assert all(layer.gradient_bytes % 4 == 0 for layer in small.layers)
