package cli

import (
	"bytes"
	"cmp"
	"encoding"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// How settings get from a file and from variables into a Config.

// parseFile returns the settings of a file as a tree, and the line of each.
func parseFile(content []byte) (tree map[string]any, lines map[string]int, err error) {
	var file yaml.Node
	d := yaml.NewDecoder(bytes.NewReader(content))
	if err := d.Decode(&file); err != nil && !errors.Is(err, io.EOF) { // of an empty file
		return nil, nil, withoutText(err)
	}
	if err := normalize(&file); err != nil {
		return nil, nil, err
	}
	switch err := d.Decode(new(yaml.Node)); {
	case err == nil:
		return nil, nil, errors.New("the file has more than one document, with a line of --- between them: only the first one would count")
	case !errors.Is(err, io.EOF):
		return nil, nil, withoutText(err)
	}
	if err := file.Decode(&tree); err != nil {
		if strings.Contains(err.Error(), "cannot unmarshal") { // it names Go types, and might repeat the file
			err = errors.New("the file is not a block of settings such as worker: {concurrency: 8}")
		}
		return nil, nil, err
	}
	if tree == nil {
		tree = map[string]any{}
	}
	lines = map[string]int{}
	linesOf(&file, "", lines)
	return tree, lines, nil
}

// withoutText returns an error of the parser that repeats nothing of the text: it calls a value
// that begins with * an alias, and names it.
func withoutText(err error) error {
	if strings.HasPrefix(err.Error(), "yaml: unknown anchor") {
		return errors.New("a value begins with * and is no alias of YAML; put it in quotes")
	}
	return err
}

// normalize makes a document ready to be decoded: see keepNames and checkPlain.
func normalize(document *yaml.Node) error {
	if err := keepNames(document); err != nil {
		return err
	}
	return checkPlain(document)
}

// keepNames makes the text of each key its name. YAML would take 0123 for the number 83, and TRUE
// for the value true, and the limit or command would have another name than the one in the file.
func keepNames(node *yaml.Node) error {
	for i, below := range node.Content {
		switch isKey := node.Kind == yaml.MappingNode && i%2 == 0; {
		case !isKey:
			if err := keepNames(below); err != nil {
				return err
			}
		case below.Kind != yaml.ScalarNode:
			return fmt.Errorf("line %d: a name is an alias, a list or a block of YAML; write it as text", below.Line)
		case below.Tag != mergeTag:
			below.Tag = stringTag
		}
	}
	return nil
}

// oddNumber matches numbers that are not what they look like: 010 is octal, and YAML ignores each _.
var oddNumber = regexp.MustCompile(`^[-+]?0[0-9]|_`)

// Tags of YAML.
const (
	intTag    = "!!int"
	floatTag  = "!!float"
	stringTag = "!!str"
	mergeTag  = "!!merge" // of the key <<
)

// checkPlain returns an error if a value is not what it looks like, because YAML takes its
// beginning for something else: a token such as &secret would be an anchor of nothing, !secret a tag
// of nothing, and the number 010 is 8. Names may look like numbers, see keepNames. The error does not
// repeat the value.
func checkPlain(node *yaml.Node) error {
	switch {
	case node.Anchor != "" && node.Kind == yaml.ScalarNode && node.Value == "":
		return fmt.Errorf("line %d: a value begins with &, which makes it an anchor of YAML; put it in quotes", node.Line)
	case node.Style&yaml.TaggedStyle != 0:
		return fmt.Errorf("line %d: a value begins with !, which makes it a tag of YAML; put it in quotes", node.Line)
	case node.Kind == yaml.ScalarNode && oddNumber.MatchString(node.Value) && (node.Tag == intTag || node.Tag == floatTag):
		return fmt.Errorf("line %d: a number begins with 0 or has a _, so YAML may read another one; write only its digits, or put it in quotes if it is text", node.Line)
	}
	for _, below := range node.Content {
		if err := checkPlain(below); err != nil {
			return err
		}
	}
	return nil
}

// linesOf adds the lines of what is in a node of a file: keys as in the errors of decode.
func linesOf(node *yaml.Node, path string, lines map[string]int) {
	switch node.Kind {
	case yaml.DocumentNode:
		for _, block := range node.Content {
			linesOf(block, path, lines)
		}
	case yaml.MappingNode:
		for i := 0; i+1 < len(node.Content); i += 2 {
			name := node.Content[i]
			key := strings.TrimPrefix(path+"."+name.Value, ".")
			lines[key] = name.Line
			linesOf(node.Content[i+1], key, lines)
		}
	case yaml.SequenceNode:
		for i, item := range node.Content {
			key := fmt.Sprintf("%s[%d]", path, i)
			lines[key] = item.Line
			linesOf(item, key, lines)
		}
	}
}

// decode puts what was read into a setting or a block of them, and returns what
// does not fit. What is left empty keeps its default. A value is accepted only
// as what it was written as: 8 is not a string, "8" and 8.5 are not whole numbers.
// The errors do not repeat strings, which may be secrets in the wrong place.
func decode(key string, from any, to reflect.Value) []error {
	problem := func(want string) []error {
		return []error{fmt.Errorf("%s: must be %s (found %s)", cmp.Or(key, "the file"), want, written(from))}
	}
	if from == nil {
		return nil
	}
	if to.Type() == reflect.TypeFor[time.Duration]() {
		text, _ := from.(string)
		d, err := time.ParseDuration(text)
		if err != nil {
			return problem("a duration with a unit, such as 500ms, 30s or 1m30s")
		}
		to.SetInt(int64(d))
		return nil
	}
	if own, ok := to.Addr().Interface().(encoding.TextUnmarshaler); ok {
		switch from.(type) {
		case string, int:
		default:
			return problem("a string or a whole number")
		}
		if err := own.UnmarshalText(fmt.Append(nil, from)); err != nil {
			return problem(err.Error())
		}
		return nil
	}
	var errs []error
	switch value := reflect.ValueOf(from); to.Kind() {
	case reflect.String:
		text, ok := from.(string)
		if !ok {
			return problem("a string in quotes")
		}
		to.SetString(text)
	case reflect.Bool:
		yes, ok := from.(bool)
		if !ok {
			return problem("true or false")
		}
		to.SetBool(yes)
	case reflect.Int:
		if !value.CanInt() {
			return problem("a whole number")
		}
		to.SetInt(value.Int())
	case reflect.Float64:
		switch {
		case value.CanFloat():
			to.SetFloat(value.Float())
		case value.CanInt():
			to.SetFloat(float64(value.Int()))
		default:
			return problem("a number")
		}
	case reflect.Slice:
		list, ok := from.([]any)
		if !ok {
			return problem("a list, such as [a, b]")
		}
		to.Set(reflect.MakeSlice(to.Type(), len(list), len(list)))
		for i, item := range list {
			name := fmt.Sprintf("%s[%d]", key, i)
			if item == nil {
				errs = append(errs, fmt.Errorf("%s: has no value", name))
				continue
			}
			errs = append(errs, decode(name, item, to.Index(i))...)
		}
	case reflect.Map:
		block, ok := from.(map[string]any)
		if !ok {
			return problem("a block with a name for each")
		}
		to.Set(reflect.MakeMap(to.Type()))
		for _, name := range slices.Sorted(maps.Keys(block)) {
			item := reflect.New(to.Type().Elem()).Elem()
			if block[name] == nil && item.Kind() != reflect.Struct { // there is no default; zero slots pause a limit
				errs = append(errs, fmt.Errorf("%s.%s: has no value", key, name))
				continue
			}
			errs = append(errs, decode(key+"."+name, block[name], item)...)
			to.SetMapIndex(reflect.ValueOf(name), item)
		}
	case reflect.Struct:
		block, ok := from.(map[string]any)
		if !ok {
			return problem("a block of settings")
		}
		for _, name := range slices.Sorted(maps.Keys(block)) {
			below := strings.TrimPrefix(key+"."+name, ".")
			if field, ok := fieldOf(to, name); ok {
				errs = append(errs, decode(below, block[name], field)...)
			} else {
				errs = append(errs, fmt.Errorf("%s: unknown setting%s; see onejob config", below, didYouMean(name, keysOf(to))))
			}
		}
	default:
		panic("no setting can be a " + to.Type().String())
	}
	return errs
}

// keysOf returns the names of the settings in a block.
func keysOf(block reflect.Value) (keys []string) {
	for i := range block.NumField() {
		if key := block.Type().Field(i).Tag.Get("yaml"); key != "" && key != "-" {
			keys = append(keys, key)
		}
	}
	return keys
}

func fieldOf(block reflect.Value, key string) (reflect.Value, bool) {
	for i := range block.NumField() {
		if tag := block.Type().Field(i).Tag.Get("yaml"); tag == key && tag != "-" {
			return block.Field(i), true
		}
	}
	return reflect.Value{}, false
}

// written names what stands in the place of something else.
func written(value any) string {
	switch value.(type) {
	case string:
		return "a string"
	case bool:
		return "true or false"
	case []any:
		return "a list"
	case map[string]any:
		return "a block"
	case time.Time:
		return "a date"
	}
	return "a number"
}

// addVariables puts the settings among environ in the place of those of tree, and returns the
// variables that they came from. A variable that is empty, or has nothing but white space, counts as not
// there, but for texts.
func addVariables(tree map[string]any, environ []string) (origin map[string]string, err error) {
	known := map[string]setting{}
	for _, s := range settings(reflect.TypeFor[Config](), nil) {
		known[s.variable()] = s
	}
	origin = map[string]string{}
	var errs []error
	for _, entry := range environ {
		name, text, _ := strings.Cut(entry, "=")
		s, ok := known[name]
		switch {
		case !strings.HasPrefix(name, "ONEJOB_"), slices.Contains(foreignVariables, name):
			continue
		case !ok && kubernetes.MatchString(name):
			continue
		case !ok:
			errs = append(errs, fmt.Errorf("variable %s: unknown setting%s; see onejob config", name, didYouMean(name, slices.Sorted(maps.Keys(known)))))
			continue
		case strings.TrimSpace(text) == "" && s.kind.Kind() != reflect.String:
			continue
		}
		value, err := s.parse(text)
		if err != nil {
			errs = append(errs, fmt.Errorf("variable %s: %w", name, err))
			continue
		}
		if value == nil {
			errs = append(errs, fmt.Errorf("variable %s: has no value; leave it empty, or out, to keep what the file says", name))
			continue
		}
		if set(tree, s.path, value) {
			origin[s.key()] = name
		}
	}
	return origin, errors.Join(errs...)
}

// set puts a value into a tree. It reports false if something else than a block is in its way,
// of which decode complains.
func set(tree map[string]any, path []string, value any) bool {
	last := len(path) - 1
	for _, name := range path[:last] {
		if tree[name] == nil {
			tree[name] = map[string]any{}
		}
		block, ok := tree[name].(map[string]any)
		if !ok {
			return false
		}
		tree = block
	}
	tree[path[last]] = value
	return true
}

// foreignVariables begin with ONEJOB_ and are no settings: those that a task's
// process finds, which may well call onejob again, and those of the tools here.
var foreignVariables = []string{
	"ONEJOB_CONFIG", "ONEJOB_TASK_ID", "ONEJOB_ATTEMPT", "ONEJOB_FENCE", "ONEJOB_LOCK_KEY", "ONEJOB_DEADLINE", "ONEJOB_GUARD", "ONEJOB_OUTER_GUARDS",
	"ONEJOB_CONSUL_BIN", "ONEJOB_POSTGRES_BIN", "ONEJOB_RABBITMQ_BIN", "ONEJOB_CHROMIUM_BIN", "ONEJOB_DEV_PIDS", "ONEJOB_DEV_PAGES",
}

// kubernetes matches the variables that Kubernetes puts into every container
// for a Service named onejob or onejob-something.
var kubernetes = regexp.MustCompile(`^ONEJOB_([A-Z0-9_]+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`)

// A setting is a leaf of Config.
type setting struct {
	path []string
	kind reflect.Type
}

func (s setting) key() string { return strings.Join(s.path, ".") }

func (s setting) variable() string {
	return "ONEJOB_" + strings.ToUpper(strings.Join(s.path, "_"))
}

// parse reads the text of a variable: as it is where the setting is a text or
// a duration, else as YAML. A list may also be written as a,b.
func (s setting) parse(text string) (any, error) {
	if s.kind.Kind() == reflect.String || s.kind == reflect.TypeFor[time.Duration]() {
		return text, nil
	}
	if s.kind.Kind() == reflect.Slice && !strings.HasPrefix(strings.TrimSpace(text), "[") {
		var list []any
		for item := range strings.SplitSeq(text, ",") {
			list = append(list, strings.TrimSpace(item))
		}
		return list, nil
	}
	var node yaml.Node
	if err := yaml.Unmarshal([]byte(text), &node); err != nil {
		return nil, fmt.Errorf("invalid YAML: %w", withoutText(err))
	}
	if err := normalize(&node); err != nil {
		return nil, err
	}
	var value any
	if err := node.Decode(&value); err != nil {
		return nil, fmt.Errorf("invalid YAML: %w", err)
	}
	return value, nil
}

// settings returns the leaves of a configuration's type. What a person names,
// such as commands, is one leaf.
func settings(t reflect.Type, path []string) []setting {
	var all []setting
	for i := range t.NumField() {
		f := t.Field(i)
		key := f.Tag.Get("yaml")
		if key == "" || key == "-" {
			continue
		}
		here := append(slices.Clone(path), key)
		if f.Type.Kind() == reflect.Struct {
			all = append(all, settings(f.Type, here)...)
		} else {
			all = append(all, setting{here, f.Type})
		}
	}
	return all
}
