from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root of the checkout that these tests belong to."""
    return Path(__file__).resolve().parent.parent
