"""The gap of what a real engine sampled, by its own Score: none, until its weights move on."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import orjson
import pytest
from tests.support.exported import turn_row

from penstock.analysis.logprob_diff import Scored, compare
from penstock.analysis.logprob_diff_rows import RowCounts, with_scores
from penstock.client import FailedPrecondition, InvalidArgument, Penstock, Sampling, VersionSpan, connect
from penstock.client.types.logprob_diff import GapReport
from penstock.inference.v1 import inference_service_pb2 as pb
from penstock_codec import tiny_tokenizer
from penstock_inference.testing import random_config, random_tensors, write_model

Open = Callable[..., Any]

PROMPT = list(range(3, 23))


async def sampled(ps: Penstock, name: str, sampling: Sampling) -> dict[str, Any]:
    return turn_row(name, PROMPT, await ps.inference.generate(np.array(PROMPT), sampling))


async def gap(ps: Penstock, rows: list[dict[str, Any]], **options: Any) -> GapReport:
    told = RowCounts()
    found = [scored async for scored in with_scores(rows, ps.inference, told, **options)]
    return compare(found, notes=told.notes())


@pytest.mark.requirement("R82", "R87")
async def test_engine_has_no_gap_to_its_own_score_until_an_update(served: Open, model_dir: Path) -> None:
    """What it sampled at several temperatures; after a push, old tokens are refused, or labelled."""
    new = random_tensors(random_config("qwen3", max_position_embeddings=4096, eos_token_id=None), seed=4)
    async with served(model_dir) as stub, connect({"inference": stub.address}) as ps:
        rows = [
            await sampled(ps, f"{n}", Sampling(max_tokens=40, temperature=temperature, seed=n))
            for n, temperature in enumerate((1.0, 0.7, 1.3))
        ]
        before = await gap(ps, rows)
        await ps.inference.update_weights(1, new)
        with pytest.raises(FailedPrecondition) as refused:
            await gap(ps, rows)
        labelled = await gap(ps, rows, any_version=True)
        rows.append(await sampled(ps, "new", Sampling(max_tokens=40, temperature=1.0, seed=9)))
        mixed = await gap(ps, rows)
    assert before.overall.tokens == 120 and before.versions[0].policy_version == 0
    assert before.overall.max_abs < 1e-5 and before.overall.effective_share > 0.999999
    assert refused.value.reason == "POLICY_VERSION_UNAVAILABLE"
    (moved,) = labelled.versions
    assert (moved.policy_version, moved.scored_version, moved.tokens) == (0, 1, 120)
    assert moved.mean_abs > 0.5 and moved.kl > 0.1 and moved.effective_share < 0.9
    assert "v0 by v1" in labelled.table()
    assert [(one.policy_version, one.tokens) for one in mixed.versions] == [(1, 40)] and mixed.overall.max_abs < 1e-5
    assert mixed.notes == ("left out: 120 tokens of versions that are no longer in force (v0)",)


@pytest.mark.requirement("R82", "R87")
async def test_weights_score_the_policy_that_they_are_of_and_no_other(served: Open, model_dir: Path) -> None:
    """A teacher and a student are at version 0 both; the service has the student's weights."""
    async with served(model_dir) as stub, connect({"inference": stub.address}) as ps:
        own = await sampled(ps, "own", Sampling(max_tokens=10, seed=1)) | {"policy_id": "student"}
        other = own | {"call_id": "other", "policy_id": "teacher", "tokenizer_sha256": "00" * 32}
        other["completion_logprobs"] = [value - 3.0 for value in own["completion_logprobs"]]
        with pytest.raises(InvalidArgument, match="student, teacher") as several:
            await gap(ps, [own, other])
        with pytest.raises(InvalidArgument) as unknown:
            await gap(ps, [own, other], policy="critic")
        report = await gap(ps, [other, own], policy="student")
        alone = await gap(ps, [own])
        both = compare(replace(made(0, -1.5), policy_id=name) for name in ("student", "teacher"))
        with pytest.raises(InvalidArgument) as reported:
            await ps.inference.report_gap(both)
        await ps.inference.report_gap(report)
    assert (several.value.reason, unknown.value.reason) == ("POLICY_NOT_CHOSEN", "POLICY_UNKNOWN")
    assert reported.value.reason == "POLICY_NOT_CHOSEN"
    assert [(one.policy_id, one.policy_version, one.tokens) for one in report.versions] == [("student", 0, 10)]
    assert report.overall.max_abs < 1e-5 and report.versions == alone.versions
    assert report.notes == ("left out: 10 tokens of other policies (teacher)",) and alone.notes == ()


