// Package logging is the format of onejob's logs.
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

// Stderr returns the logger of those who were given none: a replica that cannot reach its
// servers must not be silent about it. It writes to stderr from level info on.
var Stderr = sync.OnceValue(func() *zap.Logger {
	return zap.New(zapcore.NewCore(JSON(), zapcore.Lock(os.Stderr), zapcore.InfoLevel))
})
