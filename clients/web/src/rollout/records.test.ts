import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { DurationSchema, timestampFromMs } from "@bufbuild/protobuf/wkt";
import fc from "fast-check";
import { describe, expect, test } from "vitest";
import { FailureCause, FailureSchema, GradingPlace, OutcomeSchema, Phase, type RolloutEvent, RolloutEventSchema, VerifierSchema } from "@gen/penstock/driver/v1/rollout_pb";
import { ExitReason, ExitSchema } from "@gen/penstock/sandbox/v1/process_service_pb";
import { AnnotationSchema, type Branch, BranchSchema, type Call, CallClass, CallSchema, Dialect, SampleSchema } from "@gen/penstock/trajectory/v1/trajectory_pb";
import { beginning, FIRST_PARTS, messagesOf, newMessages, type Said } from "./bodies";
import { parseDiff } from "./diff";
import { phaseBars, seconds } from "./phases";
import { explainReward, judgements, MOST_JUDGEMENTS } from "./reward";
import { conversationTree, MAX_NESTING, type TreeBranch, turnsOf } from "./tree";
import { durationWords, exitWords, untrainedWords } from "./words";

const call = (index: number, more: Exclude<MessageInitShape<typeof CallSchema>, Call> = {}): Call => create(CallSchema, { callId: `c${index}`, index, callClass: CallClass.MAIN, ...more });

describe("the conversation as a tree", () => {
  test("a branch hangs from the turn after which it left, with its label and reason", () => {
    const calls = [call(0, { branchId: "m" }), call(1, { branchId: "m" }), call(2, { branchId: "s", callClass: CallClass.SUB_AGENT })];
    const branches = [
      create(BranchSchema, { branchId: "m", branchClass: CallClass.MAIN, callIds: ["c0", "c1"] }),
      create(BranchSchema, { branchId: "s", branchClass: CallClass.SUB_AGENT, callIds: ["c2"], forkCallId: "c0", reason: "another session", sharedCount: 5 }),
    ];
    const [main, ...others] = conversationTree(calls, branches, []);
    expect(others).toEqual([]);
    expect(main?.turns.map((turn) => turn.call.callId)).toEqual(["c0", "c1"]);
    expect(main?.turns[0]?.branches[0]).toMatchObject({ branchClass: CallClass.SUB_AGENT, reason: "another session", shared: 5 });
  });

  test("a call is trained when any sample trains it, and else says why not", () => {
    const samples = [
      create(SampleSchema, { turns: [{ callId: "c0", untrainedReason: "SHARED" }, { callId: "c1", untrainedReason: "TRUNCATED" }] }),
      create(SampleSchema, { turns: [{ callId: "c0", untrainedReason: "" }] }),
    ];
    const turns = turnsOf(conversationTree([call(0), call(1), call(2)], [], samples));
    expect(turns.map((turn) => turn.untrained)).toEqual(["", "TRUNCATED", undefined]);
  });

  test("every call is in the tree exactly once, whatever branches say of each other", () => {
    const id = fc.constantFrom("c0", "c1", "c2", "c3", "c9");
    const branches = fc.array(
      fc.record({ branchId: fc.constantFrom("a", "b", "d"), forkCallId: fc.option(id, { nil: undefined }), callIds: fc.array(id, { maxLength: 4 }) }).map(
        ({ forkCallId, ...rest }): Branch => create(BranchSchema, { ...rest, ...(forkCallId !== undefined && { forkCallId }) }),
      ),
      { maxLength: 4 },
    );
    const calls = fc
      .array(fc.record({ branchId: fc.constantFrom("", "a", "b", "z"), callClass: fc.constantFrom(CallClass.MAIN, CallClass.TITLE) }), { minLength: 4, maxLength: 4 })
      .map((many) => many.map((one, index) => call(index, one)));
    fc.assert(
      fc.property(calls, branches, (given, several) => {
        const found = turnsOf(conversationTree(given, several, [])).map((turn) => turn.call.callId);
        expect(found.toSorted()).toEqual(["c0", "c1", "c2", "c3"]);
      }),
    );
  });

  test("branches nest a few levels deep, and what left a deeper one follows it, said to be so", () => {
    const count = 2_000;
    const calls = Array.from({ length: count }, (_, index) => call(index, { branchId: `b${index}` }));
    const branches = calls.map(({ index }) =>
      create(BranchSchema, { branchId: `b${index}`, branchClass: CallClass.MAIN, callIds: [`c${index}`], ...(index > 0 && { forkCallId: `c${index - 1}` }) }),
    );
    const depth = (many: readonly TreeBranch[]): number => Math.max(0, ...many.slice(0, 20).flatMap((branch) => branch.turns.map((turn) => 1 + depth(turn.branches))));
    const tree = conversationTree(calls, branches, []);
    expect(depth(tree)).toBe(MAX_NESTING);
    const turns = turnsOf(tree);
    expect(turns.map((turn) => turn.call.index)).toEqual(calls.map((one) => one.index));
    expect(turns.flatMap((turn) => turn.branches).filter((branch) => branch.isDeeper)).toHaveLength(count - MAX_NESTING);
  });

  test("calls of a rollout that still runs stand on branches of their class", () => {
    const roots = conversationTree([call(0, { callClass: CallClass.TITLE }), call(1), call(2)], [], []);
    expect(roots.map((branch: TreeBranch) => [branch.branchClass, branch.turns.length])).toEqual([
      [CallClass.MAIN, 2],
      [CallClass.TITLE, 1],
    ]);
  });
});

