package penstock

import (
	"context"
	"encoding/json"
	"errors"
	"iter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	inferencev1 "penstock.example/penstock/gen/inference/v1"
)

// weightsTimeout bounds one attempt at what moves weights; a context may end it sooner.
const weightsTimeout = 10 * time.Minute

// othersTimeout is how long a push to one of several engines waits for another one that runs there: others may hand weights on
// to it.
const othersTimeout = time.Minute

// WeightUpdate is what an update did. Of several engines, each step lasted as long as at the slowest one.
type WeightUpdate struct {
	*inferencev1.UpdateWeightsResponse
	// Away are the names of engines that do not answer and got nothing. They get calls again when they have these weights.
	Away []string
}

// WeightOption is one setting of an update, a transfer or an adapter.
type WeightOption func(*weightOptions)

type weightOptions struct {
	format inferencev1.WeightFormat
	mode   inferencev1.PauseMode
	idle   *durationpb.Duration
}

// WithPartialWeights gives only some of the tensors; the others stay as they are.
func WithPartialWeights() WeightOption {
	return func(o *weightOptions) { o.format = inferencev1.WeightFormat_WEIGHT_FORMAT_SAFETENSORS_PARTIAL }
}

// WithPauseMode says what becomes of generations in flight: they are aborted, finished first, or kept (without it).
func WithPauseMode(mode inferencev1.PauseMode) WeightOption {
	return func(o *weightOptions) { o.mode = mode }
}

// WithIdleTimeout has the engine abandon a transfer after this long without tensors; without it 5 min.
func WithIdleTimeout(timeout time.Duration) WeightOption {
	return func(o *weightOptions) { o.idle = durationpb.New(timeout) }
}

func weightSettings(opts []WeightOption) weightOptions {
	settings := weightOptions{
		format: inferencev1.WeightFormat_WEIGHT_FORMAT_SAFETENSORS, mode: inferencev1.PauseMode_PAUSE_MODE_KEEP,
	}
	for _, option := range opts {
		option(&settings)
	}
	return settings
}

// PolicyVersion is the version of the base weights that are in force.
func (i *Inference) PolicyVersion(ctx context.Context) (int64, error) {
	info, err := i.Info(ctx)
	return info.GetPolicyVersion(), err
}

// UpdateWeights replaces the weights by those of a version, atomically: an update that fails leaves the old ones in force.
// Generations in flight go on under the new weights. It is sent once more where the service went away meanwhile. Where the gates
// have a list of engines, all get it.
//
// Errors: ErrFailedPrecondition (POLICY_VERSION_NOT_NEWER, TENSOR_UNKNOWN, TENSOR_MISSING, TENSOR_SHAPE), ErrAborted
// (UPDATE_IN_PROGRESS), ErrInvalidArgument (NO_TENSORS, TENSOR_DTYPE, TENSOR_SIZE: nothing was sent), ErrEnginesFailed: some of
// several engines failed, also for BASE_VERSION_DIFFERS: the engine's other tensors are not those that a partial update was made
// for.
func (i *Inference) UpdateWeights(
	ctx context.Context, version int64, tensors []Tensor, opts ...WeightOption,
) (WeightUpdate, error) {
	file, err := layOut(tensors)
	if err != nil {
		return WeightUpdate{}, err
	}
	settings := weightSettings(opts)
	return i.update(ctx, file, &inferencev1.UpdateWeightsRequest_UpdateBegin{
		PolicyVersion: version, Format: settings.format, Mode: settings.mode, SizeBytes: &file.size, Sha256: file.sha256,
	})
}

// UpdateWeightsFrom is UpdateWeights from files that the service reads itself: a safetensors file, or a directory of them,
// under its weights_dir. They must not change while their weights are in force.
//
// Errors: those of UpdateWeights; ErrFailedPrecondition, PATHS_OFF; ErrInvalidArgument, PATH_REFUSED.
func (i *Inference) UpdateWeightsFrom(
	ctx context.Context, version int64, path string, opts ...WeightOption,
) (WeightUpdate, error) {
	settings := weightSettings(opts)
	return i.update(ctx, nil, &inferencev1.UpdateWeightsRequest_UpdateBegin{
		PolicyVersion: version, Format: settings.format, Mode: settings.mode, Path: path,
	})
}

