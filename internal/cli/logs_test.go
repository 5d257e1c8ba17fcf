package cli

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"onejob/internal/logging"
)

// docs/reference/logs.md says of every event in the code, and of no other, which level and
// fields it has.
func TestLogsAreDocumented(t *testing.T) {
	code := eventsInCode(t, "../..")
	page := eventsOnPage(t, "../../docs/reference/logs.md")
	if len(code) < 20 {
		t.Fatalf("found only %d events in the code", len(code))
	}
	for _, name := range slices.Sorted(maps.Keys(code)) {
		in, on := code[name], page[name]
		switch {
		case on == nil:
			t.Errorf("%s: %s is not on the page; it is %s", in.where, name, in)
		case in.String() != on.String():
			t.Errorf("%s: %s is %s, on the page %s", in.where, name, in, on)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(page)) {
		if code[name] == nil {
			t.Errorf("%s is on the page and not in the code", name)
		}
	}
}

// taskFields are those of every event about a task.
var taskFields = []string{"task_id", "attempt", "kind", "lock_key", "fence"}

type event struct {
	where  string
	level  string
	task   bool            // it has the fields of a task
	fields map[string]bool // the others
}

func (e *event) String() string {
	about := "the replica's"
	if e.task {
		about = "a task's"
	}
	return fmt.Sprintf("%s, %s, with %v", about, e.level, slices.Sorted(maps.Keys(e.fields)))
}

// eventsOnPage reads the tables of docs/reference/logs.md: event, level, fields and so on.
func eventsOnPage(t *testing.T, path string) map[string]*event {
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	quoted := regexp.MustCompile("`([a-z_]+)`")
	events := map[string]*event{}
	task := false
	for line := range strings.Lines(string(raw)) {
		if heading, ok := strings.CutPrefix(line, "## "); ok {
			task = strings.HasPrefix(heading, "A task")
		}
		cells := strings.Split(line, "|")
		if len(cells) < 2 {
			continue
		}
		name := quoted.FindStringSubmatch(cells[1])
		if name == nil {
			continue
		}
		if len(cells) != 7 || strings.TrimSpace(cells[4]) == "" || strings.TrimSpace(cells[5]) == "" {
			t.Errorf("%s: not event, level, fields, what it means, what to do", strings.TrimSpace(line))
			continue
		}
		if events[name[1]] != nil {
			t.Errorf("%s is on the page twice", name[1])
		}
		e := &event{level: strings.TrimSpace(cells[2]), task: task, fields: map[string]bool{}}
		for _, field := range quoted.FindAllStringSubmatch(cells[3], -1) {
			e.fields[field[1]] = true
		}
		events[name[1]] = e
	}
	return events
}

// eventsInCode finds the calls such as log.Info("name", ...) below root. A
// function may get the name as an argument: then its callers say it.
func eventsInCode(t *testing.T, root string) map[string]*event {
	events := map[string]*event{}
	for dir, files := range sources(t, root) {
		functions := map[string]*ast.FuncDecl{}
		for _, f := range files {
			for _, d := range f.Decls {
				if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil && (fn.Recv == nil || returnsFields(fn)) {
					functions[fn.Name.Name] = fn
				}
			}
		}
		named := map[string]*event{} // by the function that logs what it is told to
		everyCall(files, func(call *ast.CallExpr, in *ast.FuncDecl) {
			if level, ok := logs(call); ok {
				e := newEvent(dir, level, fieldsOf(call.Args[1:], in, functions))
				if name, ok := literal(call.Args[0]); ok {
					merge(t, events, name, e)
				} else {
					named[in.Name.Name] = e
				}
			}
		})
		everyCall(files, func(call *ast.CallExpr, in *ast.FuncDecl) {
			if e := named[callee(call)]; e != nil {
				if name, ok := literal(call.Args[0]); ok {
					merge(t, events, name, e)
				} else {
					t.Errorf("%s: %s logs an event whose name is not written there", dir, in.Name.Name)
				}
			}
		})
	}
	return events
}

func newEvent(where, level string, fields map[string]bool) *event {
	e := &event{where: where, level: level, task: true, fields: fields}
	for _, field := range taskFields {
		e.task = e.task && fields[field]
	}
	if e.task {
		maps.DeleteFunc(fields, func(field string, _ bool) bool { return slices.Contains(taskFields, field) || field == "trace_id" })
	}
	return e
}

// everyCall calls f for every call with arguments, and the function that it is in.
func everyCall(files []*ast.File, f func(call *ast.CallExpr, in *ast.FuncDecl)) {
	for _, file := range files {
		for _, d := range file.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok && fn.Body != nil {
				ast.Inspect(fn.Body, func(n ast.Node) bool {
					if call, ok := n.(*ast.CallExpr); ok && len(call.Args) > 0 {
						f(call, fn)
					}
					return true
				})
			}
		}
	}
}

// merge adds an event, which may be logged at several places, and at two levels.
func merge(t *testing.T, events map[string]*event, name string, e *event) {
	before := events[name]
	if before == nil {
		events[name] = &event{e.where, e.level, e.task, maps.Clone(e.fields)}
		return
	}
	if levels := strings.Split(before.level, ", "); !slices.Contains(levels, e.level) {
		levels = append(levels, e.level)
		slices.Sort(levels)
		before.level = strings.Join(levels, ", ")
	}
	if before.task != e.task {
		t.Errorf("%s is %s in %s and %s in %s", name, before, before.where, e, e.where)
	}
	maps.Copy(before.fields, e.fields)
}

