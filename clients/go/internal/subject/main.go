// Command subject is the Go client's part in the suite for clients of every language, whose README
// (tests/conformance/clients) defines its commands and answers.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"penstock.example/penstock"
)

// object is a JSON object.
type object = map[string]any

// annotation is one of the command annotate.
type annotation struct {
	Name        string         `json:"name"`
	Author      string         `json:"author"`
	CallID      *string        `json:"call_id"`
	Value       *float64       `json:"value"`
	TokenValues string         `json:"token_values"`
	Details     map[string]any `json:"details"`
}

// command is one line of the input, with whatever fields it may have.
type command struct {
	ID       int     `json:"id"`
	Do       string  `json:"do"`
	Client   string  `json:"client"`
	Session  string  `json:"session"`
	TimeoutS float64 `json:"timeout_s"`
	Target   int     `json:"target"`

	Addresses      map[string]string `json:"addresses"`
	Host           string            `json:"host"`
	ConnectionFile string            `json:"connection_file"`
	Token          string            `json:"token"`
	Namespace      string            `json:"namespace"`
	Discover       *bool             `json:"discover"`
	TLS            *struct {
		CA string `json:"ca"`
	} `json:"tls"`

	Spec      spec   `json:"spec"`
	Assay     string `json:"assay"`
	N         int    `json:"n"`
	RolloutID string `json:"rollout_id"`
	GroupID   string `json:"group_id"`
	RunID     string `json:"run_id"`
	After     int64  `json:"after"`
	UntilAway bool   `json:"until_away"`

	Credits       int              `json:"credits"`
	Calls         int              `json:"calls"`
	PolicyVersion *int64           `json:"policy_version"`
	PolicyID      string           `json:"policy_id"`
	PolicyIDs     []string         `json:"policy_ids"`
	Policies      map[string]int64 `json:"policies"`
	Messages      bool             `json:"messages"`

	Call         any          `json:"call"`
	Answer       string       `json:"answer"`
	Seed         *int64       `json:"seed"`
	TrainPrefix  bool         `json:"train_prefix"`
	Replay       string       `json:"replay"`
	Annotations  []annotation `json:"annotations"`
	MaxDurationS float64      `json:"max_duration_s"`
	Images       bool         `json:"with_images"`
	Tensors      bool         `json:"with_tensors"`
	Sha256       string       `json:"sha256"`
	Verify       []string     `json:"verify"`
	Name         string       `json:"name"`

	CallID       string `json:"call_id"`
	TokenIDs     string `json:"token_ids"`
	Logprobs     string `json:"logprobs"`
	FinishReason string `json:"finish_reason"`
	Top          any    `json:"top"`
	Text         string `json:"text"`
	Reason       string `json:"reason"`
	Message      string `json:"message"`
	Retriable    bool   `json:"retriable"`

	line []byte // as it came
}

// subject has the clients, sessions, handles and calls of the case that runs.
type subject struct {
	mu       sync.Mutex
	clients  map[string]*penstock.Client
	sessions map[string]*penstock.Session
	serving  map[string]<-chan next
	groups   map[string]*penstock.Group
	rollouts map[string]*penstock.Rollout
	calls    map[string]*penstock.Call
	waiting  map[int]context.CancelCauseFunc

	sandboxes map[string]*penstock.Sandbox
	processes map[string]*penstock.Process
	terminals map[string]*penstock.Terminal
	tools     map[string]*tool

	whole  context.Context // of the case
	forget context.CancelFunc
	pumps  sync.WaitGroup
	tasks  sync.WaitGroup

	output sync.Mutex
}

// next is what a loop over calls gives.
type next struct {
	call *penstock.Call
	err  error
}

var errAborted = errors.New("aborted")

func main() {
	s := &subject{waiting: map[int]context.CancelCauseFunc{}}
	s.begin()
	input := bufio.NewReader(os.Stdin)
	for {
		line, err := input.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			s.reset()
			s.tasks.Wait()
			return
		}
		var c command
		if err == nil {
			err = json.Unmarshal(line, &c)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "the input is no command:", err)
			os.Exit(1)
		}
		c.line = line
		ctx, cancel := context.WithCancelCause(s.whole)
		if c.Do != "reset" {
			s.mu.Lock()
			s.waiting[c.ID] = cancel
			s.mu.Unlock()
			s.tasks.Add(1)
		}
		go s.answer(ctx, cancel, &c)
	}
}

