package testenv

import (
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
)

// Logger returns a logger of all levels whose entries the test can look at. They
// are printed if the test fails.
func Logger(t testing.TB) (*zap.Logger, *observer.ObservedLogs) {
	core, entries := observer.New(zapcore.DebugLevel)
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		encoder := zapcore.NewConsoleEncoder(zap.NewDevelopmentEncoderConfig())
		for _, entry := range entries.All() {
			line, err := encoder.EncodeEntry(entry.Entry, entry.Context)
			if err != nil {
				t.Logf("%s (%v)", entry.Message, err)
				continue
			}
			t.Log(line.String())
			line.Free()
		}
	})
	return zap.New(core), entries
}
