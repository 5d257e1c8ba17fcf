package cli

import (
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"go.uber.org/zap"
	"go.uber.org/zap/buffer"
	"go.uber.org/zap/zapcore"
	"golang.org/x/term"

	"onejob/internal/logging"
)

// newLogger writes JSON, or lines for people when it writes to a terminal. The level is that
// of c, and may change.
func newLogger(c Config, out *logging.Queue) (*zap.Logger, zap.AtomicLevel) {
	level, _ := zap.ParseAtomicLevel(c.Log.Level) // was validated
	f, ok := out.Out.(*os.File)
	terminal := ok && term.IsTerminal(int(f.Fd()))
	encoder := logging.JSON()
	if c.Log.Format == "console" || c.Log.Format == "auto" && terminal {
		encoder = newLineEncoder(terminal && os.Getenv("NO_COLOR") == "")
	}
	return logging.New(encoder, out, level, zap.String("replica", c.Replica)), level
}

// lineEncoder writes an entry as a line for people:
//
//	15:04:05.000 INFO  task_succeeded task_id=5 kind=noop took=1.2ms replica=a
//
// What every line carries stands at its end.
type lineEncoder struct {
	*zapcore.MapObjectEncoder      // what every line carries
	coloured                  bool // the level, for terminals
}

func newLineEncoder(coloured bool) lineEncoder {
	return lineEncoder{zapcore.NewMapObjectEncoder(), coloured}
}

// colours are those of a level, as terminals understand them.
var colours = map[zapcore.Level]string{
	zapcore.DebugLevel: "\x1b[2m", zapcore.InfoLevel: "\x1b[32m", zapcore.WarnLevel: "\x1b[33m", zapcore.ErrorLevel: "\x1b[31m",
}

var lines = buffer.NewPool()

func (e lineEncoder) Clone() zapcore.Encoder {
	clone := newLineEncoder(e.coloured)
	maps.Copy(clone.Fields, e.Fields)
	return clone
}

func (e lineEncoder) EncodeEntry(entry zapcore.Entry, fields []zapcore.Field) (*buffer.Buffer, error) {
	line := lines.Get()
	level := fmt.Sprintf("%-5s", entry.Level.CapitalString())
	if e.coloured {
		level = colours[entry.Level] + level + "\x1b[0m"
	}
	fmt.Fprintf(line, "%s %s %s", entry.Time.Format("15:04:05.000"), level, entry.Message)
	for _, f := range fields {
		one := zapcore.NewMapObjectEncoder()
		f.AddTo(one)
		delete(one.Fields, "errorVerbose") // the error once more
		writePairs(line, one.Fields)
	}
	writePairs(line, e.Fields)
	line.AppendByte('\n')
	return line, nil
}

func writePairs(w io.Writer, pairs map[string]any) {
	for _, key := range slices.Sorted(maps.Keys(pairs)) {
		text := fmt.Sprint(pairs[key])
		if d, ok := pairs[key].(time.Duration); ok {
			text = rounded(d).String()
		}
		if text == "" || strings.ContainsFunc(text, func(r rune) bool { return r == ' ' || r == '"' || !unicode.IsPrint(r) }) {
			text = strconv.Quote(text)
		}
		fmt.Fprintf(w, " %s=%s", key, text)
	}
}

// rounded leaves the three or four digits that say something to a person.
func rounded(d time.Duration) time.Duration {
	for unit := time.Second; unit > 1; unit /= 1000 {
		if d >= unit {
			return d.Round(unit / 1000)
		}
	}
	return d
}