@pytest.mark.requirement("R86")
async def test_gap_report_notes_filters_and_leaves_out_greedy_tokens(served: Open, model_dir: Path) -> None:
    """A score is of the whole distribution, so processed logprobs of a smaller one are higher."""
    async with served(model_dir) as stub, connect({"inference": stub.address}) as ps:
        filtered = await sampled(ps, "filtered", Sampling(max_tokens=40, temperature=1.0, top_p=0.5, seed=1))
        greedy = await sampled(ps, "greedy", Sampling(max_tokens=40, temperature=0.0))
        report = await gap(ps, [filtered, greedy])
    assert report.overall.tokens == 40 and report.overall.mean < -0.1
    assert [note.split(":")[0] for note in report.notes] == [
        "left out",
        "40 tokens were sampled under top_p, top_k, min_p or penalties, which a score does not apply",
    ]


async def test_rows_of_another_model_are_refused(served: Open, tmp_path: Path) -> None:
    """A gap between two models says nothing about either."""
    config = random_config("qwen3", vocab_size=384)
    directory = write_model(tmp_path / "worded", config, random_tensors(config))
    files = tiny_tokenizer.build()
    (directory / "tokenizer.json").write_bytes(files.tokenizer_json)
    (directory / "chat_template.jinja").write_text(files.chat_template, "utf-8")
    async with served(directory) as stub, connect({"inference": stub.address}) as ps:
        row = await sampled(ps, "a", Sampling(max_tokens=4))
        ours = await gap(ps, [row | {"tokenizer_sha256": (await ps.inference.info()).tokenizer_sha256.hex()}])
        with pytest.raises(FailedPrecondition) as caught:
            await gap(ps, [row | {"tokenizer_sha256": "00" * 32}])
    assert ours.overall.tokens and caught.value.reason == "TOKENIZER_MISMATCH"


@pytest.mark.requirement("R87")
async def test_exact_version_score_is_refused_under_another_version(
    served: Open, model_dir: Path, failure: Callable[[grpc.aio.AioRpcError], Any]
) -> None:
    """A version that cannot be served is FAILED_PRECONDITION."""
    async with served(model_dir) as stub:
        ids = np.array(PROMPT, "<i4").tobytes()
        assert (await stub.Score(pb.ScoreRequest(token_ids=ids, start=1, exact_version=0))).policy_version == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Score(pb.ScoreRequest(token_ids=ids, start=1, exact_version=1))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert failure(caught.value).reason == "POLICY_VERSION_UNAVAILABLE"