const body = (value: unknown): Uint8Array => new TextEncoder().encode(JSON.stringify(value));

describe("what an agent newly said", () => {
  test("each dialect's request gives its messages behind the model's last reply", () => {
    const chat = body({ messages: [{ role: "system", content: "S" }, { role: "assistant", content: null, tool_calls: [{ function: { name: "bash", arguments: "{}" } }] }, { role: "tool", tool_call_id: "1", content: "out" }] });
    expect(newMessages(messagesOf(chat, Dialect.CHAT_COMPLETIONS))).toEqual([{ role: "tool", parts: [{ kind: "tool_result", text: "out", name: "1" }] }]);
    const responses = body({ instructions: "I", input: [{ type: "function_call", name: "f", arguments: "{}" }, { type: "function_call_output", call_id: "1", output: "out" }] });
    expect(newMessages(messagesOf(responses, Dialect.RESPONSES))).toEqual([{ role: "tool", parts: [{ kind: "tool_result", text: "out", name: "1" }] }]);
    const messages = body({ system: [{ type: "text", text: "S" }], messages: [{ role: "assistant", content: [{ type: "thinking", thinking: "T" }] }, { role: "user", content: [{ type: "tool_result", tool_use_id: "1", content: [{ type: "text", text: "out" }] }] }] });
    expect(newMessages(messagesOf(messages, Dialect.MESSAGES))).toEqual([{ role: "user", parts: [{ kind: "tool_result", text: "out", name: "1" }] }]);
    const contents = body({ contents: [{ role: "model", parts: [{ functionCall: { name: "f" } }] }, { role: "user", parts: [{ functionResponse: { name: "f", response: { a: 1 } } }] }] });
    expect(newMessages(messagesOf(contents, Dialect.GENERATE_CONTENT))).toEqual([{ role: "tool", parts: [{ kind: "tool_result", text: '{\n  "a": 1\n}', name: "f" }] }]);
  });

  test("a request of any content at all gives messages, and one that is no JSON its text", () => {
    expect(messagesOf(new TextEncoder().encode("{"), Dialect.MESSAGES)).toEqual([{ role: "request", parts: [{ kind: "text", text: "{", name: "" }] }]);
    const deep = new TextEncoder().encode(`{"messages":${"[".repeat(5000)}${"]".repeat(5000)}}`);
    expect(messagesOf(deep, Dialect.CHAT_COMPLETIONS)).toHaveLength(1);
    const keys = ["messages", "input", "contents", "system", "role", "content", "parts", "type", "text", "output", "tool_calls", "function"];
    const anything = fc.letrec((tie) => ({
      value: fc.oneof({ depthSize: "small" }, fc.string(), fc.integer(), fc.constant(null), fc.array(tie("value")), fc.dictionary(fc.constantFrom(...keys), tie("value"))),
    })).value;
    fc.assert(
      fc.property(anything, fc.constantFrom(Dialect.CHAT_COMPLETIONS, Dialect.RESPONSES, Dialect.MESSAGES, Dialect.GENERATE_CONTENT), (value, dialect) => {
        for (const said of messagesOf(body(value), dialect)) {
          expect(typeof said.role).toBe("string");
          for (const part of said.parts) expect(typeof part.text).toBe("string");
        }
      }),
    );
  });
});

