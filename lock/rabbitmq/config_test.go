package rabbitmq

import (
	"strings"
	"testing"
	"time"
)

func TestConfigTellsAllThatIsWrong(t *testing.T) {
	t.Parallel()
	if err := (Config{}).Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	err := Config{
		URL: "http://user:secret@host/", Prefix: "/onejob", Names: []string{"fine", "not fine"},
		Heartbeat: 1500 * time.Millisecond, Verify: time.Millisecond, Cooldown: -1,
	}.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"rabbitmq.url", "rabbitmq.prefix", "rabbitmq.names", "rabbitmq.heartbeat: a lease lasts", "not whole seconds",
		"rabbitmq.verify", "rabbitmq.cooldown",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in:\n%v", want, err)
		}
	}
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("the password is in:\n%v", err)
	}
	for _, prefix := range []string{"amq.onejob", "onejob/", strings.Repeat("x", 101)} {
		if (Config{Prefix: prefix}).Validate() == nil {
			t.Errorf("prefix %q: no error", prefix)
		}
	}
}
