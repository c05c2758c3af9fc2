package penstock

import (
	"context"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	driverv1 "penstock.example/penstock/gen/driver/v1"
)

// listTimeout is for a list, or a deletion, of the two million points that a run may have.
const listTimeout = 5 * time.Minute

// Runs is the metrics that trainers log of runs, as Client.Runs. A run is the run id of rollouts; its metrics may come before them.
type Runs struct{ client *Client }

// Metric is one metric of a run: its points in the order of their steps, one for each step.
type Metric struct {
	Name   string
	Points []MetricPoint
}

// MetricPoint is the value of a metric at a step, and when it was logged.
type MetricPoint struct {
	Step  int64
	Value float64
	Time  time.Time
}

// Log logs metrics of a step, and returns once they are on the driver's disk. The last value of a step counts. The values are finite
// numbers by name: 1 to 128 names of 1 to 128 letters, digits and "_", ".", "/", "-".
//
// Errors: ErrInvalidArgument, FIELD_INVALID; ErrResourceExhausted, METRIC_LIMIT: the run or the namespace has as much as it may.
func (r *Runs) Log(ctx context.Context, runID string, step int64, values map[string]float64) error {
	return logMetrics(ctx, r.client.cluster, runID, step, values)
}

// Log logs metrics of the session's run: see Runs.Log. The session needs a Selector with a RunID.
//
// Errors: ErrConfiguration, RUN_NOT_SELECTED.
func (s *Session) Log(ctx context.Context, step int64, values map[string]float64) error {
	runID := s.options.selector.GetRunId()
	if runID == "" {
		return &Error{
			Kind: ErrConfiguration, Reason: "RUN_NOT_SELECTED",
			Message: "metrics are those of a run: open the session with a Selector that has a RunID",
		}
	}
	return logMetrics(ctx, s.cluster, runID, step, values)
}

func logMetrics(ctx context.Context, to *cluster, runID string, step int64, values map[string]float64) error {
	logged := &driverv1.StepMetrics{Step: step, Values: values, Time: timestamppb.Now()}
	request := &driverv1.LogMetricsRequest{RunId: runID, Steps: []*driverv1.StepMetrics{logged}}
	_, _, err := create(ctx, to, "driver", runID, func(
		ctx context.Context, at member, again func(*Error) bool,
	) (*driverv1.LogMetricsResponse, error) {
		stub := driverv1.NewRunServiceClient(at.service.conn)
		return repeated(ctx, at.service, stub.LogMetrics, request, callTimeout, again)
	})
	return err
}

// MetricsOption narrows a list of metrics.
type MetricsOption func(*driverv1.ListMetricsRequest)

// WithMetrics lists these metrics only, at most 1024.
func WithMetrics(names ...string) MetricsOption {
	return func(r *driverv1.ListMetricsRequest) { r.Names = names }
}

// WithMaxPoints thins longer metrics, at each driver, to about as many points, 3 to 10,000. The least and the greatest values stay.
func WithMaxPoints(points int) MetricsOption {
	return func(r *driverv1.ListMetricsRequest) { r.MaxPoints = int32(points) }
}

// Metrics are a run's, of all drivers, in the order of their names; none of a run that has none.
//
// Errors: ErrUnavailable: a driver is away, and what it has is missing.
func (r *Runs) Metrics(ctx context.Context, runID string, opts ...MetricsOption) ([]Metric, error) {
	request := &driverv1.ListMetricsRequest{RunId: runID}
	for _, option := range opts {
		option(request)
	}
	drivers, err := r.client.drivers(ctx)
	if err != nil {
		return nil, err
	}
	found := map[string]map[int64]MetricPoint{}
	for _, at := range drivers {
		stub := driverv1.NewRunServiceClient(at.service().conn)
		answers, err := collect(ctx, at.service(), stub.ListMetrics, request, listTimeout)
		if err != nil {
			return nil, err
		}
		for _, answer := range answers {
			mergePoints(found, answer.GetPoints())
		}
	}
	var all []Metric
	for _, name := range slices.Sorted(maps.Keys(found)) {
		metric := Metric{Name: name}
		for _, step := range slices.Sorted(maps.Keys(found[name])) {
			metric.Points = append(metric.Points, found[name][step])
		}
		all = append(all, metric)
	}
	return all, nil
}

// mergePoints adds points; of two of a step the later one counts.
func mergePoints(found map[string]map[int64]MetricPoint, points *driverv1.MetricPoints) {
	if points == nil {
		return
	}
	known := found[points.GetName()]
	if known == nil {
		known = map[int64]MetricPoint{}
		found[points.GetName()] = known
	}
	values, times := points.GetValues(), points.GetTimes()
	for index, step := range points.GetSteps() {
		if index >= len(values) || index >= len(times) {
			return
		}
		point := MetricPoint{step, values[index], time.UnixMicro(times[index])}
		if before, is := known[step]; !is || !before.Time.After(point.Time) {
			known[step] = point
		}
	}
}

// DeleteMetrics deletes points of a run's metrics at all drivers, those of a step and of later ones (0 = all), and is how many. Without
// names it is all metrics. A trainer that resumes from a checkpoint deletes what the last attempt logged after it.
//
// Errors: ErrUnavailable: a driver is away; others may have deleted theirs.
func (r *Runs) DeleteMetrics(ctx context.Context, runID string, fromStep int64, names ...string) (int64, error) {
	drivers, err := r.client.drivers(ctx)
	if err != nil {
		return 0, err
	}
	deleted := int64(0)
	for _, at := range drivers {
		request := &driverv1.DeleteMetricsRequest{RunId: runID, Names: names, FromStep: fromStep}
		stub := driverv1.NewRunServiceClient(at.service().conn)
		answer, err := call(ctx, at.service(), stub.DeleteMetrics, request, listTimeout, true)
		if err != nil {
			return deleted, err
		}
		deleted += answer.GetCount()
	}
	return deleted, nil
}