describe("a request of any size", () => {
  const part = { kind: "text", text: "x", name: "" } as const;
  const said = (count: number): Said => ({ role: "user", parts: Array.from({ length: count }, () => part) });

  test("a hundred messages and parts are shown of thousands, and the rest is counted", () => {
    const many = beginning(Array.from({ length: 10_000 }, () => said(0)), FIRST_PARTS);
    expect([many.shown.length, many.hiddenMessages, many.hiddenParts]).toEqual([100, 9_900, 0]);
    const long = beginning([said(1), said(10_000)], FIRST_PARTS);
    expect([long.shown.map((message) => message.parts.length), long.hiddenMessages, long.hiddenParts]).toEqual([[1, 99], 0, 9_901]);
  });

  test("of lists longer than anybody reads the newest messages and the first parts are taken, and the rest is counted", () => {
    const many = messagesOf(body({ messages: Array.from({ length: 5_000 }, (_, index) => ({ role: "user", content: `${index}` })) }), Dialect.CHAT_COMPLETIONS);
    expect(many).toHaveLength(2_001);
    expect(many[0]?.parts[0]?.text).toBe("(3000 earlier messages are not shown)");
    expect(many.at(-1)?.parts[0]?.text).toBe("4999");
    const [long] = messagesOf(body({ contents: [{ parts: Array.from({ length: 5_000 }, (_, index) => ({ text: `${index}` })) }] }), Dialect.GENERATE_CONTENT);
    expect([long?.parts.length, long?.parts[499]?.text, long?.parts[500]?.text]).toEqual([501, "499", "(4500 more parts are not shown)"]);
  });

  test("what is shown and what is counted is all that there is, in order", () => {
    fc.assert(
      fc.property(fc.array(fc.nat(5)), fc.nat(20), (counts, most) => {
        const messages = counts.map(said);
        const { shown, hiddenMessages, hiddenParts } = beginning(messages, most);
        expect(shown.length + hiddenMessages).toBe(messages.length);
        const all = counts.reduce((sum, count) => sum + count, 0);
        expect(shown.reduce((sum, message) => sum + message.parts.length, 0) + hiddenParts).toBe(all);
        expect(shown.reduce((sum, message) => sum + Math.max(1, message.parts.length), 0)).toBeLessThanOrEqual(most);
        shown.slice(0, -1).forEach((message, index) => expect(message).toBe(messages[index]));
      }),
    );
  });
});

