"""Every case of cases/, with the client of every language that has one."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

import pytest
from tests.conformance.clients.cases import Case, load
from tests.conformance.clients.subjects import SUBJECTS, Subject
from tests.conformance.clients.world import Execution, World

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.requirement("R20", "R29", "R82")
@pytest.mark.parametrize(
    ("case", "language"),
    [
        pytest.param(case, language, id=f"{case.name.replace(' ', '-')}-{language}")
        for language in SUBJECTS
        for case in load()
    ],
)
async def test_a_client_does_what_the_case_says(
    world: World, subject_of: Callable[[str], Awaitable[Subject]], language: str, case: Case
) -> None:
    """And what each case names: clients of all languages behave alike, against the real services."""
    subject = await subject_of(language)
    await world.heal()
    try:
        await Execution(world, subject, case, secrets.token_hex(8)).run()
    finally:
        await world.heal()
        assert "ok" in await subject.ask({"do": "reset"})
