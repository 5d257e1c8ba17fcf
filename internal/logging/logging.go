// Package logging is the format of onejob's logs, and their way to a reader that may be slow.
package logging

import (
	"os"
	"sync"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// JSON returns an encoder that writes an object per line, with the name of the event in
// event.
func JSON() zapcore.Encoder {
	e := zap.NewProductionEncoderConfig()
	e.TimeKey, e.MessageKey = "time", "event"
	e.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	e.EncodeDuration = zapcore.SecondsDurationEncoder
	return zapcore.NewJSONEncoder(e)
}

// New returns a logger that hands its lines to out, which tells it of lines that were
// dropped. Every line has these fields.
func New(e zapcore.Encoder, out *Queue, level zapcore.LevelEnabler, fields ...zap.Field) *zap.Logger {
	log := zap.New(zapcore.NewCore(e, out, level)).With(fields...)
	out.OnDrop(func(lines int) { log.Warn("log_lines_dropped", zap.Int("lines", lines)) })
	return log
}

// Stderr returns the logger of those who were given none: a replica that cannot reach its
// servers must not be silent about it. It writes to stderr from level info on.
var Stderr = sync.OnceValue(func() *zap.Logger {
	return New(JSON(), &Queue{Out: os.Stderr}, zapcore.InfoLevel)
})

// SyncStderr waits for the lines of Stderr, as Queue.Sync does.
func SyncStderr() { _ = Stderr().Sync() }
