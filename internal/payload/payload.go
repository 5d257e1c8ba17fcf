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

// Unmarshal is json.Unmarshal. Its errors are in words of JSON, as people who enqueue need not
// know Go.
func Unmarshal(payload json.RawMessage, into any) error {
	return inWords(json.Unmarshal(payload, into))
}

func inWords(err error) error {
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("payload: %s cannot be a JSON %s", cmp.Or(wrong.Field, "it"), wrong.Value)
	}
	if err != nil {
		return fmt.Errorf("payload: %w", err)
	}
	return nil
}

// Decode decodes a payload and refuses fields that into has no place for, at
// every depth, and what [Check] refuses. What a type's own UnmarshalJSON accepts, it accepts.
func Decode(payload json.RawMessage, into any) error {
	d := json.NewDecoder(bytes.NewReader(payload))
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if err == nil {
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			return errors.New("payload: something follows the JSON value")
		}
		err = Check(payload, into)
	}
	if err == nil {
		return nil
	}
	if quoted, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return fmt.Errorf("payload: unknown field %.100s%s", quoted, allowedAt(payload, quoted, into))
	}
	return inWords(err)
}

// Check refuses what encoding/json has decoded into a struct, and should not have: null, and
// two names for one field. It looks at into, at fields that are structs, and at structs in
// slices and arrays. It does not look into maps, nor into types with an UnmarshalJSON or
// UnmarshalText of their own. A field that is a pointer may be null. A name in another case
// than the field's is taken, as encoding/json does.
func Check(value json.RawMessage, into any) error {
	t := reflect.TypeOf(into)
	for t.Kind() == reflect.Pointer && !decodesItself(t.Elem()) {
		t = t.Elem()
	}
	c := checker{json.NewDecoder(bytes.NewReader(value)), map[reflect.Type][]field{}}
	return c.value(t, "")
}

// checker reads valid JSON once, however deep it is.
type checker struct {
	*json.Decoder
	fields map[reflect.Type][]field // of the structs so far
}

// value reads the next value, which was decoded into a t. where is the field that has it, or
// "" if none has.
func (c checker) value(t reflect.Type, where string) error {
	optional := t.Kind() == reflect.Pointer
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if decodesItself(t) || !holdsStructs(t) {
		c.skip()
		return nil
	}
	switch begin, _ := c.Token(); {
	case begin == nil && t.Kind() == reflect.Struct && !optional:
		if where != "" {
			return fmt.Errorf("%.100q: null is no object; leave the field out or write {}", where)
		}
		return errors.New("null is no object; for one without fields write {}")
	case begin == json.Delim('{'):
		if err := c.object(t); err != nil {
			return err
		}
		_, _ = c.Token()
	case begin == json.Delim('['):
		for i := 0; c.More(); i++ {
			if t.Kind() == reflect.Array && i >= t.Len() { // encoding/json drops these
				c.skip()
			} else if err := c.value(t.Elem(), where); err != nil {
				return err
			}
		}
		_, _ = c.Token()
	}
	return nil
}

// object reads the fields of an object that was decoded into a struct of type t.
func (c checker) object(t reflect.Type) error {
	if c.fields[t] == nil {
		c.fields[t] = fieldsOf(t)
	}
	fields, seen := c.fields[t], map[string]string{}
	for c.More() {
		token, _ := c.Token()
		name, _ := token.(string)
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == name })
		if i < 0 {
			i = slices.IndexFunc(fields, func(f field) bool { return strings.EqualFold(f.name, name) })
		}
		if i < 0 { // only a lenient decoder gets here
			c.skip()
			continue
		}
		if other, twice := seen[fields[i].name]; twice && other != name {
			return fmt.Errorf("%.100q and %.100q are the same field", other, name)
		}
		seen[fields[i].name] = name
		if err := c.value(fields[i].t, name); err != nil {
			return err
		}
	}
	return nil
}

// skip reads a value of any kind.
func (c checker) skip() {
	var value json.RawMessage
	_ = c.Decode(&value)
}

// decodesItself reports whether a t has its own way from JSON.
func decodesItself(t reflect.Type) bool {
	p := reflect.PointerTo(t)
	return p.Implements(reflect.TypeFor[json.Unmarshaler]()) || p.Implements(reflect.TypeFor[encoding.TextUnmarshaler]())
}

// holdsStructs reports whether a t is a struct, or a list that may have some.
func holdsStructs(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Struct:
		return true
	case reflect.Slice, reflect.Array:
		k := t.Elem().Kind()
		return k == reflect.Struct || k == reflect.Pointer || k == reflect.Slice || k == reflect.Array
	}
	return false
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
	for _, f := range fieldsOf(t) {
		names = append(names, f.name)
	}
	return names
}

// field is a field of a struct, by the name that encoding/json has for it.
type field struct {
	name   string
	t      reflect.Type
	tagged bool // the name is that of a tag
}

// fieldsOf returns the fields of a struct that encoding/json fills: those of embedded structs, unless
// they have a name, are fields of the struct itself. What lies less deep hides a field of the same name.
// Of two that lie equally deep the one with a tag is taken, and neither if both have one or none.
func fieldsOf(t reflect.Type) (fields []field) {
	known, names := map[reflect.Type]bool{}, map[string]bool{}
	for level := []reflect.Type{t}; len(level) > 0; {
		for _, t := range level {
			known[t] = true
		}
		var here []field
		var below []reflect.Type
		for _, t := range level {
			for i := range t.NumField() {
				f := t.Field(i)
				name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
				inner := f.Type
				if inner.Name() == "" && inner.Kind() == reflect.Pointer {
					inner = inner.Elem()
				}
				embedded := f.Anonymous && inner.Kind() == reflect.Struct
				switch {
				case f.Tag.Get("json") == "-" || !f.IsExported() && !embedded:
				case name != "" || !embedded:
					here = append(here, field{cmp.Or(name, f.Name), f.Type, name != ""})
				case !known[inner]:
					below = append(below, inner)
				}
			}
		}
		for _, f := range here {
			alike := 0
			for _, o := range here {
				if o.name == f.name && (o.tagged || !f.tagged) {
					alike++
				}
			}
			if alike == 1 && !names[f.name] {
				fields = append(fields, f)
			}
		}
		for _, f := range here {
			names[f.name] = true
		}
		level = below
	}
	return fields
}
