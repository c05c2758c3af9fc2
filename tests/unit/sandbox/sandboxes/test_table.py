"""Lookups by label find what reading every sandbox would find."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_sandbox.domain.backend import Backend
from penstock_sandbox.domain.model import Sandbox, SandboxSpec, State
from penstock_sandbox.sandboxes.table import SandboxEntry, Table

labels = st.dictionaries(st.sampled_from("abc"), st.sampled_from("xy"))
namespaces = st.sampled_from(["one", "two"])


@pytest.mark.requirement("R126")
@given(st.lists(st.tuples(st.integers(0, 8), labels, namespaces, st.booleans()), max_size=30), labels, namespaces)
def test_an_index_of_labels_finds_what_a_scan_finds(
    steps: list[tuple[int, dict[str, str], str, bool]], wanted: dict[str, str], namespace: str
) -> None:
    table, there, backend = Table(), dict[int, SandboxEntry](), cast("Backend", object())
    for number, given_labels, of, is_drop in steps:
        if is_drop and number in there:
            table.drop(there[number])
            table.drop(there.pop(number))
        elif number not in there:
            spec = SandboxSpec(labels=given_labels)
            view = Sandbox(f"s{number}", State.CREATING, spec, created_at=number, expires_at=0.0, namespace=of)
            there[number] = SandboxEntry(view, backend)
            table.add(there[number])
            there[number].become(state=State.READY)
    for scope in (namespace, None):
        scanned = [
            one.view.id
            for number, one in sorted(there.items(), reverse=True)
            if wanted.items() <= one.view.spec.labels.items() and scope in (None, one.view.namespace)
        ]
        assert [view.id for view in table.matching(wanted, scope)] == scanned
    for one in there.values():
        table.drop(one)
    assert not table.count and not table.matching({}) and not table._labelled
