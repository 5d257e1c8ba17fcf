package consul

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/hashicorp/consul/api"

	"onejob/lock"
)

// content is what stands in a .lock. Its fields are those of HashiCorp's client
// and of the guide.
type content struct {
	Limit   int
	Holders holders
}

// holders is a set of sessions: an object with the sessions as keys in the form
// of HashiCorp's client, a list in that of the guide. It keeps the form it was
// read in.
type holders struct {
	set  map[string]bool
	list bool
}

func (h *holders) UnmarshalJSON(b []byte) error {
	h.set, h.list = map[string]bool{}, bytes.HasPrefix(b, []byte("["))
	if !h.list {
		// The client counts a holder by its key, whatever the value.
		var object map[string]bool
		err := json.Unmarshal(b, &object)
		for session := range object {
			h.set[session] = true
		}
		return err
	}
	var sessions []string
	err := json.Unmarshal(b, &sessions)
	for _, session := range sessions {
		h.set[session] = true
	}
	return err
}

func (h holders) MarshalJSON() ([]byte, error) {
	if !h.list {
		return json.Marshal(h.set)
	}
	return json.Marshal(slices.Sorted(maps.Keys(h.set)))
}

// decodeLock reads a .lock. Only what we would write back whole is ours: its
// error is lock.ErrForeign.
func decodeLock(pair *api.KVPair) (content, error) {
	foreign := func(format string, a ...any) (content, error) {
		return content{}, fmt.Errorf("key %s: %w: %s", pair.Key, lock.ErrForeign, fmt.Sprintf(format, a...))
	}
	if pair.Session != "" {
		return foreign("session %s holds it as a mutex", pair.Session)
	}
	if pair.Flags != 0 && pair.Flags != api.SemaphoreFlagValue { // the guide's has none
		return foreign("its flags are %#x", pair.Flags)
	}
	var raw struct {
		Limit   *int
		Holders holders // null is the client's empty set
	}
	if err := strict(pair.Value, &raw); err != nil {
		return foreign("%v", err)
	}
	if raw.Limit == nil || *raw.Limit < 0 {
		return foreign("it has no limit")
	}
	if raw.Holders.set == nil {
		return foreign("it has no holders")
	}
	return content{Limit: *raw.Limit, Holders: raw.Holders}, nil
}

// setting is our record of a semaphore.
type setting struct {
	Limit *int `json:"limit"`
}

func decodeSetting(pair *api.KVPair) (limit int, err error) {
	var s setting
	err = strict(pair.Value, &s)
	if err == nil && (s.Limit == nil || *s.Limit < 0 || *s.Limit > lock.MaxSlots) {
		err = fmt.Errorf("it has no limit between 0 and %d", lock.MaxSlots)
	}
	if err != nil {
		return 0, fmt.Errorf("key %s: %w: %w", pair.Key, lock.ErrForeign, err)
	}
	return *s.Limit, nil
}

// strict decodes one JSON value that has no fields we do not know.
func strict(b []byte, to any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(to); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is something after the JSON")
	}
	return nil
}

// encode is for what cannot fail to be JSON.
func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}
