//go:build !linux

package servers

import (
	"errors"
	"os"
)

func unmountLazily(string) error { return errors.ErrUnsupported }

func allocate(*os.File, int64, int64) error { return errors.ErrUnsupported }
