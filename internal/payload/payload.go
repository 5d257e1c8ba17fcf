// Package payload decodes the payloads of tasks strictly.
//
// A misspelt field is an error and not a field that is ignored: a backup that
// runs without its arguments looks like one that succeeded.
package payload

import (
	"bytes"
	"cmp"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// CheckFields returns an error if payload is an object with a field that is not
// among allowed, or with one field twice. Names are compared exactly, where
// encoding/json would accept "ARGS" for "args". What is not an object is left to
// the caller's own decoding.
func CheckFields(payload json.RawMessage, allowed ...string) error {
	d := json.NewDecoder(bytes.NewReader(payload))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return nil
	}
	var seen []string
	for d.More() {
		token, err := d.Token()
		name, ok := token.(string)
		if err != nil || !ok {
			return nil
		}
		switch {
		case !slices.Contains(allowed, name):
			return fmt.Errorf("payload: unknown field %.100q; allowed are %s", name, strings.Join(allowed, ", "))
		case slices.Contains(seen, name):
			return fmt.Errorf("payload: the field %q is given twice", name)
		}
		seen = append(seen, name)
		var value json.RawMessage
		if d.Decode(&value) != nil {
			return nil
		}
	}
	return nil
}

// Decode decodes a payload and refuses fields that into has no place for, at
// every depth, null for a struct, and two fields of the payload whose names differ in case
// alone. What a type's own UnmarshalJSON accepts, it accepts.
func Decode(payload json.RawMessage, into any) error {
	d := json.NewDecoder(bytes.NewReader(payload))
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if err == nil {
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			return errors.New("payload: something follows the JSON value")
		}
		return checkNames(payload, into)
	}
	if quoted, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return fmt.Errorf("payload: unknown field %.100s%s", quoted, allowedAt(payload, quoted, into))
	}
	return fmt.Errorf("payload: %w", err)
}

// checkNames refuses what encoding/json takes for a struct, and should not: null, and two names
// for one field. A name in another case than the field's is taken, as encoding/json does.
func checkNames(payload json.RawMessage, into any) error {
	t := reflect.TypeOf(into)
	for ; t.Kind() == reflect.Pointer; t = t.Elem() {
		if t.Implements(reflect.TypeFor[json.Unmarshaler]()) || t.Implements(reflect.TypeFor[encoding.TextUnmarshaler]()) {
			return nil
		}
	}
	switch {
	case t.Kind() != reflect.Struct:
		return nil
	case string(bytes.TrimSpace(payload)) == "null":
		return errors.New("payload: null is no object; for one without fields write {}")
	}
	var top map[string]json.RawMessage
	if json.Unmarshal(payload, &top) != nil {
		return nil
	}
	fields, seen := fieldNames(t), map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(top)) {
		folded := strings.ToLower(name)
		if other, twice := seen[folded]; twice && !(slices.Contains(fields, name) && slices.Contains(fields, other)) {
			return fmt.Errorf("payload: %.100q and %.100q are the same field", other, name)
		}
		seen[folded] = name
	}
	return nil
}

// allowedAt returns the end of a sentence about an unknown field: which fields
// into has, if the field is one of the payload's own, and nothing if it is one
// of an object inside.
func allowedAt(payload json.RawMessage, quoted string, into any) string {
	var top map[string]json.RawMessage
	name, err := strconv.Unquote(quoted)
	if err != nil || json.Unmarshal(payload, &top) != nil || top[name] == nil {
		return ""
	}
	if names := fieldNames(reflect.TypeOf(into)); len(names) > 0 {
		return "; allowed are " + strings.Join(names, ", ")
	}
	return "; no fields are allowed"
}

// fieldNames returns the names that encoding/json has for the fields of a
// struct, or of what is a pointer to one.
func fieldNames(t reflect.Type) []string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	var names []string
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if !f.IsExported() || f.Tag.Get("json") == "-" || f.Anonymous && name == "" {
			continue
		}
		names = append(names, cmp.Or(name, f.Name))
	}
	return names
}
