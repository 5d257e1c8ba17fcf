package tasks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// SQL runs statements that the configuration names, with parameters from the
// payload:
//
//	{"statement": "close_month", "params": {"month": "2026-10-01"}}
//
// The statement's effect and the task's success commit in one transaction under
// the fence: each task takes effect exactly once, and a stale replica changes
// nothing. It runs in the database of the tasks, as onejob's user there.
type SQL struct {
	Statements map[string]Statement `koanf:"statements"`
	Store      Committer            `koanf:"-"`
}

// Statement is one statement that rows may ask for.
type Statement struct {
	// SQL is a single statement with $1, $2 and so on for parameters. It can
	// read the settings onejob.task_id, onejob.attempt, onejob.fence and
	// onejob.lock_key with current_setting.
	SQL string `koanf:"sql"`

	// Params names the payload's parameters in the order of $1, $2 and so on.
	// Each is given to Postgres as text, to be read as the type that the
	// statement wants there; a JSON null is a NULL.
	Params []string `koanf:"params"`
}

// Committer commits what fn does together with the success of the task, or
// neither. It returns ErrRefused if the fence has been superseded.
type Committer interface {
	CompleteWith(ctx context.Context, t *Task, fn func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error)) error
}

// Validate returns everything that is wrong with the configuration.
func (k SQL) Validate() error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(k.Statements)) {
		if s := k.Statements[name]; strings.TrimSpace(s.SQL) == "" {
			errs = append(errs, fmt.Errorf("statement %q has no sql", name))
		}
	}
	return errors.Join(errs...)
}

type sqlPayload struct {
	Statement string                     `json:"statement"`
	Params    map[string]json.RawMessage `json:"params"`
}

func (k SQL) parse(payload json.RawMessage) (Statement, []any, error) {
	var p sqlPayload
	if err := checkFields(payload, "statement", "params"); err != nil {
		return Statement{}, nil, err
	}
	if err := json.Unmarshal(payload, &p); err != nil {
		return Statement{}, nil, fmt.Errorf(`payload: %w; write {"statement": NAME, "params": {...}}`, err)
	}
	if p.Statement == "" {
		return Statement{}, nil, errors.New(`payload: it names no statement; write {"statement": NAME, "params": {...}}`)
	}
	s, ok := k.Statements[p.Statement]
	if !ok {
		return Statement{}, nil, &UnknownError{p.Statement, fmt.Errorf("payload: statement %.100q is not in the configuration (kinds.sql.statements), which has %q", p.Statement, slices.Sorted(maps.Keys(k.Statements)))}
	}
	args := make([]any, len(s.Params))
	for i, name := range s.Params {
		raw, ok := p.Params[name]
		if !ok {
			return Statement{}, nil, fmt.Errorf("payload: statement %q needs the parameter %q", p.Statement, name)
		}
		args[i] = sqlText(raw)
	}
	for name := range p.Params {
		if !slices.Contains(s.Params, name) {
			return Statement{}, nil, fmt.Errorf("payload: statement %q has no parameter %q; it has %q", p.Statement, name, s.Params)
		}
	}
	return s, args, nil
}

// sqlText returns a JSON value as Postgres reads it from text.
func sqlText(raw json.RawMessage) any {
	var s *string
	if json.Unmarshal(raw, &s) != nil {
		return string(raw) // a number, true, false, an object or an array
	}
	if s == nil {
		return nil
	}
	return *s
}

// Check refuses a payload that names no statement, that has unknown fields, or
// whose parameters are not the statement's. A statement that is not configured
// here is an [ErrUnknown].
func (k SQL) Check(payload json.RawMessage) error {
	_, _, err := k.parse(payload)
	return err
}

// Run runs the statement and commits. Data that Postgres cannot read as the
// type it wants (SQLSTATE class 22) fails the task for good.
func (k SQL) Run(ctx context.Context, a *Attempt) (Result, error) {
	s, args, err := k.parse(a.Payload)
	if err != nil {
		return Result{}, refused(err)
	}
	err = k.Store.CompleteWith(ctx, &a.Task, func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
		tag, err := tx.Exec(ctx, s.SQL, args...)
		if err != nil {
			return nil, err
		}
		return json.RawMessage(fmt.Sprintf(`{"rows": %d}`, tag.RowsAffected())), nil
	})
	var pg *pgconn.PgError
	switch {
	case errors.As(err, &pg) && strings.HasPrefix(pg.Code, "22"):
		return Result{}, Permanent(err)
	case err != nil:
		return Result{}, err
	}
	return Result{Committed: true}, nil
}
