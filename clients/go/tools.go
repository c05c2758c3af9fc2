package penstock

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	chatv1 "penstock.example/penstock/gen/chat/v1"
	interceptionv1 "penstock.example/penstock/gen/interception/v1"
)

// maxWhole is the largest integer that a Struct, which has doubles only, carries exactly.
const maxWhole = 1 << 53

// HostTool is a function of this program that agents of rollouts may call.
type HostTool struct {
	// Name is a letter, then letters, digits, _ and -, 48 at most; none that agents have themselves, as bash.
	Name string
	// Description is for the model.
	Description string
	// Parameters is the JSON Schema of the arguments, as any value that encoding/json writes; nil = any object. The gate
	// refuses invalid arguments before they come here.
	Parameters any
	// Function runs a call, in a goroutine of its own. Its context ends where nobody needs the result any more. What it
	// returns is the agent's: a string, []ToolContent, or any value that encoding/json writes. The agent reads the message
	// of a ToolError and of no other error.
	Function func(ctx context.Context, call *HostToolCall) (any, error)
}

// HostToolCall is one call of a tool by an agent. It runs once, however often the connection breaks.
type HostToolCall struct {
	// Message has its id, its rollout, its arguments and when it times out for the agent.
	Message *interceptionv1.HostToolCall
}

// Arguments reads the arguments into a value, as json.Unmarshal does.
func (c *HostToolCall) Arguments(into any) error {
	return json.Unmarshal([]byte(c.Message.GetArgumentsJson()), into)
}

// ToolError is an error of a tool whose message the agent reads.
type ToolError string

// Error is the message.
func (e ToolError) Error() string { return string(e) }

// ToolContent is one part of a result: a text, or an image with its media type.
type ToolContent struct {
	Text      string
	Image     []byte
	MediaType string
}

// WithToolErrors is given what a tool returned or panicked with and the agent does not read; without it slog has it.
func WithToolErrors(report func(call *HostToolCall, err error)) SessionOption {
	return func(o *sessionOptions) { o.toolErrors = report }
}

func (s Selector) message() *interceptionv1.CallSelector {
	return &interceptionv1.CallSelector{
		RunId: some(s.RunID), GroupId: some(s.GroupID), RolloutIds: s.RolloutIDs, Labels: s.Labels,
		PolicyIds: s.PolicyIDs,
	}
}

// offer is the tools of one selector.
type offer struct {
	selector *interceptionv1.CallSelector
	tools    []HostTool
	messages []*chatv1.Tool
}

// hostTools are the tools of a session at one gate and their calls. It knows no stream: stream.go moves the frames.
//
// Invariants: a call runs once, however often the gate sends it; its result stays until the gate has it on disk.
type hostTools struct {
	wake   chan<- struct{}
	report func(*HostToolCall, error)
	whole  context.Context // of all calls
	end    context.CancelFunc

	mu        sync.Mutex
	offers    map[string]offer
	withdrawn map[string]*interceptionv1.CallSelector // selectors of offers that the gate may still have
	running   map[string]context.CancelFunc
	results   map[string]*interceptionv1.HostToolResult
	unsent    []string
	calls     sync.WaitGroup
}

func newHostTools(wake chan<- struct{}, report func(*HostToolCall, error)) *hostTools {
	if report == nil {
		report = func(call *HostToolCall, err error) {
			slog.Error("a host tool failed", "tool", call.Message.GetName(), "rollout", call.Message.GetRolloutId(), "error", err)
		}
	}
	whole, end := context.WithCancel(context.Background())
	return &hostTools{
		wake: wake, report: report, whole: whole, end: end, offers: map[string]offer{},
		withdrawn: map[string]*interceptionv1.CallSelector{},
		running:   map[string]context.CancelFunc{}, results: map[string]*interceptionv1.HostToolResult{},
	}
}

