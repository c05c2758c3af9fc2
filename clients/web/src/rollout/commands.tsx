/** A command of the task's setup or verifier: what it was, how it ended and what it printed. */

import type { Command, Exit } from "@gen/penstock/sandbox/v1/process_service_pb";
import { HostileText } from "./hostile";
import { durationWords, exitOk, exitWords } from "./words";

/** A command as one would type it; only for people. */
export function commandLine(command: Command | undefined): string {
  const { command: what } = command ?? {};
  if (what?.case === "shell") return what.value;
  if (what?.case === "argv") return what.value.args.map((word) => (/^[\w@%+=:,./-]+$/u.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`)).join(" ");
  return "";
}

interface Props {
  readonly command: string;
  readonly exit: Exit | undefined;
  readonly stdout: Uint8Array;
  readonly stderr: Uint8Array;
}

/** All of it. */
export function CommandView({ command, exit, stdout, stderr }: Props) {
  const took = exit?.duration ? durationWords(Number(exit.duration.seconds) + exit.duration.nanos / 1e9) : "";
  const kept = stdout.length + stderr.length;
  const written = exit ? Number(exit.stdoutBytes + exit.stderrBytes) : kept;
  return (
    <div class="command">
      <div class="command-head">
        <span class={exitOk(exit) ? "chip good" : "chip bad"}>{exitWords(exit)}</span>
        {took !== "" && <span class="muted num">{took}</span>}
      </div>
      {command !== "" && (
        <div class="command-line">
          <HostileText text={command} label="command" />
        </div>
      )}
      {stdout.length > 0 && <HostileText text={stdout} label="standard output" />}
      {stderr.length > 0 && (
        <div class="stderr">
          <HostileText text={stderr} label="standard error" />
        </div>
      )}
      {written > kept && <p class="muted">The end of its output is kept; there were {written.toLocaleString("en")} bytes.</p>}
    </div>
  );
}
