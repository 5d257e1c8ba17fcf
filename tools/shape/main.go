// Command shape measures the structure of one or more checkouts of onejob and prints a
// Markdown table with a column for each, so that the effect of a change can be seen:
//
//	git worktree add /tmp/before COMMIT
//	cd tools/shape && go run . /tmp/before ../..
//
// "Product" is what the command onejob is built from: the packages of this module that
// cmd/onejob imports, directly or not, for Linux, without tests.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/token"
	"go/types"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/mod/modfile"
	"golang.org/x/tools/go/packages"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: shape CHECKOUT ...")
		os.Exit(2)
	}
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "shape:", err)
		os.Exit(1)
	}
}

// A row is one line of the table.
type row struct{ name, value string }

func run(dirs []string) error {
	var table [][]row
	for _, dir := range dirs {
		rows, err := measure(dir)
		if err != nil {
			return fmt.Errorf("measure %s: %w", dir, err)
		}
		table = append(table, rows)
	}
	out := bufio.NewWriter(os.Stdout)
	fmt.Fprint(out, "| |")
	for _, dir := range dirs {
		fmt.Fprintf(out, " %s |", commit(dir))
	}
	fmt.Fprintf(out, "\n|---|%s\n", strings.Repeat("---|", len(dirs)))
	for i := range table[0] {
		fmt.Fprintf(out, "| %s |", table[0][i].name)
		for _, rows := range table {
			fmt.Fprintf(out, " %s |", rows[i].value)
		}
		fmt.Fprintln(out)
	}
	return out.Flush()
}

// commit names what is checked out in dir.
func commit(dir string) string {
	out, err := exec.Command("git", "-C", dir, "describe", "--always", "--dirty", "--exclude", "*").Output()
	if err != nil {
		return filepath.Base(dir)
	}
	return strings.TrimSpace(string(out))
}

func measure(dir string) ([]row, error) {
	product, err := load(dir)
	if err != nil {
		return nil, err
	}
	trees, err := countTrees(dir)
	if err != nil {
		return nil, err
	}
	direct, err := directDependencies(dir)
	if err != nil {
		return nil, err
	}
	size, modules, err := binary(dir)
	if err != nil {
		return nil, err
	}

	s := survey(dir, product)
	inside := fileGraph(product, "lock/consul")
	return []row{
		{"product: packages", strconv.Itoa(len(product))},
		{"product: files", strconv.Itoa(s.files)},
		{"product: lines", strconv.Itoa(s.lines)},
		{"product: lines of code (no comments, no blank lines)", strconv.Itoa(s.code)},
		{"product: longest file", s.file.String()},
		{"product: longest function, lines", s.function.String()},
		{"product: widest struct, fields", s.structure.String()},
		{"product: largest interface, methods", s.iface.String()},
		{"product: exported names outside internal, methods included", strconv.Itoa(s.exported)},
		{"product: imports between packages", strconv.Itoa(s.imports)},
		{"lock/consul: files", strconv.Itoa(len(inside))},
		{"lock/consul: arrows between files", strconv.Itoa(arrows(inside))},
		{"lock/consul: arrows back up", strconv.Itoa(backArrows(inside))},
		{"tests: lines", strconv.Itoa(trees.tests)},
		{"chaos: lines, tests included", strconv.Itoa(trees.chaos)},
		{"bench: lines, tests included", strconv.Itoa(trees.bench)},
		{"simulate: lines, tests included", strconv.Itoa(trees.simulate)},
		{"committed JSON: lines", strconv.Itoa(trees.json)},
		{"direct dependencies", strconv.Itoa(direct)},
		{"modules in the binary", strconv.Itoa(modules)},
		{"binary, MB (-trimpath -s -w)", fmt.Sprintf("%.1f", float64(size)/1e6)},
	}, nil
}

// load returns the packages of dir's module that cmd/onejob is built from.
func load(dir string) ([]*packages.Package, error) {
	cfg := &packages.Config{
		Dir: dir,
		Env: append(os.Environ(), "GOOS=linux", "GOFLAGS=-mod=mod", "GOWORK=off"),
		Mode: packages.NeedName | packages.NeedFiles | packages.NeedImports | packages.NeedDeps | packages.NeedModule |
			packages.NeedSyntax | packages.NeedTypes | packages.NeedTypesInfo,
	}
	roots, err := packages.Load(cfg, "./cmd/onejob")
	if err != nil {
		return nil, err
	}
	if n := packages.PrintErrors(roots); n > 0 {
		return nil, fmt.Errorf("%d errors in the packages", n)
	}
	var own []*packages.Package
	packages.Visit(roots, nil, func(p *packages.Package) {
		if p.Module != nil && p.Module.Main {
			own = append(own, p)
		}
	})
	slices.SortFunc(own, func(a, b *packages.Package) int { return cmp.Compare(a.PkgPath, b.PkgPath) })
	return own, nil
}

