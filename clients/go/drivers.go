package penstock

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"

	driverv1 "penstock.example/penstock/gen/driver/v1"
)

// driver is one of the drivers. Handles share it, so that where one finds it, all do.
type driver struct {
	client *Client
	name   string // its own, where it is known
	at     atomic.Pointer[driverAt]
}

// driverAt is where a driver is reached.
type driverAt struct {
	service *service
	stub    driverv1.RolloutServiceClient
}

func (c *Client) driverOf(m member) *driver {
	d := &driver{client: c, name: m.name}
	d.at.Store(placeOf(m.service))
	return d
}

func placeOf(at *service) *driverAt { return &driverAt{at, driverv1.NewRolloutServiceClient(at.conn)} }

func (d *driver) service() *service { return d.at.Load().service }

func (d *driver) stub() driverv1.RolloutServiceClient { return d.at.Load().stub }

// follow goes to another address, if the other drivers list this one there: it was started again elsewhere.
//
// Errors: ErrConfiguration, MEMBER_NOT_TRUSTED: the token must not be sent there.
func (d *driver) follow(ctx context.Context) error {
	if d.name == "" {
		return nil
	}
	members, err := d.client.cluster.members(ctx, "driver", fresh, true)
	if err != nil {
		return err
	}
	for _, one := range members {
		if one.name == d.name && one.service.address != d.service().address {
			d.at.Store(placeOf(one.service))
		}
	}
	return nil
}

// drivers are all. Of several, one that is away is not waited for.
func (c *Client) drivers(ctx context.Context) ([]*driver, error) {
	members, err := c.cluster.members(ctx, "driver", fresh, true)
	var all []*driver
	for _, one := range ofSeveral(members) {
		all = append(all, c.driverOf(one))
	}
	return all, err
}

// having is the driver that has a rollout, group or terminal, and what `fetch` gives there. An id that a driver made names it;
// for one that a client chose, every driver is asked.
//
// Errors: ErrNotFound, no driver has it; ErrUnavailable, none that answers has it.
func having[T any](
	ctx context.Context, c *Client, id string, fetch func(context.Context, *driver) (T, error),
) (*driver, T, error) {
	var none T
	home := homeIn(id, "driver")
	isHome := func(m member) bool { return m.name == home }
	members, err := c.cluster.members(ctx, "driver", fresh, true)
	if err == nil && home != "" && !slices.ContainsFunc(members, isHome) {
		members, err = c.cluster.members(ctx, "driver", 0, true)
	}
	if err != nil {
		return nil, none, err
	}
	if at := slices.IndexFunc(members, isHome); home != "" {
		members = members[max(at, 0) : max(at, 0)+1] // where the list lacks it, any driver answers HOME_ELSEWHERE
	}
	var unknown, away error
	for _, one := range members {
		asked := one
		if len(members) > 1 {
			asked.service = one.service.briefly() // others may have it
		}
		found, err := fetch(ctx, c.driverOf(asked))
		switch {
		case err == nil:
			return c.driverOf(one), found, nil
		case errors.Is(err, ErrNotFound):
			unknown = err
		case isAway(err):
			away = err
		default:
			return nil, none, err
		}
	}
	if away != nil {
		return nil, none, away
	}
	return nil, none, unknown
}
