package cli

import (
	"testing"

	"onejob/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