// A most is the largest of many things, and where it is.
type most struct {
	n     int
	where string
}

func (m *most) offer(n int, where string) {
	if n > m.n {
		m.n, m.where = n, where
	}
}

func (m most) String() string { return fmt.Sprintf("%d (%s)", m.n, m.where) }

type figures struct {
	files, lines, code, exported, imports int
	file, function, structure, iface      most
}

func survey(dir string, product []*packages.Package) (s figures) {
	own := map[string]bool{}
	for _, p := range product {
		own[p.PkgPath] = true
	}
	for _, p := range product {
		for path := range p.Imports {
			if own[path] {
				s.imports++
			}
		}
		if p.Name != "main" && !strings.Contains(p.PkgPath+"/", "/internal/") {
			s.exported += exportedNames(p)
		}
		for i, syntax := range p.Syntax {
			name := p.GoFiles[i]
			if rel, err := filepath.Rel(dir, name); err == nil && !strings.HasPrefix(rel, "..") {
				name = rel
			} else if abs, err := filepath.Abs(dir); err == nil {
				name = strings.TrimPrefix(name, abs+"/")
			}
			file := p.Fset.File(syntax.FileStart)
			s.files++
			s.lines += file.LineCount()
			s.code += codeLines(p.Fset, syntax)
			s.file.offer(file.LineCount(), name)
			s.declarations(p, syntax)
		}
	}
	return s
}

func (s *figures) declarations(p *packages.Package, syntax *ast.File) {
	name := func(n string) string { return p.Types.Name() + "." + n }
	ast.Inspect(syntax, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			first, last := p.Fset.Position(n.Pos()).Line, p.Fset.Position(n.End()).Line
			s.function.offer(last-first+1, name(n.Name.Name))
		case *ast.TypeSpec:
			switch t := n.Type.(type) {
			case *ast.StructType:
				s.structure.offer(t.Fields.NumFields(), name(n.Name.Name))
			case *ast.InterfaceType:
				if i, ok := p.TypesInfo.TypeOf(t).(*types.Interface); ok {
					s.iface.offer(i.NumMethods(), name(n.Name.Name))
				}
			}
		}
		return true
	})
}

// exportedNames counts the names that users of a package see: constants, variables, types,
// functions, and methods of exported types.
func exportedNames(p *packages.Package) (n int) {
	for _, name := range p.Types.Scope().Names() {
		o := p.Types.Scope().Lookup(name)
		if !o.Exported() {
			continue
		}
		n++
		if named, ok := o.Type().(*types.Named); ok && isType(o) {
			for m := range named.Methods() {
				if m.Exported() {
					n++
				}
			}
		}
	}
	return n
}

func isType(o types.Object) bool {
	_, ok := o.(*types.TypeName)
	return ok
}

// codeLines counts the lines of a file on which a token other than a comment stands.
func codeLines(fset *token.FileSet, f *ast.File) int {
	lines := map[int]bool{}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case nil:
			return true
		case *ast.Comment, *ast.CommentGroup:
			return false
		case *ast.BasicLit: // a text of several lines
			for l := fset.Position(n.Pos()).Line; l <= fset.Position(n.End()).Line; l++ {
				lines[l] = true
			}
		default:
			lines[fset.Position(n.Pos()).Line] = true
			lines[fset.Position(n.End()-1).Line] = true
		}
		return true
	})
	return len(lines)
}

// A graph has an edge from each node to those that it uses.
type graph map[string]map[string]bool

