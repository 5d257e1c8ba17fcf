package servers

import (
	"io"
	"os"
	"strings"
)

const tailBytes = 4 << 10

// serverLog is what one run of a server has written to its log file.
type serverLog struct {
	path string
	from int64
}

// logFromHere is the log that starts at the end of file.
func logFromHere(file *os.File) (serverLog, error) {
	info, err := file.Stat()
	if err != nil {
		return serverLog{}, err
	}
	return serverLog{path: file.Name(), from: info.Size()}, nil
}

// tail returns the end of the log, to be added to an error message.
func (l serverLog) tail() string {
	text, err := l.read()
	switch {
	case err != nil:
		return "\nits log cannot be read: " + err.Error()
	case text == "":
		return "\nits log is empty"
	}
	return "\nits log ends with:\n\t" + strings.ReplaceAll(text, "\n", "\n\t")
}

func (l serverLog) read() (string, error) {
	file, err := os.Open(l.path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return "", err
	}
	from := max(l.from, info.Size()-tailBytes)
	text, err := io.ReadAll(io.NewSectionReader(file, from, tailBytes))
	return strings.TrimSpace(string(text)), err
}
