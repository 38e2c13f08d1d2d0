"""Doctests are for the package: what tests import from files beside them is not collected."""


def pytest_ignore_collect(collection_path):
    """Leave out modules that hold no tests: several are meant for processes of their own, with devices of their own."""
    if collection_path.suffix == ".py" and not collection_path.name.startswith("test_"):
        return True
    return None