describe("unified diffs", () => {
  test("files, hunks and line numbers are read, content that looks like headings included", () => {
    const [changed, added, binary] = parseDiff(
      "diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,2 +1,3 @@\n one\n--- a/x\n+++ b/y\n+new\n\\ No newline at end of file\n" +
        "diff --git a/n b/n\n--- /dev/null\n+++ b/n\n@@ -0,0 +1,1 @@\n+n\ndiff --git a/b b/b\nBinary files a/b and b/b differ\n",
    );
    expect(changed).toMatchObject({ path: "f", what: "changed", added: 2, removed: 1 });
    expect(changed?.hunks[0]?.rows.map((row) => [row.kind, row.text, row.before, row.after])).toEqual([
      ["context", "one", 1, 1],
      ["removed", "-- a/x", 2, undefined],
      ["added", "++ b/y", undefined, 2],
      ["added", "new", undefined, 3],
      ["note", "\\ No newline at end of file", undefined, undefined],
    ]);
    expect(added).toMatchObject({ path: "n", what: "added", added: 1 });
    expect(binary).toMatchObject({ path: "b", notes: ["Binary files a/b and b/b differ"] });
  });

  test("any text at all gives rows, and none of its lines is lost", () => {
    const line = fc.constantFrom("--- a/f", "+++ b/f", "@@ -1,2 +1 @@", "@@ -1 +1,9 @@", "+a", "-b", " c", "", "diff x", "\\ No newline", "text");
    fc.assert(
      fc.property(fc.array(line), (lines) => {
        const files = parseDiff(lines.join("\n"));
        const rows = files.flatMap((file) => file.hunks.flatMap((hunk) => hunk.rows)).length;
        const others = files.flatMap((file) => [...file.notes, ...file.hunks]).length;
        expect(rows + others).toBeLessThanOrEqual(lines.length);
        const kept = lines.filter((text) => text === "+a" || text === "-b" || text === " c" || text === "text").length;
        expect(rows + files.flatMap((file) => file.notes).length).toBeGreaterThanOrEqual(kept);
      }),
    );
  });
});

describe("the timeline", () => {
  const at = (ms: number, event: RolloutEvent["event"]): RolloutEvent => create(RolloutEventSchema, { time: timestampFromMs(ms), event });
  const phase = (ms: number, value: Phase): RolloutEvent => at(ms, { case: "phaseChanged", value: { $typeName: "penstock.driver.v1.PhaseChanged", phase: value } });

  test("bars follow each other, the last goes on until it ends, and attempts are counted", () => {
    const failed = at(30, { case: "attemptFailed", value: { $typeName: "penstock.driver.v1.AttemptFailed", attempt: 1 } });
    const ended = at(90, { case: "ended", value: create(OutcomeSchema) });
    const open = phaseBars([phase(0, Phase.QUEUED), phase(10, Phase.PREPARING), failed, phase(40, Phase.PREPARING)]);
    expect(open.map((bar) => [bar.phase, bar.attempt, bar.start, bar.end])).toEqual([
      [Phase.QUEUED, 1, 0, 10],
      [Phase.PREPARING, 1, 10, 40],
      [Phase.PREPARING, 2, 40, undefined],
    ]);
    expect(seconds(open[2]!, 1040)).toBe(1);
    expect(phaseBars([phase(0, Phase.QUEUED), ended]).map((bar) => bar.end)).toEqual([90]);
  });

  test("bars never overlap, whatever clocks say", () => {
    const times = fc.array(fc.tuple(fc.integer({ min: 0, max: 100 }), fc.constantFrom(Phase.QUEUED, Phase.RUNNING, Phase.ENDED)));
    fc.assert(
      fc.property(times, (given) => {
        const bars = phaseBars(given.map(([ms, value]) => phase(ms, value)));
        bars.forEach((bar, index) => {
          expect(bar.end ?? Number.POSITIVE_INFINITY).toBeGreaterThanOrEqual(bar.start);
          if (index > 0) expect(bar.start).toBeGreaterThanOrEqual(bars[index - 1]!.end ?? Number.POSITIVE_INFINITY);
        });
      }),
    );
  });
});

