import { create, type JsonObject, toJson } from "@bufbuild/protobuf";
import { RolloutSpecSchema } from "@gen/penstock/driver/v1/rollout_pb";
import fc from "fast-check";
import { describe, expect, test } from "vitest";

import { EMPTY, errorLine, FormError, placed, specOf } from "./order";
import { readTaskFile, TaskFileError } from "./taskfile";

const json = (form: Partial<typeof EMPTY>) =>
  toJson(RolloutSpecSchema, create(RolloutSpecSchema, specOf({ ...EMPTY, agent: "shell", ...form }))) as JsonObject;

const TASK = `
task_id: copy
instruction: Copy it.
files:
  - {path: note.txt, content: "the word\\n", mode: "0644"}
setup: [touch a, [test, -f, a]]
verifier:
  commands: [{shell: grep -q word out.txt, timeout: 2.5}]
  reward: file
  range: [0, 2]
limits: {agent: 90}
budgets: {max_calls: 5, max_completion_tokens: 100, max_request_bytes: 1MiB, wall_time: 60}
sandbox: {backend: docker, resources: {memory_bytes: 512MiB, cpu: 0.5}}
labels: {team: a}
metadata: {level: [1, two]}
`;

describe("the form", () => {
  test("what is written becomes a task with shell lines", () => {
    expect(json({ instruction: "do it", setup: "a\n\n b ", verify: "c", taskId: "t" })["task"]).toEqual({
      taskId: "t",
      instruction: "do it",
      setup: [{ shell: "a" }, { shell: "b" }],
      verifier: { commands: [{ shell: "c" }], passedShare: {} },
    });
  });

  test("what the agent changed is kept where that is wanted, however the task is given", () => {
    const yaml = "instruction: a\nkeep_diff: yes\nkeep_files: true";
    expect(json({ instruction: "a", keepDiff: true })["task"]).toMatchObject({ keepDiff: true });
    expect(json({ how: "yaml", yaml })["task"]).toMatchObject({ keepDiff: true, keepFiles: true });
  });

  test("servers for the agent and whether its end state is kept are taken from a task file", () => {
    const servers = "mcp_servers: [{name: notes, args: [python3, notes.py], env: {DEPTH: '2'}}, {name: far, url: 'http://127.0.0.1:9'}]";
    expect(json({ how: "yaml", yaml: `instruction: a\nkeep_end_state: false\n${servers}` })).toMatchObject({
      agent: {
        mcpServers: [
          { name: "notes", stdio: { args: ["python3", "notes.py"], env: { DEPTH: "2" } } },
          { name: "far", url: "http://127.0.0.1:9" },
        ],
      },
      keepEndState: false,
    });
    for (const wrong of ["{name: a}", "{name: a, args: [b], url: 'http://c'}", "{name: a, url: 'http://c', env: {D: e}}"])
      expect(() => readTaskFile(`instruction: a\nmcp_servers: [${wrong}]`)).toThrow(/args|env/);
  });

  test("a task file becomes the same as by the command line", () => {
    expect(json({ how: "yaml", yaml: TASK, labels: "step=3", run: "r", agentMinutes: "2" })).toMatchObject({
      task: {
        taskId: "copy",
        instruction: "Copy it.",
        files: [{ path: "note.txt", content: btoa("the word\n"), mode: 0o644 }],
        setup: [{ shell: "touch a" }, { argv: { args: ["test", "-f", "a"] } }],
        verifier: { commands: [{ shell: "grep -q word out.txt", timeout: "2.500s" }], rewardFile: {}, rangeMin: 0, rangeMax: 2 },
        metadata: { level: [1, "two"] },
      },
      limits: { agent: "120s" },
      budgets: { maxCalls: 5, maxCompletionTokens: "100", maxRequestBytes: "1048576", wallTime: "60s" },
      sandbox: { backend: "docker", resources: { memoryBytes: "536870912", cpu: 0.5 } },
      labels: { team: "a", step: "3" },
      runId: "r",
    });
  });

  test("endpoints are said as the gate wants them", () => {
    expect(json({ endpoint: "caller", baseUrl: "http://h/v1", apiKey: "k", model: "m" })).toMatchObject({
      source: { upstream: { caller: { baseUrl: "http://h/v1", apiKey: "k" }, model: "m" } },
    });
    expect(json({ endpoint: "upstream", name: "u" })).toMatchObject({ source: { upstream: { name: "u" } } });
  });

  test("what cannot be asked for is told at its fields", () => {
    try {
      specOf({ ...EMPTY, options: "[1]", labels: "nonsense", count: 0, agentMinutes: "x" });
      expect.unreachable();
    } catch (error) {
      expect(Object.keys((error as FormError).errors).sort()).toEqual(["agentMinutes", "count", "labels", "options"]);
    }
  });

  test("violations of the service are put at the fields that they are about", () => {
    const violations = [
      { field: "spec.task.instruction", description: "is required" },
      { field: "spec.agent.options.seed", description: "a number" },
      { field: "spec.taskless", description: "odd" },
    ];
    expect(placed(violations, { how: "written" })).toEqual({
      instruction: ["is required"],
      options: ["a number"],
      "": ["taskless: odd"],
    });
    expect(errorLine(placed(violations, { how: "written" }))).toBe("Instruction: is required; Agent's options: a number; taskless: odd");
    expect(placed(violations, { how: "yaml" })).toMatchObject({ yaml: ["instruction: is required"] });
  });
});

