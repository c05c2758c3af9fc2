package penstock

import (
	"regexp"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Most other services that one client follows HOME_ELSEWHERE to.
const maxHomes = 256

var hostAndPort = regexp.MustCompile(`^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$`)

// homes are the connections to other services of a kind, which have what a service was asked for.
type homes struct {
	tls   *TLS
	conns map[string]*grpc.ClientConn
}

// homeOf is a connection to the service that HOME_ELSEWHERE names; nil where the error is another one, or the token must
// not go there. It goes to this machine, if it was for this machine, or to a server that the caller's own CA has certified.
func (p *pool) homeOf(err error) *grpc.ClientConn {
	said, _ := status.FromError(err)
	if said.Code() != codes.FailedPrecondition {
		return nil
	}
	address := ""
	for _, detail := range said.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetReason() == "HOME_ELSEWHERE" {
			address = info.GetMetadata()["address"]
		}
	}
	mayGo := isLocal(p.address) && isLocal(address)
	if p.homes.tls != nil {
		mayGo = p.homes.tls.CA != ""
	}
	// Targets of another form than host:port are not followed.
	if !mayGo || !isAddress(address) || !hostAndPort.MatchString(address) || strings.HasPrefix(address, "unix:") {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	found := p.homes.conns[address]
	if found == nil && !p.closed && len(p.homes.conns) < maxHomes {
		if found, err = p.dial(address); err != nil {
			return nil
		}
		if p.homes.conns == nil {
			p.homes.conns = map[string]*grpc.ClientConn{}
		}
		p.homes.conns[address] = found
	}
	return found
}