describe("why a reward is what it is", () => {
  const verifier = create(VerifierSchema, { commands: [{}, {}, {}], restore: ["tests/**"], reward: { case: "passedShare", value: {} } });

  test("a share that passed is told with its figures and with what was restored", () => {
    const outcome = create(OutcomeSchema, { reward: { value: 2 / 3, rangeMin: 0, rangeMax: 1 }, grading: { place: GradingPlace.FRESH_FORK, passed: 2, total: 3, restored: 4, changes: { entries: 2, sizeBytes: 1200n } } });
    const found = explainReward(outcome, verifier, Phase.ENDED);
    expect(found.headline).toBe("0.6667");
    expect(found.sentences).toEqual([
      "2 of 3 verifier commands passed: that share of the range 0 to 1 is 0.6667.",
      "Graded in a fresh fork of the prepared state, with the agent's changes brought over.",
      "Brought over: 2 paths (1.2 kB).",
      "Before that 4 paths were put back as they had been prepared.",
    ]);
  });

  test("not graded is never told as zero", () => {
    const failed = create(OutcomeSchema, { failure: create(FailureSchema, { cause: FailureCause.INFRASTRUCTURE, reason: "SANDBOX_LOST" }) });
    for (const [outcome, of] of [[failed, verifier], [create(OutcomeSchema), undefined]] as const) {
      const found = explainReward(outcome, of, Phase.ENDED);
      expect(found.share).toBeUndefined();
      expect(found.headline).toBe("–");
      expect(found.sentences[0]).toContain("which is not zero");
    }
    expect(explainReward(failed, verifier, Phase.ENDED).sentences).toContain("It says nothing about the policy: keep it out of baselines.");
  });

  test("components come with their declared ranges", () => {
    const of = create(VerifierSchema, { reward: { case: "rewardFile", value: {} }, componentRanges: { style: { min: 0, max: 2 } } });
    const outcome = create(OutcomeSchema, { reward: { value: 1, rangeMin: 1, rangeMax: 1, components: { style: 0.5, extra: 3 } } });
    const found = explainReward(outcome, of, Phase.ENDED);
    expect(found.components).toEqual([
      { name: "extra", value: 3, range: "" },
      { name: "style", value: 0.5, range: "0 to 2" },
    ]);
    expect(found.share).toBe(1);
  });
});

describe("rewards of turns, and annotations", () => {
  const float = (...values: number[]): Uint8Array => new Uint8Array(Float32Array.from(values).buffer);

  test("the verifier's come first, by the indices of their calls", () => {
    const turns = [{ callId: "c1", value: -1, components: { style: 0.5 }, tokenValues: float(1, 2) }, { callId: "gone" }];
    const outcome = create(OutcomeSchema, { reward: { value: 1, rangeMax: 1, turns } });
    const said = [
      create(AnnotationSchema, { name: "helpful", author: "judge", value: 0, details: { why: "clear" } }),
      create(AnnotationSchema, { name: "step", author: "me", callId: "c0", tokenValues: float(1) }),
    ];
    const found = judgements(outcome, said, [call(0), call(1)]);
    expect(found.whole).toBe(4);
    expect(found.shown.map(({ turn, name, author, value, more }) => [turn, name, author, value, more])).toEqual([
      [1, "", "verifier", -1, "style 0.5, 2 tokens"],
      [undefined, "", "verifier", undefined, ""],
      [undefined, "helpful", "judge", 0, ""],
      [0, "step", "me", undefined, "1 token"],
    ]);
    expect(found.shown.map((one) => one.details)).toEqual(["", "", JSON.stringify({ why: "clear" }, null, 2), ""]);
  });

  test("there are never more than a page can show", () => {
    const turns = Array.from({ length: 150 }, (_, index) => ({ callId: `c${index}`, value: 1 }));
    const said = Array.from({ length: 1024 }, () => create(AnnotationSchema, { name: "n", author: "a", value: 1 }));
    const found = judgements(create(OutcomeSchema, { reward: { turns } }), said, []);
    expect([found.shown.length, found.whole]).toEqual([MOST_JUDGEMENTS, 1174]);
    expect(judgements(undefined, [], [])).toEqual({ shown: [], whole: 0 });
  });
});

describe("words", () => {
  test("ends of processes, reasons and durations are said as people say them", () => {
    expect(exitWords(create(ExitSchema, { reason: ExitReason.EXITED, status: { case: "code", value: 3 } }))).toBe("exit 3");
    expect(exitWords(create(ExitSchema, { reason: ExitReason.OOM, duration: create(DurationSchema) }))).toBe("killed for memory");
    expect(exitWords(undefined)).toBe("did not run");
    expect(untrainedWords("CLASS_SUB_AGENT")).toBe("not trained: sub-agent calls are context");
    expect([0.0421, 4.21, 59.7, 252, 7384].map(durationWords)).toEqual(["42 ms", "4.2 s", "1 min 0 s", "4 min 12 s", "2 h 3 min"]);
  });
});
