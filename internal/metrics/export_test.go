package metrics

import "github.com/prometheus/client_golang/prometheus"

// Gatherer returns the source of all metrics.
func (m *Replica) Gatherer() prometheus.Gatherer { return m.registry }
