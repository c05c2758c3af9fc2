// The reward curves of the first page: those of its newest runs, as the runs' own pages draw them.
import { type Axis, lineOf, type LinePoint, MEASURES, pointsOf, runsOf, usualAxis } from "../run/model";
import { usualWindow } from "../run/smoothing";
import type { Row } from "./board";

/** Lines of one picture that people can distinguish. */
const MOST_LINES = 4;

export interface Curve {
  /** Of its run; empty = its rollouts have none. */
  readonly ref: string;
  readonly points: readonly LinePoint[];
}

export interface Curves {
  readonly axis: Axis;
  /** How many points count together. */
  readonly window: number;
  /** How many would without a choice. */
  readonly usual: number;
  /** Of the run that something happened in last, first. Empty = no rollout has a reward. */
  readonly lines: readonly Curve[];
}

/**
 * The curves of some rows: one for each of the newest runs, and one for the rollouts without a run where no row has one. Rollouts of
 * two runs are never one point: their steps are not the same.
 *
 * @param windowOf how many points count together, of how many there would without a choice.
 */
export function curvesOf(rows: readonly Row[], windowOf: (usual: number) => number = (usual) => usual): Curves {
  const [measure] = MEASURES;
  const runs = runsOf(rows);
  const graded = (runs.length ? runs : [{ ref: "", rows }]).filter((run) => run.rows.some((row) => row.reward !== null)).slice(0, MOST_LINES);
  const axis = usualAxis(graded.map((run) => run.rows));
  const found = graded.map(({ ref, rows: members }) => ({ ref, points: pointsOf(members, axis) }));
  const usual = usualWindow(Math.max(0, ...found.map(({ points }) => points.length)));
  const window = windowOf(usual);
  const lines = measure ? found.map(({ ref, points }) => ({ ref, points: lineOf(points, measure, window) })) : [];
  return { axis, window, usual, lines };
}
