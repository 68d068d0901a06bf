"""Settings: sources in order, sizes in all spellings, errors that name rule, value and remedy."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bytescheduler.core.config import (
    DEFAULT_CREDIT_SIZE,
    DEFAULT_PARTITION_SIZE,
    ENV_CREDIT_SIZE,
    ENV_MODE,
    ENV_PARTITION_SIZE,
    ENV_TRACE,
    MODES,
    Settings,
    format_size,
    parse_size,
    resolve_settings,
)
from bytescheduler.exceptions import ByteSchedulerError, ConfigurationError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("4MiB", 4 << 20),
        ("512 KiB", 512 << 10),
        (" 2gib ", 2 << 30),
        ("25MB", 25 * 10**6),
        ("25M", 25 << 20),
        ("1kb", 1000),
        ("0.5KiB", 512),
        ("100 B", 100),
        (123, 123),
        (64.0, 64),
    ],
)
def test_sizes_in_all_spellings(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "4 MiBs", "1,5MiB", "0", 0, -4, True, 0.5, "0.3B", "nan", "1e6", "4 4MiB"],
)
def test_what_is_no_size_is_refused_with_its_name_and_a_remedy(text):
    with pytest.raises(ConfigurationError, match=r"speed must be .*pass an int or a text"):
        parse_size(text, name="speed")


@given(st.integers(1, 1 << 45))
def test_formatting_and_parsing_are_inverse(size):
    assert parse_size(format_size(size)) == size


def test_defaults():
    settings = resolve_settings(environ={})
    assert settings == Settings(
        partition_size=DEFAULT_PARTITION_SIZE, credit_size=DEFAULT_CREDIT_SIZE, mode="auto"
    )


@pytest.mark.parametrize("name", ["partition_size", "credit_size"])
@pytest.mark.parametrize("by_environment", [False, True])
def test_a_size_that_was_asked_for_is_not_tuned_away(name, by_environment):
    environ = {f"BYTESCHEDULER_{name.upper()}": "2MiB"} if by_environment else {}
    sizes = {} if by_environment else {name: "2MiB"}
    assert resolve_settings(**sizes, environ=environ).mode == "priority"
    assert resolve_settings(**sizes, mode="auto", environ=environ).mode == "auto"
    assert resolve_settings(**sizes, environ={**environ, ENV_MODE: "auto"}).mode == "auto"


def test_where_trying_costs_too_much_auto_has_to_be_asked_for():
    assert resolve_settings(tunable=False, environ={}).mode == "priority"
    assert resolve_settings(tunable=False, mode="auto", environ={}).mode == "auto"


def test_environment_comes_after_arguments_and_before_defaults():
    environ = {
        ENV_PARTITION_SIZE: "2MiB",
        ENV_CREDIT_SIZE: "6MiB",
        ENV_MODE: "fifo",
        ENV_TRACE: "t.json",
    }
    settings = resolve_settings(environ=environ)
    assert settings == Settings(
        partition_size=2 << 20, credit_size=6 << 20, mode="fifo", trace="t.json"
    )
    settings = resolve_settings(
        partition_size="1KiB", credit_size=4096, mode="barrier", trace="u", environ=environ
    )
    assert settings == Settings(partition_size=1024, credit_size=4096, mode="barrier", trace="u")


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv(ENV_PARTITION_SIZE, "3MiB")
    assert resolve_settings().partition_size == 3 << 20


@given(st.integers(1, 1 << 30))
def test_one_size_alone_brings_a_fitting_other(size):
    by_partition = resolve_settings(partition_size=size, environ={})
    assert by_partition.partition_size == size
    assert by_partition.credit_size >= size
    by_credit = resolve_settings(credit_size=size, environ={})
    assert by_credit.credit_size == size
    assert by_credit.partition_size <= size


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_credit_below_one_chunk_is_refused(partition_size, credit_size):
    assume(credit_size < partition_size)
    with pytest.raises(ConfigurationError, match="credit_size must hold at least one chunk"):
        resolve_settings(partition_size=partition_size, credit_size=credit_size, environ={})


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_resolves(mode):
    settings = resolve_settings(mode=mode, environ={})
    assert settings.mode == mode
    assert settings.credit_size >= settings.partition_size


def test_an_unknown_mode_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"priority, fifo, barrier, auto, got 'quick'"):
        resolve_settings(mode="quick", environ={})


def test_a_wrong_variable_is_named():
    with pytest.raises(ConfigurationError, match=ENV_CREDIT_SIZE):
        resolve_settings(environ={ENV_CREDIT_SIZE: "much"})


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "1"])
@pytest.mark.parametrize("name", ["partition_size", "credit_size"])
def test_settings_check_themselves(name, value):
    with pytest.raises(ConfigurationError, match=name):
        Settings(**{"partition_size": 1, "credit_size": 1, name: value})


def test_configuration_errors_are_value_errors_of_our_tree():
    with pytest.raises(ValueError, match="mode") as caught:
        resolve_settings(mode="?", environ={})
    assert isinstance(caught.value, ByteSchedulerError)


@pytest.mark.parametrize("megabytes", [1, 2, 8, 1024])
def test_an_engine_of_stages_gets_a_chunk_for_each(megabytes):
    size = megabytes << 20
    for bandwidth in (None, 3e8):
        known = {"model_bytes": size, "bandwidth": bandwidth, "environ": {}}
        least = resolve_settings(least_chunks=4, **known)
        assert -(-size // least.partition_size) >= 4
        assert least.partition_size <= resolve_settings(**known).partition_size


@pytest.mark.parametrize(
    ("bandwidth", "partition"),
    [(1e6, 64 << 10), (13.4e6, 128 << 10), (28e6, 256 << 10), (118e6, 1 << 20), (1e12, 4 << 20)],
)
def test_chunks_follow_the_bandwidth_between_limits(bandwidth, partition):
    settings = resolve_settings(model_bytes=1 << 30, bandwidth=bandwidth, environ={})
    assert settings.partition_size == partition
    assert settings.credit_size == 3 * partition


@pytest.mark.parametrize(
    ("model_bytes", "partition"), [(1000, 64 << 10), (1 << 20, 1 << 19), (1 << 30, 1 << 20)]
)
def test_a_small_model_has_two_chunks_at_least(model_bytes, partition):
    assert resolve_settings(model_bytes=model_bytes, environ={}).partition_size == partition


def test_what_takes_no_longer_than_a_chunk_is_not_cut():
    for megabytes, chunks in ((1, 1), (2, 1), (8, 2)):
        size = megabytes << 20
        settings = resolve_settings(model_bytes=size, bandwidth=3e8, environ={})
        assert -(-size // settings.partition_size) == chunks


def test_a_size_that_was_asked_for_counts_before_what_was_measured():
    known = {"model_bytes": 1 << 30, "bandwidth": 1e6, "environ": {}}
    settings = resolve_settings(credit_size="512KiB", **known)
    assert settings.partition_size <= settings.credit_size == 512 << 10
    settings = resolve_settings(partition_size="512KiB", **known)
    assert (settings.partition_size, settings.credit_size) == (512 << 10, 3 << 19)
