// The metrics that trainers logged, each in a picture by step, of all runs that are looked at.
import { useMemo } from "preact/hooks";

import { compact } from "../lib/format";
import { changeQuery } from "../lib/router";
import { TroubleNotice } from "../ui/notice";
import { Chart } from "./chart";
import { runName } from "./columns";
import { metricLine, type Metrics, short, shownCount, useMetrics } from "./metrics";

const MORE = 24;

interface Props {
  readonly refs: readonly string[];
  readonly query: URLSearchParams;
  /** How many points count together. */
  readonly window: number;
  readonly height: number;
}

export function MetricCharts({ refs, query, window, height }: Props) {
  const { metrics, trouble } = useMetrics(refs);
  const all = metrics.value;
  const wanted = (query.get("metric") ?? "").toLowerCase();
  const names = useMemo(() => [...new Set(all.flatMap((one) => [...one.keys()]))].sort(), [all]);
  const matching = names.filter((name) => name.toLowerCase().includes(wanted));
  const shown = matching.slice(0, shownCount.value);
  if (!names.length) return trouble.value && <TroubleNotice trouble={trouble.value} />;
  return (
    <>
      <div class="title">
        <h2>Logged by the trainer</h2>
        <span class="muted num" aria-live="polite">
          {compact(matching.length)} {matching.length === 1 ? "metric" : "metrics"}
        </span>
        <span class="grow" />
        <input class="field" type="search" placeholder="Filter by name" aria-label="Filter the metrics" maxLength={128} value={query.get("metric") ?? ""} onInput={(event) => changeQuery({ metric: event.currentTarget.value })} />
      </div>
      {trouble.value && <TroubleNotice trouble={trouble.value} />}
      <div class="charts">
        {shown.map((name) => (
          <MetricChart key={name} name={name} refs={refs} all={all} window={window} height={height} />
        ))}
      </div>
      {!matching.length && <p class="card empty">No metric has such a name.</p>}
      {matching.length > shown.length && (
        <p>
          <button type="button" class="button" onClick={() => (shownCount.value += MORE)}>
            Show {Math.min(MORE, matching.length - shown.length)} more of {compact(matching.length)}
          </button>
        </p>
      )}
    </>
  );
}

function MetricChart({ name, refs, all, window, height }: { name: string; refs: readonly string[]; all: readonly Metrics[]; window: number; height: number }) {
  const lines = useMemo(
    () =>
      refs.flatMap((ref, look) => {
        const points = all[look]?.get(name);
        return points ? [{ name: runName(ref), look, points: metricLine(points, window) }] : [];
      }),
    [all, window],
  );
  const isPooled = lines.some(({ points }) => points.some(({ mean }) => mean.count > 1));
  return <Chart title={name} lines={lines} format={short} axis="step" band={isPooled ? "from the least to the greatest of the points together" : ""} range={null} height={height} />;
}
