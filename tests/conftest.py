"""Settings every test shares: no hub is reached, one thread, hypothesis without a deadline on a busy machine.

`make thorough` looks at 1,000 examples of each property whose test names no number of its own.
"""

import os

from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("house", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("house"), max_examples=1000)
settings.load_profile("house")
