"""Which provisional fields a message sets: `penstock.values.provisional` against a slow reading of all of it."""

from __future__ import annotations

from typing import Any, Final

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given
from hypothesis import strategies as st

from penstock.options.v1 import options_pb2
from penstock.sandbox.v1 import sandbox_service_pb2
from penstock.values.provisional import (
    feature_of_method,
    is_provisional,
    is_provisional_method,
    provisional_set,
    takes_provisional,
)

Field = FieldDescriptorProto


def _tree() -> type[Message]:
    """A message that is in itself by a field, a list, a map and a oneof, and has provisional fields of every kind."""
    file = FileDescriptorProto(
        name="tests/provisional_tree.proto",
        package="penstock.tests",
        syntax="proto3",
        dependency=["penstock/options/v1/options.proto"],
    )
    tree = file.message_type.add(name="Tree")
    entry = tree.nested_type.add(name="ByNameEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL)
    one, many = Field.LABEL_OPTIONAL, Field.LABEL_REPEATED
    tree.oneof_decl.add(name="choice")
    for number, (name, kind, label, options) in enumerate(
        [
            ("child", Field.TYPE_MESSAGE, one, {}),
            ("children", Field.TYPE_MESSAGE, many, {}),
            ("chosen", Field.TYPE_MESSAGE, one, {"oneof_index": 0}),
            ("word", Field.TYPE_STRING, one, {"oneof_index": 0}),
            ("text", Field.TYPE_STRING, one, {}),
            ("new_text", Field.TYPE_STRING, one, {}),
            ("new_numbers", Field.TYPE_INT32, many, {}),
            ("new_child", Field.TYPE_MESSAGE, one, {}),
            ("new_word", Field.TYPE_STRING, one, {"oneof_index": 0}),
        ],
        start=1,
    ):
        field = tree.field.add(name=name, number=number, type=kind, label=label, **options)
        if kind == Field.TYPE_MESSAGE:
            field.type_name = ".penstock.tests.Tree"
        if name.startswith("new_"):
            field.options.Extensions[options_pb2.provisional] = "trees.new"
    kinds = {"number": 20, "type": Field.TYPE_MESSAGE, "label": many}
    tree.field.add(name="by_name", type_name=".penstock.tests.Tree.ByNameEntry", **kinds)
    entry.field.add(name="value", number=2, type=Field.TYPE_MESSAGE, label=one, type_name=".penstock.tests.Tree")
    Default().AddSerializedFile(file.SerializeToString())
    return GetMessageClass(Default().FindMessageTypeByName("penstock.tests.Tree"))


TREE: Final[Any] = _tree()


def _grown(trees: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    texts = st.sampled_from(["", "a"])
    fields = {
        "child": trees,
        "children": st.lists(trees, max_size=2),
        "by_name": st.dictionaries(st.sampled_from(["x", "y"]), trees, max_size=2),
        "text": texts,
        "new_text": texts,
        "new_numbers": st.lists(st.integers(0, 1), max_size=1),
        "new_child": trees,
    }
    choices = [st.just({}), st.fixed_dictionaries({"chosen": trees})]
    choices += [st.fixed_dictionaries({name: texts}) for name in ("word", "new_word")]
    whole = st.tuples(st.fixed_dictionaries({}, optional=fields), st.one_of(choices))
    return whole.map(lambda parts: TREE(**parts[0], **parts[1]))


TREES: Final = st.recursive(st.builds(TREE), _grown, max_leaves=8)


def slowly(message: Any, but: frozenset[str], path: str = "") -> set[str]:
    """The paths of set provisional fields, by reading every set field."""
    found = set[str]()
    for field, value in message.ListFields():
        where = f"{path}{field.name}"
        kind = field.message_type
        if is_provisional(field):
            found.add(where)
        elif kind is not None and kind.GetOptions().map_entry:
            if kind.fields_by_name["value"].message_type is not None:
                for key, item in value.items():
                    found |= _inside(item, but, f"{where}[{key}].")
        elif kind is not None and field.is_repeated:
            for index, item in enumerate(value):
                found |= _inside(item, but, f"{where}[{index}].")
        elif kind is not None:
            found |= _inside(value, but, f"{where}.")
    return found


def _inside(message: Any, but: frozenset[str], path: str) -> set[str]:
    return set() if message.DESCRIPTOR.full_name in but else slowly(message, but, path)


@pytest.mark.requirement("R106")
@given(tree=TREES, but=st.sampled_from([frozenset[str](), frozenset({"penstock.tests.Tree"})]))
def test_the_fields_found_are_those_of_a_slow_reading(tree: Message, but: frozenset[str]) -> None:
    """In fields, lists, maps and oneofs, at any depth; each with its feature."""
    found = provisional_set(tree, but)
    assert set(found.values()) <= {"trees.new"}
    assert set(found) == slowly(tree, but)


def test_a_path_names_the_way_to_the_field() -> None:
    """As violations do; a field inside a provisional one is not named."""
    tree = TREE(
        children=[TREE(), TREE(new_numbers=[0], child=TREE(new_text="x"))],
        by_name={"a": TREE(new_child=TREE(new_text="inside"))},
        new_word="",
    )
    assert list(provisional_set(tree)) == [
        "children[1].child.new_text",
        "children[1].new_numbers",
        "new_word",
        "by_name[a].new_child",
    ]


def test_a_message_that_cannot_have_such_fields_is_not_read() -> None:
    """Not even asked what it has set."""

    class Unread:
        DESCRIPTOR = sandbox_service_pb2.CreateSandboxRequest.DESCRIPTOR

    unread: Any = Unread()
    assert provisional_set(unread) == {}
    assert not takes_provisional("penstock.sandbox.v1.SandboxService/CreateSandbox")
    assert takes_provisional("/penstock.driver.v1.RolloutService/CreateGroup")


def test_only_rpcs_of_the_protos_can_be_provisional() -> None:
    """Reflection and health have none."""
    assert is_provisional_method("/penstock.driver.v1.RolloutService/ForkRollout")
    assert feature_of_method("penstock.driver.v1.RolloutService/ForkRollout") == "rollouts.fork"
    assert not is_provisional_method("/penstock.driver.v1.RolloutService/GetRollout")
    assert not is_provisional_method("/grpc.health.v1.Health/Check")
    assert not takes_provisional("/grpc.health.v1.Health/Check")
