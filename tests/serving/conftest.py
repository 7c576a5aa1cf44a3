import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a Redis server, by its fixture or its parameter, so that no test can forget to."""
    for item in items:
        if isinstance(item, pytest.Function):
            parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
            if "redis_address" in item.fixturenames or "redis" in parameters:
                item.add_marker(pytest.mark.service)