// sources parses the packages of the module at root, without tests.
func sources(t *testing.T, root string) map[string][]*ast.File {
	dirs := map[string][]*ast.File{}
	set := token.NewFileSet()
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir():
			_, notMod := os.Stat(filepath.Join(path, "go.mod"))
			if path != root && (notMod == nil || strings.HasPrefix(entry.Name(), ".") || entry.Name() == "testdata") {
				return filepath.SkipDir
			}
			return nil
		case !strings.HasSuffix(path, ".go"), strings.HasSuffix(path, "_test.go"):
			return nil
		}
		f, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
		dir := filepath.Dir(path)
		dirs[dir] = append(dirs[dir], f)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return dirs
}

// logs reports whether a call logs an event.
func logs(call *ast.CallExpr) (level string, ok bool) {
	method, ok := call.Fun.(*ast.SelectorExpr)
	if !ok || !slices.Contains([]string{"Debug", "Info", "Warn", "Error"}, method.Sel.Name) {
		return "", false
	}
	return strings.ToLower(method.Sel.Name), strings.EqualFold(lastName(method.X), "log")
}

// callee returns the name of what is called, without what it belongs to.
func callee(call *ast.CallExpr) string { return lastName(call.Fun) }

func lastName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return e.Sel.Name
	}
	return ""
}

// fieldsOf returns the names of the fields in args, in what was put into their
// variables before, and in what the functions of the package return there.
func fieldsOf(args []ast.Expr, in *ast.FuncDecl, functions map[string]*ast.FuncDecl) map[string]bool {
	names := map[string]bool{}
	for _, arg := range args {
		ast.Inspect(arg, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.CallExpr:
				switch f := n.Fun.(type) {
				case *ast.SelectorExpr:
					if pkg, ok := f.X.(*ast.Ident); ok && pkg.Name == "zap" {
						if name, ok := literal(n.Args[0]); ok {
							names[name] = true
						} else if f.Sel.Name == "Error" {
							names["error"] = true
						}
						return false // what is logged is no field
					}
					if fn := functions[f.Sel.Name]; fn != nil && fn.Recv != nil {
						maps.Copy(names, fieldsOf(returned(fn), fn, nil))
					}
				case *ast.Ident:
					if fn := functions[f.Name]; fn != nil {
						maps.Copy(names, fieldsOf(returned(fn), fn, nil))
					}
				}
			case *ast.Ident:
				maps.Copy(names, fieldsOf(assigned(in, n.Name, n.Pos()), in, functions))
			}
			return true
		})
	}
	return names
}

// assigned returns what was put into a local variable before a position.
func assigned(in *ast.FuncDecl, variable string, before token.Pos) []ast.Expr {
	var values []ast.Expr
	ast.Inspect(in.Body, func(n ast.Node) bool {
		if a, ok := n.(*ast.AssignStmt); ok && a.End() < before && len(a.Lhs) == 1 {
			if to, ok := a.Lhs[0].(*ast.Ident); ok && to.Name == variable {
				values = append(values, a.Rhs...)
			}
		}
		return true
	})
	return values
}

// returnsFields reports whether a method returns fields of a log event.
func returnsFields(f *ast.FuncDecl) bool {
	found := false
	ast.Inspect(f.Type, func(n ast.Node) bool {
		s, ok := n.(*ast.SelectorExpr)
		found = found || ok && lastName(s.X) == "zap" && s.Sel.Name == "Field"
		return true
	})
	return found
}

func returned(f *ast.FuncDecl) []ast.Expr {
	var values []ast.Expr
	ast.Inspect(f.Body, func(n ast.Node) bool {
		if r, ok := n.(*ast.ReturnStmt); ok {
			values = append(values, r.Results...)
		}
		return true
	})
	return values
}

func literal(e ast.Expr) (string, bool) {
	if l, ok := e.(*ast.BasicLit); ok && l.Kind == token.STRING {
		text, err := strconv.Unquote(l.Value)
		return text, err == nil
	}
	return "", false
}

func TestConsoleLines(t *testing.T) {
	var out strings.Builder
	c := defaults()
	c.Log.Format, c.Replica = "console", "one"
	log, _ := newLogger(c, &logging.Queue{Out: &out})
	log = log.WithOptions(zap.WithClock(fixedClock{}))
	log.Info("task_succeeded", zap.Int64("task_id", 5), zap.Duration("took", 1234567*time.Nanosecond), zap.String("kind", ""))
	log.Warn("listen_failed", zap.Error(fmt.Errorf("two\nlines and a %q", "quote")))
	log.Debug("not_at_this_level")
	if err := log.Sync(); err != nil {
		t.Fatal(err)
	}
	want := `15:04:05.006 INFO  task_succeeded task_id=5 took=1.235ms kind="" replica=one
15:04:05.006 WARN  listen_failed error="two\nlines and a \"quote\"" replica=one
`
	if out.String() != want {
		t.Errorf("got\n%s, not\n%s", out.String(), want)
	}
}

type fixedClock struct{ zapcore.Clock }

func (fixedClock) Now() time.Time { return time.Date(2006, 1, 2, 15, 4, 5, 6e6, time.UTC) }
