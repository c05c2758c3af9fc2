"""What a tool is."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

from penstock.assistant.answers import Answer
from penstock.assistant.context import Context
from penstock.assistant.paging import CURSOR_CHARACTERS

MAX_ROWS: Final = 100
MAX_LABELS: Final = 20
"""Of a rollout, as shown."""

Name = Annotated[str, Field(max_length=200)]
Cursor = Annotated[
    str, Field(max_length=CURSOR_CHARACTERS, description="`next_cursor` of the page before; empty: the first page.")
]
Limit = Annotated[int, Field(ge=1, le=MAX_ROWS, description="Most rows.")]
RolloutId = Annotated[str, Field(min_length=1, max_length=200, description="A rollout's id, from `rollouts`.")]
CallIndex = Annotated[int, Field(ge=0, le=1_000_000, description="A call's index, from `calls`; the first is 0.")]
RunId = Annotated[Name, Field(description="Only of this run; empty: of all.")]
GroupId = Annotated[Name, Field(description="Only of this group; empty: of all.")]
TaskId = Annotated[Name, Field(description="Only of this task; empty: of all.")]
AgentName = Annotated[Name, Field(description="Only of this agent; empty: of all.")]
Offset = Annotated[
    int,
    Field(ge=0, le=1 << 30, description="Of a long text: the first character that is shown; `next_offset` leads on."),
]
PathName = Annotated[
    str, Field(min_length=1, max_length=1000, description="A path below a directory that the server may read.")
]


class Arguments(BaseModel):
    """A tool's arguments; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")


class OfRun(Arguments):
    """Which rollouts."""

    run_id: RunId = ""
    task_id: TaskId = ""
    agent: AgentName = ""

    def conditions(self) -> dict[str, str]:
        """Returns them as `Context.snapshot` takes them."""
        return {"run_id": self.run_id, "task_id": self.task_id, "agent": self.agent}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool. `writes`: it changes something, and is offered only where the user allowed that.

    `destroys`: what it changes cannot be undone.
    """

    name: str
    description: str
    arguments: type[Arguments]
    run: Callable[[Context, Any], Awaitable[Answer]]
    writes: bool = False
    destroys: bool = False

    def listed(self) -> dict[str, Any]:
        """Returns it as an entry of `tools/list`."""
        return {
            "name": self.name,
            "description": self.description,
            "inputSchema": _schema(self.arguments),
            "annotations": {
                "readOnlyHint": not self.writes,
                "destructiveHint": self.destroys,
                "idempotentHint": not self.writes or self.destroys,
                "openWorldHint": False,
            },
        }


def _schema(arguments: type[Arguments]) -> Mapping[str, Any]:
    schema = arguments.model_json_schema()
    properties = {
        name: {key: value for key, value in item.items() if key != "title"}
        for name, item in schema.get("properties", {}).items()
    }
    made: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    if schema.get("required"):
        made["required"] = schema["required"]
    return made
