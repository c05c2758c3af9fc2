package penstock

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// Addresses are where the services are, host:port or unix:PATH each. Empty = there is no such service.
type Addresses struct {
	Sandbox, Driver, Interception, Inference string
}

// TLS are certificates, as PEM files: without CA the system's roots are trusted; Cert and Key are the client's own.
type TLS struct {
	CA, Cert, Key string
}

// The services' names, in the order of their default ports.
var services = []string{"sandbox", "driver", "interception", "inference"}

const firstPort = 7701

func (a *Addresses) of(service string) *string {
	switch service {
	case "sandbox":
		return &a.Sandbox
	case "driver":
		return &a.Driver
	case "interception":
		return &a.Interception
	default:
		return &a.Inference
	}
}

// onHost has all services on one machine, which is named without a port.
func onHost(host string) Addresses {
	var all Addresses
	for i, service := range services {
		*all.of(service) = net.JoinHostPort(strings.Trim(host, "[]"), strconv.Itoa(firstPort+i))
	}
	return all
}

// endpoints are the addresses and how to call them. A token never travels to an address that it was not given for, nor in
// clear beyond this machine.
type endpoints struct {
	addresses Addresses
	token     foundToken
	tls       *TLS
	namespace string // in which an operator acts; empty = none is named
	discover  bool   // whether the driver is asked which other services there are
	unnamed   bool   // whether nobody named a driver, to which the token may be sent
	alone     bool   // whether the connection file says to ask no driver
}

