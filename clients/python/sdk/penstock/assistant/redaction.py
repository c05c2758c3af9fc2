"""Takes secrets out of text before an assistant gets it: those that this process knows, and what looks like one.

An agent may print its environment, and a transcript then has keys. Known forms are found wherever they stand; a secret
of no known form that this process does not know cannot be.
"""

import os
import re
from collections.abc import Iterable, Mapping
from typing import Final

MARK: Final = "[redacted]"

_LEAST: Final = 12
"""Characters from which a variable's value counts as a secret: shorter ones are switches."""
_MOST: Final = 256
"""Most variables that are looked for."""
_SECRET_NAME: Final = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?$", re.IGNORECASE)
_START: Final = re.compile(r"(?:(?<![A-Za-z0-9])|(?<=\\[nrtbf])|(?<=\\u[0-9a-fA-F]{4})|(?<=\[[0-9]m)|(?<=\[[0-9]{2}m))")
"""Where a key may begin: after anything but a word, which an escape of JSON or a colour is not."""
_LONG: Final = r"[A-Za-z0-9_-]{16,512}"
_RANDOM: Final = rf"(?=[A-Za-z0-9_-]{{0,64}}?(?:[A-Za-z0-9]{{16}}|[A-Z][a-z0-9_-]{{0,30}}[0-9])){_LONG}"
"""After a prefix that a name may have too: a task sk-learn-regression has neither so long a word nor mixed letters."""
_FORMS: Final = tuple(
    # Each begins with a literal, for which a search is fast: transcripts have megabytes.
    re.compile(form)
    for form in (
        *(rf"{prefix}{_LONG}" for prefix in ("pst_", "glpat-", "github_pat_", "AIza")),  # the first: keys of the gate
        *(rf"{prefix}{_RANDOM}" for prefix in ("sk-", "pk-", "rk-", "pypi-")),
        *(rf"{prefix}[A-Za-z0-9]{{20,255}}" for prefix in ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "hf_", "npm_")),
        *(rf"xox{letter}-[A-Za-z0-9-]{{10,255}}" for letter in "abeprs"),
        r"AKIA[0-9A-Z]{16}",
        r"ASIA[0-9A-Z]{16}",
        r"eyJ[A-Za-z0-9_-]{10,512}\.eyJ[A-Za-z0-9_-]{10,4096}\.[A-Za-z0-9_-]{0,4096}",
        r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----[^-]{0,20000}(?:-----END [A-Z ]{0,30}PRIVATE KEY-----)?",
    )
)
_AFTER: Final = tuple(
    re.compile(form)
    for form in (
        r"://([^\s/:@\"']{1,256}:[^\s/@\"']{1,256})@",
        *(rf"{word} ([A-Za-z0-9._~+/=-]{{16,4096}})" for word in ("Bearer", "bearer", "Basic", "basic")),
        *(
            rf"{word}[\"']?[=:] ?[\"']?([A-Za-z0-9._~+/=-]{{8,4096}})"
            for word in ("api-key", "api_key", "apikey", "apiKey", "API_KEY", "API-Key", "Api-Key")
        ),
    )
)
"""Forms whose first group is a secret, by what stands before it."""
_LONGEST: Final = 32 << 10
"""Characters, more than a match of any form has."""


class Redactor:
    """Replaces secrets by `[redacted]`. `longest`: none that it finds has more characters."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        """`known`: secrets as they are; those shorter than 8 characters are ignored."""
        words = sorted({word for word in known if len(word) >= 8}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, words))) if words else None
        self.longest = max(_LONGEST, *map(len, words)) if words else _LONGEST

    def __call__(self, text: str, *, most: int | None = None) -> str:
        """Returns the text, or only its first `most` characters, without secrets.

        A secret that begins among these is taken out whole: a text that was cut before would keep a part of it. What is
        far behind them is not looked at.
        """
        if most is None or most >= len(text):
            return MARK.join(self._between(text, len(text)))
        return MARK.join(self._between(text[: most + self.longest], most))

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Returns the places of secrets: begin and end, in characters, in order and apart."""
        found = [match.span() for form in _FORMS for match in form.finditer(text) if _START.match(text, match.start())]
        found += [match.span(1) for form in _AFTER for match in form.finditer(text)]
        if self._known is not None:
            found += [match.span() for match in self._known.finditer(text)]
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(found):
            if merged and begin <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            elif end > begin:
                merged.append((begin, end))
        return merged

    def _between(self, text: str, most: int) -> list[str]:
        parts, last = [], 0
        for begin, end in self.spans(text):
            if begin >= most:
                break
            parts.append(text[last:begin])
            last = end
        return [*parts, text[last:most]]


def secrets_of(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the values of variables that are named as secrets are; paths are none."""
    found = [
        value
        for name, value in environment.items()
        if _SECRET_NAME.search(name) and len(value) >= _LEAST and not value.startswith("/")
    ]
    return found[:_MOST]