func (i *Inference) update(
	ctx context.Context, file *tensorFile, begin *inferencev1.UpdateWeightsRequest_UpdateBegin,
) (WeightUpdate, error) {
	type request = inferencev1.UpdateWeightsRequest
	frames := func(yield func(*request) bool) {
		whole := yield(&request{Frame: &inferencev1.UpdateWeightsRequest_Begin{Begin: begin}})
		for chunk := range file.chunks() {
			if whole = whole && yield(&request{Frame: &inferencev1.UpdateWeightsRequest_Chunk{Chunk: chunk}}); !whole {
				return
			}
		}
		if whole {
			commit := &inferencev1.UpdateWeightsRequest_UpdateCommit{Sha256: file.digest()}
			yield(&request{Frame: &inferencev1.UpdateWeightsRequest_Commit{Commit: commit}})
		}
	}
	push := func(ctx context.Context, at engine) (*inferencev1.UpdateWeightsResponse, error) {
		if at.name == "" {
			return pushTwice(ctx, at.service, at.stub.UpdateWeights, frames)
		}
		return afterOthers(ctx, func() (*inferencev1.UpdateWeightsResponse, error) {
			return pushTwice(ctx, at.service, at.stub.UpdateWeights, frames)
		})
	}
	var answers []*inferencev1.UpdateWeightsResponse
	var away []string
	var err error
	if begin.GetFormat() == inferencev1.WeightFormat_WEIGHT_FORMAT_SAFETENSORS_PARTIAL {
		answers, away, err = pushPartial(ctx, i.engines, begin.GetPolicyVersion(), push)
	} else {
		answers, away, err = atAll(ctx, i.engines, push)
	}
	if err != nil {
		return WeightUpdate{}, err
	}
	i.engines.allHave(begin.GetPolicyVersion())
	return WeightUpdate{slowest(answers), away}, nil
}

// slowest is the result of a push to all engines.
func slowest(answers []*inferencev1.UpdateWeightsResponse) *inferencev1.UpdateWeightsResponse {
	if len(answers) == 1 {
		return answers[0]
	}
	whole := &inferencev1.UpdateWeightsResponse{PolicyVersion: answers[0].GetPolicyVersion(), Phases: &inferencev1.UpdatePhases{}}
	later := func(one, other *durationpb.Duration) *durationpb.Duration {
		if one == nil || other != nil && other.AsDuration() > one.AsDuration() {
			return other
		}
		return one
	}
	for _, answer := range answers {
		whole.PolicyVersion = min(whole.PolicyVersion, answer.GetPolicyVersion())
		phases := answer.GetPhases()
		whole.Phases.Transfer = later(whole.Phases.Transfer, phases.GetTransfer())
		whole.Phases.Pause = later(whole.Phases.Pause, phases.GetPause())
		whole.Phases.Load = later(whole.Phases.Load, phases.GetLoad())
	}
	return whole
}

// InitTransfer sets up transfers in which the trainer moves weights itself; once, before the first StartTransfer. The
// backend is one of those that Info names, as "nccl"; its options are written as JSON.
//
// Errors: ErrUnsupported, CAPABILITY_MISSING; ErrInvalidArgument, TRANSFER_REFUSED, NOT_JSON; ErrConfiguration, ENGINE_LIST: the
// gates have a list of engines, so connect to each by its address, with WithoutDiscovery.
func (i *Inference) InitTransfer(ctx context.Context, backend string, options any) error {
	text, err := asJSON(options, "options")
	if err != nil {
		return err
	}
	at, err := i.engines.only(ctx)
	if err != nil {
		return err
	}
	request := &inferencev1.InitTransferRequest{Backend: backend, OptionsJson: text}
	_, err = call(ctx, at.service, at.stub.InitTransfer, request, weightsTimeout, false)
	return err
}

// Transfer is weights that the trainer moves itself (NCCL, IPC) while the engine is paused. End it with Commit or Abandon;
// after Commit, Abandon does nothing, so that it may be deferred.
type Transfer struct {
	// ID is the transfer's id.
	ID   string
	at   engine
	over bool
}

