package onejob_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/build"
	"go/doc"
	"go/importer"
	"go/parser"
	"go/printer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/reference/go.md instead of comparing it")

// A publicPackage is one that other modules can import.
type publicPackage struct {
	Path, Name, Dir, Export string
}

// publicPackages returns them, and where the compiler's export data of every package is
// that they import.
func publicPackages(t *testing.T) (public []publicPackage, exports map[string]string) {
	t.Helper()
	list := exec.CommandContext(t.Context(), "go", "list", "-export", "-deps", "-json=ImportPath,Name,Dir,Export,DepOnly", "./...")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	tools := regexp.MustCompile(`/internal(/|$)|^onejob/(chaos|model|simulate)(/|$)`)
	exports = map[string]string{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath, Name, Dir, Export string
			DepOnly                       bool
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("go list: %v", err)
		}
		exports[p.ImportPath] = p.Export
		if !p.DepOnly && p.Name != "main" && p.Export != "" && !tools.MatchString(p.ImportPath) {
			public = append(public, publicPackage{p.ImportPath, p.Name, p.Dir, p.Export})
		}
	}
	slices.SortFunc(public, func(a, b publicPackage) int { return strings.Compare(a.Path, b.Path) })
	if len(public) < 8 {
		t.Fatalf("found only %d packages", len(public))
	}
	return public, exports
}

// No exported signature has a type that another module cannot name.
func TestNoInternalTypesInSignatures(t *testing.T) {
	t.Parallel()
	public, exports := publicPackages(t)
	load := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) { return os.Open(exports[path]) })
	looked := 0
	for _, p := range public {
		pkg, err := load.Import(p.Path)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range pkg.Scope().Names() {
			object := pkg.Scope().Lookup(name)
			if !object.Exported() {
				continue
			}
			looked++
			s := signatures{seen: map[types.Type]bool{}}
			s.object(object)
			for _, found := range s.internal {
				t.Errorf("%s.%s has the type %s in its signature", p.Path, name, found)
			}
		}
	}
	if looked < 100 {
		t.Errorf("looked at only %d names", looked)
	}
}

// signatures looks for internal types in what another module sees of an object.
type signatures struct {
	seen     map[types.Type]bool
	internal []string
}

func (s *signatures) object(o types.Object) {
	name, isType := o.(*types.TypeName)
	if !isType {
		s.visit(o.Type())
		return
	}
	if alias, ok := o.Type().(*types.Alias); ok {
		s.visit(alias.Rhs())
		return
	}
	s.define(name.Type())
}

// define visits what belongs to a type's definition: fields, elements and methods.
func (s *signatures) define(t types.Type) {
	s.visit(t.Underlying())
	methods := types.NewMethodSet(types.NewPointer(t))
	for i := range methods.Len() {
		if m := methods.At(i).Obj(); m.Exported() {
			s.visit(m.Type())
		}
	}
}

func (s *signatures) visit(t types.Type) {
	if t == nil || s.seen[t] {
		return
	}
	s.seen[t] = true
	switch t := t.(type) {
	case *types.Alias:
		s.named(t.Obj(), t.TypeArgs())
	case *types.Named:
		s.named(t.Obj(), t.TypeArgs())
	case *types.Pointer:
		s.visit(t.Elem())
	case *types.Slice:
		s.visit(t.Elem())
	case *types.Array:
		s.visit(t.Elem())
	case *types.Chan:
		s.visit(t.Elem())
	case *types.Map:
		s.visit(t.Key())
		s.visit(t.Elem())
	case *types.Signature:
		for _, list := range []*types.Tuple{t.Params(), t.Results()} {
			for i := range list.Len() {
				s.visit(list.At(i).Type())
			}
		}
	case *types.Struct:
		for i := range t.NumFields() {
			if f := t.Field(i); f.Exported() {
				s.visit(f.Type())
			}
		}
	case *types.Interface:
		for i := range t.NumMethods() {
			s.visit(t.Method(i).Type())
		}
	}
}

