package penstock

import (
	"cmp"
	"context"
	"iter"

	driverv1 "penstock.example/penstock/gen/driver/v1"
)

// Agents is the driver's registry of agents, as Client.Agents.
type Agents struct {
	service *service
	stub    driverv1.AgentServiceClient
	cluster *cluster
}

// List yields all agents, sorted by name. An error is the last thing that it yields.
func (a *Agents) List(ctx context.Context) iter.Seq2[*driverv1.Agent, error] {
	return paged(func(token string) ([]*driverv1.Agent, string, error) {
		request := &driverv1.ListAgentsRequest{PageToken: token}
		answer, err := call(ctx, a.service, a.stub.ListAgents, request, callTimeout, true)
		return answer.GetAgents(), answer.GetNextPageToken(), err
	})
}

// Get is one agent; with a digest an older version of it, with "" the newest.
//
// Errors: ErrNotFound, AGENT_UNKNOWN.
func (a *Agents) Get(ctx context.Context, name, specSHA256 string) (*driverv1.Agent, error) {
	request := &driverv1.GetAgentRequest{Name: name, SpecSha256: specSHA256}
	answer, err := call(ctx, a.service, a.stub.GetAgent, request, callTimeout, true)
	return answer.GetAgent(), err
}

// Register adds an agent, or a new version of one of your own, at every driver.
//
// Errors: ErrInvalidArgument (Violations name the fields); ErrAlreadyExists, AGENT_BUILT_IN; ErrUnavailable: a driver is away,
// which the message names; repeat it when that one is back.
func (a *Agents) Register(ctx context.Context, spec *driverv1.AgentSpec) (*driverv1.Agent, error) {
	request := &driverv1.RegisterAgentRequest{Spec: spec}
	var agent *driverv1.Agent
	err := a.everywhere(ctx, func(at *service, stub driverv1.AgentServiceClient) error {
		answer, err := call(ctx, at, stub.RegisterAgent, request, callTimeout, true)
		if agent == nil {
			agent = answer.GetAgent()
		}
		return err
	})
	return agent, err
}

// Delete removes an agent of your own, at every driver. It may be repeated.
//
// Errors: ErrFailedPrecondition, AGENT_BUILT_IN.
func (a *Agents) Delete(ctx context.Context, name string) error {
	return a.everywhere(ctx, func(at *service, stub driverv1.AgentServiceClient) error {
		_, err := call(ctx, at, stub.DeleteAgent, &driverv1.DeleteAgentRequest{Name: name}, callTimeout, true)
		return err
	})
}

func (a *Agents) everywhere(ctx context.Context, act func(*service, driverv1.AgentServiceClient) error) error {
	members, err := a.cluster.members(ctx, "driver", fresh, true)
	for _, one := range members {
		err = cmp.Or(err, act(one.service, driverv1.NewAgentServiceClient(one.service.conn)))
	}
	return err
}

// Check reads an agent's spec, installs it, runs its check command in a sandbox, and yields findings meanwhile. The
// request names a registered agent or has a spec, which need not be registered. An error is the last thing that it yields.
//
// Errors: ErrNotFound, AGENT_UNKNOWN; ErrInvalidArgument, SPEC_INVALID: it has both.
func (a *Agents) Check(
	ctx context.Context, request *driverv1.CheckAgentRequest,
) iter.Seq2[*driverv1.CheckAgentResponse, error] {
	return streamed(ctx, a.service, a.stub.CheckAgent, request)
}