// offer has the tools served from now on; what it returns takes them back.
func (h *hostTools) offer(
	tools []HostTool, selector *interceptionv1.CallSelector,
) (func(), []*chatv1.Tool, error) {
	invalid := func(format string, arguments ...any) error {
		return &Error{Kind: ErrInvalidArgument, Reason: "HOST_TOOL", Message: fmt.Sprintf(format, arguments...)}
	}
	key, err := proto.MarshalOptions{Deterministic: true}.Marshal(selector)
	if err != nil {
		return nil, nil, invalid("The selector cannot be sent: %v", err)
	}
	messages := make([]*chatv1.Tool, len(tools))
	for i, tool := range tools {
		messages[i] = &chatv1.Tool{Name: tool.Name, Description: tool.Description}
		if tool.Parameters != nil {
			schema, err := json.Marshal(tool.Parameters)
			if err != nil {
				return nil, nil, invalid("The schema of tool %s is not JSON: %v", tool.Name, err)
			}
			messages[i].ParametersJsonSchema = string(schema)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for other, known := range h.offers {
		for i, tool := range tools {
			at := slices.IndexFunc(known.tools, func(had HostTool) bool { return had.Name == tool.Name })
			if other != string(key) && at >= 0 && !same(known, at, tool, messages[i]) {
				return nil, nil, invalid("This session has another tool %s", tool.Name)
			}
		}
	}
	before, had := h.offers[string(key)]
	set := func(offered offer, has bool) {
		delete(h.offers, string(key))
		if has {
			h.offers[string(key)] = offered
		}
	}
	set(offer{selector, tools, messages}, len(tools) > 0)
	undo := func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		set(before, had)
	}
	return undo, messages, nil
}

func same(known offer, at int, tool HostTool, message *chatv1.Tool) bool {
	one, other := reflect.ValueOf(known.tools[at].Function), reflect.ValueOf(tool.Function)
	return proto.Equal(known.messages[at], message) && one.Pointer() == other.Pointer()
}

// all is what is offered.
func (h *hostTools) all() []offer {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []offer
	for _, known := range h.offers {
		all = append(all, known)
	}
	return all
}

// withdraws notes that the offer to a selector was withdrawn, and that the gate does not know it yet.
func (h *hostTools) withdraws(selector *interceptionv1.CallSelector) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.withdrawn[keyOf(selector)] = selector
}

// registrations are what a stream has to send; withdrawals first, as a gate limits the selectors.
func (h *hostTools) registrations(session string) []*interceptionv1.RegisterToolsRequest {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []*interceptionv1.RegisterToolsRequest
	for key, selector := range h.withdrawn {
		if _, offered := h.offers[key]; !offered {
			all = append(all, &interceptionv1.RegisterToolsRequest{SessionId: session, Selector: selector})
		}
	}
	for _, known := range h.offers {
		request := &interceptionv1.RegisterToolsRequest{SessionId: session, Selector: known.selector, Tools: known.messages}
		all = append(all, request)
	}
	return all
}

// registered: the gate has these tools in place of what it had.
func (h *hostTools) registered(request *interceptionv1.RegisterToolsRequest) {
	h.mu.Lock()
	defer h.mu.Unlock()
	key := keyOf(request.GetSelector())
	if _, offered := h.offers[key]; offered || len(request.GetTools()) == 0 { // else they were withdrawn meanwhile
		delete(h.withdrawn, key)
	}
}

// keyOf returns the same key for equal selectors only. One that cannot be sent was refused when it was offered.
func keyOf(selector *interceptionv1.CallSelector) string {
	key, _ := proto.MarshalOptions{Deterministic: true}.Marshal(selector)
	return string(key)
}

// called takes a call from the gate, which may be a repeat.
func (h *hostTools) called(message *interceptionv1.HostToolCall) {
	h.mu.Lock()
	defer h.mu.Unlock()
	id := message.GetToolCallId()
	switch {
	case h.results[id] != nil:
		h.send(id)
	case h.running[id] == nil && h.whole.Err() == nil:
		ctx, cancel := context.WithCancel(h.whole)
		h.running[id] = cancel
		tool := h.tool(message.GetName())
		h.calls.Add(1)
		go func() {
			defer h.calls.Done()
			defer cancel()
			result := h.run(ctx, tool, &HostToolCall{message})
			h.mu.Lock()
			defer h.mu.Unlock()
			if h.running[id] != nil && ctx.Err() == nil {
				delete(h.running, id)
				h.results[id] = result
				h.send(id)
			}
		}()
	}
}

func (h *hostTools) tool(name string) *HostTool {
	for _, known := range h.offers {
		for i := range known.tools {
			if known.tools[i].Name == name {
				return &known.tools[i]
			}
		}
	}
	return nil
}

func (h *hostTools) run(ctx context.Context, tool *HostTool, call *HostToolCall) *interceptionv1.HostToolResult {
	result := &interceptionv1.HostToolResult{ToolCallId: call.Message.GetToolCallId()}
	fields, err := carriedOut(ctx, tool, call)
	var failed ToolError
	switch {
	case errors.As(err, &failed):
		result.Result, result.IsError = spoken(strings.TrimSpace(string(failed))), true
	case err != nil:
		if ctx.Err() == nil {
			h.report(call, err)
		}
		result.Result, result.IsError = spoken(""), true
	default:
		result.Result = fields
	}
	return result
}

func carriedOut(ctx context.Context, tool *HostTool, call *HostToolCall) (_ *structpb.Struct, err error) {
	if tool == nil {
		return nil, ToolError("The tool is no longer available.")
	}
	defer func() {
		if panicked := recover(); panicked != nil {
			err = fmt.Errorf("the tool panicked: %v", panicked)
		}
	}()
	given, err := tool.Function(ctx, call)
	if err != nil {
		return nil, err
	}
	return resultFields(given)
}

