package penstock

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	driverv1 "penstock.example/penstock/gen/driver/v1"
)

const (
	assaySchema = "2"
	// assayContext is in front of what is signed, so that no signature of another purpose fits.
	assayContext   = "penstock assay line 1\n"
	assayMostBytes = 64 << 20
	assayMinKey    = 32
	assayMostKey   = 4096
)

// assayKeys are the keys of a line but for its signature, sorted.
var assayKeys = []string{"accepted", "backend", "digest", "failed", "passed", "schema", "task_id", "time"}

// Assays are signed results of `penstock tasks assay`, one line per task; of two lines with one digest the later one counts.
type Assays struct {
	lines  map[string]assayLine
	ids    map[string]bool
	origin string
}

type assayLine struct {
	taskID, digest string
	passed         bool
	failed         []string
}

// LoadAssays reads the lines that `penstock tasks assay` wrote, at most 64 MiB, and their key: "" = beside the file, with the
// suffix .key.
//
// Errors: ErrInvalidArgument, ASSAY_UNREADABLE: a file cannot be read, or a line is not signed with this key.
func LoadAssays(file, key string) (*Assays, error) {
	if key == "" {
		key = strings.TrimSuffix(file, filepath.Ext(file)) + ".key"
	}
	secret, err := os.ReadFile(key)
	if err != nil {
		return nil, unreadableAssay(key, "the key: %v", err)
	}
	if len(secret) < assayMinKey || len(secret) > assayMostKey {
		return nil, unreadableAssay(key, "the key must have %d to %d bytes", assayMinKey, assayMostKey)
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, unreadableAssay(file, "%v", err)
	}
	if len(content) > assayMostBytes {
		return nil, unreadableAssay(file, "has more than %d bytes", assayMostBytes)
	}
	found := &Assays{lines: map[string]assayLine{}, ids: map[string]bool{}, origin: file}
	for number, text := range bytes.Split(content, []byte("\n")) {
		if len(text) == 0 {
			continue
		}
		line, err := readAssayLine(text, secret)
		if err != nil {
			return nil, unreadableAssay(file, "line %d: %v", number+1, err)
		}
		found.lines[line.digest] = line
	}
	for _, line := range found.lines {
		found.ids[line.taskID] = true
	}
	return found, nil
}

// Require checks that this very task passed: with the sandbox, limits, budgets and MCP servers of its file, and no others. An image
// that was built is named by `penstock tasks build`. WithRequiredAssays has a client check all that it creates.
//
// Errors: ErrFailedPrecondition, ASSAY_REQUIRED; the violation's field is task.
func (a *Assays) Require(spec *driverv1.RolloutSpec) error {
	line, known := a.lines[specDigest(spec)]
	if known && line.passed {
		return nil
	}
	id := spec.GetTask().GetTaskId()
	var why string
	switch {
	case known:
		why = "did not pass its assay: " + strings.Join(line.failed, ", ")
	case a.ids[id]:
		why = fmt.Sprintf("has changed since its assay in %s: run `penstock tasks assay` again", a.origin)
	default:
		why = fmt.Sprintf("has no line in %s: run `penstock tasks assay` first", a.origin)
	}
	return &Error{
		Kind:       ErrFailedPrecondition,
		Reason:     "ASSAY_REQUIRED",
		Message:    fmt.Sprintf("task %s %s", id, why),
		Violations: []Violation{{Field: "task", Description: id + " " + why}},
	}
}

// WithRequiredAssays has Rollouts.Create and Groups.Create refuse a task that did not pass its assay, before anything is sent.
func WithRequiredAssays(assays *Assays) Option {
	return func(o *options) { o.assays = assays }
}

func (c *Client) assayed(spec *driverv1.RolloutSpec) error {
	if c.assays == nil {
		return nil
	}
	return c.assays.Require(spec)
}

// specDigest is a hash of everything that a task's rollouts depend on, the same in every language: of no empty message it
// counts that it is there.
func specDigest(spec *driverv1.RolloutSpec) string {
	kept := &driverv1.RolloutSpec{Task: spec.GetTask()}
	if isSaying(spec.GetSandbox()) {
		kept.Sandbox = spec.GetSandbox()
	}
	if isSaying(spec.GetLimits()) {
		kept.Limits = spec.GetLimits()
	}
	if isSaying(spec.GetBudgets()) {
		kept.Budgets = spec.GetBudgets()
	}
	if servers := spec.GetAgent().GetMcpServers(); len(servers) > 0 {
		kept.Agent = &driverv1.AgentChoice{McpServers: servers}
	}
	sum := sha256.Sum256(fingerprint(kept.ProtoReflect()))
	return hex.EncodeToString(sum[:])
}

func isSaying(message proto.Message) bool { return len(fingerprint(message.ProtoReflect())) > 0 }

func readAssayLine(text, key []byte) (assayLine, error) {
	var line assayLine
	var given map[string]json.RawMessage
	if err := json.Unmarshal(text, &given); err != nil {
		return line, err
	}
	var signature string
	if json.Unmarshal(given["signature"], &signature) != nil || signature == "" {
		return line, errors.New("it has no signature")
	}
	delete(given, "signature")
	if string(given["schema"]) != assaySchema {
		return line, fmt.Errorf("its schema is %s, not %s", given["schema"], assaySchema)
	}
	var signed []string
	for name, value := range given {
		if !slices.Contains(assayKeys, name) || string(value) == "null" {
			return line, errors.New("its keys are not those of a line")
		}
		signed = append(signed, fmt.Sprintf("%q:%s", name, value))
	}
	if len(given) != len(assayKeys) {
		return line, errors.New("its keys are not those of a line")
	}
	var other string
	for name, into := range map[string]any{
		"task_id": &line.taskID, "digest": &line.digest, "passed": &line.passed, "backend": &other, "time": &other,
		"failed": &line.failed, "accepted": &[]string{},
	} {
		if json.Unmarshal(given[name], into) != nil {
			return line, errors.New("its values have other types")
		}
	}
	slices.Sort(signed)
	mac := hmac.New(sha256.New, key)
	fmt.Fprintf(mac, "%s{%s}", assayContext, strings.Join(signed, ","))
	if !hmac.Equal([]byte(hex.EncodeToString(mac.Sum(nil))), []byte(signature)) {
		return line, errors.New("it is not signed with this key")
	}
	return line, nil
}

func unreadableAssay(place, why string, values ...any) error {
	why = place + ": " + fmt.Sprintf(why, values...)
	return &Error{
		Kind:       ErrInvalidArgument,
		Reason:     "ASSAY_UNREADABLE",
		Message:    why,
		Violations: []Violation{{Field: "require_assay", Description: why}},
	}
}
