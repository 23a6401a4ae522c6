import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import jax
import pytest
from hypothesis import HealthCheck, settings

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

settings.register_profile(
    "syncopate",
    deadline=None,  # the first example of a shape compiles
    max_examples=25,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("syncopate")


@pytest.fixture
def key():
    return jax.random.key(0)