// named notes an internal type. What a public one consists of is looked at where it is
// declared.
func (s *signatures) named(name *types.TypeName, args *types.TypeList) {
	if p := name.Pkg(); p != nil && strings.HasPrefix(p.Path(), "onejob/") && strings.Contains(p.Path()+"/", "/internal/") {
		s.internal = append(s.internal, p.Path()+"."+name.Name())
	}
	for i := range args.Len() {
		s.visit(args.At(i))
	}
}

// docs/reference/go.md has every exported name of the public packages.
func TestGoReference(t *testing.T) {
	t.Parallel()
	public, _ := publicPackages(t)
	page := bytes.NewBufferString(goIntroduction)
	for _, p := range public {
		describePackage(t, page, p)
	}
	path := filepath.Join("docs", "reference", "go.md")
	if *update {
		if err := os.WriteFile(path, page.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, page.Bytes()) {
		t.Errorf("%s differs from the code; write it anew with: go test . -run TestGoReference -update", path)
	}
}

const goIntroduction = `# Go packages

<!-- Generated from the code: go test . -run TestGoReference -update -->

Every exported name. ` + "`go doc onejob/lock.Lease`" + ` and the like print the whole documentation of one. [Embed a worker in a Go program](../how-to/embed-in-go.md) shows how they are used; [stability](stability.md) says what may change.

- To embed onejob: ` + "`onejob`, `onejobtest`, `tasks`" + `.
- To configure a replica in code: ` + "`worker`, `store`, `lock/consul`, `lock/rabbitmq`" + `.
- To write a lock service of your own: ` + "`lock`, `lock/locktest`, `boottime`" + `.

` + "`onejob`, `onejobtest`, `tasks`, `worker`, `lock` and `boottime`" + ` compile on Linux and macOS. Replicas and commands need Linux.
`

func describePackage(t *testing.T, page *bytes.Buffer, p publicPackage) {
	t.Helper()
	sources, err := build.ImportDir(p.Dir, 0)
	if err != nil {
		t.Fatal(err)
	}
	fset := token.NewFileSet()
	var files []*ast.File
	for _, name := range sources.GoFiles {
		f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	d, err := doc.NewFromFiles(fset, files, p.Path)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(page, "\n## `%s`\n\n%s\n\n| name | |\n|---|---|\n", p.Path, plain(d.Synopsis(d.Doc)))
	row := func(name, text string) { fmt.Fprintf(page, "| `%s` | %s |\n", name, plain(d.Synopsis(text))) }
	values := func(list []*doc.Value) {
		for _, v := range list {
			for _, spec := range v.Decl.Specs {
				spec := spec.(*ast.ValueSpec)
				text := spec.Doc.Text() + spec.Comment.Text()
				if text == "" && len(v.Decl.Specs) == 1 {
					text = v.Doc
				}
				for _, name := range spec.Names {
					if name.IsExported() {
						row(v.Decl.Tok.String()+" "+name.Name, text)
					}
				}
			}
		}
	}
	funcs := func(list []*doc.Func) {
		for _, f := range list {
			if f.Level != 0 { // promoted from an embedded field
				continue
			}
			var b bytes.Buffer
			f.Decl.Body, f.Decl.Doc = nil, nil
			if err := printer.Fprint(&b, fset, f.Decl); err != nil {
				t.Fatal(err)
			}
			row(regexp.MustCompile(`\s+`).ReplaceAllString(b.String(), " "), f.Doc)
		}
	}
	values(d.Consts)
	values(d.Vars)
	funcs(d.Funcs)
	for _, typ := range d.Types {
		row("type "+typ.Name, typ.Doc)
		values(typ.Consts)
		values(typ.Vars)
		funcs(typ.Funcs)
		funcs(typ.Methods)
		for _, spec := range typ.Decl.Specs {
			methods, ok := spec.(*ast.TypeSpec).Type.(*ast.InterfaceType)
			if !ok {
				continue
			}
			for _, m := range methods.Methods.List {
				for _, name := range m.Names {
					row(typ.Name+"."+name.Name, m.Doc.Text()+m.Comment.Text())
				}
			}
		}
	}
}

// plain returns text as it is in a cell of a table.
func plain(text string) string {
	return strings.NewReplacer("|", `\|`, "<", `\<`, "[", `\[`, "\n", " ").Replace(text)
}