// StartTransfer pauses the engine for the weights of a version, which the trainer moves itself.
//
// Errors: ErrAborted, UPDATE_IN_PROGRESS; ErrFailedPrecondition, POLICY_VERSION_NOT_NEWER; ErrUnsupported,
// CAPABILITY_MISSING; ErrConfiguration, ENGINE_LIST, as InitTransfer.
func (i *Inference) StartTransfer(ctx context.Context, version int64, opts ...WeightOption) (*Transfer, error) {
	settings := weightSettings(opts)
	request := &inferencev1.StartTransferRequest{
		RequestId: requestID(), PolicyVersion: version, Mode: settings.mode, IdleTimeout: settings.idle,
	}
	at, err := i.engines.only(ctx)
	if err != nil {
		return nil, err
	}
	answer, err := call(ctx, at.service, at.stub.StartTransfer, request, weightsTimeout, true)
	if err != nil {
		return nil, err
	}
	return &Transfer{ID: answer.GetTransferId(), at: at}, nil
}

// Tensors makes the engine receive some tensors, which the trainer sends meanwhile. The descriptor is the backend's, written
// as JSON: names, shapes, dtypes.
//
// Errors: ErrInvalidArgument, TRANSFER_REFUSED, NOT_JSON; ErrFailedPrecondition, NO_TRANSFER: it was abandoned meanwhile.
func (t *Transfer) Tensors(ctx context.Context, descriptor any) error {
	text, err := asJSON(descriptor, "descriptor")
	if err != nil {
		return err
	}
	request := &inferencev1.TransferTensorsRequest{TransferId: t.ID, DescriptorJson: text}
	_, err = call(ctx, t.at.service, t.at.stub.TransferTensors, request, weightsTimeout, false)
	return err
}

// Commit puts the version in force; generations go on.
func (t *Transfer) Commit(ctx context.Context) (*inferencev1.FinishTransferResponse, error) {
	return t.finish(ctx, true)
}

// Abandon ends the transfer with the old weights in force. It does nothing where the transfer has ended.
func (t *Transfer) Abandon(ctx context.Context) error {
	if t.over {
		return nil
	}
	_, err := t.finish(ctx, false)
	return err
}

func (t *Transfer) finish(ctx context.Context, commit bool) (*inferencev1.FinishTransferResponse, error) {
	t.over = true
	request := &inferencev1.FinishTransferRequest{TransferId: t.ID, Commit: commit}
	return call(ctx, t.at.service, t.at.stub.FinishTransfer, request, weightsTimeout, true)
}

// LoadAdapter loads a LoRA adapter, or a newer version of one, beside the base weights, atomically. The tensors are those of
// PEFT's adapter_model.safetensors; config is the content of its adapter_config.json: r, lora_alpha, target_modules.
//
// Errors: ErrUnsupported, CAPABILITY_MISSING; ErrFailedPrecondition, POLICY_VERSION_NOT_NEWER; ErrInvalidArgument,
// ADAPTER_INVALID, NOT_JSON; ErrResourceExhausted, ADAPTER_LIMIT; ErrEnginesFailed: some of several engines failed.
func (i *Inference) LoadAdapter(
	ctx context.Context, name string, version int64, tensors []Tensor, config map[string]any, opts ...WeightOption,
) (*inferencev1.Adapter, error) {
	text, err := asJSON(config, "config")
	if err != nil {
		return nil, err
	}
	file, err := layOut(tensors)
	if err != nil {
		return nil, err
	}
	return i.load(ctx, file, &inferencev1.LoadAdapterRequest_AdapterBegin{
		Name: name, PolicyVersion: version, AdapterConfigJson: text, Mode: weightSettings(opts).mode,
	})
}

// LoadAdapterFrom is LoadAdapter from a directory as PEFT saves it, under the service's adapters_dir.
//
// Errors: those of LoadAdapter; ErrFailedPrecondition, PATHS_OFF; ErrInvalidArgument, PATH_REFUSED.
func (i *Inference) LoadAdapterFrom(
	ctx context.Context, name string, version int64, path string, opts ...WeightOption,
) (*inferencev1.Adapter, error) {
	return i.load(ctx, nil, &inferencev1.LoadAdapterRequest_AdapterBegin{
		Name: name, PolicyVersion: version, Path: path, Mode: weightSettings(opts).mode,
	})
}

