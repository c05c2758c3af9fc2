"""Names of images that callers give: a daemon that takes ids for names gives away none of the service's own."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock_chassis.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from penstock_sandbox.backends.docker.engine.errors import Json, Missing
from penstock_sandbox.backends.docker.images.images import Images
from penstock_sandbox.backends.docker.images.prepared_images import Prepared
from penstock_sandbox.backends.images import reference
from penstock_sandbox.settings import SandboxSettings

_SNAPSHOT = f"sha256:ad{'1' * 62}"
_PYTHON = f"sha256:be{'2' * 62}"
_OWN = f"sha256:cf{'3' * 62}"
_OPERATORS = f"sha256:d0{'4' * 62}"
_BUILT = f"sha256:e1{'6' * 62}"
_DIGEST = f"sha256:{'5' * 64}"


class Finding:
    """A daemon that finds images as Docker does: by a name, by an id, and by any beginning of one."""

    def __init__(self) -> None:
        self.pulled: list[str] = []
        self.says = ""
        self._images = [
            _image(_SNAPSHOT, ["penstock-snapshot:ss.1"], {"penstock.kind": "snapshot", "penstock.instance": "i"}),
            # Labels of another owner are no hindrance, and blank ones are those of an image that is kept for all.
            _image(_PYTHON, ["python:3.13"], {"maintainer": "x", "penstock.instance": ""}, [f"python@{_DIGEST}"]),
            _image(_OWN, ["team/tools:1", "penstock-prepared:a"], {"penstock.kind": "prepared"}),
            _image(_OPERATORS, ["team/base:1"], {}),
            _image(_BUILT, ["localhost/built:2"], {}),
        ]

    async def image(self, name: str) -> Json:
        wanted = name.removeprefix("docker.io/").removeprefix("library/")
        for one in self._images:
            if wanted in (*one["RepoTags"], *one["RepoDigests"]):
                return one
        found = [one for one in self._images if one["Id"].removeprefix("sha256:").startswith(name.split(":")[-1])]
        if len(found) == 1 and "/" not in name:
            return found[0]
        raise Missing(404, "no such image")

    async def pull(self, image: str, name: str, tag: str) -> Any:
        self.pulled.append(f"{name} {tag}")
        if self.says:
            yield {"error": self.says}


def _image(id_: str, tags: list[str], labels: dict[str, str], digests: list[str] | None = None) -> Json:
    return {"Id": id_, "RepoTags": ["<none>:<none>", *tags], "RepoDigests": digests or [], "Config": {"Labels": labels}}


def _images(daemon: Finding, *registries: str) -> Images:
    return Images(cast(Any, daemon), cast(Prepared, None), 5.0, [_OPERATORS[:12], "gone:1"], registries or ("*",))


@pytest.mark.requirement("R44", "R54", "R55")
@pytest.mark.parametrize("name", [_SNAPSHOT, "ad", "ad1", "sha256:ad", "a", "ad:latest", f"sha256:{'1' * 40}"])
async def test_no_id_and_no_beginning_of_one_is_a_name(name: str) -> None:
    daemon = Finding()
    with pytest.raises((NotFound, InvalidArgument)) as unknown:
        await _images(daemon).inspected(name, "spec.companions[0].image")
    assert unknown.value.reason in ("IMAGE_UNKNOWN", "FIELD_INVALID")
    # A registry is asked for what the name stands for, never for an id.
    assert all(one.startswith("docker.io/library/") for one in daemon.pulled)


@pytest.mark.requirement("R44", "R54", "R55")
@pytest.mark.parametrize(
    "name",
    [
        "penstock-snapshot:ss.1",
        "docker.io/penstock-snapshot:ss.1",
        "index.docker.io/library/penstock-snapshot:ss.1",
        "localhost/penstock-equipped:x",
        # By a name that is not ours: someone tagged it.
        "team/tools:1",
    ],
)
async def test_images_of_the_service_itself_are_refused(name: str) -> None:
    daemon = Finding()
    with pytest.raises(FailedPrecondition) as refused:
        await _images(daemon).inspected(name, "spec.image")
    assert refused.value.reason == "IMAGE_NOT_ALLOWED"
    assert daemon.pulled == []


@pytest.mark.requirement("R44")
@pytest.mark.parametrize(
    "name", ["python:3.13", "docker.io/library/python:3.13", f"python@{_DIGEST}", f"python:other@{_DIGEST}"]
)
async def test_an_image_is_found_by_each_of_its_names(name: str) -> None:
    assert (await _images(Finding()).inspected(name, "spec.image"))["Id"] == _PYTHON


async def test_an_image_that_podman_built_is_found_without_its_registry() -> None:
    """A caller that names another registry gets none of it."""
    assert (await _images(Finding()).inspected("built:2", "spec.image"))["Id"] == _BUILT
    for name in ("docker.io/built:2", "index.docker.io/library/built:2", "a.example/built:2"):
        with pytest.raises(NotFound):
            await _images(Finding()).inspected(name, "spec.image")


async def test_the_operator_may_name_an_image_by_its_id() -> None:
    assert (await _images(Finding()).inspected(_OPERATORS[:12], "spec.image"))["Id"] == _OPERATORS


async def test_a_field_with_a_malformed_name_is_named() -> None:
    with pytest.raises(InvalidArgument) as refused:
        await _images(Finding()).inspected("not a name", "spec.companions[1].image")
    assert refused.value.violations[0].field == "spec.companions[1].image"


@pytest.mark.requirement("R54", "R55")
@pytest.mark.parametrize(
    "name", ["127.0.0.1:5000/a", "169.254.169.254/a/b:1", "[::1]:80/a", "localhost/a", "a.example/b"]
)
async def test_a_registry_is_asked_only_if_the_operator_names_it(name: str) -> None:
    daemon = Finding()
    with pytest.raises(FailedPrecondition) as refused:
        await _images(daemon, *SandboxSettings.model_fields["docker_registries"].default).inspected(name, "spec.image")
    assert refused.value.reason == "IMAGE_NOT_ALLOWED" and "docker_registries" in refused.value.message
    assert daemon.pulled == []
    with pytest.raises(NotFound):
        await _images(daemon, reference.parse(name).registry.replace("[", "[[]")).inspected(name, "spec.image")
    assert len(daemon.pulled) == 1


@pytest.mark.requirement("R54", "R55")
async def test_what_a_registry_wrote_reaches_the_operator_alone() -> None:
    daemon = Finding()
    for daemon.says, shown in (
        ('error parsing HTTP 403 response body: "SECRET"', "the service's log has the reason"),
        ("unauthorized: SECRET", "wants a login"),
        ("toomanyrequests: SECRET", "limits pulls"),
        ("manifest unknown: SECRET", "does not give it"),
    ):
        with pytest.raises((Unavailable, NotFound)) as failed:
            await _images(daemon).inspected("absent:1", "spec.image")
        assert shown in failed.value.message and "SECRET" not in failed.value.message
        with pytest.raises((Unavailable, NotFound), match="SECRET"):
            await _images(daemon).inspected("gone:1", "spec.image")
