"""The profile of handmade.py, as fixtures."""

import pytest
from handmade import config_table, record_of

from mtcli.core.config.loading import config_of
from mtcli.core.profile.figures import Profile


@pytest.fixture
def records():
    return [record_of(0), record_of(1)]


@pytest.fixture
def profile(records):
    return Profile(config_of(config_table()), 2, "", records)


@pytest.fixture
def cpu_profile(records):
    """The same on a device that plan knows, by the made-up calibration."""
    return Profile(config_of(config_table()), 2, "cpu", records)