describe("a task file", () => {
  test.each([
    ["instruction: [", "is not YAML"],
    ["task_id: a\n\ninstructon: b", "instructon: line 3: is not known; did you mean instruction?"],
    ["instruction: a\nzzzz: b", "zzzz: line 2: is not known; there are "],
    ["instruction: a\nsetup:\n  - a\n  - {argv: [a], shell: b}", "setup.1: line 4: has argv or shell"],
    ["instruction: a\nverifier:\n  commands: [a]\n  fresh_frok: yes", "verifier.fresh_frok: line 4: is not known; did you mean fresh_fork?"],
    ["instruction: a\nverifier: {commands: [a], fresh_fork: 'yes'}", "verifier.fresh_fork: line 2: is true or false"],
    ["instruction: a\nverifier: {commands: [a], fresh_fork: y}", "verifier.fresh_fork: line 2: is true or false"],
    ["instruction: a\nsandbox: {companions: []}", "sandbox.companions: line 2: is not supported by the form: use `penstock rollout`"],
    ["instruction: a\nmodels: [{policy_id: a}]", "models: line 2: is not supported by the form: use `penstock rollout`"],
    ["instruction: a\nsandbox: {own_kernel: 1}", "sandbox.own_kernel: line 2: is true or false"],
    ["instruction: a\nsandbox: {own_kernel: }", "sandbox.own_kernel: line 2: is true or false"],
    ["instruction: a\nfiles: [{path: x, content: '', mode: 0999}]", "files.0.mode: line 2: is permission bits"],
    ["instruction: a\nkeep_diff: 1", "keep_diff: line 2: is true or false"],
    ["instruction_file: a", "instruction_file: line 1: a page cannot read files"],
    ["instruction: a\nbuild: .", "build: line 2: a page cannot read files"],
    ["instruction: a\nlabels: {day: 2026-11-21}", "labels.day: line 2: is a date"],
    ["instruction: a\nmetadata: {a: [!!binary aGk=]}", "metadata.a.0: line 2: is nothing that JSON has"],
    ["instruction: a\nmetadata: &a {b: *a}", "is nested too deeply"],
    ["- a", "is a mapping"],
    ["instruction: a\ninstuction: b", "instuction: line 2: is not known"],
    ["setup: []", "instruction: is a text"],
    ["instruction: a\nfiles: [{path: x, from: y}]", "files.0.from: line 2: a page cannot read files"],
    ["instruction: a\nverifier: {commands: [a], reward: best}", "verifier.reward: line 2: is file or passed_share"],
    ["instruction: a\nbudgets: {max_calls: many}", "budgets.max_calls: line 2: is a number"],
    ["instruction: a\nsetup: [{argv: [a], shell: b}]", "setup.0: line 2: has argv or shell"],
  ])("%j is refused by name", (text, why) => {
    expect(() => readTaskFile(text)).toThrow(why);
  });

  test.each([
    ["yes", true],
    ["On", true],
    ["true", true],
    ["no", false],
    ["OFF", false],
  ])("its switches are read as the command line reads them: %s", (said, wanted) => {
    const read = readTaskFile(`instruction: a\nverifier: {commands: [a], fresh_fork: ${said}}\nsandbox: {own_kernel: ${said}}`);
    expect([read.task.verifier?.freshFork, read.sandbox?.ownKernel]).toEqual([wanted, wanted]);
  });

  test.each([
    ["0755", 0o755],
    ['"0755"', 0o755],
    ["0o755", 0o755],
    ["493", 0o755],
  ])("its permission bits are, too: %s", (said, wanted) => {
    expect(readTaskFile(`instruction: a\nfiles: [{path: x, content: "", mode: ${said}}]`).task.files?.[0]?.mode).toBe(wanted);
  });

  test("what is a letter there is one here", () => {
    expect(readTaskFile("instruction: a\nlabels: {n: y}").labels).toEqual({ n: "y" });
  });

  test.each(["1:30", "22:22", "-1:30", "1:30:00", "1:30.5", "-.5", "+.5e+1", "._5"])("what the command line reads as a text is one here: %s", (said) => {
    expect(readTaskFile(`instruction: ${said}\nlabels: {a: ${said}}\nmetadata: {a: ${said}}`)).toMatchObject({ task: { instruction: said, metadata: { a: said } }, labels: { a: said } });
  });

  test.each([
    ["0x1F", 31],
    ["1_000", 1000],
    ["-0.5", -0.5],
    [".5", 0.5],
    ["1.5e+3", 1500],
  ])("what is a number there is one here: %s", (said, number) => {
    expect(readTaskFile(`instruction: a\nmetadata: {a: ${said}}`).task.metadata).toEqual({ a: number });
  });

  test("a number in base 60 that a tag asks for is refused", () => {
    expect(() => readTaskFile("instruction: a\nmetadata: {a: !!int 1:30}")).toThrow("is not YAML");
  });

  test("any text is read or refused, and never breaks the page", () => {
    fc.assert(
      fc.property(fc.string(), (text) => {
        try {
          readTaskFile(text);
        } catch (error) {
          expect(error).toBeInstanceOf(TaskFileError);
        }
      }),
    );
  });
});
