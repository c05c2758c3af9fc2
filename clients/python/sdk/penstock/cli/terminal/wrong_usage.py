"""What a wrong command line is answered with: the argument parser's message, in our words, with the similar name."""

import re
from typing import Any, Final

from penstock.values.similar_names import did_you_mean, did_you_mean_option

_NO_COMMAND: Final = re.compile(r"No such command '([^']*)'")
_NO_CHOICE: Final = re.compile(r"(.*'([^']*)' is not one of (.*))\.", re.DOTALL)


def explain(error: Any) -> str:
    """Returns the line for an exception of the argument parser.

    The parser's own suggestions differ by version and by what is wrong, and compare the dashes of options too.

    Args:
        error: a ClickException of click, or of the copy that typer has.
    """
    command = getattr(getattr(error, "ctx", None), "command", None)
    name = getattr(error, "option_name", None)
    if isinstance(name, str) and hasattr(error, "possibilities"):
        options = {"--help"}
        for parameter in getattr(command, "params", ()):
            options.update(parameter.opts, parameter.secondary_opts)
        return f"No such option: {name}{did_you_mean_option(name, options)}"
    message = str(error.format_message())
    if found := _NO_COMMAND.match(message):
        known = getattr(command, "commands", {})
        return found[0] + (did_you_mean(found[1], known) or ".")
    message = message.replace("Value error, ", "").replace("Input should be", "must be")
    if found := _NO_CHOICE.fullmatch(message):
        return found[1] + (did_you_mean(found[2], re.findall(r"'([^']*)'", found[3])) or ".")
    return message