// spoken is a text for the agent where the tool failed.
func spoken(text string) *structpb.Struct {
	if text == "" {
		text = "The tool failed."
	}
	fields, _ := structpb.NewStruct(map[string]any{"text": strings.ToValidUTF8(text, "\uFFFD")}) // a text is always a field
	return fields
}

// resultFields is a tool's result as the gate takes it.
func resultFields(given any) (*structpb.Struct, error) {
	switch given := given.(type) {
	case nil:
		given = map[string]any{"text": ""}
		return structpb.NewStruct(given.(map[string]any))
	case string:
		return structpb.NewStruct(map[string]any{"text": given})
	case []ToolContent:
		blocks := make([]any, len(given))
		for i, part := range given {
			blocks[i] = map[string]any{"type": "text", "text": part.Text}
			if part.Image != nil {
				data := base64.StdEncoding.EncodeToString(part.Image)
				blocks[i] = map[string]any{"type": "image", "data": data, "mimeType": part.MediaType}
			}
		}
		return structpb.NewStruct(map[string]any{"content": blocks})
	}
	text, err := json.Marshal(given)
	if err != nil {
		return nil, err
	}
	if text[0] != '{' {
		text = slices.Concat([]byte(`{"result":`), text, []byte(`}`))
	}
	if err := exactNumbers(text); err != nil {
		return nil, err
	}
	fields := &structpb.Struct{}
	return fields, protojson.Unmarshal(text, fields)
}

// exactNumbers refuses integers that would change on the way: a Struct has doubles only.
func exactNumbers(text []byte) error {
	decoder := json.NewDecoder(strings.NewReader(string(text)))
	decoder.UseNumber()
	for {
		token, err := decoder.Token()
		if err != nil {
			return nil // the end: the text was written by encoding/json
		}
		number, is := token.(json.Number)
		if !is || strings.ContainsAny(number.String(), ".eE") {
			continue
		}
		if value, err := number.Float64(); err != nil || math.Abs(value) > maxWhole {
			return fmt.Errorf("an integer beyond 2**53 cannot be sent exactly, return it as text: %s", number)
		}
	}
}

// cancelled: calls need no result any more.
func (h *hostTools) cancelled(ids []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range ids {
		h.forget(id)
		if cancel := h.running[id]; cancel != nil {
			delete(h.running, id)
			cancel()
		}
	}
}

// acknowledged: results that the gate has on disk, or refused; then the agent is given an error of the tool.
func (h *hostTools) acknowledged(frame *interceptionv1.ToolResultsAcknowledged) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range frame.GetAcceptedToolCallIds() {
		h.forget(id)
	}
	for _, rejected := range frame.GetRejected() {
		id := rejected.GetCallId()
		result := h.results[id]
		h.forget(id)
		if rejected.GetReason() != interceptionv1.ResultRejected_REASON_INVALID || result == nil {
			continue // the call is over
		}
		failed := &interceptionv1.HostToolResult{ToolCallId: id, Result: spoken(""), IsError: true}
		h.report(&HostToolCall{&interceptionv1.HostToolCall{ToolCallId: id}}, rejection(rejected))
		if !proto.Equal(result, failed) {
			h.results[id] = failed
			h.send(id)
		}
	}
}

// takenUp: a new stream stands. Results that were not acknowledged are sent again; a gate that forgot the session has no
// calls of it.
func (h *hostTools) takenUp(resumed bool) {
	if !resumed {
		h.mu.Lock()
		var ids []string
		for id := range h.running {
			ids = append(ids, id)
		}
		clear(h.results)
		clear(h.withdrawn) // the gate has nothing of the old session
		h.mu.Unlock()
		h.cancelled(ids)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.unsent = nil
	for id := range h.results {
		h.send(id)
	}
}

// next is what is to be sent, up to a bound in bytes; nil where there is nothing.
func (h *hostTools) next() *interceptionv1.ToolResults {
	h.mu.Lock()
	defer h.mu.Unlock()
	frame, size := &interceptionv1.ToolResults{}, 0
	for len(h.unsent) > 0 {
		result := h.results[h.unsent[0]]
		size += proto.Size(result)
		if len(frame.Results) > 0 && size > frameBytes {
			break
		}
		h.unsent = h.unsent[1:]
		frame.Results = append(frame.Results, result)
	}
	if len(frame.Results) == 0 {
		return nil
	}
	return frame
}

// ended: calls that run are cancelled; it returns when none does any more.
func (h *hostTools) ended() {
	h.end()
	h.calls.Wait()
}

// send and forget: the caller holds the lock.
func (h *hostTools) send(id string) {
	if !slices.Contains(h.unsent, id) {
		h.unsent = append(h.unsent, id)
	}
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

func (h *hostTools) forget(id string) {
	delete(h.results, id)
	h.unsent = slices.DeleteFunc(h.unsent, func(other string) bool { return other == id })
}