func (s *subject) begin() {
	s.clients, s.sessions = map[string]*penstock.Client{}, map[string]*penstock.Session{}
	s.serving, s.groups = map[string]<-chan next{}, map[string]*penstock.Group{}
	s.rollouts, s.calls = map[string]*penstock.Rollout{}, map[string]*penstock.Call{}
	s.sandboxes, s.processes = map[string]*penstock.Sandbox{}, map[string]*penstock.Process{}
	s.terminals, s.tools = map[string]*penstock.Terminal{}, map[string]*tool{}
	s.whole, s.forget = context.WithCancel(context.Background())
}

// reset ends all that a case left open.
func (s *subject) reset() {
	s.forget()
	s.tasks.Wait()
	s.pumps.Wait()
	for _, session := range s.sessions {
		_ = session.Close() // it never fails
	}
	for name, client := range s.clients {
		if err := client.Close(); err != nil {
			fmt.Fprintf(os.Stderr, "%s does not close: %v\n", name, err)
		}
	}
	s.begin()
}

func (s *subject) answer(ctx context.Context, cancel context.CancelCauseFunc, c *command) {
	defer cancel(nil)
	said := object{"id": c.ID}
	if c.Do == "reset" {
		s.reset()
		said["ok"] = object{}
		s.say(said)
		return
	}
	defer s.tasks.Done()
	bounded := ctx
	if c.TimeoutS > 0 {
		var stop context.CancelFunc
		bounded, stop = context.WithTimeout(ctx, time.Duration(c.TimeoutS*float64(time.Second)))
		defer stop()
	}
	done, err := s.carryOut(bounded, c)
	switch {
	case err == nil && done == nil:
		said["ok"] = object{}
	case err == nil:
		said["ok"] = done
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		said["error"] = object{"kind": "aborted"}
	case c.TimeoutS > 0 && errors.Is(err, context.DeadlineExceeded):
		said["error"] = object{"kind": "timeout"}
	default:
		said["error"] = observedError(err)
	}
	s.mu.Lock()
	delete(s.waiting, c.ID)
	s.mu.Unlock()
	s.say(said)
}

func (s *subject) say(answer object) {
	s.output.Lock()
	defer s.output.Unlock()
	if err := json.NewEncoder(os.Stdout).Encode(answer); err != nil {
		fmt.Fprintln(os.Stderr, "an answer cannot be written:", err)
		os.Exit(1)
	}
}

func observedError(err error) object {
	var failure *penstock.Error
	if !errors.As(err, &failure) {
		return object{"kind": "foreign", "message": err.Error()}
	}
	violations := []object{}
	for _, item := range failure.Violations {
		violations = append(violations, object{"field": item.Field, "description": item.Description})
	}
	metadata := failure.Metadata
	if metadata == nil {
		metadata = map[string]string{}
	}
	shown := object{
		"kind": strings.ReplaceAll(string(failure.Kind), " ", "_"), "reason": failure.Reason, "message": err.Error(),
		"metadata": metadata, "violations": violations, "retry_after_s": nil,
	}
	if failure.RetryAfter > 0 {
		shown["retry_after_s"] = failure.RetryAfter.Seconds()
	}
	if all := (*penstock.EnginesFailed)(nil); errors.As(err, &all) {
		failures := map[string]string{}
		for name, one := range all.Failures {
			failures[name] = one.Reason
		}
		shown["failures"], shown["in_force"] = failures, all.InForce
	}
	return shown
}

// one finds what the case named before.
func one[T any](s *subject, named map[string]T, name string) (T, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	found, ok := named[name]
	if !ok {
		return found, fmt.Errorf("the case has nothing named %q", name)
	}
	return found, nil
}

func keep[T any](s *subject, named map[string]T, name string, thing T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	named[name] = thing
}
