package penstock

import (
	"context"

	opsv1 "penstock.example/penstock/gen/ops/v1"
)

// Version is this package's. Each call names it as penstock-go/VERSION in its user agent.
const Version = "0.1.0"

// ServerInfo is the revision of the contract that a service ("sandbox", "driver", "interception", "inference") serves, its
// features, and its limits.
func (c *Client) ServerInfo(ctx context.Context, service string) (*opsv1.ServerInfo, error) {
	found := c.services[service]
	if found == nil {
		return nil, noService(service)
	}
	stub := opsv1.NewOperationsServiceClient(found.conn)
	answer, err := call(ctx, found, stub.GetServerInfo, &opsv1.GetServerInfoRequest{}, callTimeout, true)
	return answer.GetServer(), err
}
