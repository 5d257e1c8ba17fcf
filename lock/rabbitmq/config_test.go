package rabbitmq

import (
	"strings"
	"testing"
	"time"
)

func TestConfigReportsEveryProblem(t *testing.T) {
	t.Parallel()
	if err := (Config{}).Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	err := Config{
		URL: "http://user:secret@host/", Prefix: "/onejob", Names: []string{"fine", "not fine"},
		Heartbeat: 1500 * time.Millisecond, Verify: time.Millisecond,
	}.Validate()
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"rabbitmq.url: ", "rabbitmq.prefix", "rabbitmq.names", "rabbitmq.heartbeat: a lease lasts", "not whole seconds",
		"rabbitmq.verify",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in:\n%v", want, err)
		}
	}
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("the password is in:\n%v", err)
	}
	for _, url := range []string{
		"amqp://u:secret@host:port/", "amqp://u:secret/x@host/", "amqp://u:1/secret@host/", "amqp://u:1#secret@host/", "amqp://u:1?secret@host/",
		"amqp://u:%zzsecret@host/", "amqp://u:a secret@host/", ":secret", "secret",
	} {
		err := Config{URL: url}.Validate()
		if err == nil || !strings.HasPrefix(err.Error(), "rabbitmq.url: ") {
			t.Errorf("%s: got error %v", url, err)
		} else if strings.Contains(err.Error(), "secret") {
			t.Errorf("the password is in: %v", err)
		}
	}
	for _, heartbeat := range []string{"0", "5", "10", "60"} {
		err := Config{URL: "amqp://user:secret@host/?heartbeat=" + heartbeat}.Validate()
		if err == nil || !strings.Contains(err.Error(), "take heartbeat="+heartbeat+" out of it") || strings.Contains(err.Error(), "secret") {
			t.Errorf("heartbeat=%s in the URL: got error %v", heartbeat, err)
		}
	}
	for _, prefix := range []string{"amq.onejob", "onejob/", strings.Repeat("x", 101)} {
		if (Config{Prefix: prefix}).Validate() == nil {
			t.Errorf("prefix %q: no error", prefix)
		}
	}
}
