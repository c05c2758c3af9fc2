// The reward of the newest runs in the picture that their own pages have, with the way there.
import { href, go } from "../lib/router";
import { reward } from "../lib/format";
import { Chart, Swatch } from "../run/chart";
import { runName } from "../run/columns";
import { MEASURES } from "../run/model";
import { AXIS_NAMES, rowsPlace } from "../run/places";
import { SmoothField } from "../run/smoothing";
import "../run/run.css";
import type { Curves } from "./curves";
import { text } from "./filterfield";

const HEIGHT = 190;

export function Curve({ curves: { axis, window, usual, lines } }: { curves: Curves }) {
  return (
    <div class="runs">
      <Chart
        title={`Reward by ${AXIS_NAMES[axis]}`}
        lines={lines.map(({ ref, points }, look) => ({ name: ref ? runName(ref) : "no run", look, points }))}
        format={reward}
        axis={AXIS_NAMES[axis]}
        band={MEASURES[0]?.band ?? ""}
        range={[0, 1]}
        height={HEIGHT}
        onOpen={(line, point) => go(rowsPlace(lines[line]?.ref ?? "", axis, point, text.value))}
      >
        <div class="controls">
          {lines.some(({ ref }) => ref) && (
            <ul class="legend" aria-label="Runs">
              {lines.map(({ ref }, look) => (
                <li key={ref}>
                  <Swatch look={look} />
                  <a href={href("/runs", ref)} title={ref}>
                    <bdi>{runName(ref)}</bdi>
                  </a>
                </li>
              ))}
            </ul>
          )}
          <span class="grow" />
          <SmoothField window={window} usual={usual} />
        </div>
      </Chart>
    </div>
  );
}
