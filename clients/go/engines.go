package penstock

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	inferencev1 "penstock.example/penstock/gen/inference/v1"
)

// EnginesFailed says at which of several engines something failed; errors.As finds it in an error of the kind
// ErrEnginesFailed. The others have done it.
type EnginesFailed struct {
	// Failures are the errors, by the engine's name.
	Failures map[string]*Error
	// InForce is the policy version of the base weights that each engine has now. One that does not answer is not in it.
	InForce map[string]int64
	asked   []string
}

// Error names each engine that failed, with its error, and what all of them have.
func (e *EnginesFailed) Error() string {
	var failed, have []string
	for _, name := range slices.Sorted(maps.Keys(e.Failures)) {
		failed = append(failed, fmt.Sprintf("%s: %s: %s", name, e.Failures[name].Reason, e.Failures[name].Message))
	}
	for _, name := range e.asked {
		version := "?"
		if has, is := e.InForce[name]; is {
			version = fmt.Sprint(has)
		}
		have = append(have, name+" "+version)
	}
	return fmt.Sprintf(
		"%d of %d engines failed (%s). Policy versions in force: %s",
		len(failed), len(e.asked), strings.Join(failed, "; "), strings.Join(have, ", "),
	)
}

// engine is one inference service; its name is empty where it is the only one.
type engine struct {
	name    string
	service *service
	stub    inferencev1.InferenceServiceClient
}

// engines are those that the gates have a list of; without a list, the one at the connection's address.
type engines struct {
	cluster *cluster

	mu sync.Mutex
	// The version of the last partial push, and the one that it was made for; isMade is false before the first.
	version, made int64
	isMade        bool
	// The version that all engines had after this client's last push; hasPushed is false before the first.
	pushed    int64
	hasPushed bool
}

// found are the engines that may answer, and the names of those that are lost; all may answer if all are lost.
func (e *engines) found(ctx context.Context) (live []engine, away []string, err error) {
	members, err := e.cluster.enginesOfGates(ctx)
	if err != nil {
		return nil, nil, err
	}
	asked := slices.DeleteFunc(slices.Clone(members), func(m member) bool { return m.lost })
	if len(asked) == 0 {
		asked = members
	}
	for _, m := range members {
		if !slices.Contains(asked, m) {
			away = append(away, m.name)
			continue
		}
		live = append(live, engine{m.name, m.service, inferencev1.NewInferenceServiceClient(m.service.conn)})
	}
	return live, away, nil
}

// only is the engine of a connection that has one.
//
// Errors: ErrConfiguration, ENGINE_LIST: there are several.
func (e *engines) only(ctx context.Context) (engine, error) {
	live, away, err := e.found(ctx)
	if err != nil {
		return engine{}, err
	}
	if len(live)+len(away) > 1 {
		return engine{}, configuration("ENGINE_LIST",
			"The gate has a list of engines, and this is done at one: connect to each by its address, with WithoutDiscovery")
	}
	return live[0], nil
}

// atAll does something at all engines at once; it gives what each answered, in the order of the gates' list, and the names of
// engines that are lost and were not asked. These are left out as long as others answer.
//
// Errors: ErrEnginesFailed, some of several engines failed, and the others have done it; else the error of the only engine, or
// the one that all have.
func atAll[A any](
	ctx context.Context, e *engines, work func(context.Context, engine) (A, error),
) (answers []A, away []string, err error) {
	live, away, err := e.found(ctx)
	if err != nil {
		return nil, nil, err
	}
	found, failed := make([]A, len(live)), make([]error, len(live))
	var working sync.WaitGroup
	for at, one := range live {
		working.Add(1)
		go func() {
			defer working.Done()
			found[at], failed[at] = work(ctx, one)
		}()
	}
	working.Wait()
	if len(live) == 1 && len(away) == 0 {
		return found, nil, failed[0]
	}
	failures := map[string]*Error{}
	isOne := true
	var first *Error
	for at, one := range live {
		if failed[at] == nil {
			answers = append(answers, found[at])
			continue
		}
		failure := fromRPC(ctx, failed[at], one.service)
		failures[one.name] = failure
		if first == nil {
			first = failure
		}
		isOne = isOne && failure.Kind == first.Kind && failure.Reason == first.Reason
	}
	switch {
	case first == nil:
		return answers, away, nil
	case len(answers) == 0 && isOne:
		return nil, nil, first
	case ctx.Err() != nil: // what is in force cannot be asked any more
		return nil, nil, fromRPC(ctx, ctx.Err(), anyone)
	}
	all := &EnginesFailed{Failures: failures, InForce: inForce(ctx, live)}
	for _, one := range live {
		all.asked = append(all.asked, one.name)
	}
	return nil, nil, &Error{Kind: ErrEnginesFailed, Reason: "ENGINES_FAILED", Message: all.Error(), cause: all}
}

// pushPartial is atAll for a push of some tensors: it is made for the newest older version that any engine has, or this client
// pushed last. An engine with another version fails (BASE_VERSION_DIFFERS): its other tensors are not those that the push was made
// for.
func pushPartial[A any](
	ctx context.Context, e *engines, version int64, push func(context.Context, engine) (A, error),
) (answers []A, away []string, err error) {
	live, away, err := e.found(ctx)
	if err != nil {
		return nil, nil, err
	}
	if len(live) == 1 && len(away) == 0 {
		return atAll(ctx, e, push)
	}
	have := inForce(ctx, live)
	made := e.madeFor(version, slices.Collect(maps.Values(have)))
	return atAll(ctx, e, func(ctx context.Context, at engine) (A, error) {
		var none A
		has, is := have[at.name]
		if !is {
			var err error
			if has, err = versionOf(ctx, at); err != nil {
				return none, err
			}
		}
		if has != made && has != version {
			return none, &Error{Kind: ErrFailedPrecondition, Reason: "BASE_VERSION_DIFFERS", Message: fmt.Sprintf(
				"It has policy version %d, and the push is for engines with version %d: push all tensors", has, made,
			)}
		}
		return push(ctx, at)
	})
}

// madeFor is the version that a partial push is made for; -1 = it is not known. A repeat is made for the same one.
func (e *engines) madeFor(version int64, have []int64) int64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.isMade && e.version == version {
		return e.made
	}
	made := int64(-1)
	// Where an engine has the version already, nobody knows for which one it was made.
	if !slices.Contains(have, version) {
		for _, has := range have {
			if has < version {
				made = max(made, has)
			}
		}
		if e.hasPushed && e.pushed < version {
			made = max(made, e.pushed)
		}
	}
	if len(have) > 0 { // else no engine answers, and a repeat asks again
		e.isMade, e.version, e.made = true, version, made
	}
	return made
}

// allHave notes that all engines have a version.
func (e *engines) allHave(version int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.hasPushed, e.pushed = true, version
}

// versionOf is the policy version of an engine's base weights.
func versionOf(ctx context.Context, at engine) (int64, error) {
	info, err := call(ctx, at.service.briefly(), at.stub.GetInfo, &inferencev1.GetInfoRequest{}, callTimeout, true)
	return info.GetPolicyVersion(), err
}

// inForce is the policy version of each engine's base weights, by its name. One that does not answer is not in it.
func inForce(ctx context.Context, live []engine) map[string]int64 {
	var mu sync.Mutex
	versions := map[string]int64{}
	var asking sync.WaitGroup
	for _, one := range live {
		asking.Add(1)
		go func() {
			defer asking.Done()
			version, err := versionOf(ctx, one)
			if err != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			versions[one.name] = version
		}()
	}
	asking.Wait()
	return versions
}
