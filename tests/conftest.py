"""What holds for every test: kernels come from the checkout's ``cache/`` folder, no setting is inherited,
none stays.

``hypothesis`` runs the same examples every time; ``HYPOTHESIS_PROFILE=explore`` tries new and more ones.
Tests marked ``slow`` are left out unless ``-m slow`` (or ``-m ""``) asks for them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

ROOT = Path(__file__).resolve().parent.parent

# Before tvmgemm is imported: it reads its environment once.
for variable in [name for name in os.environ if name.startswith("TVMGEMM_") and name != "TVMGEMM_CACHE_DIR"]:
    del os.environ[variable]
os.environ.setdefault("TVMGEMM_CACHE_DIR", str(ROOT / "cache"))

hypothesis_settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
)
hypothesis_settings.register_profile(
    "explore", hypothesis_settings.get_profile("ci"), derandomize=False, max_examples=1000
)
hypothesis_settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow: takes more than ten seconds; left out unless asked for with -m slow"
    )


@pytest.fixture(autouse=True)
def nothing_stays():
    """After each test NumPy is its own again and every option at its default."""
    yield
    import tvmgemm
    from tvmgemm.settings import SETTINGS

    tvmgemm.unpatch_numpy()
    tvmgemm.options(**dict.fromkeys(SETTINGS))
    assert not tvmgemm.is_patched(), "the test left a `with patched():` open"
