/** How far a capture may be trusted, in words: what is not known yet is kept apart from what will never be known. */

import { CaptureLevel, type Finding, Grade } from "@gen/penstock/trajectory/v1/trajectory_pb";
import type { Capture } from "./records";
import { captureWords, gradeWord } from "./words";

export interface Standing {
  /** Unspecified while it is not settled. */
  readonly grade: Grade;
  readonly word: string;
  readonly sentence: string;
  readonly findings: readonly Finding[];
}

/** What a finding says only once nothing more comes. */
const SETTLED_AT_THE_END = new Set(["NOTHING_TO_TRAIN"]);

/** @param isRead the calls were read, or there are none to read. */
export function captureStanding(capture: Capture, isEnded: boolean, isRead: boolean): Standing {
  if (!isEnded) {
    const sofar = capture.captureLevel === CaptureLevel.UNSPECIFIED ? "" : ` So far: ${captureWords(capture.captureLevel)}.`;
    return {
      grade: Grade.UNSPECIFIED,
      word: "not yet",
      sentence: `It is graded when the rollout has ended.${sofar}`,
      findings: capture.findings.filter((finding) => !SETTLED_AT_THE_END.has(finding.reason)),
    };
  }
  if (!capture.isWhole) return { grade: Grade.UNSPECIFIED, word: isRead ? "none" : "reading…", sentence: isRead ? "There is no capture of this rollout." : "", findings: [] };
  return { grade: capture.grade, word: gradeWord(capture.grade), sentence: captureWords(capture.captureLevel), findings: capture.findings };
}
