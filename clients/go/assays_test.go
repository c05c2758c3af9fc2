package penstock

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	driverv1 "penstock.example/penstock/gen/driver/v1"
	interceptionv1 "penstock.example/penstock/gen/interception/v1"
	sandboxv1 "penstock.example/penstock/gen/sandbox/v1"
)

func assayedSpec(t *testing.T) *driverv1.RolloutSpec {
	t.Helper()
	metadata, err := structpb.NewStruct(map[string]any{"a": []any{true, nil, "x"}, "b": 1.5})
	if err != nil {
		t.Fatal(err)
	}
	return &driverv1.RolloutSpec{
		Agent: &driverv1.AgentChoice{Name: "shell"},
		Task: &driverv1.Task{
			TaskId: "tá", Instruction: "i", Metadata: metadata, Env: map[string]string{"A": "", "B": "2"},
			Files: []*sandboxv1.SeedFile{{Path: "f", Content: []byte{0, 0xff}, Mode: proto.Uint32(0o644)}},
			Setup: []*sandboxv1.Command{{
				Command: &sandboxv1.Command_Argv{Argv: &sandboxv1.Argv{Args: []string{"true"}}},
				Timeout: durationpb.New(1500 * time.Millisecond),
			}},
			Verifier: &driverv1.Verifier{
				Commands:        []*sandboxv1.Command{{Command: &sandboxv1.Command_Shell{Shell: "true"}}},
				Reward:          &driverv1.Verifier_PassedShare{PassedShare: &driverv1.RewardPassedShare{}},
				ComponentRanges: map[string]*driverv1.RewardRange{"c": {Min: 0, Max: 1}},
			},
		},
		Sandbox: &driverv1.SandboxChoice{
			Image: "x:1", Resources: &sandboxv1.Resources{Cpu: proto.Float64(0.5), MemoryBytes: proto.Int64(1 << 33)},
		},
		Limits:  &driverv1.Limits{Agent: durationpb.New(2 * time.Second)},
		Budgets: &interceptionv1.Budgets{},
	}
}

// The digest of a task is that of the Python client (R138).
func TestDigestOfATaskIsThatOfAllClients(t *testing.T) {
	if found := specDigest(assayedSpec(t)); found != "86cc3c848c2d985156b9a2598fef371d91c48afc89e0176848f236aa9d43e9e2" {
		t.Fatalf("the digest is %s", found)
	}
}

func assayFile(t *testing.T, digest string, passed bool, change func(string) string) string {
	t.Helper()
	file, key := filepath.Join(t.TempDir(), "assay.jsonl"), []byte(strings.Repeat("k", 32))
	rest := `"task_id":"tá","time":"2026"`
	signed := fmt.Sprintf(
		`{"accepted":[],"backend":"local","digest":%q,"failed":["X"],"passed":%t,"schema":2,%s}`, digest, passed, rest,
	)
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(assayContext + signed))
	line := fmt.Sprintf(`%s,"signature":"%x"}`, strings.TrimSuffix(signed, "}"), mac.Sum(nil)) + "\n"
	if change != nil {
		line = change(line)
	}
	for name, content := range map[string]string{file: line, strings.TrimSuffix(file, "jsonl") + "key": string(key)} {
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return file
}

// A client that requires assays sends nothing of a task that did not pass; one that passed goes its way (R138).
func TestClientThatRequiresAssaysRefusesTasksThatDidNotPass(t *testing.T) {
	nowhereElse(t)
	for _, passed := range []bool{false, true} {
		assays, err := LoadAssays(assayFile(t, specDigest(assayedSpec(t)), passed, nil), "")
		if err != nil {
			t.Fatal(err)
		}
		ps, err := Connect(WithAddresses(Addresses{Driver: "127.0.0.1:1"}), WithoutDiscovery(), WithRequiredAssays(assays))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel() // of a call that is sent this is the error
		_, one := ps.Rollouts.Create(ctx, assayedSpec(t), "")
		_, many := ps.Groups.Create(ctx, assayedSpec(t), 2)
		for _, err := range []error{one, many} {
			var failure *Error
			refused := errors.As(err, &failure) && failure.Reason == "ASSAY_REQUIRED" && errors.Is(err, ErrFailedPrecondition)
			if refused == passed || (refused && failure.Violations[0] != Violation{"task", "tá did not pass its assay: X"}) {
				t.Fatalf("passed is %v, and it came as %v", passed, err)
			}
		}
		if err := ps.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A line that was changed in any way is refused, and with it the file (R138).
func TestLineOfAnAssayThatWasChangedIsRefused(t *testing.T) {
	for change, why := range map[string]string{
		`"passed":false`: "not signed with this key", `"schema":2`: "schema", `"time":"2026"`: "not signed with this key",
		`"failed":["X"]`: "other types", `"backend":`: "keys", `"signature":`: "no signature",
	} {
		changed := map[string]string{
			`"passed":false`: `"passed":true`, `"schema":2`: `"schema":1`, `"time":"2026"`: `"time":"2027"`,
			`"failed":["X"]`: `"failed":"X"`, `"backend":`: `"backends":`, `"signature":`: `"signed":`,
		}[change]
		file := assayFile(t, "d", false, func(line string) string { return strings.Replace(line, change, changed, 1) })
		_, err := LoadAssays(file, "")
		var failure *Error
		if !errors.As(err, &failure) || failure.Reason != "ASSAY_UNREADABLE" || !strings.Contains(failure.Message, "line 1: ") ||
			!strings.Contains(failure.Message, why) {
			t.Errorf("%s came as %v", change, err)
		}
	}
}
