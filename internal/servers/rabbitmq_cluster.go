package servers

import (
	"context"
	"fmt"
)

// Join starts another node with the same configuration in the cluster of r, and returns
// when it accepts connections. It must be closed before r.
func (r *RabbitMQ) Join(ctx context.Context) (*RabbitMQ, error) {
	node, err := startRabbitMQ(ctx, r.config, r)
	if err != nil {
		return nil, err
	}
	for _, arguments := range [][]string{{"stop_app"}, {"reset"}, {"join_cluster", r.node()}, {"start_app"}} {
		if _, err := node.Ctl(ctx, arguments...); err != nil {
			_ = node.Close()
			return nil, fmt.Errorf("join a RabbitMQ cluster: %w", err)
		}
	}
	return node, nil
}

// Part cuts r off from other nodes of its cluster: they have no common secret any more.
// Clients are not cut off.
func (r *RabbitMQ) Part(ctx context.Context, others ...*RabbitMQ) error {
	for _, o := range others {
		if err := r.eval(ctx, "erlang:set_cookie('%s', parted), erlang:disconnect_node('%[1]s'), timer:sleep(1000), false = lists:member('%[1]s', nodes())", o.node()); err != nil {
			return err
		}
	}
	return nil
}

// Meet undoes Part.
func (r *RabbitMQ) Meet(ctx context.Context, others ...*RabbitMQ) error {
	for _, o := range others {
		if err := r.eval(ctx, "erlang:set_cookie('%s', erlang:get_cookie()), net_kernel:connect_node('%[1]s')", o.node()); err != nil {
			return err
		}
	}
	return nil
}

func (r *RabbitMQ) eval(ctx context.Context, expression, node string) error {
	_, err := r.Eval(ctx, fmt.Sprintf(expression, node)+".")
	return err
}
