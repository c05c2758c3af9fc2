package penstock

import (
	"regexp"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

// Most other services that one client follows HOME_ELSEWHERE to, or uses as members of a cluster.
const maxHomes = 256

var hostAndPort = regexp.MustCompile(`^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):[0-9]{1,5}$`)

// homeElsewhere is the reason of an error of a service that names another one, which has what it was asked for.
const homeElsewhere = "HOME_ELSEWHERE"

// homes are the connections to other services of a kind, which have what a service was asked for.
type homes struct {
	tls   *TLS
	conns map[string]*grpc.ClientConn
}

// homeOf is a connection to the service that HOME_ELSEWHERE names; nil where the error is another one, or the token must
// not go there.
func (p *pool) homeOf(err error) *grpc.ClientConn {
	info := reasonOf(err)
	if info.GetReason() != homeElsewhere {
		return nil
	}
	address := info.GetMetadata()["address"]
	if !mayReceiveToken(p.address, address, p.homes.tls) {
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

// reasonOf is what a service says of its error; nil where no service spoke.
func reasonOf(err error) *errdetails.ErrorInfo {
	said, _ := status.FromError(err)
	for _, detail := range said.Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil
}

// mayReceiveToken reports whether the service at one address may say that the token is for another too. It goes to this
// machine, if it was for this machine, or to a server that the caller's own CA has certified; and to no path.
func mayReceiveToken(own, address string, tls *TLS) bool {
	mayGo := isLocal(own) && isLocal(address)
	if tls != nil {
		mayGo = tls.CA != ""
	}
	return mayGo && isAddress(address) && hostAndPort.MatchString(address) && !strings.HasPrefix(address, "unix:")
}