// fileGraph is which files of a package use names that others declare, methods and
// fields included.
func fileGraph(product []*packages.Package, path string) graph {
	g := graph{}
	for _, p := range product {
		if !strings.HasSuffix(p.PkgPath, "/"+path) {
			continue
		}
		file := func(at token.Pos) string { return filepath.Base(p.Fset.Position(at).Filename) }
		for _, f := range p.GoFiles {
			g[filepath.Base(f)] = map[string]bool{}
		}
		for ident, used := range p.TypesInfo.Uses {
			if used.Pkg() != p.Types {
				continue
			}
			if v, ok := used.(*types.Var); ok && !v.IsField() && used.Parent() != p.Types.Scope() {
				continue // a local variable
			}
			from, to := file(ident.Pos()), file(used.Pos())
			if _, ok := g[to]; ok && from != to {
				g[from][to] = true
			}
		}
	}
	return g
}

func arrows(g graph) (n int) {
	for _, to := range g {
		n += len(to)
	}
	return n
}

// backArrows returns how many edges lead back up when the nodes are put in an order that
// makes them few: the heuristic of Eades, Lin and Smyth (1993) for feedback arc sets.
// Zero means that there is no cycle.
func backArrows(g graph) (n int) {
	left := graph{}
	for from, to := range g {
		left[from] = maps.Clone(to)
	}
	var first, last []string
	for len(left) > 0 {
		in := map[string]int{}
		for _, to := range left {
			for t := range to {
				in[t]++
			}
		}
		names := slices.Sorted(maps.Keys(left))
		next := slices.IndexFunc(names, func(name string) bool { return len(left[name]) == 0 })
		sink := next >= 0
		if !sink {
			next = slices.IndexFunc(names, func(name string) bool { return in[name] == 0 })
		}
		if next < 0 {
			best := 0
			for i, name := range names {
				if len(left[name])-in[name] > len(left[names[best]])-in[names[best]] {
					best = i
				}
			}
			next = best
		}
		name := names[next]
		if sink {
			last = append(last, name)
		} else {
			first = append(first, name)
		}
		delete(left, name)
		for _, to := range left {
			delete(to, name)
		}
	}
	slices.Reverse(last)
	place := map[string]int{}
	for i, name := range append(first, last...) {
		place[name] = i
	}
	for from, to := range g {
		for t := range to {
			if place[t] < place[from] {
				n++
			}
		}
	}
	return n
}

type trees struct{ tests, chaos, bench, simulate, json int }

// countTrees counts lines of the files that git knows.
func countTrees(dir string) (t trees, err error) {
	out, err := exec.Command("git", "-C", dir, "ls-files", "-z", "*.go", "*.json").Output()
	if err != nil {
		return t, err
	}
	for name := range strings.SplitSeq(strings.TrimRight(string(out), "\x00"), "\x00") {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if os.IsNotExist(err) {
			continue
		} else if err != nil {
			return t, err
		}
		lines := bytes.Count(text, []byte("\n"))
		top, _, _ := strings.Cut(name, "/")
		switch {
		case strings.HasSuffix(name, ".json"):
			t.json += lines
		case top == "chaos":
			t.chaos += lines
		case top == "bench":
			t.bench += lines
		case top == "simulate":
			t.simulate += lines
		case strings.HasSuffix(name, "_test.go"):
			t.tests += lines
		}
	}
	return t, nil
}

func directDependencies(dir string) (n int, err error) {
	name := filepath.Join(dir, "go.mod")
	text, err := os.ReadFile(name)
	if err != nil {
		return 0, err
	}
	mod, err := modfile.Parse(name, text, nil)
	if err != nil {
		return 0, err
	}
	for _, r := range mod.Require {
		if !r.Indirect {
			n++
		}
	}
	return n, nil
}

// binary builds the command and returns its size in bytes and the number of modules in it.
func binary(dir string) (size int64, modules int, err error) {
	temp, err := os.MkdirTemp("", "shape")
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = os.RemoveAll(temp) }()
	out := filepath.Join(temp, "onejob")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", out, "./cmd/onejob")
	build.Dir, build.Stderr = dir, os.Stderr
	build.Env = append(os.Environ(), "GOOS=linux", "CGO_ENABLED=0")
	if err := build.Run(); err != nil {
		return 0, 0, fmt.Errorf("build cmd/onejob: %w", err)
	}
	var info fs.FileInfo
	if info, err = os.Stat(out); err != nil {
		return 0, 0, err
	}
	listing, err := exec.Command("go", "version", "-m", out).Output()
	if err != nil {
		return 0, 0, err
	}
	return info.Size(), bytes.Count(listing, []byte("\n\tdep\t")), nil
}
