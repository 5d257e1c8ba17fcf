package store_test

import (
	"fmt"
	"testing"
)

func TestReferences(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	equal(t, "references in a new schema", b.references(), "[]")
	for _, sql := range []string{
		`CREATE TABLE public.bare (task bigint REFERENCES onejob.tasks)`,
		`CREATE TABLE public."In Odd Case" ("the task" bigint REFERENCES onejob.tasks ON DELETE SET NULL)`,
		`CREATE TABLE public.indexed (other int, task bigint REFERENCES onejob.tasks ON DELETE CASCADE, UNIQUE (task, other))`,
		`CREATE TABLE public.behind (other int, task bigint REFERENCES onejob.tasks ON DELETE RESTRICT, UNIQUE (other, task))`,
		`CREATE TABLE public.partly (task bigint REFERENCES onejob.tasks)`,
		`CREATE INDEX ON public.partly (task) WHERE task > 9`,
		`CREATE TABLE public.parts (task bigint REFERENCES onejob.tasks) PARTITION BY RANGE (task)`,
		`CREATE TABLE public.part PARTITION OF public.parts DEFAULT`,
		`CREATE TABLE public.unrelated (id bigint PRIMARY KEY, own bigint REFERENCES public.unrelated)`,
	} {
		b.sql(sql)
	}
	equal(t, "references", b.references(), `[{public."In Odd Case" "the task" false false} {public.bare task true false} {public.behind task true false} {public.indexed task false true} {public.partly task true false} {public.parts task true false}]`)
}

func (b *bench) references() string {
	b.t.Helper()
	list, err := b.References(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	type plain struct {
		Table, Columns string
		Keeps, Indexed bool
	}
	plains := []plain{}
	for _, r := range list {
		plains = append(plains, plain(r))
	}
	return fmt.Sprint(plains)
}