func (i *Inference) load(
	ctx context.Context, file *tensorFile, begin *inferencev1.LoadAdapterRequest_AdapterBegin,
) (*inferencev1.Adapter, error) {
	type request = inferencev1.LoadAdapterRequest
	frames := func(yield func(*request) bool) {
		whole := yield(&request{Frame: &inferencev1.LoadAdapterRequest_Begin{Begin: begin}})
		for chunk := range file.chunks() {
			if whole = whole && yield(&request{Frame: &inferencev1.LoadAdapterRequest_Chunk{Chunk: chunk}}); !whole {
				return
			}
		}
		if whole {
			commit := &inferencev1.LoadAdapterRequest_AdapterCommit{Sha256: file.digest()}
			yield(&request{Frame: &inferencev1.LoadAdapterRequest_Commit{Commit: commit}})
		}
	}
	answers, _, err := atAll(ctx, i.engines, func(ctx context.Context, at engine) (*inferencev1.LoadAdapterResponse, error) {
		return pushTwice(ctx, at.service, at.stub.LoadAdapter, frames)
	})
	if err != nil {
		return nil, err
	}
	return answers[0].GetAdapter(), nil
}

// UnloadAdapter unloads an adapter; its completions in flight go on. It does nothing where the adapter is not loaded.
func (i *Inference) UnloadAdapter(ctx context.Context, name string) error {
	request := &inferencev1.UnloadAdapterRequest{Name: name}
	_, _, err := atAll(ctx, i.engines, func(ctx context.Context, at engine) (*inferencev1.UnloadAdapterResponse, error) {
		return call(ctx, at.service, at.stub.UnloadAdapter, request, weightsTimeout, true)
	})
	return err
}

// Adapters yields the loaded adapters, sorted by name. An error is the last thing that it yields.
//
// Errors: ErrUnsupported, CAPABILITY_MISSING.
func (i *Inference) Adapters(ctx context.Context) iter.Seq2[*inferencev1.Adapter, error] {
	return paged(func(token string) ([]*inferencev1.Adapter, string, error) {
		request := &inferencev1.ListAdaptersRequest{PageToken: token}
		answer, err := call(
			ctx, i.client.services["inference"], i.client.inference.ListAdapters, request, callTimeout, true,
		)
		return answer.GetAdapters(), answer.GetNextPageToken(), err
	})
}

// Pause stops generating until Resume; new requests wait. It returns how many generations are in flight or wait.
func (i *Inference) Pause(ctx context.Context, mode inferencev1.PauseMode) (int, error) {
	request := &inferencev1.PauseRequest{Mode: mode}
	answers, _, err := atAll(ctx, i.engines, func(ctx context.Context, at engine) (*inferencev1.PauseResponse, error) {
		return call(ctx, at.service, at.stub.Pause, request, weightsTimeout, true)
	})
	sum := 0
	for _, answer := range answers {
		sum += int(answer.GetInFlightCount())
	}
	return sum, err
}

// Resume lets the engine generate again.
func (i *Inference) Resume(ctx context.Context) error {
	request := &inferencev1.ResumeRequest{}
	_, _, err := atAll(ctx, i.engines, func(ctx context.Context, at engine) (*inferencev1.ResumeResponse, error) {
		return call(ctx, at.service, at.stub.Resume, request, callTimeout, true)
	})
	return err
}

// pushTwice sends a client stream; once more where the service went away, which changes nothing that was done already.
func pushTwice[Q, A any, S sender[Q, A]](
	ctx context.Context, s *service, m func(context.Context, ...grpc.CallOption) (S, error), frames iter.Seq[Q],
) (A, error) {
	answer, err := push(ctx, s, m, frames, weightsTimeout)
	var failure *Error
	if !errors.As(err, &failure) || failure.Kind != ErrUnavailable {
		return answer, err
	}
	var wait delays
	if err := sleep(ctx, wait.next(failure)); err != nil {
		return answer, fromRPC(ctx, err, s)
	}
	return push(ctx, s, m, frames, weightsTimeout)
}

// afterOthers is what a push gives, repeated while another one runs at the engine.
func afterOthers[A any](ctx context.Context, push func() (A, error)) (A, error) {
	var wait delays
	for until := time.Now().Add(othersTimeout); ; {
		answer, err := push()
		var failure *Error
		isBusy := errors.As(err, &failure) && failure.Kind == ErrAborted && failure.Reason == "UPDATE_IN_PROGRESS"
		if !isBusy || time.Now().After(until) {
			return answer, err
		}
		if err := sleep(ctx, wait.next(failure)); err != nil {
			return answer, fromRPC(ctx, err, anyone)
		}
	}
}

func asJSON(value any, what string) (string, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return "", &Error{
			Kind: ErrInvalidArgument, Reason: "NOT_JSON", cause: err,
			Message: "The " + what + " have a value that JSON cannot represent: " + err.Error(),
		}
	}
	return string(text), nil
}
