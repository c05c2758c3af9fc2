"""The trial of the recipe on a machine without a GPU: a model made on the spot, tasks that it can do, short settings.

The model answers with one command or with none; the command mends each fault of the tasks. So training has something to
teach, through the same scripts, the same agents and the same engine.
"""

from pathlib import Path
from typing import Any, Final

from examples.gpu import repositories

from penstock_inference.testing.table_models import CallingModel

COMMAND: Final = "sed -i 's/ - / + /' src/*.py"
FAULT: Final = frozenset({"Add"})
SHARE: Final = 0.25
"""Of its answers that are the command, before training."""
CONTEXT: Final = 32_768

_TRAINED: Final = (
    repositories.Module(
        "price",
        '\ndef total(net, tax):\n    """The price with its tax."""\n    return net + tax\n',
        ("price.total(1, 2)", "price.total(5, 0)"),
    ),
    repositories.Module(
        "steps",
        '\ndef after(number):\n    """The number after this one."""\n    return number + 1\n',
        ("steps.after(0)", "steps.after(9)"),
    ),
)
_HELD_OUT: Final = (
    repositories.Module(
        "names",
        '\ndef full(first, last):\n    """Both names, with a space between them."""\n    return first + (" " + last)\n',
        ("names.full('Ada', 'L')", "names.full('', '')"),
    ),
    repositories.Module(
        "clock",
        '\ndef later(minute, by):\n    """Of the hour, some minutes later."""\n    return (minute + by) % 60\n',
        ("clock.later(5, 10)", "clock.later(50, 20)", "clock.later(7, 0)"),
    ),
)


def write(folder: Path) -> dict[str, Any]:
    """Writes model and tasks below a directory; returns the plan's settings that differ from those of a GPU."""
    model = CallingModel("bash", {"command": COMMAND}, share=SHARE, otherwise="Done.", context=CONTEXT)
    model.write(folder / "model")
    repositories.write(folder / "tasks" / "train", _TRAINED, kinds=FAULT)
    repositories.write(folder / "tasks" / "test", _HELD_OUT, kinds=FAULT)
    options = {"dtype": "float32", "enforce_eager": "true", "block_size": "32"}
    return {
        "model": folder / "model",
        "tasks": folder / "tasks",
        "agents": ("pi",),
        "unseen": ("mini-swe-agent",),
        "steps": 4,
        "groups": 2,
        "group_size": 4,
        "attempts": 3,
        "concurrency": 4,
        "learning_rate": 5e-3,
        "context_tokens": CONTEXT,
        "prompt_tokens": CONTEXT // 2,
        "response_tokens": CONTEXT // 2,
        "answer_tokens": 64,
        "max_calls": 4,
        "agent_seconds": 240.0,
        "engine_options": options,
        "training_options": options,
        # Short prompts: most of a CPU's time goes into them.
        "agent_options": {"mini-swe-agent": {"max_turns": 2}, "pi": {"system_prompt": "You are a coding agent."}},
        "tiny": True,
    }
