package penstock

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

func resolved(t *testing.T, opts ...Option) (*endpoints, *Error) {
	t.Helper()
	var said options
	for _, option := range opts {
		option(&said)
	}
	found, err := resolve(&said)
	if err == nil {
		return found, nil
	}
	var failure *Error
	if !errors.As(err, &failure) || !errors.Is(err, ErrConfiguration) {
		t.Fatalf("what is set up wrongly came as %v", err)
	}
	return nil, failure
}

// What the caller says comes before the environment, that before the connection file, that before loopback (R9).
func TestEndpointsAreLookedForInAStatedOrder(t *testing.T) {
	nowhereElse(t)
	found, _ := resolved(t)
	if found.addresses.Driver != "127.0.0.1:7702" || found.addresses.Inference != "127.0.0.1:7704" || found.token.text != "" {
		t.Fatalf("by default %v", found)
	}
	folder := filepath.Join(os.Getenv("XDG_STATE_HOME"), "penstock")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	content := fmt.Sprintf(
		`{"version": 1, "pid": %d, "token": "of-the-file", "ca": "ca.pem", "addresses": {"driver": "localhost:1", "inference": ""}}`,
		os.Getpid(),
	)
	if err := os.WriteFile(filepath.Join(folder, "connection.json"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	found, _ = resolved(t)
	if found.addresses.Driver != "localhost:1" || found.addresses.Inference != "" || found.token.text != "of-the-file" {
		t.Fatalf("by the file %v", found)
	}
	if found.tls == nil || found.tls.CA != filepath.Join(folder, "ca.pem") {
		t.Fatalf("its authority is %v", found.tls)
	}
	t.Setenv("PENSTOCK_DRIVER_ADDRESS", "[::1]:2")
	t.Setenv("PENSTOCK_TOKEN_FILE", write(t, "of-a-file\n", 0o600))
	found, _ = resolved(t)
	if found.addresses.Driver != "[::1]:2" || found.token.text != "of-a-file" || found.tls != nil {
		t.Fatalf("by the environment %v", found)
	}
	t.Setenv("PENSTOCK_TOKEN", "of-the-environment")
	found, _ = resolved(t, WithHost("::1"))
	if found.addresses.Sandbox != "[::1]:7701" || found.token.text != "of-the-environment" {
		t.Fatalf("by the caller %v", found)
	}
	if found, _ = resolved(t, WithAddresses(Addresses{Driver: "unix:/s"}), WithToken("x")); found.token.text != "x" {
		t.Fatalf("the caller's token is %v", found.token)
	}
}

// The connection file of a stack that was killed is void.
func TestAConnectionFileOfAProcessThatIsGoneIsPassedOver(t *testing.T) {
	nowhereElse(t)
	gone := exec.Command(os.Args[0], "-test.run=^$")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	content := fmt.Sprintf(`{"pid": %d, "token": null, "addresses": {"driver": "localhost:1"}}`, gone.Process.Pid)
	t.Setenv("PENSTOCK_CONNECTION", write(t, content, 0o600))
	if found, _ := resolved(t); found.addresses.Driver != "127.0.0.1:7702" {
		t.Fatalf("found was %v", found)
	}
}

// Nodes of a job share the file's directory: a process id means nothing on the other nodes (R125).
func TestAConnectionFileOfAnotherMachineIsBelieved(t *testing.T) {
	nowhereElse(t)
	gone := exec.Command(os.Args[0], "-test.run=^$")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	here, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	far := `{"sandbox": "10.0.0.1:1", "driver": "10.0.0.1:2", "interception": "far.example:3", "inference": ""}`
	for host, expected := range map[string]string{"another-node": "10.0.0.1:2", here: "127.0.0.1:7702"} {
		content := fmt.Sprintf(`{"pid": %d, "host": %q, "token": null, "addresses": %s}`, gone.Process.Pid, host, far)
		t.Setenv("PENSTOCK_CONNECTION", write(t, content, 0o600))
		if found, _ := resolved(t); found.addresses.Driver != expected {
			t.Errorf("of %s, found was %v", host, found)
		}
	}
}

// Home directories on NFS: the process that listens at such an address here must not get the token (R11, R125).
func TestAConnectionFileWithAddressesThatOnlyAnotherMachineReachesIsVoid(t *testing.T) {
	nowhereElse(t)
	for _, driver := range []string{`"127.0.0.1:7702"`, `"[::1]:7702"`, `"localhost:7702"`, `"unix:/run/driver"`, "null"} {
		content := fmt.Sprintf(
			`{"pid": %d, "host": "another-node", "token": "filed", "ca": "ca.pem", "addresses":
				{"sandbox": "10.0.0.1:1", "driver": %s, "interception": "10.0.0.1:3", "inference": "10.0.0.1:4"}}`,
			os.Getpid(), driver,
		)
		t.Setenv("PENSTOCK_CONNECTION", write(t, content, 0o600))
		if found, _ := resolved(t); found.token.text != "" || found.addresses != onHost("127.0.0.1") {
			t.Errorf("with the driver at %s, found was %v", driver, found)
		}
	}
}

// A token stays where it belongs, and what is invalid is refused with advice (R1, R3, R9).
func TestWhatDoesNotHoldIsRefusedBeforeAnythingIsSent(t *testing.T) {
	nowhereElse(t)
	driver := func(address string) Option { return WithAddresses(Addresses{Driver: address}) }
	for _, refused := range []struct {
		reason, told string
		opts         []Option
	}{
		{"TOKEN_IN_CLEAR", "192.0.2.1:7701", []Option{WithHost("192.0.2.1"), WithToken("secret")}},
		{"TOKEN", "empty", []Option{WithToken("")}},
		{"TOKEN", "ASCII", []Option{WithToken("a b ")}},
		{"TOKEN", "ASCII", []Option{WithToken("naïve")}},
		{"TARGET", "no port", []Option{driver("no port")}},
		{"TARGET", ":0", []Option{driver("localhost:0")}},
		{"TARGET", ":70000", []Option{driver("localhost:70000")}},
		{"TARGET", "WithAddresses", []Option{WithHost("localhost:7702")}},
		{"CONNECTION_FILE", "/nowhere", []Option{WithConnectionFile("/nowhere")}},
		{"CONNECTION_FILE", "penstock up", []Option{WithConnectionFile(write(t, "[]", 0o600))}},
		{"CONNECTION_FILE_OPEN", "chmod 600", []Option{WithConnectionFile(write(t, "{}", 0o644))}},
	} {
		found, failure := resolved(t, refused.opts...)
		if failure == nil {
			t.Errorf("%s was taken: %v", refused.told, found)
			continue
		}
		if failure.Reason != refused.reason || !strings.Contains(failure.Error(), refused.told) {
			t.Errorf("%s, %q where %s was expected, and %q", failure.Reason, failure, refused.reason, refused.told)
		}
		if strings.Contains(failure.Error(), "secret") {
			t.Errorf("it tells the token: %q", failure)
		}
	}
	if _, err := Connect(WithTLS(TLS{CA: "/nowhere"})); !errors.Is(err, ErrConfiguration) {
		t.Errorf("a certificate that is not there gave %v", err)
	}
	if _, err := Connect(WithTLS(TLS{CA: write(t, "none", 0o600)})); !errors.Is(err, ErrConfiguration) {
		t.Errorf("a certificate that is none gave %v", err)
	}
}

// A token that is not taken is told by where it was found, with what to do, and never by what it is (R3).
func TestATokenThatIsNotTakenSaysWhereItIsFrom(t *testing.T) {
	nowhereElse(t)
	file := write(t, `{"pid": null, "token": "secret", "addresses": {}}`, 0o600)
	folder := os.Getenv("XDG_STATE_HOME")
	advice := func(opts ...Option) string {
		t.Helper()
		found, failure := resolved(t, opts...)
		if failure != nil {
			t.Fatal(failure)
		}
		return found.token.advice()
	}
	told := map[string][]string{
		advice():                         {"No token was sent", "PENSTOCK_TOKEN ", "PENSTOCK_CONNECTION", folder + "/penstock/connection.json"},
		advice(WithToken("secret")):      {"from the calling program: the services may have been restarted since"},
		advice(WithConnectionFile(file)): {"from " + file + ": the services may have been restarted since"},
	}
	t.Setenv("PENSTOCK_CONNECTION", file)
	token := write(t, "secret\n", 0o600)
	t.Setenv("PENSTOCK_TOKEN_FILE", token)
	told[advice()] = []string{"from PENSTOCK_TOKEN_FILE (" + token + "): set it", "unset PENSTOCK_TOKEN_FILE to use that of " + file}
	t.Setenv("PENSTOCK_TOKEN", "secret")
	told[advice()] = []string{"from PENSTOCK_TOKEN: set it", "unset PENSTOCK_TOKEN to use that of " + file}
	for said, parts := range told {
		for _, part := range parts {
			if !strings.Contains(said, part) {
				t.Errorf("%q has not %q", said, part)
			}
		}
		if strings.Contains(said, "secret") {
			t.Errorf("it tells the token: %q", said)
		}
	}
}

// A service that there is none of is said so by the first call.
func TestAServiceThatIsNotThereIsNamed(t *testing.T) {
	leakFree(t)
	ps, err := Connect(WithAddresses(Addresses{Driver: "localhost:1"}))
	if err != nil {
		t.Fatal(err)
	}
	defer ps.Close()
	var failure *Error
	if _, err := ps.Inference.Info(bounded(t)); !errors.As(err, &failure) || failure.Reason != "NO_INFERENCE" {
		t.Errorf("the inference service gave %v", err)
	}
	if _, err := ps.Inference.Generate(bounded(t), []int32{1}, nil, ""); !errors.Is(err, ErrConfiguration) {
		t.Errorf("a generation gave %v", err)
	}
	if _, err := ps.Intercept(bounded(t), Selector{}); !errors.Is(err, ErrConfiguration) {
		t.Errorf("a session gave %v", err)
	}
	if err := ps.Conn("kitchen").Invoke(bounded(t), "/x", nil, nil); !errors.Is(err, ErrConfiguration) {
		t.Errorf("a service that was never heard of gave %v", err)
	}
}

// No driver is asked for others unless a program names one, and not where the environment or a connection file
// says so.
func TestNoDriverIsAskedForOthersUnlessAProgramNamesOne(t *testing.T) {
	nowhereElse(t)
	named := WithAddresses(Addresses{Driver: "127.0.0.1:7"})
	if found, _ := resolved(t, named); !found.discover {
		t.Fatal("the named driver is not asked")
	}
	if found, _ := resolved(t, named, WithoutDiscovery()); found.discover {
		t.Fatal("it is asked all the same")
	}
	if found, _ := resolved(t, WithAddresses(Addresses{Sandbox: "127.0.0.1:7"})); found.discover {
		t.Fatal("a driver without an address is asked")
	}
	for said, expected := range map[string]bool{"false": false, "true": true, "null": true} {
		file := write(t, `{"token": null, "discover": `+said+`, "addresses": {"driver": "127.0.0.1:7"}}`, 0o600)
		if found, _ := resolved(t, WithConnectionFile(file)); found.discover != expected {
			t.Fatalf("a connection file with %s has the driver asked: %t", said, found.discover)
		}
	}
	t.Setenv("PENSTOCK_DISCOVER", "False")
	if found, _ := resolved(t, named); found.discover {
		t.Fatal("the environment does not count")
	}
	t.Setenv("PENSTOCK_DISCOVER", "perhaps")
	if _, failure := resolved(t); failure == nil || failure.Reason != "DISCOVER" {
		t.Fatalf("it said %v", failure)
	}
}
