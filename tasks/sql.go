package tasks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"onejob/internal/pgerror"
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
	// SQL is a single statement with $1, $2 and so on for parameters. It must not
	// begin or end a transaction. It can read the settings onejob.task_id, onejob.attempt, onejob.fence and
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
		switch word := firstWord(k.Statements[name].SQL); word {
		case "":
			errs = append(errs, fmt.Errorf("statement %q has no sql", name))
		case "ABORT", "BEGIN", "COMMIT", "END", "PREPARE", "RELEASE", "ROLLBACK", "SAVEPOINT", "START":
			errs = append(errs, fmt.Errorf("statement %q begins with %s: it runs in the transaction that completes the task and must not control it", name, word))
		}
	}
	return errors.Join(errs...)
}

// firstWord returns the first word of a statement in capitals, after white space,
// comments and parentheses; "" if there is nothing.
func firstWord(sql string) string {
	for {
		sql = strings.TrimLeft(sql, " \t\r\n\f\v(;")
		switch {
		case strings.HasPrefix(sql, "--"):
			_, sql, _ = strings.Cut(sql, "\n")
		case strings.HasPrefix(sql, "/*"):
			_, sql, _ = strings.Cut(sql, "*/")
		default:
			word := sql
			if i := strings.IndexFunc(sql, func(r rune) bool { return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) }); i > 0 {
				word = sql[:i]
			}
			return strings.ToUpper(word)
		}
	}
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

// Run runs the statement and commits. The task fails for good if Postgres cannot
// read data as the type it wants (SQLSTATE class 22), if the statement is not a
// single one that it can parse, and if it ends its transaction.
//
// An error whose cause is the database or the way to it uses up no attempt. Nothing
// of the statement was kept then, or the commit was not answered; in that case the
// fence decides when the task is requeued.
func (k SQL) Run(ctx context.Context, a *Attempt) (Result, error) {
	s, args, err := k.parse(a.Payload)
	if err != nil {
		return Result{}, refused(err)
	}
	var own error // of the statement itself
	err = k.Store.CompleteWith(ctx, &a.Task, func(ctx context.Context, tx pgx.Tx) (json.RawMessage, error) {
		var n int64
		if n, own = execOne(ctx, tx, s.SQL, args); own != nil {
			return nil, own
		}
		return json.RawMessage(fmt.Sprintf(`{"rows": %d}`, n)), nil
	})
	switch {
	case err == nil:
		return Result{Committed: true}, nil
	case ctx.Err() != nil:
		return Result{}, err
	// The user's statement is not prepared: if that fails so, it said EXECUTE or PREPARE itself.
	case pgerror.Unavailable(err) && !(own != nil && pgerror.PreparedStatement(err)):
		d := requeueAfter
		if own != nil {
			d = requeueOwnAfter
		}
		return Result{}, Requeue(d, err)
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return Result{}, err
	}
	switch {
	case own != nil && pg.Code == "42601": // syntax_error; several statements are one, too
		err = Permanent(fmt.Errorf("%w; a statement must be a single one", err))
	case own != nil && (strings.HasPrefix(pg.Code, "2D") || strings.HasPrefix(pg.Code, "25")): // COMMIT in a procedure; SET TRANSACTION
		err = Permanent(fmt.Errorf("%w; it runs in the transaction that completes the task and must not end or change it", err))
	case strings.HasPrefix(pg.Code, "22"):
		err = Permanent(err)
	}
	return Result{}, err
}

// execOne runs a single statement by the extended protocol, which takes no more than
// one, and returns how many rows it affected. Postgres parses it each time: a plan
// that it kept would fail when somebody alters a table.
func execOne(ctx context.Context, tx pgx.Tx, sql string, args []any) (int64, error) {
	rows, err := tx.Query(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...)
	if err != nil {
		return 0, err
	}
	rows.Close()
	return rows.CommandTag().RowsAffected(), rows.Err()
}

// How long a task waits when the database was unavailable. It waits longer if its
// own statement was running: should the statement be what takes the server down, it
// does not do so every second. No attempt is used up, so nothing else bounds that.
const (
	requeueAfter    = time.Second
	requeueOwnAfter = 5 * time.Second
)
