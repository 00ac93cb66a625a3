"""Settings of the whole suite."""

from hypothesis import HealthCheck, settings

# On a busy machine the first example may take seconds: kernels are loaded, Unicode's tables built.
settings.register_profile("conductor", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("conductor")