var namespaceForm = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,62}$`)

// foundToken is what is sent, and where it was found, for people. Empty = none.
type foundToken struct {
	text, origin string
}

const given = "the calling program"

// advice is what to do where the services do not take the token, or there is none.
func (t foundToken) advice() string {
	file, err := connectionFile()
	if err != nil {
		file = "its connection.json"
	}
	if t.text == "" {
		return "No token was sent: set PENSTOCK_TOKEN to one of theirs, PENSTOCK_TOKEN_FILE to a file with it, or" +
			" PENSTOCK_CONNECTION to a connection file. (`penstock up` writes one while it runs: " + file + ".)"
	}
	todo := "the services may have been restarted since"
	if strings.HasPrefix(t.origin, "PENSTOCK_TOKEN") {
		variable, _, _ := strings.Cut(t.origin, " ")
		todo = fmt.Sprintf("set it to a token of these services, or unset %s to use that of %s.", variable, file)
	}
	return fmt.Sprintf("The token that was sent is from %s: %s", t.origin, todo)
}

// resolve finds the endpoints: what the caller says; the environment; the connection file; loopback.
func resolve(said *options) (*endpoints, error) {
	if said.err != nil {
		return nil, said.err
	}
	namespace := cmp.Or(said.namespace, os.Getenv("PENSTOCK_NAMESPACE"))
	if namespace != "" && !namespaceForm.MatchString(namespace) {
		return nil, configuration("NAMESPACE_INVALID",
			"%q is not a namespace: 1 to 63 of a-z, 0-9 and -, the first a letter or digit", namespace)
	}
	found, err := resolveAddresses(said)
	if err != nil {
		return nil, err
	}
	found.namespace, found.discover = namespace, !said.alone && found.addresses.Driver != ""
	switch said := os.Getenv("PENSTOCK_DISCOVER"); strings.ToLower(said) {
	case "", "1", "true":
	case "0", "false":
		found.discover = false
	default:
		return nil, configuration("DISCOVER", "PENSTOCK_DISCOVER is %q: set it to true or false, or unset it", said)
	}
	if found.unnamed || found.alone {
		found.discover = false
	}
	return found, nil
}

func resolveAddresses(said *options) (*endpoints, error) {
	token, err := foundToken{said.token, given}, error(nil)
	if said.file != "" {
		return readConnection(said.file, token, said.tls)
	}
	if token.text == "" {
		if token, err = environmentToken(); err != nil {
			return nil, err
		}
	}
	tls := said.tls
	if ca := os.Getenv("PENSTOCK_CA_FILE"); tls == nil && ca != "" {
		tls = &TLS{CA: ca}
	}
	if said.addresses != nil {
		return checked(&endpoints{addresses: *said.addresses, token: token, tls: tls})
	}
	if found, any := environmentAddresses(); any {
		unnamed := os.Getenv("PENSTOCK_DRIVER_ADDRESS") == ""
		return checked(&endpoints{addresses: found, token: token, tls: tls, unnamed: unnamed})
	}
	file, err := connectionFile()
	if err == nil && isLive(file) {
		return readConnection(file, token, said.tls)
	}
	return checked(&endpoints{addresses: onHost("127.0.0.1"), token: token, tls: tls})
}

func checked(found *endpoints) (*endpoints, error) {
	if found.token.text != "" && !isToken(found.token.text) {
		return nil, configuration("TOKEN",
			"A token must be printable ASCII, not blank and without whitespace around it; this one is from %s", found.token.origin)
	}
	for _, service := range services {
		address := *found.addresses.of(service)
		if address == "" {
			continue
		}
		if !isAddress(address) {
			return nil, configuration("TARGET", "The address of %s is not host:port: %q", service, address)
		}
		if found.token.text != "" && found.tls == nil && !isLocal(address) {
			return nil, configuration("TOKEN_IN_CLEAR",
				"A token must not be sent in cleartext to %s: set tls (WithTLS), or an address on this machine.", address)
		}
	}
	return found, nil
}

func configuration(reason, format string, arguments ...any) *Error {
	return &Error{Kind: ErrConfiguration, Reason: reason, Message: fmt.Sprintf(format, arguments...)}
}

func environmentAddresses() (found Addresses, any bool) {
	found = onHost("127.0.0.1")
	for _, service := range services {
		if value := os.Getenv("PENSTOCK_" + strings.ToUpper(service) + "_ADDRESS"); value != "" {
			*found.of(service), any = value, true
		}
	}
	return found, any
}

func environmentToken() (none foundToken, _ error) {
	token, is := os.LookupEnv("PENSTOCK_TOKEN")
	if is {
		if token == "" {
			return none, configuration("TOKEN", "PENSTOCK_TOKEN is empty: unset it, or set it to a token")
		}
		return foundToken{token, "PENSTOCK_TOKEN"}, nil
	}
	file := os.Getenv("PENSTOCK_TOKEN_FILE")
	if file == "" {
		return none, nil
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return none, configuration("TOKEN", "PENSTOCK_TOKEN_FILE names %s, which cannot be read: %v", file, err)
	}
	text := strings.TrimSuffix(strings.TrimSuffix(string(content), "\n"), "\r")
	return foundToken{text, "PENSTOCK_TOKEN_FILE (" + file + ")"}, nil
}

// connectionFile is where `penstock up` says how to reach what it started.
func connectionFile() (string, error) {
	if named := os.Getenv("PENSTOCK_CONNECTION"); named != "" {
		return named, nil
	}
	base := os.Getenv("XDG_STATE_HOME")
	if base == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return "", err
		}
		base = filepath.Join(home, ".local", "state")
	}
	return filepath.Join(base, "penstock", "connection.json"), nil
}

type connection struct {
	PID       *int               `json:"pid"`
	Host      *string            `json:"host"` // of that process; files of earlier versions do not name it
	Addresses map[string]*string `json:"addresses"`
	Token     *string            `json:"token"`
	CA        string             `json:"ca"`
	Discover  any                `json:"discover"` // false = the addresses are all that may be used
}

// all are its addresses, with those on loopback where it has none.
func (c *connection) all() Addresses {
	found := onHost("127.0.0.1")
	for _, service := range services {
		if address := c.Addresses[service]; address != nil {
			*found.of(service) = *address
		}
	}
	return found
}

// isLive reports whether the file is there and the stack that wrote it still runs: one that was killed leaves it behind.
// A stack of another machine, with which this one shares the directory, counts as running, since its process is not seen
// from here, unless it has an address that leads to this machine here.
func isLive(file string) bool {
	content, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return false
	}
	var said connection
	if err != nil || json.Unmarshal(content, &said) != nil || said.PID == nil {
		return true // reading it again shows what is wrong, if anything
	}
	if here, err := os.Hostname(); err == nil && said.Host != nil && *said.Host != here {
		found := said.all()
		return !slices.ContainsFunc(services, func(service string) bool { return isLocal(*found.of(service)) })
	}
	process, err := os.FindProcess(*said.PID)
	if err != nil {
		return false
	}
	return !errors.Is(process.Signal(syscall.Signal(0)), os.ErrProcessDone)
}

func readConnection(file string, token foundToken, tls *TLS) (*endpoints, error) {
	info, err := os.Stat(file)
	if err != nil {
		return nil, configuration("CONNECTION_FILE", "%s cannot be read: %v", file, err)
	}
	if !isOursAlone(info) {
		return nil, configuration("CONNECTION_FILE_OPEN",
			"%s has a token, so only you may read it: chmod 600 %s", file, file)
	}
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, configuration("CONNECTION_FILE", "%s cannot be read: %v", file, err)
	}
	var said connection
	if json.Unmarshal(content, &said) != nil || said.Addresses == nil {
		return nil, configuration("CONNECTION_FILE",
			"%s is not a connection file: remove it, or start `penstock up` again", file)
	}
	found := &endpoints{
		addresses: said.all(), token: token, tls: tls, unnamed: said.Addresses["driver"] == nil,
		alone: said.Discover == false,
	}
	if token.text == "" && said.Token != nil {
		found.token = foundToken{*said.Token, file}
	}
	if tls == nil && said.CA != "" {
		ca := said.CA
		if !filepath.IsAbs(ca) {
			ca = filepath.Join(filepath.Dir(file), ca)
		}
		found.tls = &TLS{CA: ca}
	}
	return checked(found)
}

func isToken(token string) bool {
	for _, character := range token {
		if character < ' ' || character > '~' {
			return false
		}
	}
	return token != "" && token == strings.TrimSpace(token)
}

func isAddress(address string) bool {
	if path, is := strings.CutPrefix(address, "unix:"); is {
		return path != ""
	}
	host, port, err := net.SplitHostPort(address)
	number, bad := strconv.ParseUint(port, 10, 16)
	return err == nil && bad == nil && number > 0 && host != "" && !strings.Contains(host, "/")
}

func isLocal(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if strings.HasPrefix(address, "unix:") || err == nil && host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
