"""Settings of the numerical tests: hypothesis draws the same examples in every run."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "core", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")
