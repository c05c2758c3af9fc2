"""The environment of a trainer under test: what was installed is kept in a cache folder, one for each set of pins.

A trainer's own requirements are not followed: they want engines and CUDA. What its classes import is listed here, and
torch, Transformers and vLLM are those of `make test-vllm`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
BASE: Final = ROOT / ".venv-vllm" / "bin" / "python"
SOURCES: Final = (
    *(f"clients/python/{name}" for name in ("sdk", "stubs", "demo")),
    *(f"libs/{name}" for name in ("chassis", "codec")),
    *(f"services/{name}" for name in ("driver", "interception", "inference", "sandbox")),
    ".",
)
RAY: Final = ("ray==2.60.0", "msgpack==1.2.4")
OMEGACONF: Final = ("omegaconf==2.4.0", "hydra-core==1.3.8", "antlr4-python3-runtime==4.9.3")
TENSORDICT: Final = ("tensordict==0.15.3", "pyvers==0.2.3")


PRIME_RL: Final = (
    "verifiers==0.3.1.dev62",
    "aiofiles==25.1.0",
    "aiolimiter==1.3.0",
    "antlr4-python3-runtime==4.13.2",
    "beartype==0.23.1",
    "connectrpc==0.12.1",
    "distro==1.9.0",
    "httpcore2==2.16.2",
    "httpx-sse==0.4.3",
    "httpx2==2.16.2",
    "jiter==0.19.0",
    "latex2sympy2-extended==1.11.0",
    "loguru==0.7.3",
    "math-verify==0.9.0",
    "mcp==1.30.0",
    "msgpack==1.2.4",
    "msgspec==0.23.0",
    "openai==2.54.0",
    "prime-pydantic-config==0.4.3",
    "prime-runs==0.1.4",
    "prime-sandboxes==0.5.1",
    "prime-tunnel==0.1.15",
    "protobuf-py-ext==0.6.0",
    "protobuf-py==0.6.0",
    "pyqwest==0.12.0",
    "pyzmq==27.3.0",
    "renderers==0.1.12",
    "sniffio==1.3.1",
    "tenacity==9.2.1",
    "tomli-w==1.2.0",
    "tqdm==4.70.1",
)


@dataclass(frozen=True, slots=True)
class Source:
    """Packages of a repository's commit, by their folders; folders of one name are one package."""

    repository: str
    commit: str
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pinned:
    """A trainer's packages; `source` is of one that is on no package index."""

    packages: tuple[str, ...]
    source: Source | None = None

    @property
    def version(self) -> str:
        """For people."""
        return self.packages[0] if self.source is None else f"{self.source.repository} at {self.source.commit[:7]}"


ART: Final = (
    "openpipe-art==0.5.23",
    "anthropic==0.109.2",
    "distro==1.9.0",
    "jiter==0.19.0",
    "nest-asyncio==1.6.0",
    "openai==2.54.0",
    "polars==2.1.0",
    "polars-runtime-32==2.1.0",
    "python-dotenv==1.2.4",
    "setproctitle==1.3.8",
    "sniffio==1.3.1",
    "tblib==3.2.2",
)


NEMO_GYM: Final = (
    "nemo-gym==0.7.0",
    "anthropic==0.109.2",
    "antlr4-python3-runtime==4.9.3",
    "asttokens==3.0.2",
    "datasets==5.2.0",
    "devtools==0.13.0",
    "dill==0.4.1",
    "distro==1.9.0",
    "executing==2.3.0",
    "httptools==0.9.0",
    "hydra-core==1.3.8",
    "itsdangerous==2.2.0",
    "jiter==0.19.0",
    "multiprocess==0.70.19",
    "omegaconf==2.4.0",
    "openai==2.44.0",
    "pandas==3.1.1",
    "pydot==4.0.1",
    "sniffio==1.3.1",
    "torchdata==0.11.0",
    "tqdm==4.70.1",
    "uvloop==0.23.0",
    "xxhash==4.1.0",
    "yappi==1.7.6",
    *RAY,
)


TRAINERS: Final[dict[str, Pinned]] = {
    "art": Pinned(ART),
    "verl": Pinned(("verl==0.9.1", *RAY, *OMEGACONF, *TENSORDICT, "codetiming==1.4.0", "pylatexenc==2.11")),
    "skyrl": Pinned(
        (
            *("skyrl==0.3.0", "skyrl-gym==0.4.0", *RAY, *OMEGACONF, *TENSORDICT, "jaxtyping==0.3.11"),
            *("wadler-lindig==0.1.8", "loguru==0.7.3", "peft==0.21.2", "hf-transfer==0.1.9", "torchdata==0.11.0"),
        )
    ),
    "openrlhf": Pinned(("openrlhf==0.11.2", *RAY, "peft==0.21.2", "pylatexenc==2.11", "torchdata==0.11.0")),
    "slime": Pinned(
        (*RAY, "pylatexenc==2.11"),
        Source("https://github.com/THUDM/slime", "624b824a898ab0ec1fcb4d373004c7f3852bf515", ("slime",)),
    ),
    "nemo_gym": Pinned(
        NEMO_GYM,
        Source("https://github.com/NVIDIA-NeMo/RL", "7ea279abfbeb698b092856d0dab61e7cf39bc909", ("nemo_rl",)),
    ),
    "prime_rl": Pinned(
        PRIME_RL,
        Source(
            "https://github.com/PrimeIntellect-ai/prime-rl",
            "559b44772e471d1538537b8805cc77f3824a5e64",
            ("src/prime_rl", "packages/prime-rl-configs/src/prime_rl"),
        ),
    ),
}


def installed(name: str, cache: Path, base: Path, repository: str | None = None) -> Path:
    """Returns the folder with the trainer's packages, installed now if it is not in `cache`.

    Raises:
        subprocess.CalledProcessError: pip or git fails; nothing is left in the cache.
    """
    pinned = TRAINERS[name]
    digest = hashlib.sha256(repr((pinned, sys.version_info[:2])).encode()).hexdigest()[:12]
    folder = cache / f"{name}-{digest}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f"{name}-") as temporary:
        made = Path(temporary) / "packages"
        pip = [str(base), "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]
        subprocess.run([*pip, "--target", str(made), *pinned.packages], check=True)
        if pinned.source is not None:
            _add_source(pinned.source, repository, Path(temporary) / "source", made)
        # Wheels bring packages of these names, which would hide ours.
        for foreign in ("tests", "scripts"):
            shutil.rmtree(made / foreign, ignore_errors=True)
        made.rename(folder)
    return folder


def _add_source(source: Source, repository: str | None, folder: Path, made: Path) -> None:
    git = ["git", "-C", str(folder)]
    folder.mkdir()
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run(
        [*git, "fetch", "--quiet", "--depth", "1", repository or source.repository, source.commit], check=True
    )
    subprocess.run([*git, "checkout", "--quiet", "FETCH_HEAD", "--", *source.folders], check=True)
    for found in source.folders:
        shutil.copytree(folder / found, made / Path(found).name, dirs_exist_ok=True)


def run(name: str, packages: Path, base: Path, timeout_s: float) -> int:
    """Runs the check in a process that sees this tree's sources, the trainer's packages, and the base environment."""
    path = os.pathsep.join([*(str(ROOT / source) for source in SOURCES), str(packages)])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(base), "-m", "tests.trainers.inside", name]
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=timeout_s, check=False).returncode
