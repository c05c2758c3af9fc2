"""The glossary defines the product's own words, few and each once; the words that lint bans are found."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from docs import words
from tests.unit.docs.pages import ROOT, tables

GLOSSARY = "docs/glossary.md"
MOST = 40
"""Words that a reader can be asked to learn."""


def banned() -> list[str]:
    """Each word of the list by itself."""
    return [word for pattern in words.BANNED for word in pattern.split("|")]


def defined() -> list[str]:
    """The glossary's words, in its order."""
    (rows,) = tables(GLOSSARY).values()
    return [row["word"] for row in rows]


@pytest.mark.requirement("R143")
def test_glossary_defines_at_most_40_words_once_each() -> None:
    """In the order in which a reader looks for them, and each with what it is."""
    found = defined()
    assert 0 < len(found) <= MOST
    assert [word for word, count in Counter(found).items() if count > 1] == []
    assert found == sorted(found, key=lambda word: word.strip("`").lower().replace("_", " "))
    (rows,) = tables(GLOSSARY).values()
    assert [row["word"] for row in rows if len(row["what it is"].split()) < 3] == []


@pytest.mark.requirement("R143")
def test_the_glossary_defines_no_banned_word() -> None:
    """A word that lint rejects is not the product's."""
    assert {word.lower() for word in defined()} & {word.lower() for word in banned()} == set()
    text = (ROOT / GLOSSARY).read_text(encoding="utf-8")
    assert [word for word in banned() if re.search(rf"\b{word}\b", text)] == []


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose texts are checked instead of this one's."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(words, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.requirement("R143")
@pytest.mark.parametrize("word", banned())
def test_lint_rejects_a_banned_word(repository: Path, word: str) -> None:
    """In a page, a docstring, comments and messages of all languages; not in code, names, keys, tests and SQL."""
    (repository / "page.md").write_text(f"Here it {word}.\n")
    (repository / "docstring.py").write_text(f'"""It {word}."""\n')
    (repository / "comment.py").write_text(f"x = 1  # it {word}\n")
    (repository / "code.md").write_text(f"The field `{word}`.\n\n```\n{word}\n```\n")
    (repository / "code.py").write_text(f'"""`{word}` is a name."""\n\nname = "{word.replace(" ", "_")}"\n')
    (repository / "message.py").write_text(f'raise ValueError("it {word}")\n')
    (repository / "sql.py").write_text(f'statement = "SELECT {word} FROM calls"\n')
    (repository / "capital.md").write_text(f"{word[0].upper()}{word[1:]} it.\n")
    (repository / "comment.go").write_text(f'const at = "http://host" // it {word}\n')
    (repository / "comment.ts").write_text(f"/** It\n * {word}. */\nconst x = 1;\n")
    (repository / "comment.yaml").write_text(f"limit: 1 # it {word}\n")
    (repository / "message.go").write_text(f'var failure = errors.New("it {word}")\n')
    (repository / "message.ts").write_text(f"const said = `it {word} ${{count}} times`;\n")
    (repository / "page.tsx").write_text(f"const page = <p>It {word} nothing</p>;\n")
    (repository / "value.yml").write_text(f"description: It {word}.\n")
    name = word.replace(" ", "_")
    (repository / "code.go").write_text(f'var {name} = "{name}"\n')
    (repository / "code.tsx").write_text(f"const {name} = `found ${{{name}}} here`; // {name}_\n")
    (repository / "code.yaml").write_text(f"values:\n  {name}: 1\n")
    (repository / "code_test.go").write_text(f"// It {word}.\n")
    (repository / "wire.proto").write_text(f"// It {word}.\nmessage Call {{}}\n")
    subprocess.run(["git", "-C", str(repository), "add", "."], check=True)
    found = words.found()
    assert sorted(line.partition(":")[0] for line in found) == [
        "capital.md",
        "comment.go",
        "comment.py",
        "comment.ts",
        "comment.yaml",
        "docstring.py",
        "message.go",
        "message.py",
        "message.ts",
        "page.md",
        "page.tsx",
        "value.yml",
        "wire.proto",
    ]
    assert all(f"'{word}': write ".lower() in line.lower() for line in found)


@pytest.mark.requirement("R143")
def test_lint_rejects_a_banned_name_in_a_service(repository: Path) -> None:
    """Names in code are checked in services, libraries and the SDK, and nowhere else."""
    for folder in ("services", "tests"):
        (repository / folder).mkdir()
        (repository / folder / "module.py").write_text("told, fold = 1, 2\n")
    subprocess.run(["git", "-C", str(repository), "add", "."], check=True)
    assert [line.partition(": write")[0] for line in words.found()] == ["services/module.py: the name told"]
