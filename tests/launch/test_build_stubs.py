"""`launch.rocm.build_stubs`: the lines with which it refuses."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--plugins and --output are needed"),
        (["--plugins=/nowhere", "--output=/nowhere/stubs"], "--plugins=/nowhere: no ROCm plugin is there; install jax-rocm7-plugin"),
    ],
)
def test_what_is_missing_is_said(command, arguments, message):
    assert command("launch.rocm.build_stubs", *arguments).refusal().startswith(message)
