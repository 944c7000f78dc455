"""The blocking client is what its script makes of the asyncio one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def script(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", root / "client" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_blocking_modules_are_what_the_asyncio_ones_generate(script: ModuleType) -> None:
    for name, twin in script.TWINS.items():
        assert (script.FOLDER / twin).read_text() == script.generate(name), "run `make client`"


def test_every_asyncio_module_has_a_twin(script: ModuleType) -> None:
    assert {path.name for path in script.FOLDER.glob("async_*.py")} == set(script.TWINS)


def test_nothing_of_asyncio_is_left_in_code_docstrings_and_examples(script: ModuleType) -> None:
    source = '''
async def all_of(client: AsyncClient) -> _AsyncPart:  # AsyncClient is awaited
    """Asynchronous iterator over parts of an asyncio call.

    ```python
    async with AsyncClient("one") as client:
        async for part in await client.parts():
            print(part)
    await client.aclose()
    ```
    """
    # They await nobody: synchronous words stay as they are, and so do gaps  of two blanks.
    await async_sleep(1)
    return [part async for part in client]
'''
    assert (
        script.blocking(source)
        == '''
def all_of(client: Client) -> _Part:  # Client is awaited
    """Iterator over parts of a blocking call.

    ```python
    with Client("one") as client:
        for part in client.parts():
            print(part)
    client.close()
    ```
    """
    # They await nobody: synchronous words stay as they are, and so do gaps  of two blanks.
    sleep(1)
    return [part for part in client]
'''
    )