@pytest.mark.requirement("R83")
async def test_reported_gap_is_shown_to_watchers(
    served: Open, model_dir: Path, failure: Callable[[grpc.aio.AioRpcError], Any]
) -> None:
    """Figures that cannot be are refused by their field; a version's newest report counts, 8 versions are kept."""
    async with served(model_dir) as stub, connect({"inference": stub.address}) as ps:
        await ps.inference.report_gap(compare([Scored(engine=[-1.0], trainer=[-1.0])]))  # of no version: left out
        report = compare([made(0, -1.5)])
        await ps.inference.report_gap(compare([made(0, -3.0)]))
        await ps.inference.report_gap(report)
        with pytest.raises(FailedPrecondition) as early:
            await ps.inference.report_gap(compare([made(1, -1.5)]))
        wrong = pb.LogprobGap(policy_version=-1, tokens=0, mean=float("nan"), kl=-1, clipped_share=1.5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ReportGap(pb.ReportGapRequest(gap=wrong))
        watch = stub.WatchStats(pb.WatchStatsRequest())
        (seen,) = (await watch.read()).gaps
        watch.cancel()
        for version in range(1, 10):
            await ps.inference.update_weights(version, {"model.norm.weight": np.ones(48, np.float32)}, partial=True)
            await ps.inference.report_gap(compare([made(version, -1.0)]))
        watch = stub.WatchStats(pb.WatchStatsRequest())
        kept = [one.policy_version for one in (await watch.read()).gaps]
        watch.cancel()
    gap = report.overall
    assert (seen.policy_version, seen.tokens, seen.mean, seen.kl) == (0, 1, gap.mean, gap.kl)
    assert early.value.reason == "POLICY_VERSION_UNAVAILABLE"
    assert {violation.field for violation in failure(caught.value).violations} == {
        "gap.policy_version", "gap.tokens", "gap.mean", "gap.kl", "gap.clipped_share",
    }  # fmt: skip
    assert kept == list(range(2, 10))


async def penstock(*argv: str, address: str = "") -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.cli.main", *argv, stdout=PIPE, stderr=PIPE,
        env={**os.environ, "PENSTOCK_INFERENCE_ADDRESS": address},
    )  # fmt: skip
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_command_prints_a_files_gap_and_fails_over_a_bound(served: Open, model_dir: Path, tmp_path: Path) -> None:
    """By the service's score, or by the trainer's own logprobs without any service; exit codes are the console's."""
    file = tmp_path / "turns.jsonl"
    async with served(model_dir) as stub, connect({"inference": stub.address}) as ps:
        row = await sampled(ps, "call-1", Sampling(max_tokens=20, seed=1))
        row["mine"] = [value - 0.5 for value in row["completion_logprobs"]]
        file.write_bytes(orjson.dumps(row))
        code, out, err = await penstock("gap", str(file), "--max-kl", "1e-6", "--report", address=stub.address)
        assert code == 0 and "v0" in out and "processed logprobs" in out, (out, err)
        watch = stub.WatchStats(pb.WatchStatsRequest())
        assert [one.tokens for one in (await watch.read()).gaps] == [20]
        watch.cancel()
        tensors = {"model.norm.weight": np.ones(48, np.float32)}
        await ps.inference.update_weights(1, tensors, partial=True)
        code, _, err = await penstock("gap", str(file), address=stub.address)
        assert code == 4 and "sampled none of these tokens (v0)" in err, err
        code, out, err = await penstock("gap", str(file), "--any-version", "--json", address=stub.address)
        (version,) = orjson.loads(out)["versions"]
        assert code == 0 and (version["policy_version"], version["scored_version"]) == (0, 1), err
    code, out, err = await penstock("gap", str(file), "--column", "mine", "--max-kl", "0.1")
    assert code == 1 and "above the limit" in out and "KL of 0.107" in out, (out, err)
    teacher = row | {"call_id": "call-2", "policy_id": "teacher", "mine": row["completion_logprobs"]}
    file.write_bytes(orjson.dumps(row | {"policy_id": "student"}) + b"\n" + orjson.dumps(teacher))
    code, out, err = await penstock("gap", str(file), "--column", "mine", "--max-kl", "0.1")
    assert code == 1 and "version student v0 has a KL of 0.107" in out and " teacher v0 " in out, (out, err)
    code, out, err = await penstock("gap", str(file), "--column", "mine", "--max-kl", "0.1", "--policy", "teacher")
    assert code == 0 and "left out: 20 tokens of other policies (student)" in out, (out, err)
    code, _, err = await penstock("gap", str(file), "--column", "absent")
    assert code == 2 and "has no absent" in err
    code, _, err = await penstock("gap", str(file), "--column", "mine", "--any-version")
    assert code == 2 and "--any-version" in err


def made(version: int, logprob: float) -> Scored:
    return Scored(engine=[-1.0], trainer=[logprob], versions=(VersionSpan(version, 0, 1),))
